"""The end of every product, `sums * a_scale * b_scale^T + bias`, in Triton and Gluon alike."""

import triton
import triton.language as tl
from triton.experimental import gluon


@triton.jit
def load_scales(a_scale_ptr, b_scale_ptr, m, n, M, N, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr):
    """Scales of rows m and of columns n of the output, or one for all."""
    if A_ROWS:
        a_scale = tl.load(a_scale_ptr + m, mask=m < M, other=0.0)[:, None]
    else:
        a_scale = tl.load(a_scale_ptr)
    if B_ROWS:
        b_scale = tl.load(b_scale_ptr + n, mask=n < N, other=0.0)[None, :]
    else:
        b_scale = tl.load(b_scale_ptr)
    return a_scale, b_scale


@triton.jit
def load_bias(bias_ptr, n, N, BIAS: tl.constexpr):
    """The bias of columns n of the output, or 0."""
    return tl.load(bias_ptr + n, mask=n < N, other=0.0) if BIAS else 0.0


@triton.jit
def finish(sums, a_scale, b_scale, bias, BIAS: tl.constexpr):
    """A block of the output as float32."""
    output = sums.to(tl.float32) * a_scale * b_scale
    if BIAS:
        output += bias.to(tl.float32)[None, :]
    return output


# Gluon compiles the same source with its own layouts, as it does Triton's standard library.
gluon_load_scales, gluon_load_bias, gluon_finish = (
    gluon.jit(function.fn) for function in (load_scales, load_bias, finish)
)
