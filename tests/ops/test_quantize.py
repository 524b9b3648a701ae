"""The quantizing and dequantizing kernels match their definitions bit for bit."""

import pytest
import torch
import triton
import triton.language as tl

from lowprec.formats import E4M3, E5M2, INT8, representable
from lowprec.ops import reference, triton_dequantize, triton_quantize_words, triton_sum
from lowprec.ops import triton_quantize as kernels
from lowprec.ops.triton_rounding import quotient

FORMATS = [INT8, E4M3, E5M2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TILES = ["1x128", "128x1", "128x128"]
ALL = ["rowwise", "columnwise", "tensorwise", *TILES]
PAIRS = [(format, dtype) for format in FORMATS for dtype in DTYPES[:2]] + [(INT8, torch.float16)]
each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
each_pair = pytest.mark.parametrize("format, dtype", PAIRS, ids=lambda v: getattr(v, "name", v))
each_granularity = pytest.mark.parametrize("granularity", ALL)
pytestmark = pytest.mark.usefixtures("poisoned")


def make(shape, dtype, device, seed=0):
    """Numbers over many binades, with zero rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    if shape[0] > 4 and shape[1] > 4:
        x[3] = 0
        x[:, 2] = 0
    return x.to(dtype).to(device)


def bits(x):
    """The bytes of a tensor, on the CPU."""
    return x.cpu().contiguous().view(-1).view(torch.uint8)


def assert_same(result, expected, what):
    assert result.dtype == expected.dtype and result.shape == expected.shape, what
    assert torch.equal(bits(result), bits(expected)), what


def assert_same_scale(scale, expected):
    nan = expected.isnan()  # NaN has many bit patterns
    assert torch.equal(scale.isnan(), nan)
    assert_same(scale.nan_to_num(7.0), expected.nan_to_num(7.0), "scale")


def by_kernels(x, format, granularity):
    """(q_MK, q_KM or None, scale) from the host functions."""
    if granularity == "rowwise":
        q, scale = kernels.quantize_rows(x, format)
        return q, None, scale
    return kernels.quantize(x, format, granularity, rows=True, transposed=True)


def check(x, format, granularity):
    q, q_transposed, scale = by_kernels(x, format, granularity)
    expected, expected_scale = reference.quantize(x, format, granularity)
    assert_same_scale(scale, expected_scale)
    assert_same(q, expected, "q")
    if q_transposed is not None:
        assert_same(q_transposed, expected.T.contiguous(), "transposed q")
    return q, scale


@pytest.mark.parametrize(
    "shape, format, dtype",
    [((63, 100), *pair) for pair in PAIRS]
    + [(shape, INT8, torch.bfloat16) for shape in [(1, 1), (128, 257), (5, 1), (1, 300)]],
    ids=lambda value: getattr(value, "name", str(value)),
)
@each_granularity
def test_kernels_match_reference_bits(device, granularity, shape, format, dtype):
    check(make(shape, dtype, device), format, granularity)


@pytest.mark.parametrize("rows, transposed", [(True, False), (False, True)])
@pytest.mark.parametrize("granularity", ALL[1:])
@each_format
def test_single_layout_matches_reference(device, format, granularity, rows, transposed):
    x = make((150, 260), torch.bfloat16, device)
    q, q_transposed, scale = kernels.quantize(
        x, format, granularity, rows=rows, transposed=transposed
    )
    expected, expected_scale = reference.quantize(x, format, granularity)
    result, other, target = (q, q_transposed, expected) if rows else (q_transposed, q, expected.T)
    assert other is None
    assert_same(result, target.contiguous(), "q")
    assert_same(scale, expected_scale, "scale")


@pytest.mark.parametrize("shape", [(4, 1), (152, 70), (132, 260)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("format", FORMATS[1:], ids=lambda format: format.name)
@pytest.mark.parametrize("granularity", ["128x1", "tensorwise"])
def test_transposed_fp8_of_16_bits(device, format, dtype, shape, granularity):
    x = make((shape[0], shape[1] + 10), dtype, device)[:, : shape[1]]
    if granularity == "128x1":
        x[-1, -1] = torch.inf
    _, q, scale = kernels.quantize(x, format, granularity, rows=False, transposed=True)
    expected, expected_scale = reference.quantize(x, format, granularity)
    assert_same(q, expected.T.contiguous(), "transposed q")
    assert_same_scale(scale, expected_scale)


IN_PAIRS = [*PAIRS[1:], (E4M3, torch.float16)]
WITHOUT_SUMS = IN_PAIRS if torch.cuda.is_available() else IN_PAIRS[:3]  # int8, fp8 of 32, 16 bits


@pytest.mark.parametrize("granularity", reference.PAIRED)
@pytest.mark.parametrize(
    "format, dtype, sums",
    [(*pair, True) for pair in IN_PAIRS] + [(*pair, False) for pair in WITHOUT_SUMS],
    ids=str,
)
def test_pairs_match_reference_bits(device, format, dtype, granularity, sums):
    wide, odd = make((132, 270), dtype, device), make((150, 20), dtype, device)
    odd[-1, -1] = torch.nan
    for x in (wide[:, :260], odd, wide[:128, ::2], wide[:, :260].T, make((4, 128), dtype, device)):
        *pair, total = kernels.quantize_pair(x, format, granularity, sums)
        *expected, expected_total = reference.quantize_pair(x, format, granularity, sums)
        for (q, scale), (e, e_scale) in ((pair[:2], expected[:2]), (pair[2:], expected[2:])):
            assert_same(q, e, "q")
            assert_same_scale(scale, e_scale)
        assert (total is None) == (not sums)
        if sums:
            torch.testing.assert_close(total, expected_total, equal_nan=True)


@pytest.mark.parametrize(
    "M, K, stride, is_taken",
    [(2**23 - 128, 2**23 - 128, 2**23 - 128, True)]
    + [(2**23, 1, 1, False), (4, 2**23, 2**23, False), (128, 1, 2**25, False)],
)
def test_words_of_large_tensors_fit_a_grid_and_int32_offsets(M, K, stride, is_taken):
    x = torch.empty_strided((M, K), (stride, 1), dtype=torch.bfloat16, device="meta")
    assert triton_quantize_words.takes(x, E4M3) == is_taken
    grid = triton_quantize_words._plan(x.device, x.dtype, M, K, stride, E4M3, True, True).grid
    largest = max(31 * 4 * stride, 63 * K, 63 * (M // 4)) + 127
    assert not is_taken or (max(grid[1:]) < 2**16 and largest < 2**31)


@each_granularity
@pytest.mark.parametrize("layout", ["transposed", "every other column", "slice", "expanded"])
def test_non_contiguous_input(device, layout, granularity):
    x = make((80, 120), torch.bfloat16, device)
    views = {
        "transposed": x.T,
        "every other column": x[:, ::2],
        "slice": x[5:60, 10:90],
        "expanded": x[:1].expand(40, 120),
    }
    assert not views[layout].is_contiguous()
    check(views[layout], INT8, granularity)


@each_format
@each_granularity
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_nan_and_inf_make_scale_nan_and_q_zero(device, bad, granularity, format):
    x = make((63, 100), torch.float32, device)
    x[5, 7] = bad
    q, scale = check(x, format, granularity)
    row, column, all = slice(5, 6), slice(7, 8), slice(None)
    hit = {"rowwise": (row, all), "columnwise": (all, column), "tensorwise": (all, all)}
    hit |= {"1x128": (row, all), "128x1": (all, column), "128x128": (all, all)}  # one tile
    by_row, by_column = (part != all for part in hit[granularity])
    assert (q.float()[hit[granularity]] == 0).all() and scale.isnan().sum() == 1
    assert scale.isnan()[5 * by_row, 7 * by_column]


@each_format
def test_smallest_and_largest_magnitudes(device, format):
    amax = torch.tensor([0.0, 1e-45, 1e-39, 1.2e-38, 1.4e-36, 3e-38 * 127, 3.4e38])
    rows = (torch.linspace(-1, 1, 35) * amax[:, None]).to(device)
    for x, granularity in ((rows, "rowwise"), *((row[None], "tensorwise") for row in rows)):
        q, scale = check(x, format, granularity)
        assert (scale[scale < torch.finfo(torch.float32).tiny] == 0).all()
        assert (q.float()[(scale == 0).expand_as(q)] == 0).all()


@each_pair
def test_rows_with_column_sums_match_reference(device, dtype, format):
    x = make((40, 30), dtype, device)
    q, scale, sums = kernels.quantize_rows_and_sum(x, format)
    expected, expected_scale, _ = reference.quantize_rows_and_sum(x, format)
    assert_same(q, expected, "q")
    assert_same(scale, expected_scale, "scale")
    assert sums.dtype == torch.float32 and sums.shape == (30,)
    # float32 sums in another order: an error of at most eps * terms * sum of magnitudes
    bound = 1.2e-7 * x.double().abs().sum(dim=0) * 12 + 1e-12
    assert ((sums - x.double().sum(dim=0)).abs() <= bound).all()


@each_format
def test_quotients_are_correctly_rounded(device, format):
    """Divides numbers at and next to the ties of a format by random scales."""
    tie = (representable(format)[1:] + representable(format)[:-1]) / 2
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        power = torch.randint(-30, 30, (1,), generator=generator)
        scale = (torch.rand(1, generator=generator) + 1) * 2.0**power
        largest = scale * format.max
        x = torch.cat((tie, tie.nextafter(torch.zeros(())), tie.nextafter(tie * 2))) * scale
        x = torch.cat((largest, x.clamp(-largest, largest)))[None].to(device)
        check(x, format, "rowwise")


@each_format
def test_scales_of_all_bfloat16_numbers_are_correctly_rounded(device, format):
    x = torch.arange(0x7F81, dtype=torch.int16).view(torch.bfloat16)[:, None]  # to inf
    check(x.to(device), format, "rowwise")


@triton.jit
def _quotients_kernel(x_ptr, scale_ptr, q_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(q_ptr + at, quotient(tl.load(x_ptr + at), tl.load(scale_ptr + at)))


@pytest.mark.gpu
def test_quotients_by_all_significands_are_correctly_rounded():
    """The GPU's approximate reciprocals are refined."""
    scale = torch.arange(2**23, dtype=torch.int32, device="cuda") + (100 << 23)
    scale = scale.view(torch.float32)
    for _ in range(8):
        x = torch.randn(2**23, device="cuda")
        q = torch.empty_like(x)
        _quotients_kernel[(2**13,)](x, scale, q, BLOCK=2**10)
        assert torch.equal(q, x / scale)


@pytest.mark.parametrize("shape", [(1, 1), (33, 300), (20, 256)], ids=str)
@pytest.mark.parametrize("granularity", ["rowwise", "tensorwise"])
@each_pair
def test_dequantization_matches_reference_bits(device, shape, granularity, format, dtype):
    q, scale = reference.quantize(make(shape, dtype, device), format, granularity)
    for factor in (1.0, 1e-37, torch.nan):  # 1e-37 makes subnormal products
        result = triton_dequantize.dequantize(q.T.contiguous().T, scale * factor, dtype)
        expected = reference.dequantize(q, scale * factor, dtype)
        assert torch.equal(result.isnan(), expected.isnan())
        assert_same(result.nan_to_num(7.0), expected.nan_to_num(7.0), factor)


@pytest.mark.parametrize("shape", [(1, 1), (130, 33), (1056, 40)], ids=str)
def test_parts_are_summed(device, shape):
    parts = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    sums = triton_sum.sum_parts(parts)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), parts.double().sum(dim=0), rtol=0, atol=1e-4)
