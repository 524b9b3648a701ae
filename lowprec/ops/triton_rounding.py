"""Scales and rounding in Triton, as `reference.quantize` defines them.

Magnitudes are compared as the integers with the same bits, which order inf and NaN last: a
floating-point maximum would drop NaN.
"""

import triton
import triton.language as tl


@triton.jit
def scale_of(bits, MAX: tl.constexpr):
    """`reference.scale_of` for largest magnitudes given as bits."""
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def quotient(x, scale):
    """The quotient x / scale; 0 where the scale is 0 or NaN.

    It is correctly rounded, computed from the reciprocal and two fused multiply-adds: one
    division per element would make the kernels compute-bound.
    """
    usable = scale > 0
    divisor = tl.where(usable, scale, 1.0)
    reciprocal = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    q = x * reciprocal
    # x - q * divisor is exact in one fma, so that adding its quotient rounds q only once, as
    # an IEEE division does.
    q = tl.fma(tl.fma(-q, divisor, x), reciprocal, q)
    return tl.where(usable, q, 0.0)


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
