"""The three products of all recipes in float64, from a table of its own, without lowprec.

Operands are quantized by float32 division and torch's casts; everything else is float64.
"""

import torch

MAX = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
I8_ROW, I8_COLUMN, I8_TENSOR = "int8 row", "int8 column", "int8 tensor"
TABLE = {  # recipe: operands of output (x, w), grad_input (g, w), grad_weight (g, x); None: 16 bit
    "high": (None, None, None),
    "autograd_high": (None, None, None),
    "switchback": ((I8_ROW, I8_TENSOR), (I8_ROW, I8_TENSOR), None),
    "switchback_m": ((I8_ROW, I8_TENSOR), (I8_ROW, I8_TENSOR), None),
    "switchback_q": ((I8_ROW, I8_ROW), (I8_ROW, I8_COLUMN), None),
    "llm_int8": ((I8_ROW, I8_ROW), (I8_ROW, I8_COLUMN), (I8_COLUMN, I8_COLUMN)),
    "fp8_tensorwise": (
        ("e4m3 tensor", "e4m3 tensor"),
        ("e5m2 tensor", "e4m3 tensor"),
        ("e5m2 tensor", "e4m3 tensor"),
    ),
    "fp8_rowwise": (
        ("e4m3 row", "e4m3 row"),
        ("e5m2 row", "e4m3 column"),
        ("e5m2 column", "e4m3 column"),
    ),
    "fp8_switchback": (("e4m3 row", "e4m3 tensor"), ("e5m2 row", "e4m3 tensor"), None),
    "fp8_switchback_blocks": (("e4m3 blocks", "e4m3 tensor"), ("e5m2 blocks", "e4m3 tensor"), None),
    "hw_fp8_tensorwise": (
        ("e4m3 tensor", "e4m3 tensor"),
        ("e5m2 tensor", "e4m3 tensor"),
        ("e5m2 tensor", "e4m3 tensor"),
    ),
    "hw_fp8_switchback": (("e4m3 row", "e4m3 tensor"), ("e5m2 row", "e4m3 tensor"), None),
}


def quantized(x, how):
    """q * scale in float64, unrounded."""
    format, granularity = how.split()
    x = x.float()
    if granularity == "blocks":
        width = x.shape[1]
        size = next(s for s in (64, 128, 256, 512, 1024, 2048, 4096) if s >= min(width, 4096))
        blocks = x.flatten().split(size)
        return torch.cat([quantized(b[None], f"{format} tensor")[0] for b in blocks]).view(x.shape)
    dim = {"row": (1,), "column": (0,), "tensor": (0, 1)}[granularity]
    scale = x.abs().amax(dim=dim, keepdim=True) / torch.tensor(MAX[format])
    q = (x / scale).nan_to_num(0.0)
    q = q.round() if format == "int8" else q.to(FLOAT8[format]).float()
    return q.double() * scale.double()


def product(a, b, how, dtype, fake_quantized):
    """a @ b.T in float64; an operand is (tensor as stored, whether it must be transposed first)."""
    (a, a_transposed), (b, b_transposed) = a, b
    if how is None:
        a, b = a.to(dtype).double(), b.to(dtype).double()
    else:
        a, b = (quantized(x, h) for x, h in zip((a, b), how, strict=True))
        if fake_quantized:
            a, b = a.to(dtype).double(), b.to(dtype).double()
    a, b = (a.T if a_transposed else a), (b.T if b_transposed else b)
    return a @ b.T


def expected_of(name, x, w, bias, g, dtype):
    """(output, grad_input, grad_weight, grad_bias) in float64; x and g are rounded to dtype."""
    output, grad_input, grad_weight = TABLE[name]
    fake_quantized = name.startswith("fp8")
    x, g = x.to(dtype), g.to(dtype)
    y = product((x, False), (w, False), output, dtype, fake_quantized)
    y = y if bias is None else y + bias.double()
    saved = quantized(x, output[0]).to(dtype) if name == "switchback_m" else x
    return (
        y,
        product((g, False), (w, True), grad_input, dtype, fake_quantized),
        product((g, True), (saved, True), grad_weight, dtype, fake_quantized),
        g.double().sum(dim=0),
    )
