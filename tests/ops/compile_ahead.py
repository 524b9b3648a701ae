"""Compiles all kernels of lowprec/ops and the optimizer, as they are launched, without a GPU.

`python tests/ops/compile_ahead.py 90` prints registers, spilled bytes and shared memory for sm_90.
The host functions run on meta tensors, with recorders in place of the kernels, and what they would
launch is compiled. TRITON_INTERPRET must not be set.
"""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction, mangle_type

import lowprec.ops
from lowprec.formats import E4M3, E5M2, INT8
from lowprec.ops import triton_attention as attention
from lowprec.ops import triton_dequantize as dequantize
from lowprec.ops import triton_gelu as gelu
from lowprec.ops import triton_matmul as matmul
from lowprec.ops import triton_quantize as quantize
from lowprec.optim import fused, triton_adamw
from lowprec.optim.adamw_update import Hyperparameters, Tensors
from lowprec.optim.statistics import ShardReduction

MODULES = [
    importlib.import_module(f"lowprec.ops.{module.name}")
    for module in pkgutil.iter_modules(lowprec.ops.__path__)
] + [triton_adamw, fused]
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
OPTIONS = ("num_warps", "num_stages", "maxnreg")
BF16, FP32, FP8, FP8_WIDE = torch.bfloat16, torch.float32, E4M3.dtype, E5M2.dtype


def find_kernels() -> dict[str, JITFunction]:
    """Kernels that are launched, without the functions that they call."""
    kernels = {}
    for module in MODULES:
        for name, member in vars(module).items():
            if isinstance(member, JITFunction) and name.endswith("_kernel"):
                kernels[name] = member
    return kernels


def _tensor(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def _matmul(a_dtype, b_dtype, out_dtype, k, n=1280, a_rows=True, b_rows=False, bias=True, m=4096):
    matmul.matmul(
        _tensor(m, k, dtype=a_dtype), _tensor(n, k, dtype=b_dtype),
        _tensor(m if a_rows else 1, 1, dtype=FP32), _tensor(n if b_rows else 1, 1, dtype=FP32),
        _tensor(n, dtype=FP32) if bias else None, out_dtype,
    )  # fmt: skip


def _gelu_backward(features, format, dtype=BF16):
    h, g = (_tensor(4096, features, dtype=dtype) for _ in range(2))
    gelu.gelu_backward_quantize(h, g, format)


def _matmul_tiles(weight: bool, n=1280, k=5120, m=4096):
    tiles = k // 128
    b_scale = (
        _tensor(-(-n // 128), tiles, dtype=FP32) if weight else _tensor(tiles, n, dtype=FP32).T
    )
    matmul.matmul(
        _tensor(m, k, dtype=FP8), _tensor(n, k, dtype=FP8), _tensor(tiles, m, dtype=FP32).T,
        b_scale, None, BF16,
    )  # fmt: skip


def _optimizer(dtype, moments=FP32):
    """Launches of a step with clipping, of one without, and of a look at the moments."""
    sizes = (100_000, 5)
    kinds = (dtype, dtype, moments, moments)
    columns = [[_tensor(size, dtype=kind) for size in sizes] for kind in kinds]
    lost = [None, None] if dtype == FP32 else [_tensor(size, dtype=dtype) for size in sizes]
    scales = [None if moments == FP32 else _tensor(-(-size // 256), dtype=FP32) for size in sizes]
    tensors = Tensors(*columns, lost, scales, scales)
    step = fused.FusedStep(tensors, ShardReduction([], str), fused.AddressTables())
    step.gradients(_tensor(dtype=FP32))
    values = Hyperparameters(*(_tensor(2, dtype=FP32) for _ in range(8)))
    for is_clipped in (True, False):
        step.update(values, _tensor(dtype=FP32), _tensor(2, dtype=FP32), is_clipped)
    if moments == FP32:
        step.observe(_tensor(2, 4, dtype=FP32))


def _rows(k, format, quantize_rows=quantize.quantize_rows):
    quantize_rows(_tensor(4096, k), format)


def _tiles(m, format, granularity, rows=True, dtype=FP32):
    x = _tensor(m, 1280, dtype=dtype)
    quantize.quantize(x, format, granularity, rows=rows, transposed=True)


def _pair(granularity, format=E4M3):
    quantize.quantize_pair(_tensor(4096, 1280), format, granularity, sums=True)


def _dequantize(dtype, rows):
    dequantize.dequantize(_tensor(4096, 1280, dtype=dtype), _tensor(rows, 1, dtype=FP32), BF16)


def _gelu(features, format):
    gelu.gelu_quantize(_tensor(4096, features), format)


def _attention(tokens, head_width, is_causal):
    qkv, g = _tensor(64, tokens, 6 * head_width), _tensor(64, tokens, 2 * head_width)
    attention.attention(qkv, 2, is_causal)
    attention.attention_backward(g, qkv, 2, is_causal)


HOPPER, HAS_E4M3, ALL = (90,), (89, 90, 100, 120), (80, 89, 90, 100, 120)
I8 = torch.int8
AND_SUM = {"quantize_rows": quantize.quantize_rows_and_sum}
ONLY_T = {"rows": False, "dtype": BF16}
NARROW = {"m": 384, "n": 384}
CASES = {  # name: (launches, architectures)
    "rows int8 of bf16, 1280": (partial(_rows, 1280, INT8), ALL),
    "rows int8 of bf16, 5120": (partial(_rows, 5120, INT8), ALL),
    "rows int8 of bf16, 16384": (partial(_rows, 16384, INT8), ALL),
    "rows int8 of bf16, 5120, with sum": (partial(_rows, 5120, INT8, **AND_SUM), ALL),
    "rows e5m2 of bf16, 1280, with sum": (partial(_rows, 1280, E5M2, **AND_SUM), ALL),
    "tensor int8 of fp32, both": (partial(_tiles, 5120, INT8, "tensorwise"), ALL),
    "tensor int8 of bf16, both": (partial(_tiles, 5120, INT8, "tensorwise", dtype=BF16), ALL),
    "tensor e4m3 of fp32, both": (partial(_tiles, 5120, E4M3, "tensorwise"), HAS_E4M3),
    "columns int8 of bf16, transposed": (partial(_tiles, 5120, INT8, "columnwise", **ONLY_T), ALL),
    "int8 to bf16": (partial(_matmul, I8, I8, BF16, 1280), ALL),
    "int8 to bf16, rows of both, no bias": (
        partial(_matmul, I8, I8, BF16, 5120, b_rows=True, bias=False), ALL,
    ),
    "int8 to bf16, in parts": (
        partial(_matmul, I8, I8, BF16, 33792, b_rows=True, bias=False, **NARROW), ALL,
    ),
    "int8 to fp32": (partial(_matmul, I8, I8, FP32, 1280), ALL),
    "int8 to bf16, odd sizes": (partial(_matmul, I8, I8, BF16, 100, n=63), ALL),
    "e4m3 to bf16": (partial(_matmul, FP8, FP8, BF16, 1280), HAS_E4M3),
    "e4m3 to bf16, long": (partial(_matmul, FP8, FP8, BF16, 5120), HOPPER),
    "e5m2 by e4m3 to bf16": (partial(_matmul, FP8_WIDE, FP8, BF16, 1280, bias=False), HOPPER),
    "e5m2 by e4m3 to bf16, long": (
        partial(_matmul, FP8_WIDE, FP8, BF16, 5120, a_rows=False, bias=False), HOPPER,
    ),
    "e4m3 to bf16, tall tiles": (partial(_matmul, FP8, FP8, BF16, 5632, n=1408, m=32768), HOPPER),
    "e4m3 to fp32, tall tiles": (partial(_matmul, FP8, FP8, FP32, 1664, n=1664, m=32768), HOPPER),
    "e4m3 in tiles to bf16": (partial(_matmul_tiles, True), HOPPER),
    "e4m3 in tiles to bf16, odd sizes": (partial(_matmul_tiles, True, n=1284), HOPPER),
    "e4m3 in tiles to bf16, grad_weight": (partial(_matmul_tiles, False), HOPPER),
    "e4m3 in tiles to bf16, grad_weight in parts": (
        partial(_matmul_tiles, False, k=33792, **NARROW), HOPPER,
    ),
    "1x128 e4m3 of bf16": (partial(_tiles, 4096, E4M3, "1x128", dtype=BF16), HOPPER),
    "128x1 e4m3 of bf16": (partial(_tiles, 4096, E4M3, "128x1", **ONLY_T), HOPPER),
    "128x128 e4m3 of fp32": (partial(_tiles, 4096, E4M3, "128x128"), HOPPER),
    "pair of 1x128 and 128x1 e4m3 of bf16, with sum": (partial(_pair, "1x128"), HAS_E4M3),
    "pair of 1x128 and 128x1 e5m2 of bf16, with sum": (partial(_pair, "1x128", E5M2), HAS_E4M3),
    "tensor e4m3 of bf16, both, with sum": (partial(_pair, "tensorwise"), HOPPER),
    "dequantize int8 to bf16": (partial(_dequantize, torch.int8, 4096), ALL),
    "dequantize e4m3 to bf16, one scale": (partial(_dequantize, FP8, 1), HOPPER),
    "gelu int8 of bf16, 5120": (partial(_gelu, 5120, INT8), ALL),
    "gelu e4m3 of bf16, 8192": (partial(_gelu, 8192, E4M3), HAS_E4M3),
    "gelu backward int8 of bf16, 5120": (partial(_gelu_backward, 5120, INT8), ALL),
    "gelu backward int8 of fp32, 6144": (partial(_gelu_backward, 6144, INT8, FP32), ALL),
    "attention, 33 tokens": (partial(_attention, 33, 64, False), ALL),
    "attention, 32 tokens, causal": (partial(_attention, 32, 64, True), ALL),
    "attention, 77 tokens, causal": (partial(_attention, 77, 64, True), HOPPER),
    "attention, 96 tokens": (partial(_attention, 96, 64, False), HOPPER),
    "attention, 129 tokens, heads of 80": (partial(_attention, 129, 80, False), HOPPER),
    "attention, 129 tokens, heads of 48": (partial(_attention, 129, 48, False), HOPPER),
    "attention, 129 tokens": (partial(_attention, 129, 64, False), HOPPER),
    "attention, 50 tokens, heads of 128": (partial(_attention, 50, 128, False), HOPPER),
    "optimizer, fp32": (partial(_optimizer, FP32), ALL),
    "optimizer, bf16": (partial(_optimizer, BF16), ALL),
    "optimizer, fp32, 8-bit moments": (partial(_optimizer, FP32, torch.uint8), ALL),
    "optimizer, bf16, 8-bit moments": (partial(_optimizer, BF16, torch.uint8), ALL),
    "gelu backward e5m2 of bf16, 8192": (partial(_gelu_backward, 8192, E5M2), ALL),
}  # fmt: skip


def forget_plans() -> None:
    """Empties the caches of prepared launches."""
    for module in MODULES:
        for member in vars(module).values():
            if hasattr(member, "cache_clear"):
                member.cache_clear()


class Recorder:
    """Replaces a kernel and records the arguments of its launches."""

    def __init__(self, name: str, launches: list):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((self.name, args, kwargs))


def launches_of(case, capability: int) -> list:
    """(kernel name, arguments, keywords) of each launch of a case on an architecture."""
    launches, kept = [], {}
    replaced = {name: Recorder(name, launches) for name in KERNELS}
    replaced["num_sms"] = lambda device: 132
    replaced["is_hopper"] = lambda device: capability == 90
    forget_plans()
    for module in MODULES:
        kept[module] = {name: vars(module)[name] for name in replaced if name in vars(module)}
        vars(module).update({name: replaced[name] for name in kept[module]})
    try:
        case()
    finally:
        forget_plans()
        for module, members in kept.items():
            vars(module).update(members)
    return launches


def compile_launch(name: str, args: tuple, kwargs: dict, capability: int) -> dict[str, int]:
    """Registers, bytes of stack and shared memory of a kernel, specialized as in a launch."""
    kernel = KERNELS[name]
    options = {key: kwargs[key] for key in OPTIONS if key in kwargs}
    signature, constants, attributes = {}, {}, {}
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    for position, argument in enumerate(kernel.arg_names):
        value = bound[argument]
        annotated = kernel.params[position].is_constexpr
        if annotated or (isinstance(value, int) and value == 1):
            signature[argument], constants[argument] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            element = mangle_type(value.base).removeprefix("*")
            block = f"{list(value.block_shape)},{value.layout!r}"
            signature[argument] = f"tensordesc<{element}{block}>"
        else:
            signature[argument] = mangle_type(value)
            if isinstance(value, torch.Tensor) or value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, spilled = (int(re.search(rf"{name}:(\d+)", report)[1]) for name in ("REG", "STACK"))
    return {"registers": registers, "spilled": spilled, "shared": compiled.metadata.shared}


def measure(capability: int) -> dict[str, dict[str, int]]:
    """The worst launch of each case and kernel on an architecture."""
    measured = {}
    for name, (case, capabilities) in CASES.items():
        launches = launches_of(case, capability) if capability in capabilities else []
        for kernel, args, kwargs in launches:
            cost = compile_launch(kernel, args, kwargs, capability)
            worst = measured.setdefault(f"{kernel}: {name}", cost)
            measured[f"{kernel}: {name}"] = {unit: max(cost[unit], worst[unit]) for unit in cost}
    return measured


KERNELS = find_kernels()

if __name__ == "__main__":
    measured = measure(capability=int(sys.argv[1]))
    print(json.dumps({"kernels": sorted(KERNELS), "measured": measured}, indent=1))
