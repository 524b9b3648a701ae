import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest  # noqa: E402
import torch  # noqa: E402

import lowprec.clip.torchvision_shim  # noqa: E402, F401


def pytest_collection_modifyitems(items):
    """Skips the gpu tests where there is no GPU, and says so."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU"))
