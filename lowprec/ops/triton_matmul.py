"""Triton kernel for `reference.matmul`: int8 or fp8 products with fused scales and bias.

`_matmul_kernel` handles all shapes; `gluon_matmul` replaces it on Hopper where rows are multiples
of 16 bytes. int8 accumulates up to 131,072 terms in int32 and adds further partial sums in float32;
fp8 accumulates in the matrix unit; scales of tiles are applied in float32 after each tile
(`_matmul_tiles_kernel`). Offsets are int64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.ops.gluon_matmul import plan_hopper
from lowprec.ops.launch import ALIGNMENT, Launch, plan
from lowprec.ops.reference import MAX_INT8_TERMS, TILE_TERMS, has_tiles
from lowprec.ops.triton_quantize import _rows_contiguous

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
def _matmul_kernel(
    a_ptr, b_ptr, out_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, M, N, K, stride_am, stride_bn,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    m, n = _block_at(M, N, BLOCK_M, BLOCK_N, GROUP_M)
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
    output = sums.to(tl.float32)
    if A_ROWS:
        output *= tl.load(a_scale_ptr + m, mask=m < M, other=0.0)[:, None]
    else:
        output *= tl.load(a_scale_ptr)
    if B_ROWS:
        output *= tl.load(b_scale_ptr + n, mask=n < N, other=0.0)[None, :]
    else:
        output *= tl.load(b_scale_ptr)
    if BIAS:
        output += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], output.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _matmul_tiles_kernel(
    a_ptr, b_ptr, out_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, M, N, K, stride_am, stride_bn,
    scale_am, scale_ak, scale_bn, scale_bk,
    B_ROWS: tl.constexpr, BIAS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n = _block_at(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(tl.cdiv(K, BLOCK_K)):
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
            first = tl.min(n, axis=0) // BLOCK_N
            b_scale = tl.load(b_scale_ptr + first * scale_bn + tile * scale_bk)
            sums += tl.dot(a, b) * (a_scale * b_scale)[:, None]
    if BIAS:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], sums.to(out_ptr.dtype.element_ty), mask=mask)


def matmul(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype
) -> Tensor:
    """`reference.matmul` by the fastest kernel for the shapes and the GPU.

    Operands whose rows are not contiguous are copied, because the kernels assume stride 1 along K;
    so are scales and a bias that are not contiguous.
    """
    a_MK, b_NK = _rows_contiguous(a_MK), _rows_contiguous(b_NK)
    bias = None if bias is None else bias.contiguous()
    (M, K), N = a_MK.shape, b_NK.shape[0]
    out = torch.empty(M, N, dtype=dtype, device=a_MK.device)
    if out.numel() == 0:
        return out
    dtypes = (a_MK.dtype, b_NK.dtype, dtype, None if bias is None else bias.dtype)
    if has_tiles(a_scale, b_scale, N):
        strides = (a_MK.stride(0), b_NK.stride(0), *a_scale.stride(), *b_scale.stride())
        launch = _plan_tiles(a_MK.device, dtypes, (M, N, K), strides, b_scale.shape[0] == N)
        launch(a_MK, b_NK, out, a_scale, b_scale, a_scale if bias is None else bias)
        return out
    a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    if a_MK.dtype == torch.int8 and K > MAX_INT8_TERMS:
        return _in_parts(a_MK, b_NK, a_scale, b_scale, bias, dtype)
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
def _plan_tiles(device, dtypes, sizes, strides, b_rows: bool) -> Launch:
    """The launch for dtypes as in `_plan`, and strides of a, b and both scales."""
    M, N, _ = sizes
    tiles = triton.cdiv(M, SCALED_TILE["BLOCK_M"]) * triton.cdiv(N, SCALED_TILE["BLOCK_N"])
    constants = {"B_ROWS": b_rows, "BIAS": dtypes[3] is not None, "GROUP_M": GROUP_M}
    return Launch(_matmul_tiles_kernel, (tiles,), (*sizes, *strides), **constants, **SCALED_TILE)


@plan
def _plan(device, dtypes, sizes, strides, per_row, is_aligned: bool) -> Launch:
    """The launch for dtypes of a, b, output and bias (or None), and strides of a and b."""
    M, N, _ = sizes
    per_row = {"A_ROWS": per_row[0], "B_ROWS": per_row[1], "BIAS": dtypes[3] is not None}
    row_bytes = (*strides, N * dtypes[2].itemsize)  # the operands have one byte per number
    if is_aligned and all(size % ALIGNMENT == 0 for size in row_bytes) and _is_hopper(device):
        return plan_hopper(device, dtypes[2], sizes, **per_row)
    is_odd = any(stride % ALIGNMENT for stride in strides)  # loads single bytes
    tile = ODD_TILE if is_odd else TILE
    tiles = triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"])
    sums = tl.int32 if dtypes[0] == torch.int8 else tl.float32
    constants = per_row | tile | {"ACC": sums, "GROUP_M": GROUP_M}
    return Launch(_matmul_kernel, (tiles,), (*sizes, *strides), **constants)


def _is_hopper(device: torch.device) -> bool:
    """Whether the device has Hopper's matrix unit, which later GPUs lack; False on a CPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
