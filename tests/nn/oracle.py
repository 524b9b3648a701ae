"""The three products of all recipes in float64, from a table of its own, without lowprec.

Operands are quantized by float32 division and torch's casts; everything else is float64.
"""

import math

import scipy.linalg
import torch

MAX = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
E2M1 = torch.tensor([0, 1, 2, 4, 0.5, 1.5, 3, 6])  # even codes first: argmin takes them at ties
MXFP8 = ("e4m3 1x32 e8m0", "e4m3 32x1 e8m0")
MXFP4 = ("e2m1 1x32 e8m0", "e2m1 32x1 e8m0")
NVFP4 = ("e2m1 1x16 e4m3", "e2m1 16x1 e4m3")
SIGNS = "+++-+-------+-+-"  # of the rows of the rotation
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
    "fp8_blockwise": (
        ("e4m3 1x128", "e4m3 128x128"),
        ("e4m3 1x128", "e4m3 128x128"),
        ("e4m3 128x1", "e4m3 128x1"),
    ),
    "mxfp8": (MXFP8[:1] * 2, MXFP8, MXFP8[1:] * 2),
    "mxfp4": (MXFP4[:1] * 2, MXFP4, MXFP4[1:] * 2),
    "nvfp4": (NVFP4[:1] * 2, NVFP4, NVFP4[1:] * 2),
    "nvfp4_rht_sr": (
        ("e2m1 1x16 e4m3", "e2m1 16x16 e4m3"),
        ("e2m1 1x16 e4m3 stochastic", "e2m1 16x16 e4m3"),
        ("e2m1 16x1 e4m3 stochastic rotated", "e2m1 16x1 e4m3 rotated"),
    ),
    "hw_fp8_tensorwise": (
        ("e4m3 tensor", "e4m3 tensor"),
        ("e5m2 tensor", "e4m3 tensor"),
        ("e5m2 tensor", "e4m3 tensor"),
    ),
    "hw_fp8_blockwise": (
        ("e4m3 1x128", "e4m3 128x128"),
        ("e4m3 1x128", "e4m3 128x128"),
        ("e4m3 128x1", "e4m3 128x1"),
    ),
    "hw_fp8_switchback": (("e4m3 row", "e4m3 tensor"), ("e5m2 row", "e4m3 tensor"), None),
}


def quantized(x, how):
    """q * scale in float64, unrounded; stochastic rounding is to nearest."""
    format, granularity, *scale = how.split()
    x = x.float()
    if "x" in granularity:
        return tiled(x, format, *map(int, granularity.split("x")), *scale[:1])
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


def tiled(x, format, rows, columns, scale="float32"):
    """`quantized` with a scale for each tile."""
    largest, of_tensor = MAX[format], x.abs().max() / torch.tensor(448 * MAX[format])
    parts = []
    for band in x.split(rows, dim=0):
        for tile in band.split(columns, dim=1):
            amax = tile.abs().max()
            if scale == "e8m0":
                exponents = (math.floor(math.log2(number)) for number in (amax or 1, largest))
                factor = torch.tensor(2.0 ** (next(exponents) - next(exponents)))
            elif scale == "e4m3":
                factor = (amax / largest / of_tensor).to(torch.float8_e4m3fn).float() * of_tensor
            else:
                factor = amax / torch.tensor(largest)
            q = (tile / factor).nan_to_num(0.0).clamp(-largest, largest)
            if format == "e2m1":
                q = E2M1[(q.abs()[..., None] - E2M1).abs().argmin(dim=-1)] * q.sign()
            else:
                q = q.to(FLOAT8[format]).float()
            parts.append(q.double() * factor.double())
    bands = torch.arange(len(parts)).view(-(-x.shape[0] // rows), -1)
    return torch.cat([torch.cat([parts[i] for i in band], dim=1) for band in bands])


def rotated(x, dim):
    """Blocks of 16 along a dimension times a Hadamard matrix with signs, in the dtype of x."""
    signs = torch.tensor([float(f"{sign}1") for sign in SIGNS])
    rotation = torch.tensor(scipy.linalg.hadamard(16)).double() * signs[:, None] / 4
    x_hat = x.double().movedim(dim, 1)
    padded = torch.nn.functional.pad(x_hat, (0, -x.shape[dim] % 16))
    return torch.cat([part @ rotation for part in padded.split(16, 1)], 1).movedim(1, dim).to(x)


def product(a, b, how, dtype, fake_quantized):
    """a @ b.T in float64; an operand is (tensor as stored, whether it must be transposed first)."""
    (a, a_transposed), (b, b_transposed) = a, b
    if how is None:
        a, b = a.to(dtype).double(), b.to(dtype).double()
    else:
        if "rotated" in how[0]:
            a, b = rotated(a, 1 - a_transposed), rotated(b, 1 - b_transposed)
        a, b = (quantized(x, h) for x, h in zip((a, b), how, strict=True))
        if fake_quantized:
            a, b = a.to(dtype).double(), b.to(dtype).double()
    a, b = (a.T if a_transposed else a), (b.T if b_transposed else b)
    return a @ b.T


def expected_of(name, x, w, bias, g, dtype):
    """(output, grad_input, grad_weight, grad_bias) in float64; x and g are rounded to dtype."""
    output, grad_input, grad_weight = TABLE[name]
    fake_quantized = name.startswith(("fp8", "mxfp", "nvfp"))
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
