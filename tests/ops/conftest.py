"""Fixtures for the kernels' tests."""

import pytest
import torch

INTEGER_POISON = 0x55  # 85 in int8


@pytest.fixture(autouse=True)
def use_right_interpreter(right_interpreter):
    """Applies to all tests of this folder."""


@pytest.fixture
def poisoned(monkeypatch):
    """Fills new tensors with poison, so that elements which are never written are detected."""

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
