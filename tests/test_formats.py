"""Formats have exactly the numbers of their definition, and rounding is to the nearest."""

import pytest
import torch

from lowprec.formats import E4M3, E5M2, INT8, parse_format, representable, round_to_format

ENUMERATED = {  # positive numbers
    "e2m1": [0.5, 1, 1.5, 2, 3, 4, 6],
    "e1m2": [0.5, 1, 1.5, 2, 2.5, 3, 3.5],
    "e3m0": [2.0**k for k in range(-2, 5)],
    "e3m2": [k / 16 for k in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56)]
    + [4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28],
    "e2m3": [k / 8 for k in (*range(1, 16), *range(16, 32, 2), *range(32, 61, 4))],
}
NAMES = ["int8", "e4m3", "e5m2", "e4m3_bnb", "e5m2_bnb", *ENUMERATED, "e7m10", "e7m0", "e5m10"]


def all_bfloat16():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).float()


def all_finite(dtype):
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("name", ENUMERATED)
def test_small_formats_have_the_listed_numbers(name):
    positive = torch.tensor(ENUMERATED[name])
    expected = torch.cat((-positive.flip(0), torch.zeros(1), positive))
    assert torch.equal(representable(parse_format(name)), expected)
    assert parse_format(name).max == positive[-1]
    assert torch.equal(representable(INT8), torch.arange(-127.0, 128.0))


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.name)
def test_numbers_and_casts_of_all_bfloat16_are_torchs(format):
    x = all_bfloat16()
    x = x[x.abs() <= format.max]
    assert len(x) > 30_000
    cast = x.to(format.dtype).float()
    assert torch.equal(representable(format), all_finite(format.dtype))
    assert format.max == torch.finfo(format.dtype).max
    rounded = round_to_format(x, format)
    assert torch.equal(rounded.view(torch.int32), cast.view(torch.int32))  # also the sign of zero


@pytest.mark.parametrize(("name", "exponent_bits", "mantissa_bits"),
                         [("e4m3_bnb", 4, 3), ("e5m2_bnb", 5, 2)])  # fmt: skip
def test_the_released_codes_formats_are_its_code_books(name, exponent_bits, mantissa_bits):
    bias, codes = 2 ** (exponent_bits - 1), {0.0}
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            share = mantissa / 2**mantissa_bits
            if exponent:
                codes.add((1 + share) * 2.0 ** (bias + 1 - exponent))
            else:
                codes.add(share * 2.0**-bias)
    positive = representable(parse_format(name))
    assert positive[positive >= 0].tolist() == sorted(codes)
    assert parse_format(name).max == max(codes) == {"e4m3_bnb": 480, "e5m2_bnb": 114688}[name]


@pytest.mark.parametrize("name", NAMES)
def test_rounding_is_to_nearest(name):
    format = parse_format(name)
    numbers = representable(format).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, generator=generator) * format.max / 3
    x = torch.cat((x, torch.randn(4000, generator=generator) * numbers.abs()[numbers != 0].min()))
    x = torch.cat((x.clamp(-format.max, format.max), numbers.float()))
    above = torch.searchsorted(numbers, x.double()).clamp(max=len(numbers) - 1)
    below = (above - 1).clamp(min=0)
    error = torch.minimum((numbers[above] - x).abs(), (x - numbers[below]).abs())
    assert torch.equal((round_to_format(x, format).double() - x).abs(), error)


@pytest.mark.parametrize("name", ["int8", "e4m3", "e5m2", "e2m1", "e3m2", "e2m3"])
def test_ties_go_to_the_even_mantissa(name):
    positive = representable(parse_format(name))
    positive = positive[positive >= 0]
    ties = (positive[1:] + positive[:-1]) / 2  # exact in float32
    even = torch.where(torch.arange(len(ties)) % 2 == 0, positive[:-1], positive[1:])
    assert torch.equal(round_to_format(ties, parse_format(name)), even)
    assert torch.equal(round_to_format(-ties, parse_format(name)), -even)


@pytest.mark.parametrize("name", NAMES)
def test_large_values_saturate_and_non_finite_become_nan(name):
    format = parse_format(name)
    large = torch.tensor([format.max * 1.001, format.max * 2, 3e38])
    assert (round_to_format(large, format) == format.max).all()
    assert (round_to_format(-large, format) == -format.max).all()
    assert round_to_format(torch.tensor([torch.nan, torch.inf, -torch.inf]), format).isnan().all()


@pytest.mark.parametrize(
    "name", ["e0m3", "e8m1", "e4m11", "int4", "fp8", "e4", "E4M3", "e4m3fn", ""]
)
def test_unknown_format_is_refused(name):
    with pytest.raises(ValueError, match="must"):
        parse_format(name)
