"""The matmul kernels match `reference.matmul`, which matches float64."""

import pytest
import torch

from lowprec.formats import E4M3, E5M2
from lowprec.ops import gluon_matmul, reference
from lowprec.ops import triton_matmul as kernels

SHAPES = [(1, 1, 1), (63, 100, 77), (128, 257, 64), (150, 33, 300), (5, 300, 129)]  # M, N, K
ALIGNED = [(150, 272, 304), (1, 16, 16), (300, 528, 128)]  # rows of 16 bytes
IN_PARTS = [(150, 272, 1296), (1, 16, 2000), (128, 528, 1024)]  # also in rows of 16 bytes
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
# Relative to the sum of magnitudes: fp8 products are added in another order in float32, or on a GPU
# in the 22 bits of the matrix unit's accumulator (14 below the largest term).
ADDED = 2e-6 if not torch.cuda.is_available() else 2.0**-12
# Hopper's matrix unit cuts terms off, so errors of positive terms add up: up to 2^-8.5 of a sum of
# 128, and exactly as much in torch._scaled_mm (measured on an H200)
ADDED_POSITIVE = 2e-6 if not torch.cuda.is_available() else 2.0**-8
EPS = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def forgotten_plans():
    """For tests that change how launches are planned."""
    kernels._plan.cache_clear()
    yield
    kernels._plan.cache_clear()


def make_int8(rows, k, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (rows, k), generator=generator).to(torch.int8).to(device)


def make_fp8(rows, k, format, device, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator) * 20
    return x.to(format.dtype).to(device)


def make_scale(rows, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, 1, generator=generator) * 1e-2 + 1e-4).to(device)


def launch_with(names, replacement, *arguments):
    """The product with members of the module replaced."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(kernels, name, replacement)
        patch.setattr(kernels, "_plan", kernels._plan.__wrapped__)  # without its cache
        return kernels.matmul(*arguments)


def launch_general(*arguments):
    """By the kernel that handles all shapes, also on Hopper."""
    return launch_with(["is_hopper"], lambda device: False, *arguments)


def launch_hopper(*arguments):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")
    return launch_with(["_matmul_kernel", "_matmul_tiles_kernel"], None, *arguments)


ON_HOPPER = pytest.param(launch_hopper, id="hopper", marks=pytest.mark.gpu)
LAUNCHES = pytest.mark.parametrize("launch", [pytest.param(launch_general, id="any"), ON_HOPPER])


def assert_int8_agrees(result, arguments):
    """Exact, except that a GPU rounds a multiply-add once and the definition twice."""
    expected = reference.matmul(*arguments)
    assert result.dtype == expected.dtype and result.shape == expected.shape
    if result.is_cuda:
        eps = EPS[result.dtype]
        assert torch.allclose(
            result.double(), expected.double(), rtol=eps, atol=eps, equal_nan=True
        )
    else:
        assert torch.equal(result, expected)


INT8 = [  # shape, operands with a scale per row, dtype of the bias, of the output
    *((ALIGNED[i], "ab", torch.float32, DTYPES[i]) for i in range(3)),
    *((ALIGNED[1], "", None, dtype) for dtype in DTYPES),
    *(
        ((63, 100, 77), rows, *dtypes)
        for rows in ("ab", "a", "b", "")
        for dtypes in [(None, torch.bfloat16), *zip(DTYPES, reversed(DTYPES), strict=True)]
    ),
]


@pytest.mark.parametrize(
    "launch, shape, rows, bias, dtype",
    [(launch_general, *case) for case in INT8]
    + [pytest.param(launch_hopper, *case, marks=pytest.mark.gpu) for case in INT8[:6]],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_int8_matches_reference(device, launch, shape, rows, bias, dtype):
    m, n, k = shape
    a, b = make_int8(m, k, device, 0), make_int8(n, k, device, 1)
    a_scale = make_scale(m if "a" in rows else 1, device, 2)
    b_scale = make_scale(n if "b" in rows else 1, device, 3)
    added = None if bias is None else torch.randn(n, device=device).to(bias)
    arguments = (a, b, a_scale, b_scale, added, dtype)
    assert_int8_agrees(launch(*arguments), arguments)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_products_are_exact(device, shape):
    m, n, k = shape
    a, b = make_int8(m, k, device, 0), make_int8(n, k, device, 1)
    one = torch.ones(1, 1, device=device)
    exact = a.double() @ b.double().T
    by_columns = (a.T.contiguous().T, b.T.contiguous().T)
    for operands in ((a, b), by_columns):
        assert torch.equal(kernels.matmul(*operands, one, one, None, torch.float32).double(), exact)
    assert torch.equal(reference.matmul(a, b, one, one, None, torch.float32).double(), exact)


@LAUNCHES
@pytest.mark.parametrize("formats, dtype", [*zip(FP8, DTYPES, strict=True)], ids=str)
def test_fp8_matches_reference_within_rounding(device, dtype, formats, launch):
    m, n, k = 150, 80, 304
    a = make_fp8(m, k, formats[0], device, 0)
    b = make_fp8(n, k, formats[1], device, 1)
    a_scale, b_scale = make_scale(m, device, 2), make_scale(1, device, 3)
    bias = torch.randn(n, device=device)
    result = launch(a, b, a_scale, b_scale, bias, dtype)
    expected = reference.matmul(a, b, a_scale, b_scale, bias, torch.float32).double()
    scale = a_scale.double() * b_scale.double().T
    added = (a.double().abs() @ b.double().abs().T) * scale * ADDED
    subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # their spacing
    bound = added + EPS[dtype] * expected.abs() + subnormal
    assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    "launch, shape",
    [
        *((launch_general, (150, 200, 300)), (launch_general, (33, 130, 100))),
        *((launch_general, (40, 16, 1)), (launch_general, (128, 256, 384))),
        pytest.param(launch_hopper, (128, 256, 384), marks=pytest.mark.gpu),
        pytest.param(launch_hopper, (300, 400, 1040), marks=pytest.mark.gpu),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("tile", ["1x128", "128x128"])
def test_scales_of_tiles_match_reference_within_rounding(device, tile, launch, shape):
    m, n, k = shape
    x, w = (torch.randn(rows, k, device=device).exp() for rows in (m, n))
    (a, a_scale), (b, b_scale) = (reference.quantize(x, E4M3, "1x128") for x in (x, w))
    if tile == "128x128":
        b, b_scale = reference.quantize(w, E4M3, tile)
    bias = torch.randn(n, device=device)
    result = launch(a, b, a_scale, b_scale, bias, torch.float32)
    expected = reference.matmul(a, b, a_scale, b_scale, bias, torch.float32)
    exact = x.double() @ w.double().T  # a sum of positive terms
    assert (
        (result - expected).abs() <= ADDED_POSITIVE * exact + EPS[torch.float32] * bias.abs()
    ).all()
    assert (result - bias - exact).norm() <= 0.05 * exact.norm()
    a_scale[7, 0] = torch.nan
    launch(a, b, a_scale, b_scale, None, torch.float32)
    result = launch(a, b, a_scale, b_scale, None, torch.bfloat16).isnan()
    assert result[7].all() and result.sum() == n


@pytest.mark.parametrize("kind", ["int8", "e4m3", "e4m3 in tiles"])
@pytest.mark.parametrize(
    "launch, shape",
    [(launch_general, shape) for shape in IN_PARTS if torch.cuda.is_available() or shape[0] < 150]
    + [(launch_general, shape) for shape in [(70, 99, 777), (200, 33, 1000)]]
    + [pytest.param(launch_hopper, shape, marks=pytest.mark.gpu) for shape in IN_PARTS],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.usefixtures("forgotten_plans")
def test_parts_of_a_sum_add_up(device, monkeypatch, shape, launch, kind):
    planned, split = [], kernels._split
    monkeypatch.setattr(
        kernels, "_split", lambda *facts: planned.append(split(*facts)) or planned[-1]
    )
    monkeypatch.setattr(kernels, "num_sms", lambda device: 50)
    monkeypatch.setattr(gluon_matmul, "num_sms", lambda device: 5)  # programs take several parts
    monkeypatch.setattr(kernels, "MIN_PART", 160)
    generator = torch.Generator().manual_seed(0)

    def integers(low, high, *size):
        return torch.randint(low, high, size, generator=generator).float().to(device)

    m, n, k = shape
    dtype = torch.int8 if kind == "int8" else E4M3.dtype
    a, b = integers(-3, 4, m, k).to(dtype), integers(-3, 4, n, k).to(dtype)
    tiles = -(-k // 128) if "tiles" in kind else 1
    a_scale, b_scale = integers(-3, 3, m, tiles).exp2(), integers(-3, 3, n, tiles).exp2()
    for bias, out in [(None, torch.float32), (integers(-9, 9, n), torch.bfloat16)]:
        arguments = (a, b, a_scale, b_scale, bias, out)
        assert torch.equal(launch(*arguments), reference.matmul(*arguments))  # sums are exact
    assert all(parts > 1 for _, parts, *_ in planned) and len(planned) == 2


def test_parts_fill_the_last_wave_of_tiles():
    for tiles, sizes, fastest in (  # measured on an H200
        (72, (3072, 768, 32768), 5),
        (200, (5120, 1280, 32768), 3),
        (2048, (16384, 4096, 32768), 1),
        (1280, (32768, 1280, 5120), 1),
        (3, (300, 528, 128), 1),
    ):
        assert kernels._parts_in_waves(tiles, sizes, sms=132) == fastest


def test_tall_tiles_are_for_fp8_that_they_cover_in_fewer_waves(monkeypatch):
    monkeypatch.setattr(kernels, "num_sms", lambda device: 132)

    def is_tall(m, n, dtype=E4M3.dtype, has_tiles=False):
        sizes, dtypes = (m, n, 5120), (dtype, dtype, torch.bfloat16, None)
        return kernels._hopper_tile(None, dtypes, sizes, has_tiles) == kernels.TALL_TILE

    for width in (1408, 1664):  # measured on an H200
        assert is_tall(32768, width) and not is_tall(32768, 4 * width)
        assert not is_tall(32768, width, torch.int8) and not is_tall(32768, width, has_tiles=True)
    for width in (768, 1024, 1280, 2048, 4096):
        assert not any(is_tall(32768, width * factor) for factor in (1, 3, 4))
    assert not is_tall(300, 1408)  # one wave of either


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(700, 400, 1040), (1, 16, 16), (33000, 1408, 272)], ids=str)
def test_sums_do_not_depend_on_the_tile(device, monkeypatch, shape, dtype):
    m, n, k = shape
    a, b = make_fp8(m, k, E4M3, device, 0), make_fp8(n, k, E5M2, device, 1)
    factors = make_scale(m, device, 2), make_scale(n, device, 3), torch.randn(n, device=device)
    results = []
    for tile in (kernels.WIDE_TILE, kernels.TALL_TILE):
        monkeypatch.setattr(kernels, "_hopper_tile", lambda *_, tile=tile: tile)
        results.append(launch_hopper(a, b, *factors, dtype))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "k, dtype", [(128, torch.float32), (200, torch.bfloat16), (400, torch.float32)], ids=str
)
@pytest.mark.usefixtures("forgotten_plans")
def test_partial_int32_sums_are_added_in_float32(device, monkeypatch, dtype, k):
    monkeypatch.setattr(kernels, "MAX_INT8_TERMS", 128)
    monkeypatch.setattr(reference, "MAX_INT8_TERMS", 128)
    a, b = make_int8(33, k, device, 0), make_int8(20, k, device, 1)
    a_scale, b_scale = make_scale(33, device, 2), make_scale(20, device, 3)
    bias = torch.randn(20, device=device)
    for tile in (kernels.TILE, kernels.ODD_TILE, kernels.WIDE_TILE):
        assert kernels._split(device, (torch.int8,), (33, 20, k), tile)[2] <= 128
    result = kernels.matmul(a, b, a_scale, b_scale, bias, dtype)
    exact = (a.double() @ b.double().T) * a_scale.double() * b_scale.double().T + bias.double()
    bound = EPS[dtype] * (exact.abs() + bias.abs()) + 1e-4  # float32 sums of the parts
    assert ((result.double() - exact).abs() <= bound).all()
    expected = reference.matmul(a, b, a_scale, b_scale, bias, torch.float32)
    torch.testing.assert_close(expected.double(), exact, rtol=1e-6, atol=1e-4)


def test_sums_beyond_int32_are_right(device):
    k = reference.MAX_INT8_TERMS + 4096
    a = torch.full((2, k), 127, dtype=torch.int8, device=device)
    b = torch.full((3, k), -127, dtype=torch.int8, device=device)
    one = torch.ones(1, 1, device=device)
    assert 127**2 * k > 2**31
    multiplies = [reference.matmul] + [kernels.matmul] * a.is_cuda  # takes 20 s in the interpreter
    for multiply in multiplies:
        result = multiply(a, b, one, one, None, torch.float32)
        exact = torch.full_like(result, -(127.0**2) * k)
        torch.testing.assert_close(result, exact, rtol=2.0**-22, atol=0)


@LAUNCHES
def test_nan_scale_makes_only_its_row_nan_and_scales_and_bias_may_have_gaps(device, launch):
    a, b = make_int8(40, 64, device, 0), make_int8(48, 64, device, 1)
    a_scale, bias = make_scale(80, device, 2)[::2], make_scale(96, device, 3)[::2, 0]
    for b_scale in (make_scale(96, device, 4)[::2], make_scale(1, device, 4).expand(48, 1)):
        arguments = (a, b, a_scale, b_scale, bias, torch.float32)
        assert_int8_agrees(launch(*arguments), arguments)
    a_scale[7], b_scale = torch.nan, make_scale(48, device, 4)
    b_scale[9] = torch.nan
    result = launch(a, b, a_scale, b_scale, None, torch.bfloat16).isnan()
    expected = torch.zeros(40, 48, dtype=torch.bool, device=device)
    expected[7], expected[:, 9] = True, True
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("m", "n"), [(0, 48), (48, 0)])
def test_empty_product_launches_nothing(device, monkeypatch, m, n):
    monkeypatch.setattr(kernels, "_plan", None)
    a, b = make_int8(m, 64, device, 0), make_int8(n, 64, device, 1)
    one = torch.ones(1, 1, device=device)
    result = kernels.matmul(a, b, one, one, None, torch.bfloat16)
    assert result.shape == (m, n) and result.dtype == torch.bfloat16


@pytest.mark.parametrize("launch", [launch_general, kernels.matmul])
def test_a_sum_of_no_terms_is_the_bias(device, launch):
    a, b = make_int8(16, 64, device, 0)[:, :0], make_int8(32, 64, device, 1)[:, :0]
    one, bias = torch.ones(1, 1, device=device), torch.randn(32, device=device)
    assert torch.equal(launch(a, b, one, one, bias, torch.float32), bias.expand(16, 32))
