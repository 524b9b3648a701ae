"""Triton kernel that quantizes to fp8 in tiles of 1x128, of 128x1 transposed, or both.

Transposed tiles are stored as words of four rows: words are transposed faster than bytes. If both
are wanted, neighboring programs read the same 128x128 numbers, all but the first from the cache.
Bit-identical to `reference.quantize`, but for what `triton_rounding.times_inverse` says.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.formats import E4M3, Format
from lowprec.ops.launch import Launch, plan
from lowprec.ops.reference import empty_scale
from lowprec.ops.triton_approximate import INTERPRETED
from lowprec.ops.triton_rounding import inverse_of, magnitudes, quotient, scale_of, times_inverse
from lowprec.ops.triton_sum import sum_parts

HALF = 64  # rows or columns of the tile that a program quantizes
MAX_SIZE = 65_535 * 128  # a grid's second and third axis; offsets within a tile then fit int32
PACK_E4M3, PACK_E5M2 = (  # four numbers into a word, of which a mask keeps all or nothing
    tl.constexpr(f"""{{
        .reg .b16 low, high; .reg .b32 word;
        cvt.rn.satfinite.{name}x2.f32 low, $2, $1;
        cvt.rn.satfinite.{name}x2.f32 high, $4, $3;
        mov.b32 word, {{low, high}};
        and.b32 $0, word, $5;
    }}""")
    for name in ("e4m3", "e5m2")
)


@triton.jit
def _word(q0, q1, q2, q3, is_usable, Q: tl.constexpr):
    """Four quotients, rounded to the fp8 type Q, as bytes of a word; 0 without a usable scale."""
    # Quotients exceed the largest number by less than half a step, so that rounding needs no clamp.
    if INTERPRETED:
        word = _byte(q0, 0, Q) | _byte(q1, 1, Q) | _byte(q2, 2, Q) | _byte(q3, 3, Q)
        return tl.where(is_usable, word, 0)
    mask = tl.broadcast_to(tl.where(is_usable, -1, 0), q0.shape)
    code: tl.constexpr = PACK_E4M3 if Q == tl.float8e4nv else PACK_E5M2
    operands = [q0, q1, q2, q3, mask]
    return tl.inline_asm_elementwise(code, "=r,r,r,r,r,r", operands, tl.int32, True, 1)


@triton.jit
def _byte(q, I: tl.constexpr, Q: tl.constexpr):
    return q.to(Q).to(tl.uint8, bitcast=True).to(tl.int32) << (8 * I)


@triton.jit
def _quantize_rows(
    x_ptr, q_ptr, scale_ptr, m0, tile_k, M, K, stride_m, MAX: tl.constexpr, HALF: tl.constexpr
):
    """1x128: HALF rows of 128 columns."""
    Q: tl.constexpr = q_ptr.dtype.element_ty
    rows, cols = tl.arange(0, HALF), tl.arange(0, 128)
    in_m = rows < M - m0
    mask = in_m[:, None] & (cols < K - tile_k * 128)[None, :]
    at = x_ptr + (m0 * stride_m + tile_k * 128)
    x = tl.load(at + (rows[:, None] * stride_m + cols[None, :]), mask=mask, other=0.0)
    x = x.to(tl.float32)
    scale = scale_of(tl.max(magnitudes(x), axis=1), MAX)  # [HALF]
    tl.store(scale_ptr + (tile_k * M + m0) + rows, scale, mask=in_m)
    q = quotient(x, scale[:, None]).to(Q)
    at = q_ptr + (m0 * K + tile_k * 128)
    tl.store(at + (rows[:, None] * K + cols[None, :]), q, mask=mask)


@triton.jit
def _quantize_columns(
    x_ptr, qt_ptr, words_ptr, scale_ptr, sum_ptr, tile_m, k0, M, K, stride_m,
    MAX: tl.constexpr, SUMS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """128x1: HALF columns of 128 rows, transposed, and with SUMS the sums of 128 rows."""
    Q: tl.constexpr = qt_ptr.dtype.element_ty
    words, cols = tl.arange(0, 32), tl.arange(0, HALF)
    in_m, in_k = words < (M - tile_m * 128) // 4, cols < K - k0
    mask = in_m[:, None] & in_k[None, :]
    at = x_ptr + (tile_m * 128 * stride_m + k0)
    offsets = words[:, None] * (4 * stride_m) + cols[None, :]
    x0 = tl.load(at + offsets, mask=mask, other=0.0).to(tl.float32)  # first rows of the words
    x1 = tl.load(at + stride_m + offsets, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(at + 2 * stride_m + offsets, mask=mask, other=0.0).to(tl.float32)
    x3 = tl.load(at + 3 * stride_m + offsets, mask=mask, other=0.0).to(tl.float32)
    at = tile_m * K + k0
    if SUMS:
        tl.store(sum_ptr + at + cols, tl.sum((x0 + x1) + (x2 + x3), axis=0), mask=in_k)
    bits_01 = tl.maximum(magnitudes(x0), magnitudes(x1))
    bits_23 = tl.maximum(magnitudes(x2), magnitudes(x3))
    scale = scale_of(tl.max(tl.maximum(bits_01, bits_23), axis=0), MAX)[None, :]  # [1, HALF]
    tl.store(scale_ptr + at + cols[None, :], scale, mask=in_k[None, :])
    is_usable = scale > 0
    divisor = tl.where(is_usable, scale, 1.0)
    inverse = inverse_of(divisor)
    q0, q1 = times_inverse(x0, divisor, inverse), times_inverse(x1, divisor, inverse)
    q2, q3 = times_inverse(x2, divisor, inverse), times_inverse(x3, divisor, inverse)
    word = _word(q0, q1, q2, q3, is_usable, Q)  # [32, HALF]
    at = words_ptr + (k0 * (M // 4) + tile_m * 32)
    mask = in_k[:, None] & in_m[None, :]
    tl.store(at + (cols[:, None] * (M // 4) + words[None, :]), tl.trans(word), mask=mask)


@triton.jit
def _quantize_pair_kernel(
    x_ptr, q_ptr, qt_ptr, words_ptr, scale_ptr, across_ptr, sum_ptr, M, K, stride_m,
    MAX: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """words_ptr is qt_ptr as int32. Without ROWS, all programs quantize columns."""
    half, tile_k, tile_m = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tile_k = tile_k.to(tl.int64)
    if ROWS and half >= 2:
        m0 = tile_m * 128 + (half - 2) * HALF
        _quantize_rows(x_ptr, q_ptr, scale_ptr, m0, tile_k, M, K, stride_m, MAX, HALF)
    else:
        _quantize_columns(
            x_ptr, qt_ptr, words_ptr, across_ptr, sum_ptr, tile_m, tile_k * 128 + half * HALF,
            M, K, stride_m, MAX, SUMS, HALF,
        )  # fmt: skip


def takes(x_MK: Tensor, format: Format) -> bool:
    """Whether the kernel does: 16-bit numbers in fours of rows, to fp8, by GPUs that have fp8.

    No size or stride may exceed `MAX_SIZE`.
    """
    if format.exponent_bits == 0 or x_MK.itemsize != 2 or x_MK.shape[0] % 4:
        return False
    if max(*x_MK.shape, *x_MK.stride()) > MAX_SIZE:
        return False
    return not x_MK.is_cuda or torch.cuda.get_device_capability(x_MK.device) >= E4M3.capability


def quantize_128x1(x_MK: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """q_KM and its scale [M / 128, K]. The rows of x must be contiguous."""
    return _quantize(x_MK, format, rows=False, sums=False)[2:4]


def quantize_pair(
    x_MK: Tensor, format: Format, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """`reference.quantize_pair` for 1x128. The rows of x must be contiguous."""
    return _quantize(x_MK, format, rows=True, sums=sums)


def _quantize(x_MK: Tensor, format: Format, rows: bool, sums: bool) -> tuple:
    M, K = x_MK.shape
    q_KM = torch.empty(K, M, dtype=format.dtype, device=x_MK.device)
    across = empty_scale(x_MK, "128x1")
    q_MK = torch.empty(M, K, dtype=format.dtype, device=x_MK.device) if rows else q_KM
    scale = empty_scale(x_MK, "1x128") if rows else across
    parts = empty_scale(x_MK, "128x1") if sums else across
    launch = _plan(x_MK.device, x_MK.dtype, M, K, x_MK.stride(0), format, rows, sums)
    launch(x_MK, q_MK, q_KM, q_KM.view(torch.int32), scale, across, parts)
    return q_MK, scale, q_KM, across, sum_parts(parts) if sums else None


@plan
def _plan(
    device, dtype, M: int, K: int, stride_m: int, format: Format, rows: bool, sums: bool
) -> Launch:
    grid = (4 if rows else 2, triton.cdiv(K, 128), triton.cdiv(M, 128))
    constants = {"MAX": format.max, "ROWS": rows, "SUMS": sums, "HALF": HALF, "num_warps": 4}
    return Launch(_quantize_pair_kernel, grid, (M, K, stride_m), **constants)
