"""Triton kernel for `reference.matmul`: int8 or fp8 products with fused scales and bias.

The kernels here handle all shapes; `gluon_matmul` replaces them on Hopper where rows are multiples
of 16 bytes. int8 accumulates in int32, fp8 in the matrix unit; scales of tiles are applied in
float32 after each tile (`_matmul_tiles_kernel`). A sum is split into parts if there are too few
output tiles for all multiprocessors or too many int8 terms for int32; then each part stores a
scaled sum in float32, and torch adds these. Offsets are int64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.ops.epilogue import finish, load_bias, load_scales
from lowprec.ops.gluon_matmul import TALL_TILE, WIDE_TILE, plan_hopper
from lowprec.ops.launch import ALIGNMENT, Launch, is_hopper, num_sms, plan, rows_contiguous
from lowprec.ops.reference import MAX_INT8_TERMS, TILE_TERMS, sizes_of

MIN_PART = 2048  # terms of a sum; on an H100, shorter parts are rarely faster
STEP_BYTES = 3_300_000  # that an H200 moves while all multiprocessors add 128 scaled terms
GROUP_M = 8  # rows of output tiles that reuse cached columns of b
TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
SCALED_TILE = TILE | {"BLOCK_N": TILE_TERMS, "BLOCK_K": TILE_TERMS, "num_stages": 4}
ODD_TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}


@triton.jit
def _block_at(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Rows and columns of this program's block of the output, as int64."""
    tile, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP_M * tiles_n) * GROUP_M  # of the rows of tiles that reuse columns of b
    rows = tl.minimum(tiles_m - first, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    tile_m, tile_n = first + within % rows, within // rows
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    return m, n


@triton.jit
def _part_of(K, K_PART):
    """First and last term (exclusive) of this program's part of the sum."""
    first = tl.program_id(1) * K_PART
    return first, tl.minimum(first + K_PART, K)


@triton.jit
def _store(output, out_ptr, m, n, M, N, BLOCK_M: tl.constexpr):
    """Stores a block of this program's part, whose rows are padded to a multiple of BLOCK_M."""
    row = tl.program_id(1).to(tl.int64) * tl.cdiv(M, BLOCK_M) * BLOCK_M + m
    mask = (m < M)[:, None] & (n < N)[None, :]
    output = output.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * N + n[None, :], output, mask=mask)


@triton.jit
def _matmul_kernel(
    a_ptr, b_ptr, out_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, M, N, K, K_PART,
    stride_am, stride_bn,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    m, n = _block_at(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    sums = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    first, last = _part_of(K, K_PART)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            a_ptr + m[:, None] * stride_am + k[None, :],
            mask=(m < M)[:, None] & (k < K)[None, :], other=0.0,
        )  # [BLOCK_M, BLOCK_K]  # fmt: skip
        b = tl.load(
            b_ptr + n[None, :] * stride_bn + k[:, None],
            mask=(n < N)[None, :] & (k < K)[:, None], other=0.0,
        )  # [BLOCK_K, BLOCK_N]  # fmt: skip
        sums = tl.dot(a, b, sums, out_dtype=ACC)
    a_scale, b_scale = load_scales(a_scale_ptr, b_scale_ptr, m, n, M, N, A_ROWS, B_ROWS)
    output = finish(sums, a_scale, b_scale, load_bias(bias_ptr, n, N, BIAS), BIAS)
    _store(output, out_ptr, m, n, M, N, BLOCK_M)


@triton.jit
def _matmul_tiles_kernel(
    a_ptr, b_ptr, out_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, M, N, K, K_PART,
    stride_am, stride_bn, scale_am, scale_ak, scale_bn, scale_bk,
    B_ROWS: tl.constexpr, BIAS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n = _block_at(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first, last = _part_of(K, K_PART)
    for tile in range(first // BLOCK_K, tl.cdiv(last, BLOCK_K)):
        k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(
            a_ptr + m[:, None] * stride_am + k[None, :],
            mask=(m < M)[:, None] & (k < K)[None, :], other=0.0,
        )  # [BLOCK_M, BLOCK_K]  # fmt: skip
        b = tl.load(
            b_ptr + n[None, :] * stride_bn + k[:, None],
            mask=(n < N)[None, :] & (k < K)[:, None], other=0.0,
        )  # [BLOCK_K, BLOCK_N]  # fmt: skip
        a_scale = tl.load(a_scale_ptr + m * scale_am + tile * scale_ak, mask=m < M, other=0.0)
        if B_ROWS:
            b_scale = tl.load(b_scale_ptr + n * scale_bn + tile * scale_bk, mask=n < N, other=0.0)
            sums += tl.dot(a, b) * (a_scale[:, None] * b_scale[None, :])
        else:  # one scale, because BLOCK_N is the height of b's tiles
            tile_n = tl.min(n, axis=0) // BLOCK_N
            b_scale = tl.load(b_scale_ptr + tile_n * scale_bn + tile * scale_bk)
            sums += tl.dot(a, b) * (a_scale * b_scale)[:, None]
    output = finish(sums, 1.0, 1.0, load_bias(bias_ptr, n, N, BIAS), BIAS)
    _store(output, out_ptr, m, n, M, N, BLOCK_M)


def matmul(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype
) -> Tensor:
    """`reference.matmul` by the fastest kernel for the shapes and the GPU.

    Operands whose rows are not contiguous are copied, because the kernels assume stride 1 along K;
    so are scales and a bias that are not contiguous. Raises ValueError for sizes that do not fit.
    """
    M, N, K, has_tiles = sizes_of(a_MK, b_NK, a_scale, b_scale, bias)
    a_MK, b_NK = rows_contiguous(a_MK), rows_contiguous(b_NK)
    is_aligned = (a_MK.data_ptr() | b_NK.data_ptr()) % ALIGNMENT == 0
    bias = None if bias is None else bias.contiguous()
    if M * N == 0:
        return torch.empty(M, N, dtype=dtype, device=a_MK.device)
    dtypes = (a_MK.dtype, b_NK.dtype, dtype, None if bias is None else bias.dtype)
    strides = (a_MK.stride(0), b_NK.stride(0))
    if has_tiles:
        strides += (*a_scale.stride(), *b_scale.stride())
        per_row = (True, b_scale.shape[0] == N)
    else:
        a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
        per_row = (a_scale.numel() > 1, b_scale.numel() > 1)
    launch, shape = _plan(a_MK.device, dtypes, (M, N, K), strides, per_row, is_aligned)
    if shape is None:
        out = torch.empty(M, N, dtype=dtype, device=a_MK.device)
        launch(a_MK, b_NK, out, a_scale, b_scale, a_scale if bias is None else bias)
        return out
    parts = torch.empty(shape, dtype=torch.float32, device=a_MK.device)
    launch(a_MK, b_NK, parts.flatten(0, 1), a_scale, b_scale, a_scale)
    out = parts[:, :M].sum(dim=0)
    return (out if bias is None else out + bias.float()).to(dtype)


def _split(
    device, dtypes, sizes, tile, in_waves=False
) -> tuple[int, int, int, tuple[int, int, int] | None]:
    """Number of output tiles, of parts of the sum, and of terms in a part, whole steps of BLOCK_K.

    Last the shape in which the kernel stores the parts, or None if there is one. `in_waves`: there
    may be more parts than fit on all multiprocessors at once; see `_parts_in_waves`.
    """
    M, N, K = sizes
    tiles_m, tiles_n = triton.cdiv(M, tile["BLOCK_M"]), triton.cdiv(N, tile["BLOCK_N"])
    tiles = tiles_m * tiles_n
    parts = min(num_sms(device) // tiles, K // MIN_PART)
    if in_waves:
        parts = _parts_in_waves(tiles, sizes, num_sms(device))
    if dtypes[0] == torch.int8:
        parts = max(parts, triton.cdiv(K, MAX_INT8_TERMS))
    if parts <= 1:
        return tiles, 1, max(K, 1), None
    terms = triton.cdiv(K, parts * tile["BLOCK_K"]) * tile["BLOCK_K"]
    parts = triton.cdiv(K, terms)  # rounding up may have left fewer
    return tiles, parts, terms, (parts, tiles_m * tile["BLOCK_M"], N) if parts > 1 else None


def _parts_in_waves(tiles: int, sizes: tuple, sms: int) -> int:
    """The number of parts that takes least time: most of `sms` may idle in the last wave of tiles.

    Time is counted in bytes moved: whole waves of steps of a tile, and parts stored and added.
    """
    M, N, K = sizes

    def cost(parts: int) -> int:
        steps = triton.cdiv(tiles * parts, sms) * triton.cdiv(K, parts * TILE_TERMS)
        return steps * STEP_BYTES + (8 * parts * M * N if parts > 1 else 0)

    return min(range(1, K // MIN_PART + 1), key=cost, default=1)


@plan
def _plan(device, dtypes, sizes, strides, per_row, is_aligned: bool) -> tuple[Launch, tuple | None]:
    """The launch and the shape of parts, from dtypes of a, b, output and bias (or None).

    `strides`: of the rows of a and b, then those of both scales if they are of tiles.
    """
    has_tiles = len(strides) > 2
    on_hopper = is_aligned and _has_whole_rows(dtypes, sizes, strides[:2]) and is_hopper(device)
    is_odd = any(stride % ALIGNMENT for stride in strides[:2])  # loads single bytes
    general = SCALED_TILE if has_tiles else ODD_TILE if is_odd else TILE
    tile = _hopper_tile(device, dtypes, sizes, has_tiles) if on_hopper else general
    tiles, parts, terms, shape = _split(device, dtypes, sizes, tile, on_hopper and has_tiles)
    constants = {"B_ROWS": per_row[1], "BIAS": dtypes[3] is not None and parts == 1}
    if not has_tiles:
        constants["A_ROWS"] = per_row[0]
    if on_hopper:
        stored = dtypes[2] if parts == 1 else torch.float32
        integers = (*sizes, terms, *strides[2:])
        launch = plan_hopper(device, stored, integers, tile, tiles * parts, has_tiles, constants)
        return launch, shape
    constants |= tile | {"GROUP_M": GROUP_M}
    if not has_tiles:
        constants["ACC"] = tl.int32 if dtypes[0] == torch.int8 else tl.float32
    kernel = _matmul_tiles_kernel if has_tiles else _matmul_kernel
    return Launch(kernel, (tiles, parts), (*sizes, terms, *strides), **constants), shape


def _hopper_tile(device, dtypes, sizes, has_tiles: bool) -> dict:
    """TALL_TILE for products in fp8 if it takes fewer waves of all multiprocessors.

    It can where the last wide tile of a row is at most half full, as at the measured widths of
    1,408 and 1,664. Sums do not depend on the tile.
    """

    def waves(tile: dict) -> int:
        tiles = triton.cdiv(sizes[0], tile["BLOCK_M"]) * triton.cdiv(sizes[1], tile["BLOCK_N"])
        return triton.cdiv(tiles, num_sms(device))

    is_wide = has_tiles or dtypes[0] == torch.int8 or waves(WIDE_TILE) <= waves(TALL_TILE)
    return WIDE_TILE if is_wide else TALL_TILE


def _has_whole_rows(dtypes, sizes, strides) -> bool:
    """Whether rows of the operands, one byte per number, and the output are whole 16 bytes."""
    row_bytes = (*strides, sizes[1] * dtypes[2].itemsize)
    return sizes[2] > 0 and all(size % ALIGNMENT == 0 for size in row_bytes)
