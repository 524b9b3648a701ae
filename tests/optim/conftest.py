import pytest
import torch

from lowprec.optim import StableAdamW, fused
from lowprec.optim.muon import MuonAdamW
from tests.optim.optimizers import OURS, RULE, make_groups


@pytest.fixture
def torchao(monkeypatch):
    """torchao.optim without torch.compile, which takes seconds per shape."""
    module = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return module


@pytest.fixture
def build(device, monkeypatch):
    """`build(kind, **options)`: an optimizer; its parameters are always the same."""
    monkeypatch.setattr(fused, "DEVICES", (device.type,))

    def make(kind, *, weight_decay=0.1, **options):
        own = {"fused": False, **OURS.get(kind, {})}
        groups = make_groups(own.pop("dtype", torch.float32), device, weight_decay)
        if kind in OURS:
            return StableAdamW(groups, **RULE, **own, **options)
        muon = MuonAdamW(groups, RULE, **options)
        muon.adamw.fused = False
        return muon

    return make
