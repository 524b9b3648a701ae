"""Triton kernels for self-attention over short sequences: one program per head and sample.

A program holds the whole sequence, so the backward pass recomputes the weights from queries and
keys and needs neither the output nor a second kernel. Queries, keys and values are read from the
packed product and their gradients are written in its layout. `triton_attention_129` has kernels for
129 tokens.
`F.scaled_dot_product_attention` is the definition.

Block sizes are powers of two. To waste less work, tokens are split into two parts: the first A
tokens, and up to B remaining ones; B may be 0. The suffixes _a and _b denote these parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowprec.ops import triton_attention_129
from lowprec.ops.launch import Launch, plan
from lowprec.ops.triton_approximate import divided, exp2

DTYPES = (torch.bfloat16, torch.float16)  # float32 products would not use tensor cores


@triton.jit
def _load(ptr, t, stride, tokens, head_width, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (t[:, None] < tokens) & (d < head_width)
    return tl.load(ptr + t[:, None] * stride + d, mask=inside, other=0.0)


@triton.jit
def _store(ptr, x, t, stride, tokens, head_width, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (t[:, None] < tokens) & (d < head_width)
    tl.store(ptr + t[:, None] * stride + d, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dot(x, y, sum=None):
    return tl.dot(x, y, sum, input_precision="ieee")


@triton.jit
def _logits(q, k, t, keys, tokens, SCALE: tl.constexpr, CAUSAL: tl.constexpr):
    visible = keys[None, :] < tokens
    if CAUSAL:
        visible &= keys[None, :] <= t[:, None]
    return tl.where(visible, _dot(q, tl.trans(k)) * (SCALE * 1.4426950408889634), float("-inf"))


@triton.jit
def _weights(
    q, k_a, k_b, t, a, b, tokens,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, SEES_B: tl.constexpr,
):  # fmt: skip
    """Weights of the keys in both parts before softmax's division, and their sums.

    Without SEES_B, the weights of the last part are unspecified.
    """
    # Logits are in units of log2(e), so that exp2, one instruction, gives the weights. The first
    # key is visible to every query, which keeps the maximum finite.
    weights_a = _logits(q, k_a, t, a, tokens, SCALE, CAUSAL)
    largest = tl.max(weights_a, axis=1, keep_dims=True)
    weights_b = weights_a
    if SEES_B:
        weights_b = _logits(q, k_b, t, b, tokens, SCALE, CAUSAL)
        largest = tl.maximum(largest, tl.max(weights_b, axis=1, keep_dims=True))
        weights_b = exp2(weights_b - largest)
    weights_a = exp2(weights_a - largest)
    total = tl.sum(weights_a, axis=1, keep_dims=True)
    if SEES_B:
        total += tl.sum(weights_b, axis=1, keep_dims=True)
    return weights_a, weights_b, total


@triton.jit
def _output(
    q, k_a, v_a, k_b, v_b, t, a, b, tokens,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, SEES_B: tl.constexpr,
):  # fmt: skip
    weights_a, weights_b, total = _weights(q, k_a, k_b, t, a, b, tokens, SCALE, CAUSAL, SEES_B)
    out = _dot(weights_a.to(q.dtype), v_a)
    if SEES_B:
        out = _dot(weights_b.to(q.dtype), v_b, out)
    return divided(out, total, q.dtype)


@triton.jit
def _attention_kernel(
    qkv_ptr, out_ptr, tokens, heads, head_width,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * head_width
    stride = 3 * width
    a, b = tl.arange(0, A), A + tl.arange(0, max(B, 1))
    q_ptr = qkv_ptr + sample * tokens * stride + head * head_width
    k_ptr, v_ptr = q_ptr + width, q_ptr + 2 * width
    out_ptr += sample * tokens * width + head * head_width
    q = _load(q_ptr, a, stride, tokens, head_width, BLOCK_D)
    k_a = _load(k_ptr, a, stride, tokens, head_width, BLOCK_D)
    v_a = _load(v_ptr, a, stride, tokens, head_width, BLOCK_D)
    k_b, v_b = k_a, v_a
    if B:
        q_b = _load(q_ptr, b, stride, tokens, head_width, BLOCK_D)
        k_b = _load(k_ptr, b, stride, tokens, head_width, BLOCK_D)
        v_b = _load(v_ptr, b, stride, tokens, head_width, BLOCK_D)
        out = _output(q_b, k_a, v_a, k_b, v_b, b, a, b, tokens, SCALE, CAUSAL, True)
        _store(out_ptr, out, b, width, tokens, head_width, BLOCK_D)
    SEES_B: tl.constexpr = B > 0 and not CAUSAL
    out = _output(q, k_a, v_a, k_b, v_b, a, a, b, tokens, SCALE, CAUSAL, SEES_B)
    _store(out_ptr, out, a, width, tokens, head_width, BLOCK_D)


@triton.jit
def _gradients(
    q, g, k_a, v_a, k_b, v_b, grad_k_a, grad_v_a, grad_k_b, grad_v_b, t, a, b, tokens,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, SEES_B: tl.constexpr,
):  # fmt: skip
    """Gradient of one part's queries; adds this part's share to the gradients of keys and values.

    The caller multiplies the gradients of queries and keys by SCALE.
    """
    weights_a, weights_b, total = _weights(q, k_a, k_b, t, a, b, tokens, SCALE, CAUSAL, SEES_B)
    weights_a = divided(weights_a, total, q.dtype)
    grad_v_a = _dot(tl.trans(weights_a.to(q.dtype)), g, grad_v_a)
    grad_weights_a = _dot(g, tl.trans(v_a))
    # Softmax's gradient is weight * (grad - mean), with the mean over all keys of both parts. It
    # equals g . output, which need not be loaded.
    mean = tl.sum(weights_a * grad_weights_a, axis=1, keep_dims=True)
    if SEES_B:
        weights_b = divided(weights_b, total, q.dtype)
        grad_v_b = _dot(tl.trans(weights_b.to(q.dtype)), g, grad_v_b)
        grad_weights_b = _dot(g, tl.trans(v_b))
        mean += tl.sum(weights_b * grad_weights_b, axis=1, keep_dims=True)
    grad_logits_a = (weights_a * (grad_weights_a - mean)).to(q.dtype)
    grad_q = _dot(grad_logits_a, k_a)
    grad_k_a = _dot(tl.trans(grad_logits_a), q, grad_k_a)
    if SEES_B:
        grad_logits_b = (weights_b * (grad_weights_b - mean)).to(q.dtype)
        grad_q = _dot(grad_logits_b, k_b, grad_q)
        grad_k_b = _dot(tl.trans(grad_logits_b), q, grad_k_b)
    return grad_q, grad_k_a, grad_v_a, grad_k_b, grad_v_b


@triton.jit
def _attention_backward_kernel(
    qkv_ptr, g_ptr, grad_ptr, tokens, heads, head_width,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * head_width
    stride = 3 * width
    a, b = tl.arange(0, A), A + tl.arange(0, max(B, 1))
    q_ptr = qkv_ptr + sample * tokens * stride + head * head_width
    k_ptr, v_ptr = q_ptr + width, q_ptr + 2 * width
    grad_q_ptr = grad_ptr + sample * tokens * stride + head * head_width
    grad_k_ptr, grad_v_ptr = grad_q_ptr + width, grad_q_ptr + 2 * width
    g_ptr += sample * tokens * width + head * head_width
    k_a = _load(k_ptr, a, stride, tokens, head_width, BLOCK_D)
    v_a = _load(v_ptr, a, stride, tokens, head_width, BLOCK_D)
    grad_k_a = tl.zeros([A, BLOCK_D], tl.float32)
    grad_v_a = tl.zeros([A, BLOCK_D], tl.float32)
    # Triton needs a value of the right kind on every path; without a last part these are not read.
    k_b, v_b, grad_k_b, grad_v_b = k_a, v_a, grad_k_a, grad_v_a
    SEES_B: tl.constexpr = B > 0 and not CAUSAL
    if B:
        q = _load(q_ptr, b, stride, tokens, head_width, BLOCK_D)
        k_b = _load(k_ptr, b, stride, tokens, head_width, BLOCK_D)
        v_b = _load(v_ptr, b, stride, tokens, head_width, BLOCK_D)
        g = _load(g_ptr, b, width, tokens, head_width, BLOCK_D)
        grad_k_b = tl.zeros([B, BLOCK_D], tl.float32)
        grad_v_b = tl.zeros([B, BLOCK_D], tl.float32)
        grad_q, grad_k_a, grad_v_a, grad_k_b, grad_v_b = _gradients(
            q, g, k_a, v_a, k_b, v_b, grad_k_a, grad_v_a, grad_k_b, grad_v_b, b, a, b, tokens,
            SCALE, CAUSAL, True,
        )  # fmt: skip
        _store(grad_q_ptr, grad_q * SCALE, b, stride, tokens, head_width, BLOCK_D)
        if CAUSAL:  # queries of the first part do not see these keys
            _store(grad_k_ptr, grad_k_b * SCALE, b, stride, tokens, head_width, BLOCK_D)
            _store(grad_v_ptr, grad_v_b, b, stride, tokens, head_width, BLOCK_D)
    q = _load(q_ptr, a, stride, tokens, head_width, BLOCK_D)
    g = _load(g_ptr, a, width, tokens, head_width, BLOCK_D)
    grad_q, grad_k_a, grad_v_a, grad_k_b, grad_v_b = _gradients(
        q, g, k_a, v_a, k_b, v_b, grad_k_a, grad_v_a, grad_k_b, grad_v_b, a, a, b, tokens,
        SCALE, CAUSAL, SEES_B,
    )  # fmt: skip
    _store(grad_q_ptr, grad_q * SCALE, a, stride, tokens, head_width, BLOCK_D)
    _store(grad_k_ptr, grad_k_a * SCALE, a, stride, tokens, head_width, BLOCK_D)
    _store(grad_v_ptr, grad_v_a, a, stride, tokens, head_width, BLOCK_D)
    if SEES_B:
        _store(grad_k_ptr, grad_k_b * SCALE, b, stride, tokens, head_width, BLOCK_D)
        _store(grad_v_ptr, grad_v_b, b, stride, tokens, head_width, BLOCK_D)


def takes(qkv: Tensor, num_heads: int, is_causal: bool) -> bool:
    """Whether `attention` takes packed queries, keys and values [batch, tokens, 3 width].

    It requires 16 bits and a GPU of compute capability 8.0 or higher. All of these take up to 64
    tokens and heads up to 64 wide. Capabilities 9 and 10 also take either heads up to 128 wide or
    up to 96 tokens, and Hopper (9) alone 129 tokens without a causal mask, with heads up to 80
    wide. Elsewhere, these sizes would spill registers.
    """
    tokens, packed_width = qkv.shape[1:]
    head_width = packed_width // 3 // num_heads
    if not (qkv.is_cuda and qkv.dtype in DTYPES and 0 < tokens <= 129 and head_width <= 128):
        return False
    is_small = tokens <= 64 and head_width <= 64
    is_medium = tokens <= 64 or (tokens <= 96 and head_width <= 64)
    is_129 = tokens == 129 and head_width <= 80 and not is_causal
    major, _ = torch.cuda.get_device_capability(qkv.device)
    if is_small:
        return major >= 8
    return (is_medium and major in (9, 10)) or (is_129 and major == 9)


def output_size(qkv: Tensor, num_heads: int, g: Tensor | None = None) -> tuple[int, int, int]:
    """The size [batch, tokens, width] of `attention`'s output, and of its gradient g.

    Raises ValueError unless qkv has the size [batch, tokens, 3 width] with whole heads, and g this
    size and qkv's dtype.
    """
    if qkv.dim() != 3 or qkv.shape[2] % (3 * num_heads):
        raise ValueError(
            f"qkv {list(qkv.shape)} must have three dimensions, and the last must be 3 times a "
            f"multiple of num_heads={num_heads}"
        )
    batch, tokens, packed_width = qkv.shape
    size = (batch, tokens, packed_width // 3)
    if g is not None and (g.shape != size or g.dtype != qkv.dtype):
        given = f"{list(g.shape)} in {g.dtype}"
        raise ValueError(f"g must be {list(size)} in {qkv.dtype}, as the output, not {given}")
    return size


def attention(qkv: Tensor, num_heads: int, is_causal: bool) -> Tensor:
    """[batch, tokens, 3 width] -> [batch, tokens, width]; ValueError: see `output_size`."""
    size = output_size(qkv, num_heads)
    qkv = qkv.contiguous()
    out = torch.empty(size, dtype=qkv.dtype, device=qkv.device)
    _plan_forward(qkv.device, qkv.dtype, *qkv.shape, num_heads, is_causal)(qkv, out)
    return out


@plan
def _plan_forward(device, dtype, *sizes: int) -> Launch:
    return _plan(_attention_kernel, *sizes)


def attention_backward(g: Tensor, qkv: Tensor, num_heads: int, is_causal: bool) -> Tensor:
    """The gradient of qkv, in its layout, from the gradient g of `attention`'s output.

    Raises ValueError: see `output_size`.
    """
    output_size(qkv, num_heads, g)
    g, qkv = g.contiguous(), qkv.contiguous()
    grad = torch.empty_like(qkv)
    _plan_backward(qkv.device, qkv.dtype, *qkv.shape, num_heads, is_causal)(qkv, g, grad)
    return grad


@plan
def _plan_backward(device, dtype, *sizes: int) -> Launch:
    return _plan(_attention_backward_kernel, *sizes)


def _plan(kernel, batch: int, tokens: int, packed_width: int, num_heads: int, is_causal: bool):
    """One program for each head of a sample."""
    head_width = packed_width // 3 // num_heads
    if tokens == triton_attention_129.TOKENS and not is_causal:
        is_backward = kernel is _attention_backward_kernel
        return triton_attention_129.plan(is_backward, batch, head_width, num_heads)
    first, last = _parts(tokens)
    return Launch(
        kernel,
        grid=(batch * num_heads,),
        sizes=(tokens, num_heads, head_width),
        SCALE=head_width**-0.5,
        CAUSAL=is_causal,
        A=first,
        B=last,
        BLOCK_D=max(16, triton.next_power_of_2(head_width)),
        num_warps=first // 16,
    )


def _parts(tokens: int) -> tuple[int, int]:
    """Sizes of the blocks for the first and the last tokens."""
    first = 64 if tokens > 32 else 32 if tokens > 16 else 16
    return first, max(16, triton.next_power_of_2(tokens - first)) if tokens > first else 0
