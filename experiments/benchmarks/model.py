"""Times forward and backward of a whole CLIP model by recipe, against open_clip's own model.

    python -m experiments.benchmarks model model=vit_h14 model.patch_dropout=0.5 batch_size=256 \
        compile=true checkpointing=true

Takes the keys of `train`; `precision` gives the autocast dtype, and all recipes are measured. The
cases are open_clip eager and, under compile=true, with compiled blocks; then ours, 16 bit and
8 bit. A case counts only if its first loss is open_clip's, and if the gradient of the patch
embedding, which has passed through all blocks, is near enough; if open_clip fails, none of ours
counts. `ratio` is relative to the faster open_clip case, for the eager one to itself. Lines go
to `runs/bench/model/<time>.jsonl`; exits with 1 if one of ours was wrong or failed.
"""

import dataclasses
import gc

import torch
from torch import Tensor, nn

from experiments.benchmarks.measure import Lines, check_error, median_ms, random_batch
from lowprec.clip.model import Normalize, blocks, build_model, contrastive_loss
from lowprec.config.schema import Config
from lowprec.data.loader import Batch
from lowprec.train.build import build, pick_device, set_parameter_dtype
from lowprec.train.task import ContrastiveTask

EAGER = "open_clip eager"
OPEN_CLIP = (EAGER, "open_clip")
OURS = ("autograd_high", "high", "switchback", "switchback_m", "hw_fp8_switchback", "llm_int8")
REPEATS = 10
LOSS_TOLERANCE = 2e-2
GRADIENT_TOLERANCE = 0.5  # of the first layer's, behind all others; a scrambled one errs by 1.4


@dataclasses.dataclass
class Measured:
    """Milliseconds, first loss (0-d), gradient of the patch embedding, peak GiB (None on a CPU)."""

    ms: float
    loss: Tensor
    gradient: Tensor
    memory_gib: float | None


def main(config: Config) -> None:
    """Measures all cases of one config, each built anew from the same seed."""
    device = pick_device(config.device)
    lines = Lines(config.run_dir, "model", device)
    checkpointed = ", checkpointing" if config.checkpointing else ""
    shape = f"{config.model.name} batch {config.batch_size}{checkpointed}"
    dtype, facts = config.precision.autocast, {"image_size": config.model.image_size}
    facts["patch_dropout"] = config.model.patch_dropout
    expected, base_ms = None, None
    for case in (*OPEN_CLIP, *OURS):
        if case == "open_clip" and not config.compile:
            continue
        is_ours = case in OURS
        facts["compiled"] = config.compile and case != EAGER
        with lines.measurement(case, shape, dtype, is_ours=is_ours, **facts) as row:
            if is_ours and expected is None:
                raise RuntimeError("no case of open_clip to compare with")
            result = measure(config, case, device)
            right = expected or result
            check_error("the loss", result.loss, right.loss, LOSS_TOLERANCE)
            gradients = (result.gradient, right.gradient)
            error = check_error("the first layer's gradient", *gradients, GRADIENT_TOLERANCE)
            expected = right
            row.update(loss=round(result.loss.item(), 5), gradient_error=round(error, 5))
            if not is_ours:
                base_ms = min(base_ms or result.ms, result.ms)
            row.update(ms=result.ms, rate=1000 * config.batch_size / result.ms)
            row.update(ratio=base_ms / result.ms, memory_gib=result.memory_gib)
            row.update(ratio_to=EAGER if case == EAGER else "the faster open_clip")
    lines.exit_if_failed()


def measure(config: Config, case: str, device: torch.device) -> Measured:
    """Builds the model of a case and times forward and backward of a random batch."""
    torch.compiler.reset()
    gc.collect()  # the previous model's compiled blocks form reference cycles
    with device:  # a large model is initialized there much faster
        task = open_clip_task(config, case) if case in OPEN_CLIP else our_task(config, case)
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
    ms = median_ms(lambda: forward_and_backward(task, batch), device, REPEATS)
    memory_gib = round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None
    return Measured(ms, loss.detach(), gradient, memory_gib)


def our_task(config: Config, case: str) -> ContrastiveTask:
    """Builds a config's run with the recipe of a case."""
    threshold = config.precision.outlier_threshold if case == "llm_int8" else 0.0
    precision = dataclasses.replace(config.precision, recipe=case, outlier_threshold=threshold)
    return build(dataclasses.replace(config, precision=precision), None).task


def open_clip_task(config: Config, case: str) -> ContrastiveTask:
    """Builds open_clip's model, unchanged but for its blocks, which "open_clip" compiles."""
    device = pick_device(config.device)
    torch.manual_seed(config.seed)
    model = build_model(config.model, config.intervention.name).to(device)
    set_parameter_dtype(model, config.precision.autocast)
    if config.checkpointing:
        model.set_grad_checkpointing(True)
    if case != EAGER:
        for block in blocks(model):  # under open_clip's own checkpointing
            block.compile(dynamic=False)
    normalize = Normalize().to(device)
    return ContrastiveTask(model, contrastive_loss(), normalize, config.precision.autocast)


def forward_and_backward(task: ContrastiveTask, batch: Batch) -> Tensor:
    """Returns the loss of a batch; replaces the gradients."""
    for parameter in task.model.parameters():
        parameter.grad = None
    loss, _ = task.loss(batch)
    loss.backward()
    return loss
