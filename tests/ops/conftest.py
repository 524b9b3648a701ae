"""Fixtures of the kernels' tests: the device, a right interpreter, outputs that begin as poison."""

import importlib.util
from pathlib import Path

import pytest
import torch

SPEC = importlib.util.spec_from_file_location(
    "interpreter_patch", Path(__file__).with_name("interpreter.py")
)
INTEGER_POISON = 0x55  # of int8: 85


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU where there is one; else the kernels are interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def right_interpreter(monkeypatch):
    """The interpreter with torch's casts, where kernels are interpreted."""
    if not torch.cuda.is_available():
        module = importlib.util.module_from_spec(SPEC)
        SPEC.loader.exec_module(module)
        module.patch(monkeypatch)


@pytest.fixture
def poisoned(monkeypatch):
    """Fills what torch.empty and torch.empty_like give: an element never written is seen."""

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point() and tensor.element_size() > 1:
                return tensor.fill_(torch.nan)
            tensor.view(torch.uint8).fill_(INTEGER_POISON)
            return tensor

        return made

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
