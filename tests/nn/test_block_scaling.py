"""Rounding beside gfloat's, and what the tiles of block-scaled formats do at their limits."""

import pytest
import torch

from lowprec.formats import parse_format, round_to_format
from lowprec.nn.linear import LowPrecisionLinear
from lowprec.ops import reference


def scaled(rows, columns):
    """Rows and columns of many magnitudes."""
    return torch.randn(rows, columns) * torch.randn(rows, 1).exp() * torch.randn(1, columns).exp()


def spread(rows, columns):
    """Numbers of many magnitudes; a row of zeros, tiny blocks and a huge row."""
    x = scaled(rows, columns)
    x[3], x[4, :32], x[5] = 0, x[4, :32] * 1e-30, x[5] * 1e20
    return x


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
def test_rounding_equals_gfloats(monkeypatch, name, stochastic):
    gfloat, formats = pytest.importorskip("gfloat"), pytest.importorskip("gfloat.formats")
    format, num_bits = parse_format(name), 12
    exponents = torch.randint(format.min_exponent - 5, 4, (5000,)).float()
    x = torch.randint(-64, 65, (5000,)) * exponents.exp2()
    bits = torch.randint(2**num_bits, x.shape)
    draws = (torch.where(x > 0, 2**num_bits - bits - 0.5, bits + 0.5)) / 2**num_bits
    monkeypatch.setattr(torch, "rand_like", lambda x: draws)
    mode = gfloat.RoundMode.Stochastic if stochastic else gfloat.RoundMode.TiesToEven
    options = {"sat": True, "srbits": bits.numpy(), "srnumbits": num_bits}
    info = getattr(formats, f"format_info_ocp_{name}")
    expected = gfloat.round_ndarray(info, x.double().numpy(), mode, **options)
    assert torch.equal(round_to_format(x, format, stochastic).double(), torch.tensor(expected))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
@pytest.mark.parametrize("scale", reference.SCALES)
def test_compiled_for_a_gpu_subnormal_tiles_stay_finite(name, scale):
    """torch.frexp, compiled, had given them an infinite power-of-two scale."""

    def quantized(x, granularity):  # looks the format up, as layers do: its numbers are constants
        format = parse_format(name)
        return reference.fake_quantize(x, format, granularity, torch.bfloat16, scale=scale)

    x = spread(64, 256).cuda()
    x[6], x[7, :32] = 1e-39, x[7, :32] * 1e-40
    for granularity in ("1x32", "32x1"):
        x_hat, expected = torch.compile(quantized)(x, granularity), quantized(x, granularity)
        normal = x.abs() > reference.TINY
        assert x_hat.isfinite().all() and torch.equal(x_hat[normal], expected[normal])


@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
@pytest.mark.parametrize("scale", reference.SCALES)
def test_subnormal_tiles_stay_finite_whatever_frexp_says(name, scale, monkeypatch):
    frexp = torch.frexp

    def compiled_frexp(x):  # as compiled for CUDA
        mantissa, exponent = frexp(x)
        return mantissa, exponent.masked_fill((x != 0) & (x.abs() < reference.TINY), 1 - 2**31)

    monkeypatch.setattr(torch, "frexp", compiled_frexp)
    x = spread(64, 256) * 1e-39
    x_hat = reference.fake_quantize(x, parse_format(name), "1x32", torch.float32, scale=scale)
    assert x_hat.isfinite().all() and ((x_hat - x).abs() <= reference.TINY).float().mean() > 0.9


@pytest.mark.parametrize("scale", reference.SCALES)
def test_a_tile_with_a_value_that_is_not_finite_is_nan(scale):
    x, format = spread(37, 50), parse_format("e2m1")
    x[5] = 1.0
    for value in (torch.nan, torch.inf):
        x[20, 40] = value
        x_hat = reference.fake_quantize(x, format, "16x16", torch.float32, scale=scale)
        assert x_hat[16:32, 32:48].isnan().all()
        assert x_hat[:16].isfinite().all() != (scale == "e4m3")  # which has a scale of the tensor


@pytest.mark.parametrize(
    "width, size",
    [(1, 64), (64, 64), (65, 128), (512, 512), (513, 1024), (4096, 4096), (5000, 4096)],
)
def test_blocks_have_the_least_power_of_two_from_the_width_on(width, size):
    x, format = scaled(5, width), parse_format("e4m3")
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % size)).view(-1, size)
    expected = reference.fake_quantize(blocks, format, "rowwise", torch.float32)
    x_hat = reference.fake_quantize(x, format, "blocks", torch.float32)
    assert torch.equal(x_hat, expected.flatten()[: x.numel()].view(x.shape))


def test_only_gradients_are_rounded_stochastically():
    layer = LowPrecisionLinear(48, 70, recipe="nvfp4_rht_sr")
    x, g = torch.randn(37, 48, requires_grad=True), torch.randn(37, 70)
    (output, *gradients), (repeated, *others) = (
        (y, *torch.autograd.grad(y, [x, layer.weight], g)) for y in (layer(x), layer(x))
    )
    assert torch.equal(output, repeated)
    for gradient, other in zip(gradients, others, strict=True):
        assert 0 < (gradient - other).norm() < 0.5 * gradient.norm()
