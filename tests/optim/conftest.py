import pytest
import torch


@pytest.fixture
def torchao(monkeypatch):
    """torchao.optim without torch.compile, which takes seconds per shape."""
    module = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return module
