"""Which linear layers of a model gain from 8 bits, on this GPU and for these inputs."""

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec.nn.coverage import call
from lowprec.nn.linear import LowPrecisionLinear, missing_format
from lowprec.nn.noise import product_rows, recorded
from lowprec.nn.recipe import PRODUCTS, RECIPES, Recipe, find_recipe
from lowprec.nn.replace import replace_attention, replaceable_layers
from lowprec.nn.timing import Step, kernel_ms, median_ms
from lowprec.ops.launch import on_device

NATIVE = tuple(name for name, recipe in RECIPES.items() if recipe.is_native)
MIN_SQNR_DB = 20.0  # noise of a tenth of the signal
REPEATS, STEPS = 20, 5
BUSY = 0.9  # least share of a step that the kernels take if the host is fast enough


class Shape(NamedTuple):
    """What the time of a layer depends on: x [rows, dim_in], W [dim_out, dim_in]."""

    rows: int
    dim_in: int
    dim_out: int
    bias: bool
    x_dtype: torch.dtype
    w_dtype: torch.dtype
    needs_grad: tuple[bool, bool]  # of x, of the parameters


@dataclass(frozen=True)
class Advice:
    """The result of `advise`; `print` shows a table of its best recipe.

    Attributes:
        rows: a flat dict of plain values for each recipe and layer. `share`: of the multiply-adds
            of all layers. `ms`, `ms_16bit`: of all calls in a step; None without a GPU. By product,
            the worst of all calls and of both operands, None in 16 bits: `<product>_sqnr_db` of the
            product, `<product>_underflowed`, the share of an operand's non-zero elements that
            become 0, and `<product>_peak`, its largest magnitude divided by its root mean square.
            `verdict`, and the number that says why as `reason`: see `verdict`.
        step_ms: of forward and backward of the first batch, with the model as it is; None without a
            GPU.
        kernel_ms: of its kernels alone, NaN where they cannot be profiled.
    """

    rows: list[dict]
    step_ms: float | None = None
    kernel_ms: float | None = None

    @property
    def waits_for_host(self) -> bool:
        """Whether the GPU idles in a tenth of the step, so that faster layers save no time."""
        return self.step_ms is not None and self.kernel_ms < BUSY * self.step_ms

    @property
    def saved_ms(self) -> dict[str, float]:
        """What the layers that gain save in a step that does not wait for the host, by recipe.

        {} without a GPU.
        """
        saved = dict.fromkeys((r["recipe"] for r in self.rows if r["ms"] is not None), 0.0)
        for row in self.rows:
            if row["verdict"] == "gain":
                saved[row["recipe"]] += row["ms_16bit"] - row["ms"]
        return saved

    @property
    def recipe(self) -> str:
        """The recipe that saves most; the first without a GPU."""
        saved = self.saved_ms
        return max(saved, key=saved.__getitem__, default=self.rows[0]["recipe"])

    def gains(self, module: nn.Module, name: str) -> bool:
        """Whether a layer gains under `recipe`: a filter for `prepare_for_training`.

        Of a narrow model, none may gain: then `prepare_for_training` raises NoLayerError. Raises
        ValueError if no layer was timed.
        """
        if self.rows[0]["ms"] is None:
            raise ValueError("no layer was timed: advise needs the model on a GPU")
        is_gain = {"recipe": self.recipe, "layer": name, "verdict": "gain"}.items()
        return any(is_gain <= row.items() for row in self.rows)

    def __repr__(self) -> str:
        best, groups = self.recipe, defaultdict(list)
        for row in self.rows:
            if row["recipe"] == best:
                name = re.sub(r"\.\d+(?=\.)", ".*", row["layer"])
                groups[name, row["verdict"]].append(row)
        heads = ("16 bit (ms)", f"{best} (ms)", *(f"{part} (dB)" for part in PRODUCTS))
        table = [("layers", "", "share", *heads, "to 0", "peak", "verdict")]
        for (name, text), rows in groups.items():
            of = {key: [row[key] for row in rows if row[key] is not None] for key in rows[0]}
            cells = [name, f"{len(rows)} x", f"{sum(of['share']):.1%}"]
            cells += [f"{sum(of[key]):.3f}" if of[key] else "" for key in ("ms_16bit", "ms")]
            noise = [of[f"{part}_sqnr_db"] for part in PRODUCTS]
            cells += [f"{_worst(numbers):.1f}" if numbers else "16 bit" for numbers in noise]
            zeros, peaks = ([of[f"{p}_{key}"] for p in PRODUCTS] for key in ("underflowed", "peak"))
            cells += [f"{max(chain(*zeros)):.1%}", f"{max(chain(*peaks)):.0f}"]
            table.append([*cells, "" if text == "not timed" else text])
        saved = ", ".join(f"{name} {ms:.3f} ms" for name, ms in self.saved_ms.items())
        lines = [f"expected to save in a step: {saved}"] if saved else ["not timed: no GPU"]
        if self.waits_for_host:
            lines.append(
                f"not yet: of {self.step_ms:.1f} ms, kernels take {self.kernel_ms:.1f} ms, and the "
                "GPU waits for the host; use CUDA graphs or larger batches first"
            )
        columns = []
        for head, *cells in zip(*table, strict=True):
            if any(cells):  # without a GPU, there are no times
                width = max(map(len, (head, *cells)))
                align = "<" if head in ("layers", "verdict") else ">"
                columns.append([f"{cell:{align}{width}}" for cell in (head, *cells)])
        lines += ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
        return "\n".join(lines)


def advise(
    model: nn.Module,
    inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    recipes: Sequence[str | Recipe] = NATIVE,
    min_sqnr_db: float = MIN_SQNR_DB,
) -> Advice:
    """Measures which linear layers gain from 8 bits, on the model's device and for these inputs.

    Runs the forward and backward of each batch, in the model's mode, under autocast to bfloat16 if
    all parameters are float32, or as autocast is set already. Rounds the tensors of each layer as
    each recipe does; the errors of a product are without those of its own sums. On a GPU, times the
    forward and backward of each shape as a CUDA graph, in 16 bits and in each recipe that the GPU
    multiplies natively. What surrounds a layer is not timed: neither the fusion of an MLP's GELU
    nor what torch.compile fuses. The whole step is timed as it is, to see if it waits for the host:
    the first batch is run about ten more times.

    Leaves the model as it was, with its buffers, gradients and hooks, and the random state. Needs
    memory for one more copy of the layers' inputs. Layers that no gradient reaches or that
    `apply_recipe` refuses have no row.

    Args:
        model: any module.
        inputs: a batch of training: a tensor, a tuple of arguments or a dict of keyword arguments;
            or a list of batches.
        loss: computes the loss, 0-d, from the model's output. None: the output is the loss, or has
            an entry "loss".
        recipes: native recipes, by default all.
        min_sqnr_db: a layer with a noisier product is "noisy". The default is noise of a tenth of
            the signal; we have not measured at which noise training degrades.

    Raises:
        ValueError: unsuitable inputs, a recipe that is unknown or not native, an output without a
            loss, no linear layer with a gradient, no recipe that the GPU multiplies natively, or a
            model that is frozen, sharded or in DistributedDataParallel.
    """
    batches = _suitable(model, inputs if isinstance(inputs, list) else [inputs])
    device = next(model.parameters()).device
    chosen = _find_native([recipes] if isinstance(recipes, str | Recipe) else recipes, device)
    step = (None, None)
    with _unchanged(model, device), on_device(device), torch.enable_grad():
        if device.type == "cuda":
            step = _step_times(model, batches[0], loss, device)
        shapes, errors = _calls(model, batches, loss, chosen, device)
        ms = _times(chain.from_iterable(shapes.values()), chosen, device)
    if not any(shapes.values()):
        raise ValueError("no linear layer was called and got a gradient")
    work = {name: sum(math.prod(s[:3]) for s in calls) for name, calls in shapes.items() if calls}
    rows = []
    for recipe, name in product(chosen, work):
        row = {"recipe": recipe.name, "layer": name, "share": work[name] / sum(work.values())}
        for key, case in (("ms_16bit", RECIPES["high"]), ("ms", recipe)):
            times = [ms[shape, case] for shape in shapes[name]] if ms else []
            row[key] = sum(times) / len(batches) if ms else None
        for part in PRODUCTS:
            row |= _summary(part, errors[name, part, getattr(recipe, part)])
        row["verdict"], row["reason"] = verdict(row, min_sqnr_db)
        rows.append(row)
    return Advice(rows, *step)


def _calls(
    model: nn.Module,
    batches: list,
    loss: Callable | None,
    recipes: list[Recipe],
    device: torch.device,
) -> tuple[dict[str, list[Shape]], dict[tuple, list[dict]]]:
    """The shapes of each layer's calls, and the errors by layer, product and its formats."""
    replace_attention(model)
    modules = replaceable_layers(model)
    products = {(part, getattr(recipe, part)) for recipe in recipes for part in PRODUCTS}
    shapes: dict = {name: [] for name in modules}
    errors: dict = defaultdict(list)

    def keep(name: str, x: Tensor, w: Tensor, g: Tensor) -> None:
        parameters = {n: p for n, p in modules[name]._parameters.items() if p is not None}
        needs_grad = x.requires_grad, any(p.requires_grad for p in parameters.values())
        bias = any(n.endswith("bias") for n in parameters)
        shapes[name].append(Shape(*x.shape, g.shape[1], bias, x.dtype, w.dtype, needs_grad))
        tensors = {"x": x.detach(), "w": w, "g": g}
        with torch.autocast(device.type, enabled=False):
            for part, how in products:
                operands = (tensors[operand] for operand in PRODUCTS[part])
                rows = [] if how is None else product_rows(part, how, *operands)
                errors[name, part, how].extend(rows)

    with torch.compiler.set_stance("force_eager"), recorded(modules, keep):
        for batch in batches:
            output = _loss(model, batch, loss, device)
            with _without_gradients(model, output):
                output.backward()  # autograd.grad cannot pass reentrant checkpoints
    return shapes, errors


def _suitable(model: nn.Module, batches: list) -> list:
    """The batches; ValueError if they, or the model, are not as in training."""
    wrong = [type(b).__name__ for b in batches if not isinstance(b, Tensor | tuple | Mapping)]
    if wrong or not batches:
        kind = wrong[0] if wrong else "an empty list"
        raise ValueError(f"inputs: {kind}; must be a tensor, a tuple, a dict or a list of these")
    parameters = dict(model.named_parameters())
    if not any(p.requires_grad for p in parameters.values()):
        raise ValueError("no parameter of the model requires a gradient, as in training")
    sharded = [name for name, p in parameters.items() if type(p).__name__ == "DTensor"]
    if sharded or isinstance(model, nn.parallel.DistributedDataParallel):
        what = f"{sharded[0]} is sharded" if sharded else "the model is in DDP"
        raise ValueError(f"{what}: call advise before DistributedDataParallel and fully_shard")
    return batches


def _summary(part: str, operands: list[dict]) -> dict:
    """The worst of all calls and both operands of a product; None without any."""
    worst = {f"{part}_sqnr_db": _worst(row["product_sqnr_db"] for row in operands)}
    for key in ("underflowed", "peak"):
        worst[f"{part}_{key}"] = max((row[key] for row in operands), default=None)
    return worst


def verdict(row: dict, min_sqnr_db: float) -> tuple[str, str]:
    """The verdict on a row of `Advice` and its reason.

    "loses time" is followed by "noisy", if a product's SQNR is below the limit or NaN, and by
    "gain". Without times, a layer that is not noisy is "not timed".
    """
    noise = {row[f"{p}_sqnr_db"]: p for p in PRODUCTS if row[f"{p}_sqnr_db"] is not None}
    worst = _worst(noise)
    text = f"{noise[worst]} {worst:.1f} dB"
    times = (row["ms_16bit"], row["ms"])
    if None not in times and times[1] >= times[0]:
        return "loses time", f"{times[1] - times[0]:.3f} ms"
    if not worst >= min_sqnr_db:
        return "noisy", text
    return ("not timed", text) if None in times else ("gain", f"{times[0] - times[1]:.3f} ms")


def _find_native(recipes: Sequence[str | Recipe], device: torch.device) -> list[Recipe]:
    """The recipes that a GPU multiplies natively, all on a CPU."""
    found = [find_recipe(recipe) for recipe in recipes]
    if fake := [recipe.name for recipe in found if not recipe.is_native]:
        raise ValueError(f"recipe {fake[0]!r} is not native: must be one of {', '.join(NATIVE)}")
    fit = [recipe for recipe in found if missing_format(recipe, device) is None]
    if not fit:
        raise ValueError(f"recipes={recipes}: {device} multiplies none of them natively")
    return fit


def _loss(model: nn.Module, batch: Any, loss: Callable | None, device: torch.device) -> Tensor:
    """The loss of a batch, 0-d."""
    is_on = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if is_on else torch.bfloat16
    is_32bit = all(p.dtype == torch.float32 for p in model.parameters())
    with torch.autocast(device.type, dtype, enabled=is_on or is_32bit):
        output = call(model, batch)
        if loss is not None:
            output = loss(output)
        elif isinstance(output, Mapping):
            output = output.get("loss")
    if not isinstance(output, Tensor) or output.ndim or not output.requires_grad:
        what = "the model's output has no loss" if loss is None else "loss returns no 0-d tensor"
        raise ValueError(f"{what} with a gradient: pass loss=, a function of the model's output")
    return output


@contextlib.contextmanager
def _without_gradients(model: nn.Module, output: Tensor) -> Iterator[set[Tensor]]:
    """A backward pass of the output in here leaves no gradients and calls no optimizer.

    Yields the tensors that have gradients in here.
    """
    leaves = _leaves(output) | set(model.parameters())  # reentrant checkpoints hide some
    del output  # its activations
    hooks = ((x, x._post_accumulate_grad_hooks or {}) for x in leaves)  # optimizers may step there
    before = [(x, x.grad, of_x, dict(of_x)) for x, of_x in hooks]
    try:
        for x, _, of_x, _ in before:
            x.grad = None
            of_x.clear()
        yield leaves
    finally:
        for x, grad, of_x, then in before:
            x.grad = grad
            of_x.update(then)


def _step_times(
    model: nn.Module, batch: Any, loss: Callable | None, device: torch.device
) -> tuple[float, float]:
    """Milliseconds of forward and backward of a batch, and of its kernels alone."""
    with _without_gradients(model, _loss(model, batch, loss, device)) as leaves:

        def step():
            for x in leaves:
                x.grad = None
            _loss(model, batch, loss, device).backward()

        return median_ms(step, device, STEPS), kernel_ms(step, device)


def _leaves(output: Tensor) -> set[Tensor]:
    """The tensors in whose `grad` the backward of an output accumulates."""
    nodes, seen = [output.grad_fn], {None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [inner for inner, _ in node.next_functions]
    return {node.variable for node in seen if type(node).__name__ == "AccumulateGrad"}


def _times(shapes: Iterable[Shape], recipes: list[Recipe], device: torch.device) -> dict:
    """Milliseconds of forward and backward as a CUDA graph, by shape and recipe; {} on a CPU."""
    ms = {}
    for shape, recipe in product(dict.fromkeys(shapes), (RECIPES["high"], *recipes)):
        if device.type == "cuda":
            like = {"device": device, "dtype": shape.x_dtype}
            x, g = (torch.randn(shape.rows, size, **like) for size in (shape.dim_in, shape.dim_out))
            layer = LowPrecisionLinear(*shape[1:4], device, shape.w_dtype, recipe=recipe)
            needs_x, needs_parameters = shape.needs_grad
            step = Step(layer.requires_grad_(needs_parameters), x.requires_grad_(needs_x), g)
            is_on = shape.x_dtype != shape.w_dtype
            with torch.autocast("cuda", shape.x_dtype, enabled=is_on, cache_enabled=False):
                ms[shape, recipe] = median_ms(step, device, REPEATS, graph=True)
    return ms


@contextlib.contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores attention, buffers and the random state at the end."""
    before = [(m, type(m), dict(vars(m)), dict(m._modules)) for m in model.modules()]
    buffers = [(m._buffers, dict(m._buffers)) for m in model.modules()]
    copies: dict = {None: None} | {buffer: buffer.clone() for buffer in model.buffers()}
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        try:
            for now, then in buffers:
                now.update((name, copies[buffer]) for name, buffer in then.items())
            yield
        finally:
            for module, kind, attributes, children in before:
                if type(module) is not kind:
                    module.__class__ = kind
                    for now, then in ((module._modules, children), (vars(module), attributes)):
                        now.clear()
                        now.update(then)
            for now, then in buffers:
                now.clear()
                now.update(then)


def _worst(decibels: Iterable[float]) -> float | None:
    """The lowest, where NaN is worse than any; None if there is none."""
    return min(decibels, key=lambda x: (not math.isnan(x), x), default=None)
