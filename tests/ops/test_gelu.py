"""The kernels that quantize around a GELU against `reference`, up to the last bit of erf."""

import pytest
import torch

from lowprec.formats import E4M3, E5M2, INT8
from lowprec.ops import reference
from lowprec.ops import triton_gelu as kernels

# Another erf may round GELU's result differently: one unit in the last place.
BF16_INT8 = (torch.bfloat16, INT8)
ULP = {torch.float32: 2.0**-19, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
pytestmark = pytest.mark.usefixtures("poisoned")
each_format = pytest.mark.parametrize("format", [INT8, E4M3, E5M2], ids=lambda f: f.name)
each_case = pytest.mark.parametrize(
    "shape, dtype, format",
    [((7, 100), torch.bfloat16, format) for format in (INT8, E4M3, E5M2)]
    + [((37, 100), *BF16_INT8)]  # several rows a program
    + [((7, 64), torch.float32, E4M3), ((5, 257), torch.float16, INT8), ((1, 1), *BF16_INT8)],
    ids=str,
)


def make(shape, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 2).to(dtype).to(device)


def assert_quantized(q, scale, of, format):
    """Checks the quantized tensor against the values: bit for bit in the interpreter.

    On a GPU, kernels fuse multiplications and additions differently, so that few values may fall to
    the other side of a tie.
    """
    expected, expected_scale = reference.quantize(of, format, "rowwise")
    assert q.dtype == format.dtype and scale.shape == expected_scale.shape
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6 * q.is_cuda, atol=0)
    differ = (q.float() != expected.float()).float().mean()
    assert differ <= 0.02 * q.is_cuda


@each_case
def test_gelu_backward_quantizes_the_gradient_it_returns(device, shape, dtype, format):
    h, g = make(shape, dtype, device, 0), make(shape, dtype, device, 1)
    out, grad, q, scale, sums = kernels.gelu_backward_quantize(h, g, format)
    expected_out, expected_grad, *_ = reference.gelu_backward_quantize(h, g, format)
    size = g.abs().double() * 1.2
    for result, target, by in ((out, expected_out, h.abs().double()), (grad, expected_grad, size)):
        assert result.dtype == dtype
        assert ((result.double() - target.double()).abs() <= ULP[dtype] * by + 1e-6).all()
    assert_quantized(q, scale, grad, format)
    torch.testing.assert_close(sums, grad.float().sum(dim=0), rtol=1e-5, atol=1e-5)


@each_case
def test_gelu_forward_quantizes_gelu(device, shape, dtype, format):
    h = make(shape, dtype, device, 0)
    q, scale = kernels.gelu_quantize(h, format)
    out = kernels.gelu_backward_quantize(h, h, format)[0]
    assert_quantized(q, scale, out, format)


@each_format
def test_nan_and_inf_make_their_row_nan(device, format):
    h, g = make((5, 100), torch.bfloat16, device, 0), make((5, 100), torch.bfloat16, device, 1)
    h[2, 7], g[4, 9] = torch.nan, torch.inf
    _, scale = kernels.gelu_quantize(h, format)
    assert scale.isnan().flatten().tolist() == [False, False, True, False, False]
    _, _, q, scale, sums = kernels.gelu_backward_quantize(h, g, format)
    assert scale.isnan().flatten().tolist() == [False, False, True, False, True]
    assert (q[2].float() == 0).all() and not sums[7].isfinite() and not sums[9].isfinite()
    assert sums[:7].isfinite().all()
