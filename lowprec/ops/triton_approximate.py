"""Functions of the GPU's special units in Triton, without the cases that full functions handle.

Results that would be subnormal are 0. Triton's interpreter computes them in numpy.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def reciprocal(x):
    """1 / x to 1 ulp for normal x; infinite for smaller x."""
    if INTERPRETED:
        return 1.0 / x
    code: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(code, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def exp2(x):
    """2^x to 2 ulp."""
    if INTERPRETED:
        return tl.exp2(x)
    code: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(code, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def divided(x, by, X: tl.constexpr):
    """Divides x; by a product with the reciprocal if the result will be rounded to 16 bits."""
    return x / by if X == tl.float32 else x * reciprocal(by)
