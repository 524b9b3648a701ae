"""Times forward and backward of open_clip's CLIP, as it is and after `prepare_for_training`.

    python -m experiments.benchmarks model model=vit_h14 model.patch_dropout=0.5 batch_size=256 \
        compile=true checkpointing=true

Takes the keys of `train`; `precision.autocast` gives the dtype. The cases are open_clip eager and,
under compile=true, with compiled blocks; then the same model as `lowprec.nn.prepare_for_training`
leaves it, by recipe. A case counts only if its first loss is open_clip's, and if the gradient of
the patch embedding, which has passed through all blocks, is near enough; if open_clip fails, none
of ours counts. `ratio` is relative to the faster open_clip case, for the eager one to itself;
`ratio_to_high` to the recipe "high", which has nn.Linear's products. Lines go to
`runs/bench/model/<time>.jsonl`; exits with 1 if one of ours was wrong or failed.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from experiments.benchmarks.configs import OPEN_CLIP, RECIPES, ModelConfig
from experiments.benchmarks.measure import Lines, check_error, random_batch
from lowprec.clip import open_clip
from lowprec.clip.model import CLIP, Normalize, blocks, build_model, contrastive_loss
from lowprec.clip.vision import VisionTransformer
from lowprec.data.loader import Batch
from lowprec.nn import prepare_for_training
from lowprec.nn.coverage import Layers
from lowprec.nn.timing import kernel_ms, median_ms
from lowprec.train.build import pick_device, set_parameter_dtype
from lowprec.train.task import ContrastiveTask

EAGER = "open_clip eager"
OWN_CLASSES = {
    CLIP: open_clip.model.CLIP,
    VisionTransformer: open_clip.transformer.VisionTransformer,
}
CHECKPOINTED = ", checkpointing"  # of a line's shape
REPEATS = 10
LOSS_TOLERANCE = 2e-2
GRADIENT_TOLERANCE = 0.5  # of the first layer's, behind all others; a scrambled one errs by 1.4


class Measured(NamedTuple):
    """First loss (0-d), gradient of the patch embedding, and numbers of the line.

    `kernel_ms` is the sum over the GPU's kernels, `memory_gib` its peak; both are None on a CPU.
    `quantized` counts the quantized layers, such as "48 of 96".
    """

    loss: Tensor
    gradient: Tensor
    numbers: dict


def main(config: ModelConfig) -> None:
    """Measures all cases of one config, each built anew from the same seed."""
    device = pick_device(config.device)
    lines = Lines(config.run_dir, "model", device)
    run_cases(config, lines, lambda case: measure(config, case, device), check)


def run_cases(
    config: ModelConfig,
    lines: Lines,
    measure: Callable,
    check: Callable,
    facts: Callable = lambda case: {},
) -> None:
    """Writes a line per case, open_clip's first; exits with 1 if one of ours was wrong or failed.

    `measure(case)` returns a result with the line's `numbers`. `check(result, expected)` compares
    it with the first one, raises Wrong or returns more numbers. `facts(case)` are also of the line.
    """
    expected, fastest, high = None, 0.0, None
    for case in (*OPEN_CLIP, *RECIPES):
        if case not in config.cases or (case == "open_clip" and not config.compile):
            continue
        is_ours = case in RECIPES
        with lines.measurement(
            case,
            f"{config.model.name} batch {config.batch_size}" + CHECKPOINTED * config.checkpointing,
            config.precision.autocast,
            is_ours=is_ours,
            image_size=config.model.image_size,
            patch_dropout=config.model.patch_dropout,
            compiled=config.compile and case != EAGER,
            **facts(case),
        ) as row:
            if is_ours and expected is None:
                raise RuntimeError("no case of open_clip to compare with")
            result = measure(case)
            row.update(check(result, expected or result))
            expected = expected or result
            rate = 1000 * config.batch_size / result.numbers["ms"]
            fastest = fastest if is_ours else max(fastest, rate)
            high = rate if case == "high" else high
            row.update(result.numbers, rate=rate, ratio=rate / fastest)
            row["ratio_to"] = EAGER if case == EAGER else "the faster open_clip"
            if is_ours and high:
                row["ratio_to_high"] = round(rate / high, 4)
    lines.exit_if_failed()


def check(result: Measured, expected: Measured) -> dict:
    """Raises Wrong unless loss and gradient are near enough; returns the numbers of both."""
    check_error("the loss", result.loss, expected.loss, LOSS_TOLERANCE)
    gradients = (result.gradient, expected.gradient)
    error = check_error("the first layer's gradient", *gradients, GRADIENT_TOLERANCE)
    return {"loss": round(result.loss.item(), 5), "gradient_error": round(error, 5)}


def measure(config: ModelConfig, case: str, device: torch.device) -> Measured:
    """Builds the model of a case and times forward and backward of a random batch."""
    task, layers = build_task(config, case, device)
    task.model.train()
    batch = random_batch(task.model, config.batch_size, device).to(device)
    torch.manual_seed(config.seed)  # of patch dropout
    loss = forward_and_backward(task, batch)
    patches = next(m for m in task.model.visual.modules() if isinstance(m, nn.Conv2d))
    gradient = patches.weight.grad.clone()
    on_gpu = device.type == "cuda"
    if on_gpu:  # compilation and tuning do not count
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = partial(forward_and_backward, task, batch)
    numbers = {"ms": median_ms(step, device, REPEATS)}
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    numbers["memory_gib"] = round(peak / 2**30, 2) or None
    numbers["kernel_ms"] = round(kernel_ms(step, device), 3) if on_gpu else None
    swapped = sum(layer.swapped for layer in layers or ())
    numbers["quantized"] = f"{swapped} of {len(layers)}" if layers else ""
    return Measured(loss.detach(), gradient, numbers)


def build_task(
    config: ModelConfig, case: str, device: torch.device
) -> tuple[ContrastiveTask, Layers | None]:
    """Builds open_clip's model for a case; for a recipe, also returns the prepared layers."""
    free()
    torch.manual_seed(config.seed)
    layers = None
    with device:  # a large model is initialized there much faster
        model = build_model(config.model, config.intervention.name)
        for module in (model, model.visual):  # `build_model` uses our classes
            if type(module) in OWN_CLASSES:
                module.__class__ = OWN_CLASSES[type(module)]
        set_parameter_dtype(model, config.precision.autocast)
        model.set_grad_checkpointing(config.checkpointing)
        if case in RECIPES:
            threshold = config.precision.outlier_threshold if case == "llm_int8" else 0.0
            options = {"backend": config.precision.backend, "outlier_threshold": threshold}
            where = config.precision.where
            layers = prepare_for_training(model, case, where, compile=config.compile, **options)
        elif case != EAGER:
            for block in blocks(model):  # under open_clip's own checkpointing
                block.compile(dynamic=False)
        task = ContrastiveTask(model, contrastive_loss(), Normalize(), config.precision.autocast)
    return task, layers


def free() -> None:
    """Frees the previous model, whose compiled blocks form reference cycles."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def forward_and_backward(task: ContrastiveTask, batch: Batch) -> Tensor:
    """Returns the loss of a batch; replaces the gradients."""
    for parameter in task.model.parameters():
        parameter.grad = None
    loss, _ = task.loss(batch)
    loss.backward()
    return loss
