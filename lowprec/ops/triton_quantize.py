"""Triton kernels for `reference.quantize`.

Results are bit-identical, but for what `triton_rounding.times_inverse` says.

Quantization row-wise and by tile ("1x128") reads the input once. Column- and tensor-wise
quantization read it twice (maxima, then quotients) and can store the result as it is, transposed or
both.
Input float32, bfloat16 or float16; output in a native format (`formats.NATIVE`). Offsets are int64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.formats import Format
from lowprec.ops import triton_quantize_words
from lowprec.ops.launch import (
    Launch,
    num_sms,
    pipelined,
    plan,
    programs_that_sum,
    row_blocks,
    rows_contiguous,
)
from lowprec.ops.reference import PAIRED, empty_scale
from lowprec.ops.triton_rounding import divide, largest, magnitudes, scale_of
from lowprec.ops.triton_sum import sum_parts
from lowprec.ops.triton_transpose import transpose_bytes, transposed_copy

MAX_FEATURES = 16384  # of rows, which one program keeps in registers


@triton.jit
def _quantize_rows_kernel(
    x_ptr, q_ptr, scale_ptr, M, K, stride_m,
    MAX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    Q: tl.constexpr = q_ptr.dtype.element_ty
    rows = tl.program_id(0) * tl.full([], BLOCK_M, tl.int64) + tl.arange(0, BLOCK_M)
    a, b = tl.arange(0, BLOCK_A)[None, :], BLOCK_A + tl.arange(0, BLOCK_B)[None, :]
    in_m = (rows < M)[:, None]
    at = rows[:, None] * stride_m
    x_a = tl.load(x_ptr + at + a, mask=in_m & (a < K), other=0.0).to(tl.float32)
    x_b = tl.load(x_ptr + at + b, mask=in_m & (b < K), other=0.0).to(tl.float32)
    scale = scale_of(tl.maximum(largest(x_a, 1), largest(x_b, 1)), MAX)  # [BLOCK_M]
    at = rows[:, None] * K
    tl.store(q_ptr + at + a, divide(x_a, scale[:, None], MAX, Q), mask=in_m & (a < K))
    tl.store(q_ptr + at + b, divide(x_b, scale[:, None], MAX, Q), mask=in_m & (b < K))
    tl.store(scale_ptr + rows, scale, mask=rows < M)


@triton.jit
def _quantize_rows_and_sum_kernel(
    x_ptr, q_ptr, scale_ptr, sum_ptr, M, K, stride_m,
    MAX: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    Q: tl.constexpr = q_ptr.dtype.element_ty
    a, b = tl.arange(0, BLOCK_A), BLOCK_A + tl.arange(0, BLOCK_B)
    sum_a, sum_b = tl.zeros([BLOCK_A], tl.float32), tl.zeros([BLOCK_B], tl.float32)
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        at = row * tl.full([], stride_m, tl.int64)
        x_a = tl.load(x_ptr + at + a, mask=a < K, other=0.0).to(tl.float32)
        x_b = tl.load(x_ptr + at + b, mask=b < K, other=0.0).to(tl.float32)
        scale = scale_of(tl.maximum(largest(x_a, 0), largest(x_b, 0)), MAX)
        at = row * tl.full([], K, tl.int64)
        tl.store(q_ptr + at + a, divide(x_a, scale, MAX, Q), mask=a < K)
        tl.store(q_ptr + at + b, divide(x_b, scale, MAX, Q), mask=b < K)
        tl.store(scale_ptr + row, scale)
        sum_a += x_a
        sum_b += x_b
    at = tl.program_id(0) * tl.full([], K, tl.int64)
    tl.store(sum_ptr + at + a, sum_a, mask=a < K)
    tl.store(sum_ptr + at + b, sum_b, mask=b < K)


@triton.jit
def _amax_kernel(
    x_ptr, bits_ptr, sum_ptr, M, K, stride_m,
    COLUMNS: tl.constexpr, SUMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    bits = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
    sums = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    blocks, step = tl.cdiv(M, BLOCK_M), tl.num_programs(1)
    for block in tl.range(tl.program_id(1), blocks, step, num_stages=STAGES):
        rows = block * tl.full([], BLOCK_M, tl.int64) + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (cols < K)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_m + cols[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32)
        bits = tl.maximum(bits, magnitudes(x))
        if SUMS:
            sums += x
    if SUMS:
        at = tl.program_id(1).to(tl.int64) * K + cols
        tl.store(sum_ptr + at, tl.sum(sums, axis=0), mask=cols < K)
    # Column maxima of all programs meet in one array; for a tensor, each program stores its own
    # and the next kernel takes their maximum, so that the array need not be zeroed.
    if COLUMNS:
        tl.atomic_max(bits_ptr + cols, tl.max(bits, axis=0), mask=cols < K)
    else:
        part = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(bits_ptr + part, tl.max(tl.max(bits, axis=0), axis=0))


@triton.jit
def _quantize_tiles_kernel(
    x_ptr, q_ptr, qt_ptr, bits_ptr, scale_ptr, M, K, stride_m, parts,
    MAX: tl.constexpr, COLUMNS: tl.constexpr, ROWS_OUT: tl.constexpr, TRANSPOSED_OUT: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    Q: tl.constexpr = q_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    if COLUMNS:
        scale = scale_of(tl.load(bits_ptr + cols, mask=cols < K, other=0), MAX)  # [BLOCK_K]
        tl.store(scale_ptr + cols, scale, mask=(cols < K) & (tl.program_id(0) == 0))
        scale = scale[None, :]
    else:
        # Every program takes the maximum of all parts again: a few numbers from the cache cost less
        # than a third launch.
        part = tl.arange(0, PARTS)
        bits = tl.load(bits_ptr + part, mask=part < parts, other=0)
        scale = scale_of(tl.max(bits, axis=0) + tl.zeros([1, 1], tl.int32), MAX)  # [1, 1]
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        tl.store(scale_ptr + tl.zeros([1, 1], tl.int32), scale, mask=first)
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    at = rows[:, None] * stride_m + cols[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    q = divide(x, scale, MAX, Q)  # [BLOCK_M, BLOCK_K]
    if ROWS_OUT:
        tl.store(q_ptr + rows[:, None] * K + cols[None, :], q, mask=mask)
    if TRANSPOSED_OUT:
        mask_t = (cols < K)[:, None] & (rows < M)[None, :]
        tl.store(qt_ptr + cols[:, None] * M + rows[None, :], tl.trans(q), mask=mask_t)


@triton.jit
def _quantize_by_tile_kernel(
    x_ptr, q_ptr, scale_ptr, M, K, stride_m, stride_sm, stride_sk, MAX: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    Q: tl.constexpr = q_ptr.dtype.element_ty
    tile_m, tile_k = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    rows, cols = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    at = rows[:, None] * stride_m + cols[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    bits = magnitudes(x)
    if TILE_M > 1:
        bits = tl.max(bits, axis=0, keep_dims=True)
        scale_m = tile_m + tl.zeros([1], tl.int64)
    else:
        scale_m = rows
    if TILE_K > 1:
        bits = tl.max(bits, axis=1, keep_dims=True)
        scale_k = tile_k + tl.zeros([1], tl.int64)
    else:
        scale_k = cols
    scale = scale_of(bits, MAX)
    at = scale_m[:, None] * stride_sm + scale_k[None, :] * stride_sk
    in_scale = (scale_m * TILE_M < M)[:, None] & (scale_k * TILE_K < K)[None, :]
    tl.store(scale_ptr + at, scale, mask=in_scale)
    q = divide(x, scale, MAX, Q)  # [BLOCK_M, BLOCK_K]
    tl.store(q_ptr + rows[:, None] * K + cols[None, :], q, mask=mask)


def quantize_rows(x_MK: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Row-wise: q_MK and scale [M, 1]; K <= `MAX_FEATURES`."""
    x_MK = rows_contiguous(x_MK)
    M, K = x_MK.shape
    q_MK = torch.empty_like(x_MK, dtype=format.dtype, memory_format=torch.contiguous_format)
    scale = torch.empty(M, 1, dtype=torch.float32, device=x_MK.device)
    _plan_rows(x_MK.device, x_MK.dtype, M, K, x_MK.stride(0), format)(x_MK, q_MK, scale)
    return q_MK, scale


@plan
def _plan_rows(device, dtype, M: int, K: int, stride_m: int, format: Format) -> Launch:
    block_m = max(1, 4096 // triton.next_power_of_2(K))
    constants = {"MAX": format.max, "BLOCK_M": block_m, **row_blocks(K)}
    grid = (triton.cdiv(M, block_m),)
    return Launch(_quantize_rows_kernel, grid, (M, K, stride_m), **constants)


def quantize_rows_and_sum(x_MK: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Row-wise: q_MK, scale [M, 1], column sums [K] from partial sums; K <= `MAX_FEATURES`."""
    x_MK = rows_contiguous(x_MK)
    M, K = x_MK.shape
    device = x_MK.device
    q_MK = torch.empty_like(x_MK, dtype=format.dtype, memory_format=torch.contiguous_format)
    scale = torch.empty(M, 1, dtype=torch.float32, device=device)
    launch = _plan_rows_and_sum(device, x_MK.dtype, M, K, x_MK.stride(0), format)
    sums = torch.empty(launch.grid[0], K, dtype=torch.float32, device=device)
    launch(x_MK, q_MK, scale, sums)
    return q_MK, scale, sum_parts(sums)


@plan
def _plan_rows_and_sum(device, dtype, M: int, K: int, stride_m: int, format: Format) -> Launch:
    constants = {"MAX": format.max, **row_blocks(K, least_warps=2), **pipelined(K * dtype.itemsize)}
    grid = (programs_that_sum(M, K, device),)
    return Launch(_quantize_rows_and_sum_kernel, grid, (M, K, stride_m), **constants)


def quantize(
    x_MK: Tensor, format: Format, granularity: str, *, rows: bool, transposed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """q_MK, q_KM (each None unless requested) and the scale.

    Row-wise and by tile ("1x128"; both sides are powers of two), a copy transposes, except where
    `triton_quantize_words` does; the other granularities store both layouts in one pass.
    """
    if granularity == "rowwise":
        q_MK, scale = quantize_rows(x_MK, format)
        return q_MK if rows else None, transposed_copy(q_MK) if transposed else None, scale
    has_words = granularity == "128x1" and triton_quantize_words.takes(x_MK, format)
    if has_words and transposed and not rows:
        return None, *triton_quantize_words.quantize_128x1(rows_contiguous(x_MK), format)
    is_scaled_by_tile = granularity not in ("columnwise", "tensorwise")
    if transposed and (is_scaled_by_tile or _is_scrambled(x_MK, format)):
        q_MK, _, scale = quantize(x_MK, format, granularity, rows=True, transposed=False)
        q_KM = transpose_bytes(q_MK.view(torch.int8)).view(format.dtype)
        return q_MK if rows else None, q_KM, scale
    x_MK = rows_contiguous(x_MK)
    if is_scaled_by_tile:
        return _quantize_by_tile(x_MK, format, granularity)
    return _quantize_tiles(x_MK, format, granularity == "columnwise", rows, transposed)[:3]


def quantize_pair(
    x_MK: Tensor, format: Format, granularity: str, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """`reference.quantize_pair`; the sums take no pass of their own, where kernels suit x."""
    both = {"rows": True, "transposed": True}
    if granularity == "tensorwise":
        if _is_scrambled(x_MK, format):
            q_MK, q_KM, scale = quantize(x_MK, format, granularity, **both)
            total = x_MK.sum(dim=0) if sums else None
        else:
            x_MK = rows_contiguous(x_MK)
            q_MK, q_KM, scale, total = _quantize_tiles(x_MK, format, False, **both, sums=sums)
        return q_MK, scale, q_KM, scale, total
    if triton_quantize_words.takes(x_MK, format):
        return triton_quantize_words.quantize_pair(rows_contiguous(x_MK), format, sums)
    q_MK, _, scale = quantize(x_MK, format, granularity, rows=True, transposed=False)
    across = PAIRED[granularity]
    _, q_KM, across_scale = quantize(x_MK, format, across, rows=False, transposed=True)
    return q_MK, scale, q_KM, across_scale, x_MK.sum(dim=0, dtype=torch.float32) if sums else None


def _is_scrambled(x_MK: Tensor, format: Format) -> bool:
    """Whether Triton 3.6 scrambles transposed tiles of fp8: those computed from float32.

    Of bfloat16, it does so in tiles of 128x128, not of 64x128. Weight gradients became NaN.
    """
    return format.exponent_bits > 0 and x_MK.dtype == torch.float32


def _quantize_by_tile(x_MK: Tensor, format: Format, granularity: str) -> tuple:
    """q_MK, None and the scale."""
    M, K = x_MK.shape
    q_MK = torch.empty(M, K, dtype=format.dtype, device=x_MK.device)
    scale = empty_scale(x_MK, granularity)
    facts = (x_MK.device, x_MK.dtype, M, K, x_MK.stride(0), granularity, scale.stride())
    _plan_by_tile(*facts, format)(x_MK, q_MK, scale)
    return q_MK, None, scale


@plan
def _plan_by_tile(
    device, dtype, M: int, K: int, stride_m: int, granularity: str, strides, format
) -> Launch:
    tile_m, tile_k = map(int, granularity.split("x"))
    constants = {
        "MAX": format.max,
        "TILE_M": tile_m,
        "TILE_K": tile_k,
        "BLOCK_M": tile_m if tile_m > 1 else 32,
        "BLOCK_K": tile_k if tile_k > 1 else 64,
        "num_warps": 4 if tile_m == 1 else 8,
    }
    grid = (triton.cdiv(M, constants["BLOCK_M"]), triton.cdiv(K, constants["BLOCK_K"]))
    return Launch(_quantize_by_tile_kernel, grid, (M, K, stride_m, *strides), **constants)


def _quantize_tiles(
    x_MK: Tensor, format: Format, columns: bool, rows: bool, transposed: bool, sums: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """q_MK, q_KM, the scale and the column sums."""
    M, K = x_MK.shape
    device, facts = x_MK.device, (x_MK.device, x_MK.dtype, M, K, x_MK.stride(0), columns)
    find_maxima = _plan_maxima(*facts, sums)
    if columns:  # one maximum per column
        bits = torch.zeros(K, dtype=torch.int32, device=device)
    else:  # one per program
        bits = torch.empty(find_maxima.num_programs, dtype=torch.int32, device=device)
    scale = torch.empty(1, K if columns else 1, dtype=torch.float32, device=device)
    parts = (
        torch.empty(find_maxima.grid[1], K, dtype=torch.float32, device=device) if sums else scale
    )
    find_maxima(x_MK, bits, parts)
    q_MK = torch.empty(M, K, dtype=format.dtype, device=device) if rows else None
    q_KM = torch.empty(K, M, dtype=format.dtype, device=device) if transposed else None
    launch = _plan_tiles(*facts, format, rows, transposed, find_maxima.num_programs)
    launch(x_MK, q_MK if rows else q_KM, q_KM if transposed else q_MK, bits, scale)
    return q_MK, q_KM, scale, sum_parts(parts) if sums else None


@plan
def _plan_maxima(device, dtype, M: int, K: int, stride_m: int, columns: bool, sums: bool) -> Launch:
    block_m, block_k = (16, 256) if columns else (8, 512)
    across, down = triton.cdiv(K, block_k), triton.cdiv(M, block_m)
    down = min(down, max(1, (8 if columns else 2) * num_sms(device) // across))
    constants = {
        "COLUMNS": columns,
        "SUMS": sums,
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
        "STAGES": 1 if columns else 4,
    }
    return Launch(_amax_kernel, (across, down), (M, K, stride_m), **constants)


@plan
def _plan_tiles(
    device, dtype, M: int, K: int, stride_m: int, columns: bool, format, rows, transposed, parts
) -> Launch:
    """`parts`: the number of maxima of a tensor."""
    block_m, block_k = 64, 128 if format.exponent_bits else 64  # int8 would spill registers
    constants = {
        "MAX": format.max,
        "COLUMNS": columns,
        "ROWS_OUT": rows,
        "TRANSPOSED_OUT": transposed,
        "PARTS": triton.next_power_of_2(parts),
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
    }
    grid = (triton.cdiv(M, block_m), triton.cdiv(K, block_k))
    return Launch(_quantize_tiles_kernel, grid, (M, K, stride_m, parts), **constants)
