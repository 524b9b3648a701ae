"""The layer that `bench_layer` times: its steps, their memory, and whether they are right."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.benchmarks.peers import PEERS
from experiments.benchmarks.report import relative_error
from lowprec import ops
from lowprec.formats import parse_format
from lowprec.nn.linear import LowPrecisionLinear
from lowprec.nn.recipe import RECIPES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TENSORS = ("output", "grad_input", "grad_weight", "grad_bias")
ERRORS = {"int8": 0.03, "e4m3": 0.06, "e5m2": 0.1}  # of a product of normal numbers, generously
QUANTIZED = 1e-3  # an 8-bit product that is nearer to the 16-bit one was not quantized
HIGH = 0.01  # 16 bit, sums in another order
DEFINITION = {"int8": 2e-3, "fp8": 2e-2}  # exact sums rounded twice; fp8 sums of fewer bits
SLICE = 256  # rows on which ours is held against its definition, which is slow


class Wrong(Exception):
    """The numbers of a case are not what they should be."""


class Unable(Exception):
    """A case that this device cannot run."""


@dataclass(frozen=True)
class Shape:
    """A layer of one direction: `rows` x `dim_in` -> `rows` x `dim_out`."""

    rows: int
    dim_in: int
    dim_out: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.dim_in}x{self.dim_out}"

    @property
    def operations(self) -> int:
        """Of three products; multiplying and adding are two."""
        return 6 * self.rows * self.dim_in * self.dim_out


@dataclass(frozen=True)
class Step:
    """Forward and backward of a module, as a call without arguments."""

    module: nn.Module
    x: Tensor
    g: Tensor

    def __call__(self) -> tuple[Tensor, ...]:
        """Output and gradients, in the order of TENSORS."""
        output = self.module(self.x)
        wanted = (self.x, *self.module.parameters())
        return (output.detach(), *torch.autograd.grad(output, wanted, self.g))

    def saved_bytes(self) -> int:
        """Bytes that the forward keeps for backward; a parameter itself is not counted."""
        saved = {}
        known = {p.untyped_storage().data_ptr() for p in self.module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self()
        return sum(saved.values())

    def peak_bytes(self) -> int:
        """The most that a step takes on a GPU above what was there before; 0 on a CPU."""
        if self.x.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self()
        return torch.cuda.max_memory_allocated() - before


class Autocast(nn.Module):
    """A layer as a trainer uses it: float32 weights, which kernels read as they are, under bf16."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output; backward runs outside autocast."""
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.layer(x)


class Problem:
    """The layer, input and output gradient of one shape, and nn.Linear's results."""

    def __init__(self, shape: Shape, device: torch.device):
        self.shape, self.device = shape, device
        torch.manual_seed(0)
        self.linear = nn.Linear(shape.dim_in, shape.dim_out, device=device)
        self.x = torch.randn(shape.rows, shape.dim_in, device=device)
        self.g = torch.randn(shape.rows, shape.dim_out, device=device)
        self.dtype = None

    def checked_step(self, case: str) -> Step:
        """The step of a case whose numbers were found right; raises Wrong or Unable."""
        peer = PEERS.get(case)
        self._cast(peer.dtype if peer else "bf16")
        if peer:
            module, like, compiled = peer.build(self.linear), peer.like, peer.compiled
        else:
            module, like, compiled = self._ours(case), case, case == "linear_compiled"
        if compiled:
            torch.compiler.reset()
            module = torch.compile(module, dynamic=False)
        step = self._step(module)
        check(step(), self.expected, limits_of(like))
        return step

    def _cast(self, dtype: str) -> None:
        """Everything in a dtype, and nn.Linear's results in it."""
        if dtype != self.dtype:
            self.linear.to(DTYPES[dtype])
            self.x, self.g = self.x.to(DTYPES[dtype]), self.g.to(DTYPES[dtype])
            self.dtype, self.expected = dtype, self._step(self.linear)()

    def _step(self, module: nn.Module, rows: int | None = None) -> Step:
        return Step(module, self.x.detach()[:rows].requires_grad_(), self.g[:rows])

    def _ours(self, case: str) -> nn.Module:
        """nn.Linear, or our layer of a recipe, which equals its definition in both kinds of use."""
        if case not in RECIPES:
            return copy.deepcopy(self.linear)
        require(case, self.device)
        sizes = (self.shape.dim_in, self.shape.dim_out)
        trained = LowPrecisionLinear(*sizes, device=self.device, recipe=case)
        module = copy.deepcopy(trained).to(DTYPES[self.dtype])
        module.load_state_dict(self.linear.state_dict())
        self._check_definition(module, case, lambda layer: layer)
        self._check_definition(trained, case, Autocast)
        return module

    def _check_definition(self, module: nn.Module, case: str, used: Callable) -> None:
        """Raises Wrong if a layer, used in a way, differs from its definition on a slice of x."""
        definition = copy.deepcopy(module)
        definition.set_recipe(case, backend="reference")
        limit = DEFINITION["fp8" if "fp8" in case else "int8"]
        expected = self._step(used(definition), SLICE)()
        check(self._step(used(module), SLICE)(), expected, dict.fromkeys(TENSORS, (0.0, limit)))


def require(recipe: str, device: torch.device) -> None:
    """Raises Unable where a GPU lacks the matrix units of a recipe: its definition is too slow."""
    row = RECIPES[recipe]
    for product in filter(None, (row.output, row.grad_input, row.grad_weight)):
        for name in (product.first.format, product.second.format):
            format = parse_format(name)
            if device.type == "cuda" and ops.takes("auto", format, device) == "reference":
                raise Unable(f"this GPU does not multiply {name}")


def limits_of(recipe: str) -> dict[str, tuple[float, float]]:
    """Least and greatest relative error of each tensor; one that is quantized must show it."""
    limits = dict.fromkeys(TENSORS, (0.0, HIGH))
    for name in TENSORS[:3]:
        product = getattr(RECIPES[recipe], name) if recipe in RECIPES else None
        if product:
            worst = max(ERRORS[o.format] for o in (product.first, product.second))
            limits[name] = (QUANTIZED, worst)
    return limits


def check(found: tuple, expected: tuple, limits: dict[str, tuple[float, float]]) -> None:
    """Raises Wrong where a relative error is outside its limits."""
    for name, value, right in zip(TENSORS, found, expected, strict=True):
        error = relative_error(value, right)
        least, most = limits[name]
        if not least <= error <= most or math.isnan(error):
            raise Wrong(f"{name} differs by {error:.2g}, {least:g} to {most:g} expected")
