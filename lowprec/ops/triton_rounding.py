"""Scales and rounding in Triton, as `reference.quantize` defines them.

Magnitudes are compared as the integers with the same bits, which order inf and NaN last: a
floating-point maximum would drop NaN.
"""

import triton
import triton.language as tl

from lowprec.ops.triton_approximate import INTERPRETED, reciprocal


@triton.jit
def scale_of(bits, MAX: tl.constexpr):
    """`reference.scale_of` for largest magnitudes given as bits."""
    amax = bits.to(tl.float32, bitcast=True)
    scale = amax * (1 / MAX)
    scale = tl.fma(tl.fma(scale, -MAX, amax), 1 / MAX, scale)  # amax / MAX, correctly rounded
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def inverse_of(scale):
    """The reciprocal of a normal number, for `times_inverse`."""
    inverse = reciprocal(scale)
    return tl.fma(tl.fma(inverse, -scale, 1.0), inverse, inverse)


@triton.jit
def times_inverse(x, scale, inverse):
    """The quotient x / scale, correctly rounded, for a normal scale and its inverse.

    One division per element would make the kernels compute-bound. -0 becomes 0, and scales below
    2^-86 may give the number next to the quotient: x - q * scale may be too small for float32. So
    may three pairs of significands, whose quotients are far from the ties of 8 bits.
    """
    q = x * inverse
    # x - q * scale is exact in one fma, so that adding its quotient rounds q only once, as an IEEE
    # division does.
    return tl.fma(tl.fma(q, -scale, x), inverse, q)


@triton.jit
def quotient(x, scale):
    """The quotient x / scale, correctly rounded; 0 where the scale is 0 or NaN."""
    usable = scale > 0
    divisor = tl.where(usable, scale, 1.0)
    return tl.where(usable, times_inverse(x, divisor, inverse_of(divisor)), 0.0)


@triton.jit
def divide(x, scale, MAX: tl.constexpr, Q: tl.constexpr):
    """Rounds `quotient` to the type Q."""
    q = quotient(x, scale)
    if Q == tl.int8:  # adding 1.5 * 2^23 rounds ties to even and puts the integer in the low bits
        return (q + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    return tl.clamp(q, -MAX, MAX).to(Q)


@triton.jit
def magnitudes(x):
    """The bits of |x|, as integers that order inf and NaN last."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """Bits of the largest magnitudes."""
    return tl.max(magnitudes(x), axis=AXIS)


@triton.jit
def rounded(x, X: tl.constexpr):
    """Rounds x to the type X; returns it as float32."""
    if X != tl.bfloat16 or INTERPRETED:
        return x.to(X).to(tl.float32)
    # the pair's other half is 0, so that its bits are those of a float32
    code: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;"
    return tl.inline_asm_elementwise(code, "=r,r", [x], tl.float32, is_pure=True, pack=1)
