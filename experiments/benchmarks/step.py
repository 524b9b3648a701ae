"""Times one training step, eager, with compiled blocks and as a CUDA graph, on random pairs.

    python -m experiments.benchmarks step model=mini_l model.patch_dropout=0.5 batch_size=1024 \
        optimizer=stable_adamw

Takes the keys of `train`. A case counts only if its first losses are the eager step's. Lines go to
`runs/bench/step/<time>.jsonl` and to the console.
"""

import dataclasses

import torch

from experiments.benchmarks.measure import Lines, Wrong, median_ms, random_batch
from lowprec.config.schema import Config
from lowprec.data.loader import Batch
from lowprec.optim.schedules import set_learning_rate
from lowprec.runs.identity import label
from lowprec.train.build import Built, build, pick_device
from lowprec.train.step import GraphedStep, TrainStep

CASES = {"eager": (False, False), "compiled": (True, False), "compiled, one graph": (True, True)}
TOLERANCE = 2e-2  # of the loss in three steps: bf16 sums in another order
REPEATS = 100


def main(config: Config) -> None:
    """Measures the cases of one config; exits with 1 if one was wrong or failed."""
    device = pick_device(config.device)
    lines = Lines(config.run_dir, "step", device)
    shape = f"{label(config)}, batch {config.batch_size}"
    eager = None  # losses and milliseconds
    for case, (compiled, graphed) in CASES.items():
        if graphed and device.type != "cuda":
            continue
        with lines.measurement(case, shape, config.precision.autocast) as row:
            losses, ms = measure(dataclasses.replace(config, compile=compiled), graphed)
            eager = eager or (losses, ms)
            gap = max(abs(a - b) for a, b in zip(losses, eager[0], strict=True))
            if not gap < TOLERANCE:  # NaN too
                raise Wrong(f"the loss differs from the eager step's by {gap:.3g}")
            row.update(ms=ms, rate=1000 * config.batch_size / ms)
            row.update(ratio_to="eager", ratio=eager[1] / ms)
        if not eager:
            break
    lines.exit_if_failed()


def measure(config: Config, graphed: bool) -> tuple[list[float], float]:
    """Returns the losses of the first three steps, and the median milliseconds of a step."""
    torch.compiler.reset()
    built = build(config, None)
    step, batch = prepare(built, config.batch_size, graphed=graphed)
    losses = [step(batch)["loss"].item() for _ in range(3)]
    return losses, median_ms(lambda: step(batch), built.device, REPEATS)


def prepare(
    built: Built, batch_size: int, *, graphed: bool = False
) -> tuple[TrainStep | GraphedStep, Batch]:
    """Returns the training step of a built config, and a random batch for it on the host.

    `graphed` captures the step as a CUDA graph.
    """
    batch = random_batch(built.task.model, batch_size, built.device)
    built.task.model.train()
    step = TrainStep(built.task, built.state.optimizer, built.state.scaler)
    if graphed:
        step = GraphedStep(step, batch)
    set_learning_rate(built.state.optimizer, built.config.optimizer.lr)
    return step, batch
