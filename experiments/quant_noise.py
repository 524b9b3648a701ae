"""Quantization errors: in the layers of a trained run, and in dot products of random numbers."""

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.benchmarks.measure import Lines
from lowprec.config.check import RunError
from lowprec.data.open import open_data
from lowprec.formats import parse_format
from lowprec.nn.linear import fake_quantize_operands
from lowprec.nn.noise import dot_error_variance, product, recorded
from lowprec.nn.recipe import RECIPES
from lowprec.runs.attempts import saved_steps, step_of
from lowprec.runs.read import read_config
from lowprec.train.build import Built, build
from lowprec.train.checkpoint import find_checkpoint
from lowprec.train.preflight import preflight

SLUG = "quantization_variance"
ROWS, COLUMNS = 128, 64  # of the random products
CASES = {  # case: formats of x and w; the granularities are SwitchBack's
    "int8": ("int8", "int8"),
    "e4m3": ("e4m3", "e4m3"),
    "e5m2 e4m3": ("e5m2", "e4m3"),
}
GRANULARITIES = ("rowwise", "tensorwise")
WITH_BLOCKS = ("fp8_blockwise", "mxfp8", "mxfp4", "nvfp4", "nvfp4_rht_sr")
TOLERANCE = 0.1  # for `correct`: |measured / predicted - 1|


def capture(
    run: Path,
    device: str,
    *,
    checkpoint: int | None = None,
    layers: Sequence[str] = ("*",),
    batch_size: int | None = None,
) -> tuple[int, dict[str, dict[str, Tensor]]]:
    """The step of a checkpoint, and x, w and g of each matching layer for the batch after it.

    `checkpoint` is its step, 0 for the initial weights, None for the newest one. x and g are 2-d,
    in the dtype that the layer computes in; w is as stored. A finished run repeats its last batch.
    Raises ConfigError or RunError if the run cannot be loaded or no layer matches.
    """
    trained = read_config(run)
    trained.device, trained.num_workers = device, 0
    trained.compile = trained.checkpointing = trained.optimizer.paged = False
    trained.evaluation.name = trained.logger.name = "none"
    trained.data.cache = None
    trained.model.init_from = trained.model.init_from if checkpoint == 0 else None
    trained.batch_size = batch_size or trained.batch_size
    preflight(trained, training=False)
    saved = {step_of(path): path for path in saved_steps(run / "checkpoints")}
    if checkpoint and checkpoint not in saved:
        raise RunError(f"{run} has no checkpoint of step {checkpoint}, only of {[*saved]}")
    path = None if checkpoint == 0 else find_checkpoint(saved.get(checkpoint, run))
    step = step_of(path) if path else 0
    next_step = min(step + 1, trained.num_steps)
    trained = trained.at_step(next_step)
    built = build(trained, open_data(trained))
    if path:
        built.state.load(path, model_only=True)
    batch = next(built.batches_from(next_step))
    built.task.model.train()
    tensors: dict[str, dict[str, Tensor]] = {}

    def keep(name: str, x: Tensor, w: Tensor, g: Tensor) -> None:
        tensors[name] = {"x": x.detach(), "w": w, "g": g}

    with recorded(find_layers(built, layers), keep):
        loss, _ = built.task.loss(batch.to(built.device))
        built.state.scaler.scale(loss).backward()
    return step, tensors


def find_layers(built: Built, layers: Sequence[str] = ("*",)) -> dict[str, nn.Module]:
    """The run's layers that match a pattern, as `recorded` takes them."""
    names = [layer.name for layer in built.layers]
    matching = [name for name in names if any(fnmatch(name, each) for each in layers)]
    if not matching:
        raise RunError(f"layers={list(layers)} match none of the run's, such as {names[:3]}")
    modules = dict(built.task.model.named_modules())
    return {name: modules.get(name) or modules[name.removesuffix(".in_proj")] for name in matching}


def measure_random(inner_dims: list[int], seed: int, run_dir: str) -> None:
    """Writes a line per case and inner dimension, for normally distributed numbers.

    Of the recipes WITH_BLOCKS, the weight gradient is measured, without a prediction: that of
    `dot_error_variance` is for one scale per row or tensor.
    """
    torch.manual_seed(seed)  # of stochastic rounding
    lines = Lines(run_dir, SLUG, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for dim in inner_dims:
        x = torch.randn(ROWS, dim, generator=generator)
        w = torch.randn(COLUMNS, dim, generator=generator)
        exact, shape = x.double() @ w.double().T, f"{ROWS}x{dim}x{COLUMNS}"
        for case, names in CASES.items():
            formats = tuple(parse_format(name) for name in names)
            measured, predicted = dot_error_variance(x, w, formats, GRANULARITIES)
            ratio = measured / predicted
            with lines.measurement(case, shape, "float32", inner_dim=dim) as row:
                row.update(measured=measured, predicted=predicted, ratio_to="predicted")
                row.update(ratio=ratio, correct=abs(ratio - 1) <= TOLERANCE)
        for name in WITH_BLOCKS:
            how = RECIPES[name].grad_weight
            used = fake_quantize_operands("grad_weight", how, x.T, w.T, torch.float32)
            error = product("grad_weight", *(operand.double() for operand in used)) - exact
            with lines.measurement(name, shape, "float32", inner_dim=dim) as row:
                row.update(measured=error.square().mean().item(), predicted=None)
