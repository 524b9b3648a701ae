"""Times one linear layer, forward and backward, by recipe, against nn.Linear and other libraries.

    python -m experiments.benchmarks layer
    python -m experiments.benchmarks layer dims=[1280] cases=[switchback,bnb_switchback]

A time is the sum of a layer dim -> 4 dim and one 4 dim -> dim, with a bias and random inputs:
eager; on a GPU also as a CUDA graph ("graph"), and ours under torch.compile as a CUDA graph
("compiled", compared with nn.Linear's graph). "host" is the time until the calls of an eager layer
return, measured once, with so few rows that the GPU does not limit it. Layers of other libraries
are compiled in all modes if the library recommends it. A case counts only if its output and
gradients are as close to nn.Linear's as its formats allow, and no closer, and if ours equals its
definition in plain torch.
Lines go to `runs/bench/layer/<time>.jsonl`, and those of memory to `runs/bench/layer_memory/`.
"""

import copy
import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

from experiments.benchmarks.configs import LayerConfig
from experiments.benchmarks.measure import Lines, Unable, check_error, host_ms, median_ms
from experiments.benchmarks.peers import LINEAR_PEERS, PACKAGES
from lowprec import ops
from lowprec.formats import parse_format
from lowprec.nn.linear import LowPrecisionLinear
from lowprec.nn.recipe import RECIPES
from lowprec.train.build import pick_device

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TENSORS = ("output", "grad_input", "grad_weight", "grad_bias")
ERRORS = {"int8": 0.03, "e4m3": 0.06, "e5m2": 0.1}  # of a product of normal numbers, generously
QUANTIZED = 1e-3  # an 8-bit product that is nearer to the 16-bit one was not quantized
HIGH = 0.01  # 16 bit, sums in another order
DEFINITION = {"int8": 2e-3, "fp8": 2e-2}  # exact sums rounded twice; fp8 sums of fewer bits
ON_GPU = ("graph", "compiled")  # modes
HOST_ROWS, HOST_DIM = 128, 768  # of the layer in mode "host"
SLICE = 256  # rows on which ours is compared with its definition, which is slow
MIB = 2**20


class Shape(NamedTuple):
    """A layer in one direction: `rows` x `dim_in` -> `rows` x `dim_out`."""

    rows: int
    dim_in: int
    dim_out: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.dim_in}x{self.dim_out}"

    @property
    def operations(self) -> int:
        """Operations of the three products; a multiplication and an addition are two."""
        return 6 * self.rows * self.dim_in * self.dim_out


def main(config: LayerConfig) -> None:
    """Measures each dim; exits with 1 if one of ours was wrong or failed."""
    device = pick_device(config.device)
    lines = Lines(config.run_dir, "layer", device, PACKAGES)
    if "host" in config.modes:
        tiny = dataclasses.replace(config, tokens=HOST_ROWS)
        measure(tiny, HOST_DIM, [Shape(HOST_ROWS, HOST_DIM, 4 * HOST_DIM)], ["host"], device, lines)
    modes = [mode for mode in config.modes if device.type == "cuda" or mode not in ON_GPU]
    modes = [mode for mode in modes if mode != "host"]
    for dim in config.dims:
        shapes = [Shape(config.tokens, *pair) for pair in ((dim, 4 * dim), (4 * dim, dim))]
        measure(config, dim, shapes, [*modes, *["saved"] * ("eager" in modes)], device, lines)
    lines.exit_if_failed()


def measure(
    config: LayerConfig,
    dim: int,
    shapes: list[Shape],
    quantities: list[str],
    device: torch.device,
    lines: Lines,
) -> None:
    """Writes a line per case and quantity, a mode or "saved" (memory), summed over the shapes."""
    base: dict[str, float] = {}
    facts = {"direction": "both" if len(shapes) > 1 else "up", "dim": dim, "tokens": config.tokens}
    shape = " + ".join(map(str, shapes))
    for case in ("linear", *config.cases):
        peer = LINEAR_PEERS.get(case)
        dtype = peer.dtype if peer else "bf16"
        for quantity in quantities:
            if quantity in ("compiled", "saved") and peer:
                continue
            if quantity == "compiled" and case == "linear":
                continue
            of = {"slug": "layer_memory"} if quantity == "saved" else {"mode": quantity}
            with lines.measurement(case, shape, dtype, is_ours=not peer, **facts, **of) as row:
                parts = (measured(case, quantity, s, device, config.repeats) for s in shapes)
                value = sum(parts)  # one in memory at a time
                if case == "linear":
                    base[quantity] = value
                row.update(numbers(value, quantity, shapes, base))
            if not row:
                break


def measured(case: str, quantity: str, shape: Shape, device: torch.device, repeats: int) -> float:
    """Milliseconds of a case's checked step in a mode, or the bytes that it saves."""
    step = checked_step(case, shape, device, compiled=quantity == "compiled")
    if quantity == "saved":
        return step.saved_bytes()
    if quantity == "host":
        return host_ms(step, device, repeats)
    return median_ms(step, device, repeats, graph=quantity in ON_GPU)


def numbers(value: float, quantity: str, shapes: list[Shape], base: dict[str, float]) -> dict:
    """A line's numbers next to nn.Linear's, `base`."""
    other = "graph" if quantity == "compiled" else quantity
    ratio = base[other] / value if other in base else None
    if quantity == "saved":
        return {
            "saved_mib": round(value / MIB, 4),
            "ratio_to": "linear",
            "ratio": ratio and 1 / ratio,
        }
    rate = sum(shape.operations for shape in shapes) / value / 1e9
    ratio_to = {"ratio_to": f"linear, {other}", "ratio": ratio}
    return {"ms": value, "rate": rate, "rate_unit": "TFLOP/s", **ratio_to}


class Step(NamedTuple):
    """Forward and backward of a module, as a call without arguments."""

    module: nn.Module
    x: Tensor
    g: Tensor

    def __call__(self) -> tuple[Tensor, ...]:
        """Returns output and gradients, in the order of TENSORS."""
        output = self.module(self.x)
        inputs = (self.x, *self.module.parameters())
        return (output.detach(), *torch.autograd.grad(output, inputs, self.g))

    def saved_bytes(self) -> int:
        """Returns the bytes that the forward keeps for backward, parameters not counted."""
        saved = {}
        parameters = {p.untyped_storage().data_ptr() for p in self.module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self()
        return sum(saved.values())


def checked_step(case: str, shape: Shape, device: torch.device, *, compiled: bool) -> Step:
    """Returns the step of a case after a check of its numbers; raises Wrong or Unable."""
    peer = LINEAR_PEERS.get(case)
    dtype = DTYPES[peer.dtype if peer else "bf16"]
    torch.manual_seed(0)
    linear = nn.Linear(shape.dim_in, shape.dim_out, device=device).to(dtype)
    x = torch.randn(shape.rows, shape.dim_in, device=device).to(dtype).requires_grad_()
    g = torch.randn(shape.rows, shape.dim_out, device=device).to(dtype)
    expected = Step(linear, x, g)()
    if peer:
        module = peer.build(linear)
    else:
        module = linear if case == "linear" else checked_layer(case, Step(linear, x, g))
    if compiled or (peer and peer.compiled):
        torch.compiler.reset()
        module = torch.compile(module, dynamic=False)
    step = Step(module, x, g)
    check(step(), expected, limits_of(peer.like if peer else case))
    return step


def checked_layer(recipe: str, step: Step) -> LowPrecisionLinear:
    """Returns our layer with the weights of a step's after a check against its definition."""
    linear, x, g = step
    require(recipe, x.device)
    sizes, kind = (linear.in_features, linear.out_features), {"device": x.device, "dtype": x.dtype}
    module = LowPrecisionLinear(*sizes, recipe=recipe, **kind)
    module.load_state_dict(linear.state_dict())
    definition = copy.deepcopy(module)
    definition.set_recipe(recipe, backend="reference")
    few = x.detach()[:SLICE].requires_grad_(), g[:SLICE]
    limit = DEFINITION["fp8" if "fp8" in recipe else "int8"]
    expected = Step(definition, *few)()
    check(Step(module, *few)(), expected, dict.fromkeys(TENSORS, (0.0, limit)))
    return module


def require(recipe: str, device: torch.device) -> None:
    """Raises Unable if a GPU lacks the matrix units of a recipe: its definition is too slow."""
    row = RECIPES[recipe]
    for product in filter(None, (row.output, row.grad_input, row.grad_weight)):
        for name in (product.first.format, product.second.format):
            format = parse_format(name)
            if device.type == "cuda" and ops.takes("auto", format, device) == "reference":
                raise Unable(f"this GPU has no native products of {name}")


def limits_of(recipe: str) -> dict[str, tuple[float, float]]:
    """Returns the least and greatest relative error of each tensor; quantization must show."""
    limits = dict.fromkeys(TENSORS, (0.0, HIGH))
    for name in TENSORS[:3]:
        product = getattr(RECIPES[recipe], name) if recipe in RECIPES else None
        if product:
            worst = max(ERRORS[o.format] for o in (product.first, product.second))
            limits[name] = (QUANTIZED, worst)
    return limits


def check(values: tuple, expected: tuple, limits: dict[str, tuple[float, float]]) -> None:
    """Raises Wrong if the relative error of a tensor is outside its limits."""
    for name, actual, correct in zip(TENSORS, values, expected, strict=True):
        least, most = limits[name]
        check_error(name, actual, correct, most, least)
