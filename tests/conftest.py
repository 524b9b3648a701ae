import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import lowprec.clip.torchvision_shim  # noqa: E402, F401
