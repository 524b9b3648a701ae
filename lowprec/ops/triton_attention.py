"""Triton kernels for self-attention over short sequences: one program takes one head of a sample.

A program holds the whole sequence, so the backward pass recomputes the weights from queries and
keys and needs neither the output nor a second kernel. Queries, keys and values are read from the
packed product and their gradients are written in its layout.
`F.scaled_dot_product_attention` is the definition.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.ops.launch import Launch, plan

MAX_TOKENS = 64
MAX_HEAD_WIDTH = 128
DTYPES = (torch.bfloat16, torch.float16)  # float32 products would take the slow units


@triton.jit
def _weights(
    q, k, tokens, SCALE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """Softmax of q k^T without its division: float32 weights, and their sums [BLOCK_T, 1]."""
    queries = tl.arange(0, BLOCK_T)[:, None]
    keys = tl.arange(0, BLOCK_T)[None, :]
    visible = (keys < tokens) & (keys <= queries) if CAUSAL else keys < tokens
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (SCALE * 1.4426950408889634)
    logits = tl.where(visible, logits, float("-inf"))
    weights = tl.exp2(logits - tl.max(logits, axis=1, keep_dims=True))
    return weights, tl.sum(weights, axis=1, keep_dims=True)


@triton.jit
def _attention_kernel(
    qkv_ptr, out_ptr, tokens, heads, head_width,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * head_width
    t, d = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (t < tokens) & (d < head_width)
    first = head * head_width + d
    qkv_ptr += sample * tokens * 3 * width + t * 3 * width + first
    q = tl.load(qkv_ptr, mask=inside, other=0.0)
    k = tl.load(qkv_ptr + width, mask=inside, other=0.0)
    v = tl.load(qkv_ptr + 2 * width, mask=inside, other=0.0)
    weights, total = _weights(q, k, tokens, SCALE, CAUSAL, BLOCK_T)
    out = tl.dot(weights.to(v.dtype), v, input_precision="ieee") / total
    out_ptr += sample * tokens * width + t * width + first
    tl.store(out_ptr, out.to(v.dtype), mask=inside)


@triton.jit
def _attention_backward_kernel(
    qkv_ptr, g_ptr, grad_ptr, tokens, heads, head_width,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * head_width
    t, d = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (t < tokens) & (d < head_width)
    first = head * head_width + d
    at = sample * tokens * 3 * width + t * 3 * width + first
    q = tl.load(qkv_ptr + at, mask=inside, other=0.0)
    k = tl.load(qkv_ptr + at + width, mask=inside, other=0.0)
    v = tl.load(qkv_ptr + at + 2 * width, mask=inside, other=0.0)
    g = tl.load(g_ptr + sample * tokens * width + t * width + first, mask=inside, other=0.0)
    weights, total = _weights(q, k, tokens, SCALE, CAUSAL, BLOCK_T)
    weights = weights / total
    grad_v = tl.dot(tl.trans(weights.to(g.dtype)), g, input_precision="ieee")
    tl.store(grad_ptr + at + 2 * width, grad_v.to(g.dtype), mask=inside)
    grad_weights = tl.dot(g, tl.trans(v), input_precision="ieee")
    mean = tl.sum(weights * grad_weights, axis=1, keep_dims=True)
    grad_logits = (weights * (grad_weights - mean)).to(g.dtype)
    grad_q = tl.dot(grad_logits, k, input_precision="ieee") * SCALE
    tl.store(grad_ptr + at, grad_q.to(g.dtype), mask=inside)
    grad_k = tl.dot(tl.trans(grad_logits), q, input_precision="ieee") * SCALE
    tl.store(grad_ptr + at + width, grad_k.to(g.dtype), mask=inside)


def attention(qkv: Tensor, num_heads: int, is_causal: bool) -> Tensor:
    """[batch, tokens, 3 width] -> [batch, tokens, width], for up to `MAX_TOKENS` tokens."""
    qkv = qkv.contiguous()
    batch, tokens, packed_width = qkv.shape
    out = torch.empty(batch, tokens, packed_width // 3, dtype=qkv.dtype, device=qkv.device)
    _plan_forward(qkv.device, qkv.dtype, *qkv.shape, num_heads, is_causal)(qkv, out)
    return out


@plan
def _plan_forward(device, dtype, *sizes: int) -> Launch:
    return _plan(_attention_kernel, *sizes)


def attention_backward(g: Tensor, qkv: Tensor, num_heads: int, is_causal: bool) -> Tensor:
    """The gradient of qkv, in its layout, from the gradient g of `attention`'s output."""
    g, qkv = g.contiguous(), qkv.contiguous()
    grad = torch.empty_like(qkv)
    _plan_backward(qkv.device, qkv.dtype, *qkv.shape, num_heads, is_causal)(qkv, g, grad)
    return grad


@plan
def _plan_backward(device, dtype, *sizes: int) -> Launch:
    return _plan(_attention_backward_kernel, *sizes)


def _plan(kernel, batch: int, tokens: int, packed_width: int, num_heads: int, is_causal: bool):
    """One program for each head of a sample, with a warp for each 16 tokens."""
    head_width = packed_width // 3 // num_heads
    block_tokens = max(16, triton.next_power_of_2(tokens))
    return Launch(
        kernel,
        grid=(batch * num_heads,),
        sizes=(tokens, num_heads, head_width),
        SCALE=head_width**-0.5,
        CAUSAL=is_causal,
        BLOCK_T=block_tokens,
        BLOCK_D=max(16, triton.next_power_of_2(head_width)),
        num_warps=block_tokens // 16,
    )
