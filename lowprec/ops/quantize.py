"""Triton kernels of `reference.quantize`: the same numbers, one read of the input where possible.

Row-wise quantization reads a row once if it has at most 16,384 features. Column- and tensor-wise
need two reads: the largest magnitudes, then the quotients, stored as they are, transposed or both.
Input float32, bfloat16 or float16; output int8, float8_e4m3fn (compute capability >= 8.9) or
float8_e5m2. Offsets are int64. Magnitudes are compared as the integers their bits make, because a
floating-point maximum drops NaN: inf and NaN are the largest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.formats import E4M3, INT8, Format

WHOLE_ROW = 16384  # features that one program keeps in registers
PROGRAMS_PER_SM = 4  # of the kernel that sums columns: each adds a row to the partial sums


@triton.jit
def _scale(bits, MAX: tl.constexpr):
    """Scale of the largest magnitude, given as bits: as `reference.scale_of`."""
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def _divide(x, scale, MAX: tl.constexpr, Q: tl.constexpr):
    """Rounds x / scale to the type Q; 0 where the scale is 0 or NaN."""
    usable = scale > 0
    q = tl.where(usable, tl.div_rn(x, tl.where(usable, scale, 1.0)), 0.0)
    if Q == tl.int8:
        return ((q + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23 rounds ties to even
    return tl.clamp(q, -MAX, MAX).to(Q)


@triton.jit
def _quantize_rows_kernel(
    x_ptr, q_ptr, scale_ptr, sum_ptr, M, K, stride_m,
    MAX: tl.constexpr, SUM: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    Q: tl.constexpr = q_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_K], tl.float32)
    for block in range(program, tl.cdiv(M, BLOCK_M), programs):
        rows = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        if WHOLE:
            mask = (rows < M)[:, None] & (cols < K)[None, :]
            at = rows[:, None] * stride_m + cols[None, :]
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_K]
            scale = _scale(tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1), MAX)
            q = _divide(x, scale[:, None], MAX, Q)
            tl.store(q_ptr + rows[:, None] * K + cols[None, :], q, mask=mask)
            if SUM:
                sums += tl.sum(x, axis=0)
        else:
            bits = tl.zeros([BLOCK_M], tl.int32)
            for start in range(0, K, BLOCK_K):
                mask = (rows < M)[:, None] & (start + cols < K)[None, :]
                at = rows[:, None] * stride_m + start + cols[None, :]
                x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
                bits = tl.maximum(bits, tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1))
            scale = _scale(bits, MAX)
            for start in range(0, K, BLOCK_K):
                mask = (rows < M)[:, None] & (start + cols < K)[None, :]
                at = rows[:, None] * stride_m + start + cols[None, :]
                x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
                q = _divide(x, scale[:, None], MAX, Q)
                tl.store(q_ptr + rows[:, None] * K + start + cols[None, :], q, mask=mask)
        tl.store(scale_ptr + rows, scale, mask=rows < M)
    if SUM:
        tl.store(sum_ptr + program.to(tl.int64) * K + cols, sums, mask=cols < K)


@triton.jit
def _amax_kernel(
    x_ptr, bits_ptr, M, K, stride_m,
    COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    bits = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
    for block in range(tl.program_id(1), tl.cdiv(M, BLOCK_M), tl.num_programs(1)):
        rows = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
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


def quantize_rows(
    x_MK: Tensor, format: Format, with_sum: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """q_MK, scale [M, 1] and, if asked for, the float32 column sums [K] (else empty)."""
    x_MK = _rows_contiguous(x_MK)
    M, K = x_MK.shape
    block_k = min(triton.next_power_of_2(K), WHOLE_ROW)
    block_m = max(1, 4096 // block_k)
    whole = block_k >= K
    if with_sum and not whole:
        return *quantize_rows(x_MK, format)[:2], x_MK.sum(dim=0, dtype=torch.float32)
    q_MK = torch.empty_like(x_MK, dtype=format.dtype, memory_format=torch.contiguous_format)
    scale = torch.empty(M, 1, dtype=torch.float32, device=x_MK.device)
    programs = triton.cdiv(M, block_m)
    if with_sum:
        programs = min(programs, PROGRAMS_PER_SM * num_sms(x_MK.device))
    sums = torch.empty(programs if with_sum else 0, K, dtype=torch.float32, device=x_MK.device)
    _quantize_rows_kernel[(programs,)](
        x_MK, q_MK, scale, sums, M, K, x_MK.stride(0),
        MAX=format.max, SUM=with_sum, WHOLE=whole, BLOCK_M=block_m, BLOCK_K=block_k,
        num_warps=4 if block_k <= 4096 else 8 if block_k <= 8192 else 16,
    )  # fmt: skip
    return q_MK, scale, sums.sum(dim=0) if with_sum else sums


def quantize_tiles(
    x_MK: Tensor, format: Format, granularity: str, *, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Columnwise or tensorwise: q_MK, q_KM (each empty unless asked for) and the scale."""
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


def quantizes(format: Format, device: torch.device) -> bool:
    """Whether these kernels can write a format on a GPU."""
    if format is E4M3:
        return torch.cuda.get_device_capability(device) >= (8, 9)
    return format is INT8 or format.dtype == torch.float8_e5m2


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 on a CPU, where the kernels are only interpreted."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
