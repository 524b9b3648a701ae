"""Triton kernel for `reference.dequantize`, with bit-identical results, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.ops.launch import Launch, plan

BLOCK = {"BLOCK_M": 32, "BLOCK_K": 256}


@triton.jit
def _dequantize_kernel(
    q_ptr, scale_ptr, x_ptr, M, K,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (m < M)[:, None] & (k < K)[None, :]
    at = m[:, None] * K + k[None, :]
    if ROWS:
        scale = tl.load(scale_ptr + m, mask=m < M, other=0.0)[:, None]
    else:
        scale = tl.load(scale_ptr)
    x = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=mask)


def dequantize(q_MK: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`q * scale`, rounded once to dtype; scale is [M, 1] or [1, 1]."""
    q_MK, scale = q_MK.contiguous(), scale.contiguous()
    x_MK = torch.empty(q_MK.shape, dtype=dtype, device=q_MK.device)
    launch = _plan(q_MK.device, q_MK.dtype, dtype, *q_MK.shape, scale.numel() > 1)
    launch(q_MK, scale, x_MK)
    return x_MK


@plan
def _plan(device, q_dtype, dtype, M: int, K: int, has_rows: bool) -> Launch:
    grid = (triton.cdiv(M, BLOCK["BLOCK_M"]), triton.cdiv(K, BLOCK["BLOCK_K"]))
    return Launch(_dequantize_kernel, grid, (M, K), ROWS=has_rows, **BLOCK)
