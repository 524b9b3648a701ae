"""Fixtures of the kernels' tests: outputs that begin as poison."""

import pytest
import torch

INTEGER_POISON = 0x55  # of int8: 85


@pytest.fixture(autouse=True)
def kernels_interpreted_right(right_interpreter):
    """All tests of this room."""


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
