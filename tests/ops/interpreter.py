"""Makes Triton's interpreter round and multiply as a GPU does.

The interpreter truncates casts to bfloat16, mishandles carries and ties of float8, multiplies the
bits of bfloat16 and rounds a fused multiply-add twice. The patch does casts and products in torch
and multiply-adds in float64.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

DTYPES = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.int8: torch.int8,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _to_torch(data: np.ndarray, dtype: tl.dtype) -> torch.Tensor:
    bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.itemsize}"))
    return bits.view(DTYPES[dtype.scalar])


def convert_float(input, input_dtype, output_dtype, rounding_mode):
    """Casts bits to bits, to nearest, ties to even."""
    output = _to_torch(input, input_dtype).to(DTYPES[output_dtype])
    bits = output.view(BITS[output.element_size()]).numpy()
    return bits.view(f"u{bits.itemsize}").reshape(input.shape)


def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Adds exact products in float64 and rounds once."""
    product = _to_torch(a.data, a.dtype).double() @ _to_torch(b.data, b.dtype).double()
    return TensorHandle((product.numpy() + d.data).astype(d.data.dtype), d.dtype.scalar)


def create_fma(self, x, y, z):
    """Computes the product exactly, in float64."""
    with np.errstate(all="ignore"):  # inf - inf, as on a GPU
        total = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)


def patch(monkeypatch) -> None:
    """Patches the interpreter until the monkeypatch is undone."""
    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "create_fma", create_fma)
