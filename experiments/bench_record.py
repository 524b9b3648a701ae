"""Times what safety costs: the flush of the record and the checkpoint, against a training step.

    python -m experiments.bench_record model=mini_l model.patch_dropout=0.5 batch_size=1024 \
        optimizer=stable_adamw compile=true

Takes the keys of `train`; random pairs, real files in `run_dir`. `overhead` is the share that a
flush every `log_every` and a checkpoint every `save_every` steps add to a step. A checkpoint counts
only if it is whole. One JSON line a case goes to `runs/bench/record/<time>.jsonl`.
"""

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from experiments import cli
from experiments.bench_step import random_batch
from lowprec.config import Config
from lowprec.environment import environment
from lowprec.run import encode_row, label

STEPS, FLUSHES, SAVES = 40, 5, 3  # measured of each, the median is kept


def main(config: Config) -> None:
    """Measures one config and writes its lines."""
    out = Path(config.run_dir) / "bench" / "record"
    out.mkdir(parents=True, exist_ok=True)
    scratch = out / ".scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    facts = environment()
    try:
        step_ms, flush_ms, save_ms, size = measure(config, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    overhead_ms = flush_ms / config.log_every + save_ms / config.save_every
    common = {
        "slug": "record",
        "device": facts["gpu"] or facts["cpu"],
        "versions": facts["packages"],
        "commit": facts["commit"],
        "shape": f"{label(config)}, batch {config.batch_size}, checkpoint {size / 2**20:.0f} MiB, "
        f"log_every {config.log_every}, save_every {config.save_every}",
        "dtype": config.precision.autocast,
        "ratio_to": "step",
    }
    cases = {"step": step_ms, "flush": flush_ms, "checkpoint": save_ms, "overhead": overhead_ms}
    target = out / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    for case, ms in cases.items():
        numbers = {"case": case, "ms": round(ms, 3), "rate": round(1000 / ms, 2)}
        row = {**common, **numbers, "ratio": round(ms / step_ms, 5), "correct": True}
        with open(target, "a") as file:
            file.write(encode_row(row))
        print(encode_row(row), end="", flush=True)


def measure(config: Config, run: Path) -> tuple[float, float, float, int]:
    """Milliseconds of a step, of a flush of log_every steps, of a checkpoint, and its bytes."""
    from experiments.build import build
    from lowprec.optim.schedules import set_learning_rate
    from lowprec.record import Record
    from lowprec.train.checkpoint import save_checkpoint, verify
    from lowprec.train.journal import Journal
    from lowprec.train.loggers import Logger
    from lowprec.train.step import GraphedStep, TrainStep, can_capture

    built = build(config, data=None)
    batch = random_batch(built, config.batch_size)
    built.task.model.train()
    step: Callable = TrainStep(built.task, built.state.optimizer, built.state.scaler)
    step = GraphedStep(step, batch) if can_capture(config, built.device) else step
    set_learning_rate(built.state.optimizer, config.optimizer.lr)
    for _ in range(5):
        step(batch)["loss"].item()
    start = time.perf_counter()
    for _ in range(STEPS):
        values = step(batch)
    values["loss"].item()  # waits for the device
    step_ms = 1000 * (time.perf_counter() - start) / STEPS

    record = Record(run)
    journal = Journal(built.state, record, config, built.device, Logger(), None)
    number, flushes, saves = 0, [], []
    for _ in range(FLUSHES):
        for _ in range(config.log_every):
            number += 1
            journal.append(number, config.optimizer.lr, step(batch))
        values["loss"].item()
        flushes.append(_timed(lambda: journal.flush(None))[0])
    for count in range(1, SAVES + 1):
        ms, path = _timed(
            lambda count=count: save_checkpoint(
                run, count, built.state, record.offsets(), keep=2, provenance={}
            )
        )
        saves.append(ms)
        verify(path)
    size = sum(file.stat().st_size for file in path.iterdir())
    record.close()
    return step_ms, statistics.median(flushes), statistics.median(saves), size


def _timed(call: Callable) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return 1000 * (time.perf_counter() - start), result


if __name__ == "__main__":
    cli.main(main, "train")
