"""Times one training step, eager, with compiled blocks and as a CUDA graph, on random pairs.

    python -m experiments.benchmarks.step model=mini_l model.patch_dropout=0.5 batch_size=1024 \
        optimizer=stable_adamw

Takes the keys of `train`. A case counts only if its first losses are the eager step's. One JSON
line a case goes to `runs/bench/step/<time>.jsonl`, and to the console.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from experiments.entry import run_command
from lowprec.config.schema import Config
from lowprec.runs.environment import environment
from lowprec.runs.identity import label
from lowprec.runs.read import encode_row

CASES = {"eager": (False, False), "compiled": (True, False), "compiled, one graph": (True, True)}
TOLERANCE = 2e-2  # of the loss after three steps: bf16 sums in another order


def main(config: Config) -> None:
    """Measures all cases of one config."""
    from lowprec.train.build import pick_device

    device = pick_device(config.device)
    facts = environment()
    out = Path(config.run_dir) / "bench" / "step" / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    reference = None
    for case, (compiled, graphed) in CASES.items():
        if graphed and device.type != "cuda":
            continue
        losses, ms = measure(dataclasses.replace(config, compile=compiled), graphed)
        reference = reference or (losses, ms)
        gap = max(abs(a - b) for a, b in zip(losses, reference[0], strict=True))
        row = {
            "slug": "step",
            "device": facts["gpu"] or facts["cpu"],
            "versions": facts["packages"],
            "commit": facts["commit"],
            "case": case,
            "shape": f"{label(config)}, batch {config.batch_size}",
            "dtype": config.precision.autocast,
            "ms": round(ms, 3),
            "rate": round(1000 * config.batch_size / ms, 1),
            "ratio_to": "eager",
            "ratio": round(reference[1] / ms, 3),
            "correct": gap < TOLERANCE,
        }
        with open(out, "a") as file:
            file.write(encode_row(row))
        print(encode_row(row), end="", flush=True)
        if not row["correct"]:
            sys.exit(f"{case}: the loss differs from the eager step's by {gap:.3g}; no number")


def measure(config: Config, graphed: bool, windows: int = 5, steps: int = 20) -> tuple:
    """Losses of the first three steps, and the median over windows of milliseconds a step."""
    import torch

    from lowprec.optim.schedules import set_learning_rate
    from lowprec.train.build import build
    from lowprec.train.step import GraphedStep, TrainStep

    torch.compiler.reset()
    built = build(config, data=None)
    batch = random_batch(built, config.batch_size)
    built.task.model.train()
    step: Callable = TrainStep(built.task, built.state.optimizer, built.state.scaler)
    step = GraphedStep(step, batch) if graphed else step
    set_learning_rate(built.state.optimizer, config.optimizer.lr)
    losses = [step(batch)["loss"].item() for _ in range(3)]
    times = []
    for window in range(windows + 1):
        start = time.perf_counter()
        for _ in range(steps if window else 5):  # the first window warms up
            values = step(batch)
        values["loss"].item()  # waits for the device
        times.append(1000 * (time.perf_counter() - start) / steps)
    return losses, statistics.median(times[1:])


def random_batch(built: object, size: int) -> object:
    """A Batch of random pixels and tokens for a built model; page-locked on a GPU machine."""
    import torch

    from lowprec.clip.model import image_size
    from lowprec.data.loader import Batch

    generator = torch.Generator().manual_seed(0)
    side, vocabulary = image_size(built.task.model), built.tokenizer.vocab_size
    shape = (size, built.tokenizer.context_length)
    tokens = torch.randint(1, vocabulary - 2, shape, generator=generator)
    tokens[:, -1] = vocabulary - 1
    pixels = torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, generator=generator)
    numbers = torch.zeros(size, dtype=torch.int64)
    batch = Batch(pixels, tokens, numbers, numbers)
    return batch.pin_memory() if built.device.type == "cuda" else batch


if __name__ == "__main__":
    run_command(main, "train")
