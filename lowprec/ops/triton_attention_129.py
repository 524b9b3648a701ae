"""Triton kernels for self-attention over 129 tokens: half of 256 patches, and a class token.

As in `triton_attention`, one program computes a head of a sample. 128 tokens fill blocks of the
tensor cores. The last token is handled in float32 without them: a block for it would take registers
that hold the gradients of a head.

A head is cut into two blocks of columns whose widths are powers of two, so that 80 = 64 + 16 needs
no padding; without a second block (D1 = 0), a pair holds the first one twice. The last token is a
pair of rows, [1, D0] and [1, D1]. The suffix _l denotes it.
"""

import triton
import triton.language as tl

from lowprec.ops.launch import Launch

BLOCK = 128  # tokens besides the last one
QUERIES = 64  # that forward handles at a time


@triton.jit
def _load(ptr, t, stride, WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """A pair of rows t."""
    d0, d1 = tl.arange(0, D0)[None, :], tl.arange(0, max(D1, 1))[None, :] + D0
    x0 = tl.load(ptr + t[:, None] * stride + d0, mask=d0 < WIDTH, other=0.0)
    x1 = x0
    if D1:
        x1 = tl.load(ptr + t[:, None] * stride + d1, mask=d1 < WIDTH, other=0.0)
    return x0, x1


@triton.jit
def _store(ptr, x, t, stride, WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    d0, d1 = tl.arange(0, D0)[None, :], tl.arange(0, max(D1, 1))[None, :] + D0
    dtype = ptr.dtype.element_ty
    tl.store(ptr + t[:, None] * stride + d0, x[0].to(dtype), mask=d0 < WIDTH)
    if D1:
        tl.store(ptr + t[:, None] * stride + d1, x[1].to(dtype), mask=d1 < WIDTH)


@triton.jit
def _load_last(
    ptr, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr
):
    x = _load(ptr + BLOCK * stride, tl.arange(0, 1), stride, WIDTH, D0, D1)
    return x[0].to(tl.float32), x[1].to(tl.float32)


@triton.jit
def _store_last(
    ptr, x, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr
):
    _store(ptr + BLOCK * stride, x, tl.arange(0, 1), stride, WIDTH, D0, D1)


@triton.jit
def _dot(x, y, sum=None):
    return tl.dot(x, y, sum, input_precision="ieee")


@triton.jit
def _by_tokens(x, y, D1: tl.constexpr):
    """The product x y^T: [tokens of x, tokens of y]."""
    products = _dot(x[0], tl.trans(y[0]))
    return _dot(x[1], tl.trans(y[1]), products) if D1 else products


@triton.jit
def _by_last(x, y_l, D1: tl.constexpr):
    """The product x y_l^T: [tokens, 1]."""
    products = tl.sum(x[0].to(tl.float32) * y_l[0], axis=1, keep_dims=True)
    if D1:
        products += tl.sum(x[1].to(tl.float32) * y_l[1], axis=1, keep_dims=True)
    return products


@triton.jit
def _weighted(weights, x, weights_l, x_l, D1: tl.constexpr):
    """The sum weights x + weights_l x_l: a pair of [tokens, D0] and [tokens, D1]."""
    sum0 = _dot(weights, x[0]) + weights_l * x_l[0]
    return sum0, (_dot(weights, x[1]) + weights_l * x_l[1] if D1 else sum0)


@triton.jit
def _weighted_last(weights, x, weight_l, x_l):
    """The sum weights^T x + weight_l x_l for weights [tokens, 1]: a pair of [1, D0] and [1, D1]."""
    sum0 = tl.sum(weights * x[0].to(tl.float32), axis=0, keep_dims=True)
    sum1 = tl.sum(weights * x[1].to(tl.float32), axis=0, keep_dims=True)
    return sum0 + weight_l * x_l[0], sum1 + weight_l * x_l[1]


@triton.jit
def _softmax(logits, logits_l, SCALE: tl.constexpr, KEYS: tl.constexpr):
    """Unnormalized weights of the keys along axis KEYS and of the last key, and their sums."""
    scale: tl.constexpr = SCALE * 1.4426950408889634  # exp2 is one instruction
    logits, logits_l = logits * scale, logits_l * scale
    largest = tl.maximum(tl.max(logits, axis=KEYS, keep_dims=True), logits_l)
    weights, weights_l = tl.exp2(logits - largest), tl.exp2(logits_l - largest)
    return weights, weights_l, tl.sum(weights, axis=KEYS, keep_dims=True) + weights_l


@triton.jit
def _attention_129_kernel(
    qkv_ptr, out_ptr, heads, SCALE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * WIDTH
    stride = 3 * width
    keys = tl.arange(0, BLOCK)
    q_ptr = qkv_ptr + sample * (BLOCK + 1) * stride + head * WIDTH
    k_ptr, v_ptr = q_ptr + width, q_ptr + 2 * width
    out_ptr += sample * (BLOCK + 1) * width + head * WIDTH
    k = _load(k_ptr, keys, stride, WIDTH, D0, D1)
    v = _load(v_ptr, keys, stride, WIDTH, D0, D1)
    q_l = _load_last(q_ptr, stride, BLOCK, WIDTH, D0, D1)
    k_l = _load_last(k_ptr, stride, BLOCK, WIDTH, D0, D1)
    v_l = _load_last(v_ptr, stride, BLOCK, WIDTH, D0, D1)
    u, u_l, total_l = _softmax(_by_last(k, q_l, D1), _by_last(q_l, k_l, D1), SCALE, 0)
    out_l = _weighted_last(u / total_l, v, u_l / total_l, v_l)
    _store_last(out_ptr, out_l, width, BLOCK, WIDTH, D0, D1)
    for start in tl.range(0, BLOCK, QUERIES, num_stages=1):
        t = start + tl.arange(0, QUERIES)
        q = _load(q_ptr, t, stride, WIDTH, D0, D1)
        w_l = _by_last(q, k_l, D1)  # early, while q is in registers
        w, w_l, total = _softmax(_by_tokens(q, k, D1), w_l, SCALE, 1)
        out = _weighted(w.to(q[0].dtype), v, w_l, v_l, D1)
        _store(out_ptr, (out[0] / total, out[1] / total), t, width, WIDTH, D0, D1)


@triton.jit
def _attention_backward_129_kernel(
    qkv_ptr, g_ptr, grad_ptr, heads, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
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
    q_l = _load_last(q_ptr, stride, BLOCK, WIDTH, D0, D1)
    k_l = _load_last(k_ptr, stride, BLOCK, WIDTH, D0, D1)
    v_l = _load_last(v_ptr, stride, BLOCK, WIDTH, D0, D1)
    g_l = _load_last(g_ptr, width, BLOCK, WIDTH, D0, D1)
    q = _load(q_ptr, t, stride, WIDTH, D0, D1)
    k = _load(k_ptr, t, stride, WIDTH, D0, D1)
    v = _load(v_ptr, t, stride, WIDTH, D0, D1)
    g = _load(g_ptr, t, width, WIDTH, D0, D1)
    # The last query's weights u and the gradients h of its logits. Softmax's gradient is
    # weight * (grad - mean), with the mean over all keys.
    u, u_l, total = _softmax(_by_last(k, q_l, D1), _by_last(q_l, k_l, D1), SCALE, 0)
    u, u_l = u / total, u_l / total
    grad, grad_l = _by_last(v, g_l, D1), _by_last(v_l, g_l, D1)
    mean = tl.sum(u * grad, axis=0, keep_dims=True) + u_l * grad_l
    h, h_l = u * (grad - mean) * SCALE, u_l * (grad_l - mean) * SCALE
    _store_last(grad_q_ptr, _weighted_last(h, k, h_l, k_l), stride, BLOCK, WIDTH, D0, D1)
    # The weights w of the other queries and the gradients e of their logits.
    w_l, grad_l = _by_last(q, k_l, D1), _by_last(g, v_l, D1)  # early, as in forward
    w, w_l, total = _softmax(_by_tokens(q, k, D1), w_l, SCALE, 1)
    w, w_l = w / total, w_l / total
    _store_last(grad_v_ptr, _weighted_last(w_l, g, u_l, g_l), stride, BLOCK, WIDTH, D0, D1)
    grad_v = _weighted(tl.trans(w.to(q[0].dtype)), g, u, g_l, D1)
    _store(grad_v_ptr, grad_v, t, stride, WIDTH, D0, D1)
    grad = _by_tokens(g, v, D1)
    mean = tl.sum(w * grad, axis=1, keep_dims=True) + w_l * grad_l
    e_l = w_l * (grad_l - mean) * SCALE
    _store_last(grad_k_ptr, _weighted_last(e_l, q, h_l, q_l), stride, BLOCK, WIDTH, D0, D1)
    e = (w * (grad - mean) * SCALE).to(q[0].dtype)
    _store(grad_q_ptr, _weighted(e, k, e_l, k_l, D1), t, stride, WIDTH, D0, D1)
    _store(grad_k_ptr, _weighted(tl.trans(e), q, h, q_l, D1), t, stride, WIDTH, D0, D1)


def plan(is_backward: bool, batch: int, head_width: int, num_heads: int) -> Launch:
    """One program for each head of a sample; wider heads than 80 would spill registers."""
    padded = max(16, triton.next_power_of_2(head_width))
    rest = max(16, triton.next_power_of_2(head_width - padded // 2))
    is_cut = padded > 32 and rest < padded // 2
    return Launch(
        _attention_backward_129_kernel if is_backward else _attention_129_kernel,
        grid=(batch * num_heads,),
        sizes=(num_heads,),
        SCALE=head_width**-0.5,
        BLOCK=BLOCK,
        WIDTH=head_width,
        D0=padded // 2 if is_cut else padded,
        D1=rest if is_cut else 0,
        **({"num_warps": 8} if is_backward else {"num_warps": 4, "QUERIES": QUERIES}),
    )
