"""Quantization, products and attention by the implementation that suits the device.

`backend` "auto" uses the Triton kernels on a GPU and the definitions in plain torch elsewhere;
"triton" and "reference" force one. Each operation is a torch custom op with a fake implementation,
for torch.compile. Operations do not record gradients: `lowprec.nn` defines them.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._C import _is_tracing, _len_torch_dispatch_stack

if importlib.util.find_spec("triton") is None:
    raise ImportError("lowprec needs triton, which pip installs on Linux only", name="triton")

from lowprec.formats import NATIVE, Format, parse_format
from lowprec.ops import (
    reference,
    triton_attention,
    triton_dequantize,
    triton_gelu,
    triton_matmul,
    triton_quantize,
)
from lowprec.ops.triton_attention import takes as takes_attention  # noqa: F401

__all__ = ["matmul", "quantize"]
BACKENDS = ("auto", "reference", "triton")


def takes(backend: str, format: Format, device: torch.device) -> str:
    """The implementation that a backend stands for on a device: "reference" or "triton".

    Raises ValueError for backend "triton" if its kernels do not support the format there.
    """
    if backend == "reference":
        return backend
    least = format.capability if device.type == "cuda" else None
    able = least is not None and torch.cuda.get_device_capability(device) >= least
    if backend == "triton" and not able:
        raise ValueError(
            f"backend=triton: {format.name} needs a GPU that supports it, not {device}"
        )
    return "triton" if able else "reference"


_takes_cached = functools.cache(takes)


def _is_reference(backend: str, format: Format, device: torch.device) -> bool:
    """Whether `takes` returns "reference"; not cached when torch.compile traces it."""
    find = takes if torch.compiler.is_compiling() else _takes_cached
    return find(backend, format, device) == "reference"


def _is_eager(x: Tensor) -> bool:
    """Whether only autograd intercepts operations on x, so that kernels can be launched."""
    is_plain = type(x) is Tensor or type(x) is nn.Parameter
    is_traced = torch.compiler.is_compiling() or _is_tracing()
    return is_plain and not is_traced and not _len_torch_dispatch_stack() and not x.is_neg()


def quantize(
    x_MK: Tensor, format: Format, granularity: str, *, layout: str = "rows", backend: str = "auto"
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`reference.quantize`, stored as it is, transposed or both: (q_MK, q_KM, scale).

    `layout` "rows" gives q_MK, "transposed" gives q_KM, "both" gives both; the other is None.
    scale is float32: rowwise [M, 1], columnwise [1, K], tensorwise [1, 1], of tiles as in
    `reference`.
    """
    rows, transposed = layout != "transposed", layout != "rows"
    is_long = granularity == "rowwise" and x_MK.shape[1] > triton_quantize.MAX_FEATURES
    if is_long or _is_reference(backend, format, x_MK.device):
        q_MK, scale = reference.quantize(x_MK, format, granularity)
        q_KM = triton_quantize.transposed_copy(q_MK) if transposed else None
        return q_MK if rows else None, q_KM, scale
    if _is_eager(x_MK):
        return triton_quantize.quantize(x_MK, format, granularity, rows=rows, transposed=transposed)
    q_MK, q_KM, scale = _quantize(x_MK, format.name, granularity, rows, transposed)
    return q_MK if rows else None, q_KM if transposed else None, scale


def quantize_pair(
    x_MK: Tensor, format: Format, granularity: str, *, sums: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """`reference.quantize_pair`: (q_MK, scale, q_KM, its scale, column sums [K] or None)."""
    if _is_reference(backend, format, x_MK.device):
        return reference.quantize_pair(x_MK, format, granularity, sums)
    if _is_eager(x_MK):
        return triton_quantize.quantize_pair(x_MK, format, granularity, sums)
    q_MK, scale, q_KM, across_scale, total = _quantize_pair(x_MK, format.name, granularity, sums)
    across_scale = scale if granularity == "tensorwise" else across_scale
    return q_MK, scale, q_KM, across_scale, total if sums else None


def quantize_rows_and_sum(
    g_MN: Tensor, format: Format, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.quantize_rows_and_sum` in one pass: (q_MN, scale [M, 1], float32 sums [N])."""
    is_long = g_MN.shape[1] > triton_quantize.MAX_FEATURES
    if is_long or _is_reference(backend, format, g_MN.device):
        return reference.quantize_rows_and_sum(g_MN, format)
    if _is_eager(g_MN):
        return triton_quantize.quantize_rows_and_sum(g_MN, format)
    return _quantize_rows_and_sum(g_MN, format.name)


def dequantize(q_MK: Tensor, scale: Tensor, dtype: torch.dtype, *, backend: str = "auto") -> Tensor:
    """`reference.dequantize` with a scale [M, 1] or [1, 1], in one pass."""
    if _is_reference(backend, NATIVE[q_MK.dtype], q_MK.device):
        return reference.dequantize(q_MK, scale, dtype)
    if _is_eager(q_MK):
        return triton_dequantize.dequantize(q_MK, scale, dtype)
    return _dequantize(q_MK, scale, dtype)


def gelu_quantize(h_MN: Tensor, format: Format, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """`reference.gelu_quantize`, in one pass up to 8,192 features: (q_MN, scale [M, 1])."""
    is_long = h_MN.shape[1] > triton_gelu.MAX_FEATURES
    if is_long or _is_reference(backend, format, h_MN.device):
        return reference.gelu_quantize(h_MN, format)
    if _is_eager(h_MN):
        return triton_gelu.gelu_quantize(h_MN, format)
    return _gelu_quantize(h_MN, format.name)


def gelu_backward_quantize(
    h_MN: Tensor, g_MN: Tensor, format: Format, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference.gelu_backward_quantize`, in one pass up to 8,192 features.

    Returns (GELU(h), grad, q_MN, scale [M, 1], column sums [N]). Raises ValueError if h and g
    differ in size.
    """
    if g_MN.shape != h_MN.shape:
        raise ValueError(f"g {list(g_MN.shape)} must have the size of h, {list(h_MN.shape)}")
    is_long = h_MN.shape[1] > triton_gelu.MAX_FEATURES
    if is_long or _is_reference(backend, format, h_MN.device):
        return reference.gelu_backward_quantize(h_MN, g_MN, format)
    if _is_eager(h_MN):
        return triton_gelu.gelu_backward_quantize(h_MN, g_MN, format)
    return _gelu_backward_quantize(h_MN, g_MN, format.name)


def matmul(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    backend: str = "auto",
) -> Tensor:
    """`reference.matmul`: `(a @ b^T) * a_scale * b_scale^T + bias` of quantized tensors.

    On a GPU, fp8 products are summed in the matrix unit's accumulator (22 bits on Hopper), which
    other libraries call fast accumulation; the definition sums them in float32. Raises ValueError
    for sizes that do not fit.
    """
    if _is_reference(backend, NATIVE[a_MK.dtype], a_MK.device):
        return reference.matmul(a_MK, b_NK, a_scale, b_scale, bias, dtype)
    if _is_eager(a_MK):
        return triton_matmul.matmul(a_MK, b_NK, a_scale, b_scale, bias, dtype)
    return _matmul(a_MK, b_NK, a_scale, b_scale, bias, dtype)


# Registered with the dispatcher directly: torch.library.custom_op would add Python checks to each
# of the thousands of calls in a training step.
_LIBRARY = torch.library.Library("lowprec", "FRAGMENT")


def _define(schema: str, kernel: Callable, fake: Callable) -> Callable:
    """Registers a custom op with a CUDA kernel and a fake implementation; returns the op."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"lowprec::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.lowprec, name).default


def _quantize_kernel(x_MK, format, granularity, rows, transposed):
    """Returns empty tensors for layouts that are not requested: an op cannot return None."""
    format = parse_format(format)
    *layouts, scale = triton_quantize.quantize(
        x_MK, format, granularity, rows=rows, transposed=transposed
    )
    empty = x_MK.new_empty(0, dtype=format.dtype)
    return *(empty if q is None else q for q in layouts), scale


def _quantize_fake(x_MK, format, granularity, rows, transposed):
    M, K = x_MK.shape
    dtype = parse_format(format).dtype
    return (
        x_MK.new_empty((M, K) if rows else (0,), dtype=dtype),
        x_MK.new_empty((K, M) if transposed else (0,), dtype=dtype),
        reference.empty_scale(x_MK, granularity),
    )


def _pair_kernel(x_MK, format, granularity, sums):
    """Returns empty tensors for the second scale of a tensor and for sums not requested."""
    *pair, across_scale, total = triton_quantize.quantize_pair(
        x_MK, parse_format(format), granularity, sums
    )
    empty = x_MK.new_empty(0, dtype=torch.float32)
    across_scale = empty if granularity == "tensorwise" else across_scale
    return *pair, across_scale, total if sums else empty.clone()


def _pair_fake(x_MK, format, granularity, sums):
    (M, K), dtype, empty = x_MK.shape, parse_format(format).dtype, x_MK.new_empty(0).float()
    across = None if granularity == "tensorwise" else reference.PAIRED[granularity]
    return (
        x_MK.new_empty((M, K), dtype=dtype),
        reference.empty_scale(x_MK, granularity),
        x_MK.new_empty((K, M), dtype=dtype),
        reference.empty_scale(x_MK, across) if across else empty,
        x_MK.new_empty((K if sums else 0,), dtype=torch.float32),
    )


def _rows_fake(x_MK, format):
    q_MK = x_MK.new_empty(x_MK.shape, dtype=parse_format(format).dtype)
    return q_MK, x_MK.new_empty((x_MK.shape[0], 1), dtype=torch.float32)


def _rows_and_sum_fake(x_MK, format):
    return *_rows_fake(x_MK, format), x_MK.new_empty((x_MK.shape[1],), dtype=torch.float32)


def _attention_backward_fake(g, qkv, num_heads, is_causal):
    triton_attention.output_size(qkv, num_heads, g)
    return qkv.new_empty(qkv.shape)


_quantize = _define(
    "quantize(Tensor x, str format, str granularity, bool rows, bool transposed)"
    " -> (Tensor, Tensor, Tensor)",
    _quantize_kernel,
    _quantize_fake,
)
_quantize_pair = _define(
    "quantize_pair(Tensor x, str format, str granularity, bool sums)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _pair_kernel,
    _pair_fake,
)
_quantize_rows_and_sum = _define(
    "quantize_rows_and_sum(Tensor g, str format) -> (Tensor, Tensor, Tensor)",
    lambda g_MN, format: triton_quantize.quantize_rows_and_sum(g_MN, parse_format(format)),
    _rows_and_sum_fake,
)
_dequantize = _define(
    "dequantize(Tensor q, Tensor scale, ScalarType dtype) -> Tensor",
    triton_dequantize.dequantize,
    lambda q_MK, scale, dtype: q_MK.new_empty(q_MK.shape, dtype=dtype),
)
_gelu_quantize = _define(
    "gelu_quantize(Tensor h, str format) -> (Tensor, Tensor)",
    lambda h_MN, format: triton_gelu.gelu_quantize(h_MN, parse_format(format)),
    _rows_fake,
)
_gelu_backward_quantize = _define(
    "gelu_backward_quantize(Tensor h, Tensor g, str format)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda h_MN, g_MN, format: triton_gelu.gelu_backward_quantize(h_MN, g_MN, parse_format(format)),
    lambda h_MN, g_MN, format: (
        h_MN.new_empty(h_MN.shape),
        h_MN.new_empty(h_MN.shape),
        *_rows_and_sum_fake(h_MN, format),
    ),
)
_matmul = _define(
    "matmul(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType dtype)"
    " -> Tensor",
    triton_matmul.matmul,
    lambda a_MK, b_NK, a_scale, b_scale, bias, dtype: a_MK.new_empty(
        (a_MK.shape[0], b_NK.shape[0]), dtype=dtype
    ),
)
# `F.scaled_dot_product_attention` of packed queries, keys and values, if `takes_attention` them:
# [batch, tokens, 3 width] -> [batch, tokens, width].
attention = _define(
    "attention(Tensor qkv, int num_heads, bool is_causal) -> Tensor",
    triton_attention.attention,
    lambda qkv, num_heads, is_causal: qkv.new_empty(triton_attention.output_size(qkv, num_heads)),
)
# The gradient of qkv, [batch, tokens, 3 width], from that of the output of `attention`.
attention_backward = _define(
    "attention_backward(Tensor g, Tensor qkv, int num_heads, bool is_causal) -> Tensor",
    triton_attention.attention_backward,
    _attention_backward_fake,
)
