"""Number formats as data, and exact rounding to them.

Format names are "int8", "e4m3", "e5m2" and any other "eXmY" with X exponent and Y mantissa bits.
e4m3 and e5m2 are the OCP formats (`torch.float8_e4m3fn`, `torch.float8_e5m2`). The other eXmY
formats have no codes for inf or NaN, as in OCP MX: the largest e2m1 number is 6, and the largest
e3m2 number is 28.

"e4m3_bnb" and "e5m2_bnb" are the code books with which the paper's released code simulates fp8.
They have no NaN or inf (the largest numbers are 480 and 114,688). Their subnormal numbers are 4
times smaller than OCP's, which leaves a gap: e4m3_bnb has no number between 0.0034 and 0.0156.
Source: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0; `create_fp8_map`
of bitsandbytes 0.39.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, eq=False)  # one object per format: hashed and compared by identity
class Format:
    """A signed number format: `max` is the largest number, `dtype` the torch dtype of storage.

    `capability` is the least compute capability of a GPU on which kernels quantize to a native
    format and multiply it; None for a format that is only fake-quantized.
    """

    name: str
    max: float
    dtype: torch.dtype
    exponent_bits: int = 0  # 0 for integers
    mantissa_bits: int = 0
    gap: int = 0  # number of exponents by which subnormal numbers are too small
    capability: tuple[int, int] | None = None

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent_bits - 1)


INT8 = Format("int8", 127.0, torch.int8, capability=(8, 0))
E4M3 = Format("e4m3", 448.0, torch.float8_e4m3fn, 4, 3, capability=(8, 9))
E5M2 = Format("e5m2", 57344.0, torch.float8_e5m2, 5, 2, capability=(8, 0))
E4M3_BNB = Format("e4m3_bnb", 480.0, torch.float32, 4, 3, gap=2)
E5M2_BNB = Format("e5m2_bnb", 114688.0, torch.float32, 5, 2, gap=2)
_NAMED = (INT8, E4M3, E5M2, E4M3_BNB, E5M2_BNB)
_OTHERS = (
    Format(f"e{x}m{y}", 2.0 ** (2 ** (x - 1)) * (2 - 2.0**-y), torch.float32, x, y)
    for x in range(1, 8)
    for y in range(11)
)
NATIVE = {format.dtype: format for format in reversed(_NAMED) if format.capability}
_FORMATS = {format.name: format for format in (*_OTHERS, *_NAMED)}  # complete: see parse_format


def parse_format(name: str) -> Format:
    """Returns the format of a name; eXmY formats that torch lacks are stored as float32.

    A look-up alone, because layers call it while torch.compile traces them: a format made there
    would run the layer uncompiled, or compile it again.
    Raises ValueError for an unknown name, or unless 1 <= X <= 7 and 0 <= Y <= 10.
    """
    if name not in _FORMATS:
        named = ", ".join(format.name for format in _NAMED)
        raise ValueError(
            f"format {name!r}: must be {named} or another eXmY "
            "with 1 to 7 exponent and 0 to 10 mantissa bits"
        )
    return _FORMATS[name]


def round_to_format(x: Tensor, format: Format, stochastic: bool = False) -> Tensor:
    """Rounds to the nearest number of a format, with ties to the even mantissa.

    If stochastic, rounds to one of the two numbers that enclose x, to the upper one with a
    probability that makes x the expected value. Processes of a torch.distributed group round
    differently, although they draw the same numbers if their random states are equal.
    Takes a tensor of any shape and returns float32. Finite values beyond the largest number
    saturate. NaN and inf become NaN, also for int8.
    Raises ValueError for stochastic rounding to a code book.
    """
    if stochastic and format.gap:
        raise ValueError(f"{format.name} cannot be rounded to stochastically")
    number = x.float()
    x = number.clamp(-format.max, format.max)
    to_integer = _round_stochastically if stochastic else torch.round
    if format.exponent_bits:
        exponent = exponent_of(x).clamp(min=format.min_exponent) - format.mantissa_bits
        rounded = to_integer(x * power_of_two(-exponent)) * power_of_two(exponent)
        if format.gap:
            rounded = torch.where(x.abs() < 2.0**format.min_exponent, _below(x, format), rounded)
    else:
        rounded = to_integer(x)
    return torch.where(number.isfinite(), rounded, torch.nan)


def exponent_of(x: Tensor) -> Tensor:
    """floor(log2(abs(x))) of float32 numbers as int32; -127 for 0 and subnormal numbers.

    Compiled for CUDA, torch.frexp gives a wrong exponent for subnormal numbers.
    """
    return (x.view(torch.int32) >> 23 & 0xFF) - 127


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32, exactly, for int32 exponents from -126 to 127."""
    return (exponent + 127 << 23).view(torch.float32)


def _round_stochastically(x: Tensor) -> Tensor:
    draws = torch.rand_like(x)  # the same in all ranks, whose patch dropout shares a random state
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank > 0:
        draws = (draws + rank * GOLDEN % 1) % 1  # evenly spread for any number of ranks
    lower = x.floor()
    return lower + (draws < x - lower)


def _below(x: Tensor, format: Format) -> Tensor:
    """Rounds to a subnormal number or to the smallest normal one, across the gap between them."""
    step = 2.0 ** (format.min_exponent - format.gap - format.mantissa_bits)
    most = step * (2**format.mantissa_bits - 1)
    subnormal = (x / step).round() * step
    smallest = 2.0**format.min_exponent
    is_normal = x.abs() > (most + smallest) / 2
    return torch.where(is_normal, x.sign() * smallest, subnormal.clamp(-most, most))


def representable(format: Format) -> Tensor:
    """Returns all numbers of a format in ascending order, 1-d, float32; zero appears once."""
    if not format.exponent_bits:
        return torch.arange(-format.max, format.max + 1, dtype=torch.float32)
    mantissas = torch.arange(2**format.mantissa_bits, dtype=torch.float64) / 2**format.mantissa_bits
    exponents = torch.arange(2**format.exponent_bits - 1, dtype=torch.float64)
    normal = (2.0 ** (exponents + format.min_exponent))[:, None] * (1 + mantissas)
    subnormal = mantissas * 2.0 ** (format.min_exponent - format.gap)
    positive = torch.cat((subnormal, normal.flatten()))
    positive = positive[positive <= format.max].float()
    return torch.cat((-positive[1:].flip(0), positive))
