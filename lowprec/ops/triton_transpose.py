"""Triton kernel that transposes bytes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.ops.launch import Launch, plan


@triton.jit
def _transpose_kernel(q_ptr, qt_ptr, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    q = tl.load(q_ptr + rows[:, None] * K + cols[None, :], mask=mask, other=0)
    at = cols[:, None] * M + rows[None, :]
    tl.store(qt_ptr + at, tl.trans(q), mask=(cols < K)[:, None] & (rows < M)[None, :])


def transposed_copy(q_MK: Tensor) -> Tensor:
    """[K, M], contiguous; shares no memory, for M or K of 1 either."""
    return q_MK.T.clone(memory_format=torch.contiguous_format)


def transpose_bytes(q_MK: Tensor) -> Tensor:
    """int8 [M, K] -> [K, M], contiguous; several times faster than torch's copy."""
    M, K = q_MK.shape
    q_KM = torch.empty(K, M, dtype=torch.int8, device=q_MK.device)
    _plan_transpose(q_MK.device, M, K)(q_MK, q_KM)
    return q_KM


@plan
def _plan_transpose(device, M: int, K: int) -> Launch:
    block = 128
    grid = (triton.cdiv(M, block), triton.cdiv(K, block))
    return Launch(_transpose_kernel, grid, (M, K), BLOCK_M=block, BLOCK_K=block, num_warps=8)
