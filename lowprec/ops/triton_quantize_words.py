"""Triton kernel that quantizes to fp8 in tiles of 128x1 and transposes words of four rows.

Words are transposed faster than bytes. Bit-identical to `reference.quantize`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.formats import Format
from lowprec.ops.launch import Launch, plan
from lowprec.ops.reference import empty_scale
from lowprec.ops.triton_rounding import magnitudes, quotient, scale_of
from lowprec.ops.triton_sum import sum_parts


@triton.jit
def _load_fourth(x_ptr, words, cols, M, K, stride_m, I: tl.constexpr):
    """Row I of the four rows that make each word."""
    rows = words * 4 + I
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    at = rows[:, None] * stride_m + cols[None, :]
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _byte(x, scale, I: tl.constexpr, Q: tl.constexpr):
    """The quotient x / scale, rounded to the fp8 type Q, as byte I of a word."""
    # It exceeds the largest number by less than half a step, so that rounding needs no clamp.
    q = quotient(x, scale[None, :]).to(Q).to(tl.uint8, bitcast=True)
    return q.to(tl.int32) << (8 * I)


@triton.jit
def _quantize_128x1_kernel(
    x_ptr, qt_ptr, words_ptr, scale_ptr, sum_ptr, M, K, stride_m,
    MAX: tl.constexpr, SUMS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """words_ptr is qt_ptr as int32. SUMS: stores the sums of 128 rows."""
    Q: tl.constexpr = qt_ptr.dtype.element_ty
    tile_m, tile_k = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    words, cols = tile_m * 32 + tl.arange(0, 32), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    x0 = _load_fourth(x_ptr, words, cols, M, K, stride_m, 0)
    x1 = _load_fourth(x_ptr, words, cols, M, K, stride_m, 1)
    x2 = _load_fourth(x_ptr, words, cols, M, K, stride_m, 2)
    x3 = _load_fourth(x_ptr, words, cols, M, K, stride_m, 3)
    bits_01 = tl.maximum(magnitudes(x0), magnitudes(x1))
    bits_23 = tl.maximum(magnitudes(x2), magnitudes(x3))
    scale = scale_of(tl.max(tl.maximum(bits_01, bits_23), axis=0), MAX)  # [BLOCK_K]
    at = tile_m * K + cols
    tl.store(scale_ptr + at, scale, mask=cols < K)
    if SUMS:
        tl.store(sum_ptr + at, tl.sum((x0 + x1) + (x2 + x3), axis=0), mask=cols < K)
    word = _byte(x0, scale, 0, Q) | _byte(x1, scale, 1, Q)
    word |= _byte(x2, scale, 2, Q) | _byte(x3, scale, 3, Q)
    at = cols[:, None] * (M // 4) + words[None, :]
    tl.store(words_ptr + at, tl.trans(word), mask=(cols < K)[:, None] & (words * 4 < M)[None, :])


def takes(x_MK: Tensor, format: Format) -> bool:
    """Whether `quantize_128x1` does: 16-bit numbers in fours of rows, to fp8."""
    return format.exponent_bits > 0 and x_MK.itemsize == 2 and x_MK.shape[0] % 4 == 0


def quantize_128x1(
    x_MK: Tensor, format: Format, sums: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q_KM, its scale [M / 128, K] and the float32 sums [K] of columns, or None.

    The rows of x must be contiguous.
    """
    M, K = x_MK.shape
    q_KM = torch.empty(K, M, dtype=format.dtype, device=x_MK.device)
    scale = empty_scale(x_MK, "128x1")
    parts = empty_scale(x_MK, "128x1") if sums else scale
    launch = _plan(x_MK.device, x_MK.dtype, M, K, x_MK.stride(0), format, sums)
    launch(x_MK, q_KM, q_KM.view(torch.int32), scale, parts)
    return q_KM, scale, sum_parts(parts) if sums else None


@plan
def _plan(device, dtype, M: int, K: int, stride_m: int, format: Format, sums: bool) -> Launch:
    grid = (triton.cdiv(M, 128), triton.cdiv(K, 64))
    constants = {"MAX": format.max, "SUMS": sums, "BLOCK_K": 64, "num_warps": 4}
    return Launch(_quantize_128x1_kernel, grid, (M, K, stride_m), **constants)
