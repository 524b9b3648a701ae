"""The definitions of the operations of this package, in plain torch, on any device.

Shape suffixes: M = batch * tokens, K = features in, N = features out. A quantized tensor is
`x ~= q * scale` with a float32 scale of two dimensions: rowwise [M, 1], columnwise [1, K],
tensorwise [1, 1].
"""

import torch
from torch import Tensor

from lowprec.formats import INT8, Format, round_to_format

REDUCED = {"rowwise": (1,), "columnwise": (0,), "tensorwise": (0, 1)}  # dimensions of amax
TINY = torch.finfo(torch.float32).tiny  # the smallest normal number
MAX_FLOAT32_TERMS = 1024  # products of int8 whose sum float32 holds exactly: 128^2 * 1024 = 2^24
MAX_INT8_TERMS = 131072  # products of int8 whose sum always fits int32: 127^2 * 133144 < 2^31


def quantize(x_MK: Tensor, format: Format, granularity: str) -> tuple[Tensor, Tensor]:
    """Symmetric quantization, `x ~= q * scale` with `scale = amax / format.max`: q_MK and scale.

    x / scale is rounded to nearest, ties to even. Where amax is 0 or the scale is subnormal, q = 0
    and scale = 0. A row, column or tensor that contains NaN or inf gets q = 0 and scale = NaN, so
    that products with it are NaN. Source: arXiv:2304.13013, section 2.
    """
    x_MK = x_MK.float()
    amax = x_MK.abs().amax(dim=REDUCED[granularity], keepdim=True)
    scale = scale_of(amax, format)
    usable = scale > 0  # False for NaN
    q_MK = torch.where(usable, x_MK / torch.where(usable, scale, 1.0), 0.0)
    return _cast(q_MK, format), scale


def scale_of(amax: Tensor, format: Format) -> Tensor:
    """`amax / format.max`: 0 where that is subnormal, NaN where amax is not finite; float32."""
    scale = amax / torch.full_like(amax, format.max)  # CUDA would multiply by 1 / number
    scale = torch.where(scale < TINY, 0.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def _cast(x: Tensor, format: Format) -> Tensor:
    """Rounds to the format's dtype; a division may round |x| above the largest number."""
    if format is INT8:
        return x.round().clamp(-format.max, format.max).to(torch.int8)
    if format.dtype == torch.float32:
        return round_to_format(x, format)
    return x.clamp(-format.max, format.max).to(format.dtype)


def quantize_rows_and_sum(g_MN: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Row-wise quantization and column sums: q_MN, scale [M, 1], float32 sum [N]."""
    q_MN, scale = quantize(g_MN, format, "rowwise")
    return q_MN, scale, g_MN.float().sum(dim=0)


def gelu_quantize(h_MN: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Row-wise quantization of GELU(h), which is rounded to h's dtype first: q_MN, scale [M, 1]."""
    return quantize(torch.nn.functional.gelu(h_MN), format, "rowwise")


def gelu_backward_quantize(
    h_MN: Tensor, g_MN: Tensor, format: Format
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the backward of two linear layers around a GELU needs, from its input h and gradient g.

    Returns GELU(h) and grad = g GELU'(h) in h's dtype, then grad quantized row-wise, its scale
    [M, 1] and its float32 column sums [N].
    """
    output = torch.nn.functional.gelu(h_MN)
    grad = torch.ops.aten.gelu_backward(g_MN, h_MN)
    return output, grad, *quantize_rows_and_sum(grad, format)


def matmul(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype
) -> Tensor:
    """`(a @ b^T) * a_scale * b_scale^T + bias` in float32, rounded to dtype: [M, N].

    int8 products are summed exactly, up to 131,072 terms at a time, and the partial sums are added
    in float32; fp8 products are summed in float32. a_scale is [M, 1] or [1, 1], b_scale [N, 1] or
    [1, 1], bias [N] or None.
    """
    with torch.autocast(a_MK.device.type, enabled=False):  # would round float32 to 16 bits
        if a_MK.dtype == torch.int8:
            parts = (operand.split(MAX_INT8_TERMS, dim=1) for operand in (a_MK, b_NK))
            sums = sum(_int_product(a, b).float() for a, b in zip(*parts, strict=True))
        else:
            sums = a_MK.float() @ b_NK.float().T
    output = sums * a_scale * b_scale.T
    return (output if bias is None else output + bias.float()).to(dtype)


def _int_product(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Exact `a @ b^T` of int8 tensors, in float: a CPU may lack instructions for int8."""
    is_small = a_MK.device.type == "cpu" and a_MK.shape[1] <= MAX_FLOAT32_TERMS
    dtype = torch.float32 if is_small else torch.float64
    return a_MK.to(dtype) @ b_NK.to(dtype).T


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`q * scale`, rounded once to dtype."""
    return (q.float() * scale).to(dtype)


def fake_quantize(x: Tensor, format: Format, granularity: str, dtype: torch.dtype) -> Tensor:
    """Quantizes and dequantizes a 2-d tensor; the result has the given dtype.

    Granularity "blocks" uses one scale per block of consecutive elements of the flattened tensor.
    A block has the smallest power of two that is at least the width, within 64 to 4,096 elements,
    so blocks can straddle rows. Source: the fp8 code released with arXiv:2304.13013, whose text
    calls this row-wise.
    """
    if granularity != "blocks":
        return dequantize(*quantize(x, format, granularity), dtype)
    size = min(4096, max(64, 1 << (x.shape[1] - 1).bit_length()))
    padding = -x.numel() % size
    blocks = torch.nn.functional.pad(x.flatten(), (0, padding)).view(-1, size)
    values = dequantize(*quantize(blocks, format, "rowwise"), dtype)
    return values.flatten()[: x.numel()].view(x.shape)
