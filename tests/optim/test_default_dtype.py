"""torch.set_default_dtype changes neither layers nor optimizers."""

import pytest
import torch

from lowprec.nn.linear import LowPrecisionLinear
from lowprec.nn.recipe import RECIPES
from lowprec.optim import StableAdamW, fused
from lowprec.optim.eight_bit import code_books
from lowprec.optim.loss_scaling import FixedScaler

pytestmark = pytest.mark.usefixtures("right_interpreter")


def with_default(dtype, function):
    """The function's tensors, computed under a default dtype."""
    before = torch.get_default_dtype()
    code_books.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        return function()
    finally:
        torch.set_default_dtype(before)
        code_books.cache_clear()


def assert_same(function):
    expected = with_default(torch.float32, function)
    for dtype in (torch.bfloat16, torch.float16):
        for a, e in zip(with_default(dtype, function), expected, strict=True):
            assert a.dtype == e.dtype and torch.equal(a, e)


@pytest.mark.parametrize("optim_bits", [32, 8])
@pytest.mark.parametrize("by_kernels", [True, False])
def test_optimizers_step_alike(device, monkeypatch, by_kernels, optim_bits):
    monkeypatch.setattr(fused, "DEVICES", (device.type,) if by_kernels else ())
    start = torch.randn(7, 293, device=device)  # as many elements: 2051

    def run():
        p = torch.nn.Parameter(start.clone())
        unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float32, device=device))
        optimizer = StableAdamW([p, unused], fused=by_kernels, optim_bits=optim_bits, clip_norm=1.0)
        optimizer.steps = [2051, 0]  # no number of bfloat16 or float16
        scaler = FixedScaler(2.0**20, device)  # infinite in float16
        for step in range(1, 4):
            p.grad = scaler.scale(torch.sin(step * start))
            scaler.step(optimizer)
        state = optimizer.state[p]
        moments = [state[kind] for kind in sorted(state)]
        return p.detach(), optimizer.statistics.nan_to_num(0), optimizer.grad_norm, *moments

    assert_same(run)


@pytest.mark.parametrize("name", RECIPES)
def test_layers_compute_alike(device, name):
    options = {"dtype": torch.float32, "device": device}
    x = torch.randn(40, 130, **options, requires_grad=True)
    weight, g = torch.randn(150, 130, **options), torch.randn(40, 150, **options)

    def run():
        torch.manual_seed(0)
        layer = LowPrecisionLinear(130, 150, bias=False, recipe=name, **options)
        layer.weight.data = weight
        output = layer(x)
        return output, *torch.autograd.grad(output, (x, layer.weight), g)

    assert_same(run)
