"""Times forward and backward of a whole CLIP model by recipe, beside open_clip's own model.

    python -m experiments.benchmarks.model model=vit_h14 model.patch_dropout=0.5 batch_size=256 \
        compile=true checkpointing=true

Takes the keys of `train`; `precision` says the autocast dtype, the recipes are all measured. Rows:
open_clip eager and, under compile=true, with every block compiled; then ours, 16 bit and 8 bits.
A case counts only if its first loss is open_clip's, and near enough the gradient of the patch
embedding, which all blocks have passed on; without any row of open_clip none of ours does. `ratio`
is to the faster of the open_clip rows, of the eager one to itself. One JSON line a case goes to
`runs/bench/model/<time>.jsonl`; exits with 1 if one of ours was wrong or failed.
"""

import dataclasses
import gc
import sys

from experiments.benchmarks.report import median_ms, reason_of, relative_error, reporter
from experiments.entry import run_command
from lowprec.config.schema import Config
from lowprec.runs.identity import label

OPEN_CLIP = ("open_clip eager", "open_clip")
RECIPES = ("autograd_high", "high", "switchback", "switchback_m", "hw_fp8_switchback", "llm_int8")
REPEATS = 10
LOSS_TOLERANCE = 2e-2
GRADIENT_TOLERANCE = 0.5  # of the first layer's, behind all others; a scrambled one errs by 1.4


class Wrong(Exception):
    """The numbers of a case are not open_clip's."""


def main(config: Config) -> None:
    """Measures all cases of one config, each built anew from the same seed."""
    from lowprec.train.build import pick_device

    device = pick_device(config.device)
    report = reporter(config.run_dir, "model")
    print(f"{label(config)} on {device}", file=sys.stderr)
    expected, base, failed = None, None, []
    for case in (*OPEN_CLIP, *RECIPES):
        if case == "open_clip" and not config.compile:
            continue
        about = facts(config, case)
        try:
            if case in RECIPES and expected is None:
                raise RuntimeError("no row of open_clip to hold it against")
            ms, found, memory_gib = measure(config, case, device)
            checked = check(found, expected or found)
            expected = expected or found
        except (RuntimeError, Wrong) as error:  # of memory too
            wrong = isinstance(error, Wrong)
            report(**about, correct=False if wrong else None, reason=reason_of(error))
            failed += [case] if case in RECIPES else []
            continue
        if case in OPEN_CLIP:
            base = min(base or ms, ms)
        report(
            **about, ms=ms, rate=1000 * config.batch_size / ms, ratio=base / ms, correct=True,
            ratio_to=case if case == "open_clip eager" else "the faster open_clip",
            memory_gib=memory_gib, **checked,
        )  # fmt: skip
    if failed:
        sys.exit(f"no number for {', '.join(failed)}; their lines say why")


def facts(config: Config, case: str) -> dict:
    """What a line says of its case beside the numbers."""
    checkpointed = ", checkpointing" if config.checkpointing else ""
    return {
        "case": case,
        "shape": f"{config.model.name} batch {config.batch_size}{checkpointed}",
        "dtype": config.precision.autocast,
        "image_size": config.model.image_size,  # None: that of the model's name
        "patch_dropout": config.model.patch_dropout,
        "compiled": config.compile and case != "open_clip eager",
    }


def check(found: tuple, expected: tuple) -> dict:
    """Loss and error of the gradient for a line; raises Wrong."""
    loss_gap = abs(found[0] - expected[0]) / abs(expected[0])
    error = relative_error(found[1], expected[1])
    if not (loss_gap <= LOSS_TOLERANCE and error <= GRADIENT_TOLERANCE):
        raise Wrong(f"off by {loss_gap:.3g} in loss, {error:.3g} in the first layer's gradient")
    return {"loss": round(found[0], 5), "gradient_error": round(error, 5)}


def measure(config: Config, case: str, device: object) -> tuple:
    """Milliseconds, first (loss, gradient of the patch embedding), peak GiB (None on a CPU)."""
    import torch

    from lowprec.clip.model import Normalize, contrastive_loss
    from lowprec.train.task import ContrastiveTask

    torch.compiler.reset()
    gc.collect()  # the compiled blocks of the model before lie in cycles
    model = build(config, case, device)
    task = ContrastiveTask(
        model, contrastive_loss(), Normalize().to(device), config.precision.autocast
    )
    batch = random_batch(config, model, device)
    torch.manual_seed(config.seed)  # of patch dropout
    loss = forward_and_backward(task, batch).item()
    first = (loss, first_layer(model).weight.grad.clone())
    if device.type == "cuda":  # what compiling and tuning took is not the recipe's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    ms = median_ms(lambda: forward_and_backward(task, batch), device, REPEATS)
    if device.type != "cuda":
        return ms, first, None
    return ms, first, round(torch.cuda.max_memory_allocated() / 2**30, 2)


def first_layer(model: object) -> object:
    """The convolution that embeds the patches, in towers of open_clip and of timm."""
    from torch import nn

    found = (module for module in model.visual.modules() if isinstance(module, nn.Conv2d))
    layer = next(found, None)
    if layer is None:
        raise RuntimeError("the vision tower has no convolution, whose gradient is compared")
    return layer


def forward_and_backward(task: object, batch: object) -> object:
    """The loss of a batch; gradients are made anew."""
    for parameter in task.model.parameters():
        parameter.grad = None
    loss, _ = task.loss(batch)
    loss.backward()
    return loss


def build(config: Config, case: str, device: object) -> object:
    """The model of a case in training mode: open_clip's own, or with a recipe's layers."""
    import torch

    from lowprec.clip.model import blocks, build_model, compile_blocks, set_precision
    from lowprec.train.build import set_parameter_dtype

    torch.manual_seed(config.seed)
    with device:
        model = build_model(config.model, config.intervention.name).to(device)
    set_parameter_dtype(model, config.precision.autocast)
    if case not in OPEN_CLIP:
        threshold = config.precision.outlier_threshold if case == "llm_int8" else 0.0
        changes = {"recipe": case, "outlier_threshold": threshold}
        set_precision(model, dataclasses.replace(config.precision, **changes))
    if config.checkpointing:
        model.set_grad_checkpointing(True)
    if config.compile and case == "open_clip":
        for block in blocks(model):  # under its own checkpointing
            block.compile(dynamic=False)
    elif config.compile and case not in OPEN_CLIP:
        compile_blocks(model)
    return model.train()


def random_batch(config: Config, model: object, device: object) -> object:
    """A Batch of random pixels and tokens on the device."""
    import torch

    from lowprec.clip.model import image_size
    from lowprec.data.loader import Batch

    generator = torch.Generator().manual_seed(0)
    side, size = image_size(model), config.batch_size
    length = config.model.context_length or model.context_length
    vocabulary = config.model.vocab_size or model.vocab_size
    tokens = torch.randint(1, vocabulary - 2, (size, length), generator=generator)
    tokens[:, -1] = vocabulary - 1
    pixels = torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, generator=generator)
    numbers = torch.zeros(size, dtype=torch.int64)
    return Batch(pixels, tokens, numbers, numbers).to(device)


if __name__ == "__main__":
    run_command(main, "train")
