"""Triton kernels for self-attention over 129 tokens: half of 256 patches, and a class token.

As in `triton_attention`, one program computes a head of a sample. 128 tokens fill blocks of the
tensor cores. The last token, with the suffix _l, is the first row of a block of LAST rows; the
others are zeros, and nothing that is computed from them is stored.

A head is cut into two blocks of columns whose widths are powers of two, so that 80 = 64 + 16 needs
no padding; without a second block (D1 = 0), a pair holds the first one twice. Narrower heads than
64 are padded to a power of two: in two blocks, backward would spill registers.
"""

import triton
import triton.language as tl

from lowprec.ops.launch import Launch
from lowprec.ops.triton_approximate import divided, exp2

TOKENS = 129
BLOCK = tl.constexpr(128)  # tokens besides the last one
QUERIES = tl.constexpr(64)  # that forward handles at a time
LAST = tl.constexpr(16)  # the fewest rows that tensor cores multiply


@triton.jit
def _load(ptr, t, stride, WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, inside=True):
    """A pair of rows t; `inside` [rows, 1]: the others are zeros."""
    d0, d1 = tl.arange(0, D0)[None, :], tl.arange(0, max(D1, 1))[None, :] + D0
    x0 = tl.load(ptr + t[:, None] * stride + d0, mask=(d0 < WIDTH) & inside, other=0.0)
    x1 = x0
    if D1:
        x1 = tl.load(ptr + t[:, None] * stride + d1, mask=(d1 < WIDTH) & inside, other=0.0)
    return x0, x1


@triton.jit
def _store(ptr, x, t, stride, WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    d0, d1 = tl.arange(0, D0)[None, :], tl.arange(0, max(D1, 1))[None, :] + D0
    dtype = ptr.dtype.element_ty
    tl.store(ptr + t[:, None] * stride + d0, x[0].to(dtype), mask=d0 < WIDTH)
    if D1:
        tl.store(ptr + t[:, None] * stride + d1, x[1].to(dtype), mask=d1 < WIDTH)


@triton.jit
def _load_last(ptr, stride, WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    t = tl.arange(0, LAST)
    return _load(ptr + BLOCK * stride, t, stride, WIDTH, D0, D1, t[:, None] == 0)


@triton.jit
def _store_last(ptr, x, stride, WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Stores the first columns of a pair [D0, LAST] and [D1, LAST]."""
    ptr += BLOCK * stride + tl.zeros([1, LAST], tl.int32)
    is_last = tl.arange(0, LAST)[None, :] == 0
    d0, d1 = tl.arange(0, D0)[:, None], tl.arange(0, max(D1, 1))[:, None] + D0
    tl.store(ptr + d0, x[0].to(ptr.dtype.element_ty), mask=is_last & (d0 < WIDTH))
    if D1:
        tl.store(ptr + d1, x[1].to(ptr.dtype.element_ty), mask=is_last & (d1 < WIDTH))


@triton.jit
def _dot(x, y, sum=None):
    return tl.dot(x, y, sum, input_precision="ieee")


@triton.jit
def _by_tokens(x, y, D1: tl.constexpr):
    """The product x y^T: [tokens of x, tokens of y]."""
    products = _dot(x[0], tl.trans(y[0]))
    return _dot(x[1], tl.trans(y[1]), products) if D1 else products


@triton.jit
def _weighted(weights, x, weights_l, x_l, D1: tl.constexpr):
    """The sum weights x + weights_l x_l: a pair of [tokens, D0] and [tokens, D1]."""
    weights, weights_l = weights.to(x[0].dtype), weights_l.to(x[0].dtype)
    sum0 = _dot(weights, x[0], _dot(weights_l, x_l[0]))
    return sum0, (_dot(weights, x[1], _dot(weights_l, x_l[1])) if D1 else sum0)


@triton.jit
def _weighted_last(weights, x, weights_l, x_l, D1: tl.constexpr):
    """The transposed sum (weights^T x + weights_l^T x_l)^T: a pair of [D0, LAST] and [D1, LAST]."""
    weights, weights_l = weights.to(x[0].dtype), weights_l.to(x[0].dtype)
    sum0 = _dot(tl.trans(x[0]), weights, _dot(tl.trans(x_l[0]), weights_l))
    return sum0, (_dot(tl.trans(x[1]), weights, _dot(tl.trans(x_l[1]), weights_l)) if D1 else sum0)


@triton.jit
def _softmax(logits, logits_l, SCALE: tl.constexpr, KEYS: tl.constexpr):
    """Unnormalized weights of the keys along axis KEYS and of the last key, and their sums."""
    scale: tl.constexpr = SCALE * 1.4426950408889634  # exp2 is one instruction
    is_last = tl.expand_dims(tl.arange(0, LAST), 1 - KEYS) == 0
    logits, logits_l = logits * scale, tl.where(is_last, logits_l * scale, float("-inf"))
    largest = tl.max(logits, axis=KEYS, keep_dims=True)
    largest = tl.maximum(largest, tl.max(logits_l, axis=KEYS, keep_dims=True))
    weights, weights_l = exp2(logits - largest), exp2(logits_l - largest)
    total = tl.sum(weights, axis=KEYS, keep_dims=True)
    return weights, weights_l, total + tl.sum(weights_l, axis=KEYS, keep_dims=True)


@triton.jit
def _softmax_backward(weights, weights_l, grad, grad_l, SCALE: tl.constexpr, KEYS: tl.constexpr):
    """Gradients of the logits: weight * (grad - mean), with the mean over all keys."""
    mean = tl.sum(weights * grad, axis=KEYS, keep_dims=True)
    mean += tl.sum(weights_l * grad_l, axis=KEYS, keep_dims=True)
    mean *= SCALE
    return weights * (grad * SCALE - mean), weights_l * (grad_l * SCALE - mean)


@triton.jit
def _attention_129_kernel(
    qkv_ptr, out_ptr, heads,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * WIDTH
    stride = 3 * width
    keys = tl.arange(0, BLOCK)
    q_ptr = qkv_ptr + sample * (BLOCK + 1) * stride + head * WIDTH
    k_ptr, v_ptr = q_ptr + width, q_ptr + 2 * width
    out_ptr += sample * (BLOCK + 1) * width + head * WIDTH
    dtype = qkv_ptr.dtype.element_ty
    k_l = _load_last(k_ptr, stride, WIDTH, D0, D1)
    v_l = _load_last(v_ptr, stride, WIDTH, D0, D1)
    q_l = _load_last(q_ptr, stride, WIDTH, D0, D1)
    k = _load(k_ptr, keys, stride, WIDTH, D0, D1)
    v = _load(v_ptr, keys, stride, WIDTH, D0, D1)
    u, u_l, total_l = _softmax(_by_tokens(k, q_l, D1), _by_tokens(k_l, q_l, D1), SCALE, 0)
    u, u_l = divided(u, total_l, dtype), divided(u_l, total_l, dtype)
    out_l = _weighted_last(u, v, u_l, v_l, D1)
    _store_last(out_ptr, out_l, width, WIDTH, D0, D1)
    for start in tl.range(0, BLOCK, QUERIES, num_stages=1):
        t = start + tl.arange(0, QUERIES)
        q = _load(q_ptr, t, stride, WIDTH, D0, D1)
        w, w_l, total = _softmax(_by_tokens(q, k, D1), _by_tokens(q, k_l, D1), SCALE, 1)
        out = _weighted(w, v, w_l, v_l, D1)
        out = divided(out[0], total, dtype), divided(out[1], total, dtype)
        _store(out_ptr, out, t, width, WIDTH, D0, D1)


@triton.jit
def _attention_backward_129_kernel(
    qkv_ptr, g_ptr, grad_ptr, heads,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * WIDTH
    stride = 3 * width
    t = tl.arange(0, BLOCK)
    q_ptr = qkv_ptr + sample * (BLOCK + 1) * stride + head * WIDTH
    k_ptr, v_ptr = q_ptr + width, q_ptr + 2 * width
    grad_q_ptr = grad_ptr + sample * (BLOCK + 1) * stride + head * WIDTH
    grad_k_ptr, grad_v_ptr = grad_q_ptr + width, grad_q_ptr + 2 * width
    g_ptr += sample * (BLOCK + 1) * width + head * WIDTH
    q_l = _load_last(q_ptr, stride, WIDTH, D0, D1)
    k_l = _load_last(k_ptr, stride, WIDTH, D0, D1)
    v_l = _load_last(v_ptr, stride, WIDTH, D0, D1)
    g_l = _load_last(g_ptr, width, WIDTH, D0, D1)
    q = _load(q_ptr, t, stride, WIDTH, D0, D1)
    k = _load(k_ptr, t, stride, WIDTH, D0, D1)
    v = _load(v_ptr, t, stride, WIDTH, D0, D1)
    g = _load(g_ptr, t, width, WIDTH, D0, D1)
    dtype = qkv_ptr.dtype.element_ty
    # The last query's weights u and the gradients h of its logits: [keys, queries].
    u, u_l, total = _softmax(_by_tokens(k, q_l, D1), _by_tokens(k_l, q_l, D1), SCALE, 0)
    u, u_l = divided(u, total, dtype), divided(u_l, total, dtype)
    grad, grad_l = _by_tokens(v, g_l, D1), _by_tokens(v_l, g_l, D1)
    h, h_l = _softmax_backward(u, u_l, grad, grad_l, SCALE, 0)
    u, u_l, h, h_l = u.to(dtype), u_l.to(dtype), h.to(dtype), h_l.to(dtype)
    grad_q_l = _weighted_last(h, k, h_l, k_l, D1)
    _store_last(grad_q_ptr, grad_q_l, stride, WIDTH, D0, D1)
    # The weights w of the other queries and the gradients e of their logits.
    w, w_l, total = _softmax(_by_tokens(q, k, D1), _by_tokens(q, k_l, D1), SCALE, 1)
    w, w_l = divided(w, total, dtype), divided(w_l, total, dtype)
    grad_v_l = _weighted_last(w_l, g, tl.trans(u_l), g_l, D1)
    _store_last(grad_v_ptr, grad_v_l, stride, WIDTH, D0, D1)
    grad_v = _weighted(tl.trans(w.to(dtype)), g, u, g_l, D1)
    _store(grad_v_ptr, grad_v, t, stride, WIDTH, D0, D1)
    grad, grad_l = _by_tokens(g, v, D1), _by_tokens(g, v_l, D1)
    e, e_l = _softmax_backward(w, w_l, grad, grad_l, SCALE, 1)
    e, e_l = e.to(dtype), e_l.to(dtype)
    _store(grad_q_ptr, _weighted(e, k, e_l, k_l, D1), t, stride, WIDTH, D0, D1)
    _store(grad_k_ptr, _weighted(tl.trans(e), q, h, q_l, D1), t, stride, WIDTH, D0, D1)
    grad_k_l = _weighted_last(e_l, q, tl.trans(h_l), q_l, D1)
    _store_last(grad_k_ptr, grad_k_l, stride, WIDTH, D0, D1)


def plan(is_backward: bool, batch: int, head_width: int, num_heads: int) -> Launch:
    """One program for each head of a sample."""
    padded = max(16, triton.next_power_of_2(head_width))
    rest = max(16, triton.next_power_of_2(head_width - padded // 2))
    is_cut = padded > 64 and rest < padded // 2
    return Launch(
        _attention_backward_129_kernel if is_backward else _attention_129_kernel,
        grid=(batch * num_heads,),
        sizes=(num_heads,),
        SCALE=head_width**-0.5,
        WIDTH=head_width,
        D0=padded // 2 if is_cut else padded,
        D1=rest if is_cut else 0,
        num_warps=8 if is_backward else 4,
    )
