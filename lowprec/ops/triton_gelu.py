"""Triton kernels that compute GELU, or its gradient, and quantize the result in one pass.

Values are rounded to the input's dtype before they are quantized, as by separate operations.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.formats import Format
from lowprec.ops.launch import Launch, is_hopper, num_sms, pipelined, plan, row_blocks
from lowprec.ops.triton_approximate import exp2, reciprocal
from lowprec.ops.triton_rounding import divide, largest, rounded, scale_of
from lowprec.ops.triton_sum import sum_parts

MAX_FEATURES = 8192  # longer rows would spill registers


@triton.jit
def _normal(h):
    """The tail of the standard normal distribution below -|h|, and its density there.

    The tail is the density times a polynomial in t = 1 / (1 + 0.36 |h|), fitted to a
    relative error of 2e-6, with half the instructions of an erf.
    Source: Abramowitz and Stegun, 26.2.17, with other coefficients.
    """
    bell = exp2(h * h * -0.7213475204444817)  # exp(-h^2 / 2)
    t = reciprocal(1.0 + 0.36 * tl.abs(h))
    tail = 0.04440003 * t - 0.17070286
    tail = tail * t + 0.16873246
    tail = tail * t + 0.034826493
    tail = tail * t + 0.13677489
    tail = tail * t + 0.14228976
    tail = tail * t + 0.14367822
    return tail * t * bell, 0.3989422804014327 * bell


@triton.jit
def _gelu(h, tail, X: tl.constexpr):
    """GELU(h), h times the distribution function, rounded to the type X, as float32."""
    return rounded(tl.maximum(h, 0.0) - tl.abs(h) * tail, X)


@triton.jit
def _gelu_quantize_kernel(
    h_ptr, q_ptr, scale_ptr, N,
    MAX: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    Q: tl.constexpr = q_ptr.dtype.element_ty
    X: tl.constexpr = h_ptr.dtype.element_ty
    a, b = tl.arange(0, BLOCK_A), BLOCK_A + tl.arange(0, BLOCK_B)
    at = tl.program_id(0) * tl.full([], N, tl.int64)
    x_a = tl.load(h_ptr + at + a, mask=a < N, other=0.0).to(tl.float32)
    x_b = tl.load(h_ptr + at + b, mask=b < N, other=0.0).to(tl.float32)
    x_a, x_b = _gelu(x_a, _normal(x_a)[0], X), _gelu(x_b, _normal(x_b)[0], X)
    scale = scale_of(tl.maximum(largest(x_a, 0), largest(x_b, 0)), MAX)
    tl.store(q_ptr + at + a, divide(x_a, scale, MAX, Q), mask=a < N)
    tl.store(q_ptr + at + b, divide(x_b, scale, MAX, Q), mask=b < N)
    tl.store(scale_ptr + tl.program_id(0), scale)


@triton.jit
def _backward_block(h_ptr, g_ptr, out_ptr, grad_ptr, at, mask):
    """Stores GELU and the gradient of its input for one block; returns the gradient as float32."""
    X: tl.constexpr = h_ptr.dtype.element_ty
    h = tl.load(h_ptr + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tail, density = _normal(h)
    distribution = tl.where(h > 0, 1.0 - tail, tail)
    tl.store(out_ptr + at, _gelu(h, tail, X).to(X), mask=mask)
    grad = rounded(g * (distribution + h * density), X)
    tl.store(grad_ptr + at, grad.to(X), mask=mask)
    return grad


@triton.jit
def _gelu_backward_quantize_kernel(
    h_ptr, g_ptr, out_ptr, grad_ptr, q_ptr, scale_ptr, sum_ptr, M, N,
    MAX: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    Q: tl.constexpr = q_ptr.dtype.element_ty
    a, b = tl.arange(0, BLOCK_A), BLOCK_A + tl.arange(0, BLOCK_B)
    sum_a, sum_b = tl.zeros([BLOCK_A], tl.float32), tl.zeros([BLOCK_B], tl.float32)
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        at = row * tl.full([], N, tl.int64)
        x_a = _backward_block(h_ptr, g_ptr, out_ptr, grad_ptr, at + a, a < N)
        x_b = _backward_block(h_ptr, g_ptr, out_ptr, grad_ptr, at + b, b < N)
        scale = scale_of(tl.maximum(largest(x_a, 0), largest(x_b, 0)), MAX)
        tl.store(q_ptr + at + a, divide(x_a, scale, MAX, Q), mask=a < N)
        tl.store(q_ptr + at + b, divide(x_b, scale, MAX, Q), mask=b < N)
        tl.store(scale_ptr + row, scale)
        sum_a += x_a
        sum_b += x_b
    at = tl.program_id(0) * tl.full([], N, tl.int64)
    tl.store(sum_ptr + at + a, sum_a, mask=a < N)
    tl.store(sum_ptr + at + b, sum_b, mask=b < N)


def gelu_quantize(h_MN: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """GELU(h), row-wise quantized: q_MN and scale [M, 1]; N <= `MAX_FEATURES`."""
    h_MN = h_MN.contiguous()
    M, N = h_MN.shape
    q_MN = torch.empty_like(h_MN, dtype=format.dtype)
    scale = torch.empty(M, 1, dtype=torch.float32, device=h_MN.device)
    _plan_forward(h_MN.device, h_MN.dtype, M, N, format)(h_MN, q_MN, scale)
    return q_MN, scale


@plan
def _plan_forward(device, dtype, M: int, N: int, format: Format) -> Launch:
    blocks = row_blocks(N, features_per_thread=40)
    return Launch(_gelu_quantize_kernel, (M,), (N,), MAX=format.max, **blocks)


def gelu_backward_quantize(
    h_MN: Tensor, g_MN: Tensor, format: Format
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference.gelu_backward_quantize`; N <= `MAX_FEATURES`."""
    h_MN, g_MN = h_MN.contiguous(), g_MN.contiguous()
    M, N = h_MN.shape
    device = h_MN.device
    out, grad = torch.empty_like(h_MN), torch.empty_like(h_MN)
    q_MN = torch.empty_like(h_MN, dtype=format.dtype)
    scale = torch.empty(M, 1, dtype=torch.float32, device=device)
    launch = _plan_backward(device, h_MN.dtype, g_MN.dtype, M, N, format)
    sums = torch.empty(launch.grid[0], N, dtype=torch.float32, device=device)
    launch(h_MN, g_MN, out, grad, q_MN, scale, sums)
    return out, grad, q_MN, scale, sum_parts(sums)


@plan
def _plan_backward(device, h_dtype, g_dtype, M: int, N: int, format: Format) -> Launch:
    blocks = row_blocks(N, features_per_thread=12)
    constants = {
        "MAX": format.max,
        **blocks,
        **pipelined(N * (h_dtype.itemsize + g_dtype.itemsize)),
        # Of 65,536 for the 32 warps that a multiprocessor has at a time. With this limit, float32
        # and kernels for Blackwell would spill.
        "maxnreg": 64 if is_hopper(device) and h_dtype.itemsize == 2 else None,
    }
    grid = (min(M, 32 // blocks["num_warps"] * num_sms(device)),)
    return Launch(_gelu_backward_quantize_kernel, grid, (M, N), **constants)
