"""Triton kernels for `reference.matmul`: int8 or fp8 products with fused scales and bias.

`_matmul_tma_kernel` (compute capability 9.0, rows of 16 n bytes) is persistent: one program per
multiprocessor loops over output tiles, and a producer warp loads operands ahead. `_matmul_kernel`
handles all shapes. int8 accumulates up to 131,072 terms in int32 and adds further partial sums in
float32; fp8 accumulates in the matrix unit. Offsets are int64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.ops.launch import ALIGNMENT, Launch, plan
from lowprec.ops.reference import MAX_INT8_TERMS
from lowprec.ops.triton_quantize import _rows_contiguous, num_sms

GROUP_M = 8  # rows of output tiles that reuse cached columns of b
TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
ODD_TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
TMA_TILE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "num_warps": 8}
DEEP = {"SUBTILES": 2, "num_stages": 4}  # stores halves of a tile: room for a fourth stage
LONG = {"SUBTILES": 1, "num_stages": 3}  # faster for fp8 with many steps along K
WIDE = {"SUBTILES": 2, "num_stages": 3}  # for float32 output, whose tiles are twice as large
LONG_K = 2048


@triton.jit
def _tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile, in an order that covers GROUP_M rows at a time."""
    group = tile // (GROUP_M * tiles_n)
    first = group * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return first + within % rows, within // rows


@triton.jit
def _scaled(
    sums, m, n, a_scale_ptr, b_scale_ptr, bias_ptr, M, N,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """`sums * a_scale * b_scale^T + bias` in float32, for rows m and columns n."""
    if A_ROWS:
        sums = sums * tl.load(a_scale_ptr + m, mask=m < M, other=0.0)[:, None]
    else:
        sums = sums * tl.load(a_scale_ptr)
    if B_ROWS:
        sums = sums * tl.load(b_scale_ptr + n, mask=n < N, other=0.0)[None, :]
    else:
        sums = sums * tl.load(b_scale_ptr)
    if BIAS:
        sums = sums + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def _matmul_kernel(
    a_ptr, b_ptr, out_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, M, N, K, stride_am, stride_bn,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for start in range(0, K, BLOCK_K):
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
    output = _scaled(
        sums.to(tl.float32), m, n, a_scale_ptr, b_scale_ptr, bias_ptr, M, N, A_ROWS, B_ROWS, BIAS
    )
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], output.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _matmul_tma_kernel(
    a_desc, b_desc, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr, M, N, K,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True, warp_specialize=True
    ):
        tile_m, tile_n = _tile_of(tile, tiles_m, tiles_n, GROUP_M)
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        sums = tl.zeros([BLOCK_M, BLOCK_N], ACC)
        for step in range(steps):
            a = a_desc.load([m0, step * BLOCK_K])
            b = b_desc.load([n0, step * BLOCK_K])
            sums = tl.dot(a, b.T, sums, out_dtype=ACC)
        m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
        output = _scaled(
            sums.to(tl.float32), m, n, a_scale_ptr, b_scale_ptr, bias_ptr, M, N,
            A_ROWS, B_ROWS, BIAS,
        )  # fmt: skip
        if SUBTILES == 1:
            out_desc.store([m0, n0], output.to(out_desc.dtype))
        else:
            halves = tl.reshape(output, [BLOCK_M, 2, BLOCK_N // 2])
            left, right = tl.split(tl.permute(halves, [0, 2, 1]))
            out_desc.store([m0, n0], left.to(out_desc.dtype))
            out_desc.store([m0, n0 + BLOCK_N // 2], right.to(out_desc.dtype))


def matmul(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype
) -> Tensor:
    """`reference.matmul` by the fastest kernel for the shapes and the GPU.

    Operands whose rows are not contiguous are copied, because the kernels assume stride 1 along K.
    """
    a_MK, b_NK = _rows_contiguous(a_MK), _rows_contiguous(b_NK)
    if a_MK.dtype == torch.int8 and a_MK.shape[1] > MAX_INT8_TERMS:
        return _in_parts(a_MK, b_NK, a_scale, b_scale, bias, dtype)
    (M, K), N = a_MK.shape, b_NK.shape[0]
    out = torch.empty(M, N, dtype=dtype, device=a_MK.device)
    if out.numel() == 0:
        return out
    dtypes = (a_MK.dtype, b_NK.dtype, dtype, None if bias is None else bias.dtype)
    is_aligned = (a_MK.data_ptr() | b_NK.data_ptr()) % ALIGNMENT == 0
    per_row = (a_scale.numel() > 1, b_scale.numel() > 1)
    strides = (a_MK.stride(0), b_NK.stride(0))
    launch = _plan(a_MK.device, dtypes, (M, N, K), strides, per_row, is_aligned)
    launch(a_MK, b_NK, out, a_scale, b_scale, a_scale if bias is None else bias)
    return out


def _in_parts(a_MK, b_NK, a_scale, b_scale, bias, dtype) -> Tensor:
    """Adds partial sums over K, each short enough for int32, scaled, in float32."""
    parts = zip(a_MK.split(MAX_INT8_TERMS, dim=1), b_NK.split(MAX_INT8_TERMS, dim=1), strict=True)
    outputs = [
        matmul(a.contiguous(), b.contiguous(), a_scale, b_scale, None, torch.float32)
        for a, b in parts
    ]
    output = sum(outputs[1:], outputs[0])
    return (output if bias is None else output + bias.float()).to(dtype)


@plan
def _plan(device, dtypes, sizes, strides, per_row, is_aligned: bool) -> Launch:
    """The launch for dtypes of a, b, output and bias (or None), and strides of a and b."""
    M, N, K = sizes
    constants = {
        "A_ROWS": per_row[0],
        "B_ROWS": per_row[1],
        "BIAS": dtypes[3] is not None,
        "ACC": tl.int32 if dtypes[0] == torch.int8 else tl.float32,
        "GROUP_M": GROUP_M,
    }
    row_bytes = (*strides, N * dtypes[2].itemsize)  # the operands have one byte per number
    if is_aligned and all(size % ALIGNMENT == 0 for size in row_bytes) and _has_tma(device):
        return _plan_tma(device, dtypes, sizes, constants)
    is_odd = any(stride % ALIGNMENT for stride in strides)  # loads single bytes
    tile = ODD_TILE if is_odd else TILE
    tiles = triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"])
    return Launch(_matmul_kernel, (tiles,), (*sizes, *strides), **constants, **tile)


def _plan_tma(device, dtypes, sizes, constants: dict) -> Launch:
    M, N, K = sizes
    tile = TMA_TILE | (DEEP if dtypes[0] == torch.int8 or K < LONG_K else LONG)
    if dtypes[2] == torch.float32:
        tile |= WIDE
    block_m, block_n, block_k = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    programs = min(num_sms(device), triton.cdiv(M, block_m) * triton.cdiv(N, block_n))
    blocks = [block_m, block_k], [block_n, block_k], [block_m, block_n // tile["SUBTILES"]]
    constants = constants | tile | {"PROGRAMS": programs}
    return Launch(_matmul_tma_kernel, (programs,), sizes, blocks, **constants)


def _has_tma(device: torch.device) -> bool:
    """Whether the device has a tensor memory accelerator; False on a CPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
