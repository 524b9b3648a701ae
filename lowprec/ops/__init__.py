"""Quantize and multiply, by the kernel that fits the device.

`backend` "auto" takes the Triton kernels on a GPU and the definition in plain torch elsewhere;
"triton" and "reference" insist on one. Each operation is a custom op of torch with a fake, so it
goes through torch.compile, CUDA graphs and checkpointing whole. Tensors come back detached:
gradients are the business of `lowprec.nn`.
"""

import torch
from torch import Tensor

from lowprec.formats import Format, parse_format
from lowprec.ops import matmul as triton_matmul
from lowprec.ops import quantize as triton_quantize
from lowprec.ops import reference

BACKENDS = ("auto", "reference", "triton")


def takes(backend: str, format: Format, device: torch.device) -> str:
    """Which implementation an operation takes: "reference" or "triton".

    Raises ValueError where "triton" is insisted on and cannot run.
    """
    if backend == "reference":
        return backend
    able = device.type == "cuda" and triton_quantize.quantizes(format, device)
    if backend == "triton" and not able:
        raise ValueError(
            f"backend=triton: {format.name} needs a GPU that multiplies it, not {device}"
        )
    return "triton" if able else "reference"


def quantize(
    x_MK: Tensor, format: Format, granularity: str, *, layout: str = "rows", backend: str = "auto"
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """(q_MK, q_KM, scale): `reference.quantize`, stored as it is, transposed or both.

    layout "rows", "transposed" or "both" says which of the first two there are; the other is None.
    scale is float32: rowwise [M, 1], columnwise [1, K], tensorwise [1, 1].
    """
    rows, transposed = layout != "transposed", layout != "rows"
    if takes(backend, format, x_MK.device) == "reference":
        q_MK, scale = reference.quantize(x_MK, format, granularity)
        return q_MK if rows else None, q_MK.T.contiguous() if transposed else None, scale
    q_MK, q_KM, scale = _quantize(x_MK, format.name, granularity, rows, transposed)
    return q_MK if rows else None, q_KM if transposed else None, scale


def quantize_rows_and_sum(
    g_MN: Tensor, format: Format, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """(q_MN, scale [M, 1], float32 column sums [N]) in one pass: `reference` defines it."""
    if takes(backend, format, g_MN.device) == "reference":
        return reference.quantize_rows_and_sum(g_MN, format)
    return _quantize_rows_and_sum(g_MN, format.name)


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
    """`(a @ b^T) * a_scale * b_scale^T + bias` of quantized tensors: `reference.matmul`.

    On a GPU fp8 adds in the matrix unit's own accumulator (Hopper: 22 bits), as "fast accumulation"
    elsewhere; the definition adds in float32.
    """
    format = _format_of(a_MK.dtype)
    if takes(backend, format, a_MK.device) == "reference":
        return reference.matmul(a_MK, b_NK, a_scale, b_scale, bias, dtype)
    return _matmul(a_MK, b_NK, a_scale, b_scale, bias, dtype)


def _format_of(dtype: torch.dtype) -> Format:
    names = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
    return parse_format(names[dtype])


@torch.library.custom_op("lowprec::quantize", mutates_args=(), device_types="cuda")
def _quantize(
    x_MK: Tensor, format: str, granularity: str, rows: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Row-wise: one pass, transposed by a copy; else both layouts in one pass after the maxima."""
    kind = parse_format(format)
    if granularity != "rowwise":
        return triton_quantize.quantize_tiles(
            x_MK, kind, granularity, rows=rows, transposed=transposed
        )
    q_MK, scale, _ = triton_quantize.quantize_rows(x_MK, kind)
    empty = q_MK.new_empty(0)
    return q_MK if rows else empty, q_MK.T.contiguous() if transposed else empty, scale


@_quantize.register_fake
def _(x_MK, format, granularity, rows, transposed):
    M, K = x_MK.shape
    shapes = {"rowwise": (M, 1), "columnwise": (1, K), "tensorwise": (1, 1)}
    dtype = parse_format(format).dtype
    return (
        x_MK.new_empty((M, K) if rows else (0,), dtype=dtype),
        x_MK.new_empty((K, M) if transposed else (0,), dtype=dtype),
        x_MK.new_empty(shapes[granularity], dtype=torch.float32),
    )


@torch.library.custom_op("lowprec::quantize_rows_and_sum", mutates_args=(), device_types="cuda")
def _quantize_rows_and_sum(g_MN: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    return triton_quantize.quantize_rows(g_MN, parse_format(format), with_sum=True)


@_quantize_rows_and_sum.register_fake
def _(g_MN, format):
    M, N = g_MN.shape
    return (
        g_MN.new_empty((M, N), dtype=parse_format(format).dtype),
        g_MN.new_empty((M, 1), dtype=torch.float32),
        g_MN.new_empty((N,), dtype=torch.float32),
    )


@torch.library.custom_op("lowprec::matmul", mutates_args=(), device_types="cuda")
def _matmul(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return triton_matmul.matmul(a_MK, b_NK, a_scale, b_scale, bias, dtype)


@_matmul.register_fake
def _(a_MK, b_NK, a_scale, b_scale, bias, dtype):
    return a_MK.new_empty((a_MK.shape[0], b_NK.shape[0]), dtype=dtype)
