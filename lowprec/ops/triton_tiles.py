"""Triton kernels of column- and tensor-wise quantization, stored as it is, transposed or both.

Two reads of the input: the largest magnitudes, then the quotients. Types and comparisons are those
of `triton_quantize`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.formats import INT8, Format
from lowprec.ops.triton_quantize import _divide, _rows_contiguous, _scale, num_sms


@triton.jit
def _amax_kernel(
    x_ptr, bits_ptr, M, K, stride_m,
    COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    bits = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
    for block in range(tl.program_id(1), tl.cdiv(M, BLOCK_M), tl.num_programs(1)):
        rows = block * tl.full([], BLOCK_M, tl.int64) + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (cols < K)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_m + cols[None, :], mask=mask, other=0.0)
        bits = tl.maximum(bits, tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True))
    if COLUMNS:
        tl.atomic_max(bits_ptr + cols, tl.max(bits, axis=0), mask=cols < K)
    else:
        tl.atomic_max(bits_ptr, tl.max(tl.max(bits, axis=0), axis=0))


@triton.jit
def _quantize_tiles_kernel(
    x_ptr, q_ptr, qt_ptr, bits_ptr, scale_ptr, M, K, stride_m,
    MAX: tl.constexpr, COLUMNS: tl.constexpr, ROWS_OUT: tl.constexpr, TRANSPOSED_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    Q: tl.constexpr = q_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    if COLUMNS:
        scale = _scale(tl.load(bits_ptr + cols, mask=cols < K, other=0), MAX)  # [BLOCK_K]
        tl.store(scale_ptr + cols, scale, mask=(cols < K) & (tl.program_id(0) == 0))
        scale = scale[None, :]
    else:
        scale = _scale(tl.load(bits_ptr + tl.zeros([1, 1], tl.int32)), MAX)  # [1, 1]
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        tl.store(scale_ptr + tl.zeros([1, 1], tl.int32), scale, mask=first)
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    at = rows[:, None] * stride_m + cols[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    q = _divide(x, scale, MAX, Q)  # [BLOCK_M, BLOCK_K]
    if ROWS_OUT:
        tl.store(q_ptr + rows[:, None] * K + cols[None, :], q, mask=mask)
    if TRANSPOSED_OUT:
        mask_t = (cols < K)[:, None] & (rows < M)[None, :]
        tl.store(qt_ptr + cols[:, None] * M + rows[None, :], tl.trans(q), mask=mask_t)


@triton.jit
def _transpose_kernel(q_ptr, qt_ptr, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    q = tl.load(q_ptr + rows[:, None] * K + cols[None, :], mask=mask, other=0)
    at = cols[:, None] * M + rows[None, :]
    tl.store(qt_ptr + at, tl.trans(q), mask=(cols < K)[:, None] & (rows < M)[None, :])


def quantize_tiles(
    x_MK: Tensor, format: Format, granularity: str, *, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Columnwise or tensorwise: q_MK, q_KM (each empty unless asked for) and the scale.

    Triton 3.6 scrambles a transposed fp8 tile that was float32 (some weights' gradients were NaN on
    an H100), so there the bytes are transposed by a kernel of their own.
    """
    if transposed and x_MK.dtype == torch.float32 and format is not INT8:
        q_MK, _, scale = quantize_tiles(x_MK, format, granularity, rows=True, transposed=False)
        q_KM = transpose_bytes(q_MK.view(torch.int8)).view(format.dtype)
        return q_MK if rows else q_MK.new_empty(0), q_KM, scale
    x_MK = _rows_contiguous(x_MK)
    M, K = x_MK.shape
    columns = granularity == "columnwise"
    device = x_MK.device
    bits = torch.zeros(1, K if columns else 1, dtype=torch.int32, device=device)
    scale = torch.empty(bits.shape, dtype=torch.float32, device=device)
    block_m, block_k = 16, 256
    across, down = triton.cdiv(K, block_k), triton.cdiv(M, block_m)
    down = min(down, max(1, 8 * num_sms(device) // across))
    _amax_kernel[(across, down)](
        x_MK, bits, M, K, x_MK.stride(0), COLUMNS=columns, BLOCK_M=block_m, BLOCK_K=block_k
    )
    q_MK = torch.empty((M, K) if rows else (0,), dtype=format.dtype, device=device)
    q_KM = torch.empty((K, M) if transposed else (0,), dtype=format.dtype, device=device)
    block = 64
    _quantize_tiles_kernel[(triton.cdiv(M, block), triton.cdiv(K, block))](
        x_MK, q_MK, q_KM, bits, scale, M, K, x_MK.stride(0),
        MAX=format.max, COLUMNS=columns, ROWS_OUT=rows, TRANSPOSED_OUT=transposed,
        BLOCK_M=block, BLOCK_K=block,
    )  # fmt: skip
    return q_MK, q_KM, scale


def transpose_bytes(q_MK: Tensor) -> Tensor:
    """int8 [M, K] -> [K, M], several times faster than torch's copy."""
    M, K = q_MK.shape
    q_KM = torch.empty(K, M, dtype=torch.int8, device=q_MK.device)
    block = 128
    _transpose_kernel[(triton.cdiv(M, block), triton.cdiv(K, block))](
        q_MK, q_KM, M, K, BLOCK_M=block, BLOCK_K=block, num_warps=8
    )
    return q_KM
