"""Times one linear layer, forward and backward, by recipe, against nn.Linear and other libraries.

    python -m experiments.benchmarks layer
    python -m experiments.benchmarks layer dims=[1280] cases=[switchback,bnb_switchback]

A time is the sum of a layer dim -> 4 dim and one 4 dim -> dim, with a bias and random inputs:
eager; on a GPU also as a CUDA graph ("graph"). Layers of other libraries are compiled if the
library recommends it. A case counts only if its output and gradients are as close to nn.Linear's as
its formats allow, and no closer, and if ours equals its definition in plain torch.
Lines go to `runs/bench/layer/<time>.jsonl`.
"""

import copy
from typing import NamedTuple

import torch
from torch import nn

from experiments.benchmarks.configs import LayerConfig
from experiments.benchmarks.measure import Lines, Unable, check_error
from experiments.benchmarks.peers import LINEAR_PEERS, PACKAGES
from lowprec.nn.linear import LowPrecisionLinear, missing_format
from lowprec.nn.recipe import RECIPES
from lowprec.nn.timing import Step, median_ms
from lowprec.train.build import pick_device

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TENSORS = ("output", "grad_input", "grad_weight", "grad_bias")
ERRORS = {"int8": 0.03, "e4m3": 0.06, "e5m2": 0.1}  # of a product of normal numbers, generously
QUANTIZED = 1e-3  # an 8-bit product that is nearer to the 16-bit one was not quantized
HIGH = 0.01  # 16 bit, sums in another order
DEFINITION = {"int8": 2e-3, "fp8": 2e-2}  # exact sums rounded twice; fp8 sums of fewer bits
SLICE = 256  # rows on which ours is compared with its definition, which is slow


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
    for dim in config.dims:
        measure(config, dim, device, lines)
    lines.exit_if_failed()


def measure(config: LayerConfig, dim: int, device: torch.device, lines: Lines) -> None:
    """Writes a line per case and mode, summed over both directions."""
    shapes = [Shape(config.tokens, *pair) for pair in ((dim, 4 * dim), (4 * dim, dim))]
    operations, shape = sum(s.operations for s in shapes), " + ".join(map(str, shapes))
    facts = {"direction": "both", "dim": dim, "tokens": config.tokens}
    base: dict[str, float] = {}
    for case in ("linear", *config.cases):
        peer = LINEAR_PEERS.get(case)
        dtype = peer.dtype if peer else "bf16"
        for mode in ("eager", "graph") if device.type == "cuda" else ("eager",):
            options = {"is_ours": not peer, **facts, "mode": mode}
            with lines.measurement(case, shape, dtype, **options) as row:
                ms, graph = 0.0, mode == "graph"
                for one in shapes:  # one in memory at a time
                    ms += median_ms(
                        checked_step(case, one, device), device, config.repeats, graph=graph
                    )
                if case == "linear":
                    base[mode] = ms
                row.update(ms=ms, rate=operations / ms / 1e9, rate_unit="TFLOP/s")
                if mode in base:
                    row.update(ratio_to=f"linear, {mode}", ratio=base[mode] / ms)
            if not row:
                break


def checked_step(case: str, shape: Shape, device: torch.device) -> Step:
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
    if peer and peer.compiled:
        torch.compiler.reset()
        module = torch.compile(module, dynamic=False)
    step = Step(module, x, g)
    check(step(), expected, limits_of(peer.like if peer else case))
    return step


def checked_layer(recipe: str, step: Step) -> LowPrecisionLinear:
    """Returns our layer with the weights of a step's after a check against its definition.

    Raises Unable if a GPU lacks the matrix units of the recipe: its definition is too slow.
    """
    linear, x, g = step
    if name := missing_format(RECIPES[recipe], x.device):
        raise Unable(f"this GPU has no native products of {name}")
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
