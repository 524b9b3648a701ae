"""The definitions of the operations of this package, in plain torch, on any device.

Shape suffixes: M = batch * tokens, K = features in, N = features out. A quantized tensor is
`x ~= q * scale` with a float32 scale of two dimensions: rowwise [M, 1], columnwise [1, K],
tensorwise [1, 1]; "RxC" has an element for each tile of R rows and C columns, [M / R, K / C]
rounded up.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec.formats import E4M3, Format, exponent_of, power_of_two, round_to_format

REDUCED = {"rowwise": (1,), "columnwise": (0,), "tensorwise": (0, 1)}  # dimensions of amax
PAIRED = {"tensorwise": "tensorwise", "1x128": "128x1"}  # granularities of x and of its transpose
TINY = torch.finfo(torch.float32).tiny  # the smallest normal number
TILE_TERMS = 128  # terms of a sum that share a scale, in products of scaled tiles
MAX_FLOAT32_TERMS = 1024  # products of int8 whose sum float32 holds exactly: 128^2 * 1024 = 2^24
MAX_INT8_TERMS = 131072  # products of int8 whose sum always fits int32: 127^2 * 133144 < 2^31


def quantize(x_MK: Tensor, format: Format, granularity: str) -> tuple[Tensor, Tensor]:
    """Symmetric quantization, `x ~= q * scale` with `scale = amax / format.max`: q_MK and scale.

    x / scale is rounded to nearest, ties to even. Where amax is 0 or the scale is subnormal, q = 0
    and scale = 0. A row, column, tensor or tile that contains NaN or inf gets q = 0 and
    scale = NaN, so that products with it are NaN. Source: arXiv:2304.13013, section 2.
    """
    x_MK = x_MK.float()
    if granularity in REDUCED:
        scale = scale_of(x_MK.abs().amax(dim=REDUCED[granularity], keepdim=True), format)
        return _cast(_divide(x_MK, scale), format), scale
    tiles = _to_tiles(x_MK, granularity)
    scale = scale_of(tiles.abs().amax(dim=(1, 3), keepdim=True), format)
    # cast last: on a CPU, Inductor compiles slices of 8-bit tiles to wrong code
    quotients = _from_tiles(_divide(tiles, scale), granularity, x_MK.shape)
    return _cast(quotients, format), scale[:, 0, :, 0]


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    """`x / scale`; 0 where the scale is 0 or NaN."""
    usable = scale > 0  # False for NaN
    return torch.where(usable, x / torch.where(usable, scale, 1.0), 0.0)


def scale_of(amax: Tensor, format: Format) -> Tensor:
    """`amax / format.max`: 0 where that is subnormal, NaN where amax is not finite; float32."""
    scale = amax / torch.full_like(amax, format.max)  # CUDA would multiply by 1 / number
    scale = torch.where(scale < TINY, 0.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def _cast(x: Tensor, format: Format) -> Tensor:
    """Rounds to the format's dtype; a division may round |x| above the largest number."""
    if not format.exponent_bits:
        return x.round().clamp(-format.max, format.max).to(format.dtype)
    if format.dtype == torch.float32:
        return round_to_format(x, format)
    return x.clamp(-format.max, format.max).to(format.dtype)


def quantize_rows_and_sum(g_MN: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Row-wise quantization and column sums: q_MN, scale [M, 1], float32 sum [N]."""
    q_MN, scale = quantize(g_MN, format, "rowwise")
    return q_MN, scale, g_MN.float().sum(dim=0)


def quantize_pair(
    x_MK: Tensor, format: Format, granularity: str, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """What two products that sum over both dimensions of x need of it.

    Returns q_MK and its scale, q_KM with the granularity that `PAIRED` gives and its scale, as
    stored for x, and if `sums` the float32 column sums [K] of x.
    """
    q_MK, scale = quantize(x_MK, format, granularity)
    across, across_scale = quantize(x_MK, format, PAIRED[granularity])
    q_KM = across.T.clone(memory_format=torch.contiguous_format)
    return q_MK, scale, q_KM, across_scale, x_MK.float().sum(dim=0) if sums else None


def gelu_quantize(h_MN: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Row-wise quantization of GELU(h), which is rounded to h's dtype first: q_MN, scale [M, 1]."""
    return quantize(F.gelu(h_MN), format, "rowwise")


def gelu_backward_quantize(
    h_MN: Tensor, g_MN: Tensor, format: Format
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the backward of two linear layers around a GELU needs, from its input h and gradient g.

    Returns GELU(h) and grad = g GELU'(h) in h's dtype, then grad quantized row-wise, its scale
    [M, 1] and its float32 column sums [N].
    """
    output = F.gelu(h_MN)
    grad = torch.ops.aten.gelu_backward(g_MN, h_MN)
    return output, grad, *quantize_rows_and_sum(grad, format)


def matmul(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype
) -> Tensor:
    """`(a @ b^T) * a_scale * b_scale^T + bias` in float32, rounded to dtype: [M, N].

    int8 products are summed exactly, up to 131,072 terms at a time, and the partial sums are added
    in float32; fp8 products are summed in float32. a_scale is [M, 1] or [1, 1], b_scale [N, 1] or
    [1, 1], bias [N] or None. If the scales vary along K (see `sizes_of`), the operands are scaled
    first. Raises ValueError for other sizes and for scales that are not float32.
    """
    if sizes_of(a_MK, b_NK, a_scale, b_scale, bias)[3]:
        a_MK, b_NK = _scaled(a_MK, a_scale), _scaled(b_NK, b_scale)
        a_scale = b_scale = torch.ones(1, 1, dtype=torch.float32, device=a_MK.device)
    with torch.autocast(a_MK.device.type, enabled=False):  # would round float32 to 16 bits
        if a_MK.dtype == torch.int8:
            parts = (operand.split(MAX_INT8_TERMS, dim=1) for operand in (a_MK, b_NK))
            sums = sum(_int_product(a, b).float() for a, b in zip(*parts, strict=True))
        else:
            sums = a_MK.float() @ b_NK.float().T
    # [:, 0], since Inductor reads past the end of a column whose symbolic size happens to be 1
    output = sums * a_scale[:, 0, None] * b_scale[:, 0]
    if bias is not None:
        output = output + bias.float()
    # A cast of float32 to float32 would return an alias of the output, and torch.compile of torch
    # 2.11 computes gradients of 0 for an autograd function that returns an alias.
    return output if dtype == torch.float32 else output.to(dtype)


def sizes_of(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None
) -> tuple[int, int, int, bool]:
    """M, N and K of a product, and whether its scales belong to tiles of TILE_TERMS along K.

    If they do, a_scale is [M, K / 128] and b_scale is [N, K / 128] or [N / 128, K / 128], rounded
    up; `matmul` lists the other sizes. Raises ValueError for sizes that do not fit and for scales
    that are not float32: kernels would read past the end of a tensor, or other numbers.
    """
    if a_scale.dtype != torch.float32 or b_scale.dtype != torch.float32:
        raise ValueError(f"scales must be float32, not {a_scale.dtype} and {b_scale.dtype}")
    (M, K), (N, terms) = a_MK.shape, b_NK.shape
    (a_rows, a_tiles), (b_rows, b_tiles) = a_scale.shape, b_scale.shape
    # no `in`: torch.compile compares symbolic sizes with it as objects
    has_tiles = a_tiles != 1 or b_tiles != 1 or (b_rows != 1 and b_rows != N)
    if has_tiles:
        tiles = -(-K // TILE_TERMS)
        has_rows = a_rows == M and (b_rows == N or b_rows == -(-N // TILE_TERMS))
        fits = has_rows and a_tiles == tiles and b_tiles == tiles
    else:
        fits = a_rows == 1 or a_rows == M
    if not fits or terms != K or (bias is not None and bias.shape != (N,)):
        a, b, of_a, of_b = (list(x.shape) for x in (a_MK, b_NK, a_scale, b_scale))
        raise ValueError(
            f"product of a {a} and b {b} with a_scale {of_a}, b_scale {of_b} and bias "
            f"{bias if bias is None else list(bias.shape)}: must be [M, K] and [N, K] with [M, 1] "
            "or [1, 1], [N, 1] or [1, 1] and [N] or None; scales of tiles: [M, K / 128] with "
            "[N, K / 128] or [N / 128, K / 128], rounded up"
        )
    return M, N, K, has_tiles


def _scaled(q: Tensor, scale: Tensor) -> Tensor:
    """`q * scale` in float32 for the scales of tiles."""
    rows = 1 if scale.shape[0] == q.shape[0] else TILE_TERMS
    granularity = f"{rows}x{TILE_TERMS}"
    tiles = _to_tiles(q.float(), granularity) * scale[:, None, :, None]
    return _from_tiles(tiles, granularity, q.shape)


def _int_product(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Exact `a @ b^T` of int8 tensors, in float: a CPU may lack instructions for int8."""
    is_small = a_MK.device.type == "cpu" and a_MK.shape[1] <= MAX_FLOAT32_TERMS
    dtype = torch.float32 if is_small else torch.float64
    return a_MK.to(dtype) @ b_NK.to(dtype).T


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`q * scale`, rounded once to dtype."""
    return (q.float() * scale).to(dtype)


def fake_quantize(
    x_MK: Tensor,
    format: Format,
    granularity: str,
    dtype: torch.dtype,
    *,
    scale: str = "float32",
    stochastic: bool = False,
) -> Tensor:
    """Quantizes and dequantizes a 2-d tensor; the result has the given dtype.

    granularity: as in `quantize`, "RxC" or "blocks". "RxC" uses one scale per tile of R rows and C
        columns, such as "1x32"; tiles at the end may be smaller. "blocks" uses one scale per block
        of consecutive elements of the flattened tensor. A block has the smallest power of two that
        is at least the width, within 64 to 4,096 elements, so blocks can straddle rows. Source: the
        fp8 code released with arXiv:2304.13013, whose text calls this row-wise.
    scale: "float32"; "e8m0", the power of two of OCP Microscaling Formats 1.0, section 6.3, with
        which the largest elements may saturate; or "e4m3", as in NVFP4: an e4m3 number for each
        tile times a float32 scale of the tensor (arXiv:2509.25149, appendix A).
    stochastic: see `round_to_format`.
    """
    if granularity in REDUCED and scale == "float32" and not stochastic:
        return dequantize(*quantize(x_MK, format, granularity), dtype)
    tiles = _to_tiles(x_MK.float(), granularity)
    amax = tiles.abs().amax(dim=(1, 3), keepdim=True)
    scales = SCALES[scale](amax, format)
    q = _divide(tiles, scales)
    q = round_to_format(q, format, stochastic=True) if stochastic else _cast(q, format)
    return _from_tiles(dequantize(q, scales, dtype), granularity, x_MK.shape)


def _power_of_two(amax: Tensor, format: Format) -> Tensor:
    """The scale that gives amax the exponent of the format's largest number, 2^-126 at least."""
    largest = math.frexp(format.max)[1] - 1
    scale = power_of_two((exponent_of(amax) - largest).clamp(min=-126))
    return torch.where(amax.isfinite(), scale, torch.nan)


def _two_levels(amax: Tensor, format: Format) -> Tensor:
    """An e4m3 number for each tile times a scale of the tensor."""
    largest = amax.amax()
    of_tensor = torch.where(largest.isfinite(), largest / (E4M3.max * format.max), torch.nan)
    of_tiles = torch.where(of_tensor >= TINY, amax / format.max / of_tensor, 0.0)
    of_tiles = of_tiles.clamp(max=E4M3.max).to(E4M3.dtype).float()
    return of_tiles * of_tensor


SCALES = {"float32": scale_of, "e8m0": _power_of_two, "e4m3": _two_levels}


def _tile_shape(granularity: str, shape: torch.Size) -> tuple[int, int]:
    rows, columns = shape
    whole = {"rowwise": (1, columns), "columnwise": (rows, 1), "tensorwise": (rows, columns)}
    if granularity in whole:
        return whole[granularity]
    rows, columns = map(int, granularity.split("x"))
    return rows, columns


def _to_tiles(x_MK: Tensor, granularity: str) -> Tensor:
    """[tiles down, rows of a tile, tiles across, columns of a tile], padded with zeros."""
    if granularity == "blocks":
        size = min(4096, max(64, 1 << (x_MK.shape[1] - 1).bit_length()))
        return F.pad(x_MK.flatten(), (0, -x_MK.numel() % size)).view(-1, 1, 1, size)
    rows, columns = _tile_shape(granularity, x_MK.shape)
    padded = F.pad(x_MK, (0, -x_MK.shape[1] % columns, 0, -x_MK.shape[0] % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _from_tiles(tiles: Tensor, granularity: str, shape: torch.Size) -> Tensor:
    """The tensor of a shape whose tiles these are."""
    if granularity == "blocks":
        return tiles.flatten()[: shape.numel()].view(shape)
    return tiles.flatten(2).flatten(0, 1)[: shape[0], : shape[1]]


def hadamard(x_MK: Tensor, dim: int) -> Tensor:
    """Rotates blocks of 16 consecutive elements along a dimension by a random Hadamard matrix.

    The dimension is padded with zeros to a multiple of 16. Rotating both operands of a product
    along the summed dimension leaves it unchanged and spreads outliers over their block. The matrix
    is the same for all tensors: random signs, fixed once, times H / 4. Computes in float32.
    Source: arXiv:2509.25149, section 4.2.
    """
    x = x_MK.float().movedim(dim, 1)
    blocks = F.pad(x, (0, -x.shape[1] % 16)).unflatten(1, (-1, 16))
    return (blocks @ _hadamard_matrix(x.device)).flatten(1).movedim(1, dim).to(x_MK.dtype)


def _hadamard_matrix(device: torch.device) -> Tensor:
    """[16, 16] in float32, made on the device: a CUDA graph cannot copy it from the host."""
    bits = torch.arange(16, device=device)
    signs = 1 - 2 * (0b1010_1111_1110_1000 >> bits & 1)
    common = bits[:, None] & bits  # H[i, j] = (-1)^(number of bits that i and j share)
    common = common ^ common >> 2
    parity = (common ^ common >> 1) & 1
    return ((1 - 2 * parity) * signs[:, None]).float() / 4


def empty_scale(x_MK: Tensor, granularity: str) -> Tensor:
    """A float32 scale for `quantize`; 1x128 has contiguous columns, as products read it."""
    M, K = x_MK.shape
    shapes = {"rowwise": (M, 1), "columnwise": (1, K), "tensorwise": (1, 1)}
    if granularity in shapes:
        return x_MK.new_empty(shapes[granularity], dtype=torch.float32)
    tile_m, tile_k = map(int, granularity.split("x"))
    down, across = -(-M // tile_m), -(-K // tile_k)
    if tile_m == 1:
        return x_MK.new_empty((across, down), dtype=torch.float32).T
    return x_MK.new_empty((down, across), dtype=torch.float32)
