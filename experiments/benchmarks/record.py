"""Times what record and safety cost against a training step: flush, blocks, checkpoint.

    python -m experiments.benchmarks.record model=mini_l model.patch_dropout=0.5 batch_size=1024 \
        optimizer=stable_adamw compile=true

`flush`: `log_every` steps are read from the device, searched for spikes and written; `blocks`: the
pass that measures every block. What the statistics of tensors cost is in bench_optimizer. Takes the
keys of `train`; random pairs, real files in `run_dir`. `diagnostics` is what a flush every
`log_every` and a pass every `diagnostics.block_every` steps add to a step, `overhead` that and a
checkpoint every `save_every` steps. A checkpoint counts only if it is whole. One JSON line a case
goes to `runs/bench/record/<time>.jsonl`.
"""

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from experiments.benchmarks.step import random_batch
from experiments.entry import run_command
from lowprec.config.schema import Config
from lowprec.runs.environment import environment
from lowprec.runs.identity import label
from lowprec.runs.read import encode_row

STEPS, FLUSHES, SAVES = 40, 5, 3  # measured of each, the median is kept


def main(config: Config) -> None:
    """Measures one config and writes its lines."""
    out = Path(config.run_dir) / "bench" / "record"
    out.mkdir(parents=True, exist_ok=True)
    scratch = out / ".scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    facts = environment()
    try:
        step_ms, flush_ms, blocks_ms, save_ms, size = measure(config, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    block_every = config.diagnostics.block_every
    diagnostics_ms = flush_ms / config.log_every + (blocks_ms / block_every if block_every else 0)
    overhead_ms = diagnostics_ms + save_ms / config.save_every
    common = {
        "slug": "record",
        "device": facts["gpu"] or facts["cpu"],
        "versions": facts["packages"],
        "commit": facts["commit"],
        "shape": f"{label(config)}, batch {config.batch_size}, checkpoint {size / 2**20:.0f} MiB, "
        f"log_every {config.log_every}, block_every {block_every}, save_every {config.save_every}",
        "dtype": config.precision.autocast,
        "ratio_to": "step",
    }
    cases = {
        "step": step_ms,
        "flush": flush_ms,
        "blocks": blocks_ms,
        "checkpoint": save_ms,
        "diagnostics": diagnostics_ms,
        "overhead": overhead_ms,
    }
    target = out / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    for case, ms in cases.items():
        numbers = {"case": case, "ms": round(ms, 3), "rate": round(1000 / ms, 2) if ms else None}
        row = {**common, **numbers, "ratio": round(ms / step_ms, 5), "correct": True}
        with open(target, "a") as file:
            file.write(encode_row(row))
        print(encode_row(row), end="", flush=True)


def measure(config: Config, run: Path) -> tuple[float, float, float, float, int]:
    """Milliseconds of a step, a flush of log_every steps, blocks, a checkpoint; its bytes."""
    from lowprec.optim.schedules import set_learning_rate
    from lowprec.runs.record import Record
    from lowprec.train.build import build
    from lowprec.train.checkpoint import save_checkpoint, verify
    from lowprec.train.metrics import MetricsBuffer
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
    metrics = MetricsBuffer(built, record)
    number, flushes, passes, saves = 0, [], [], []
    for _ in range(FLUSHES):
        for _ in range(config.log_every):
            number += 1
            metrics.append(number, {"lr": config.optimizer.lr, **step(batch)})
        values["loss"].item()
        flushes.append(_timed(lambda: metrics.flush())[0])
    for _ in range(FLUSHES if config.diagnostics.block_every else 0):
        passes.append(_timed(lambda: _blocks(metrics, batch))[0])
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
    blocks_ms = statistics.median(passes) if passes else 0.0
    return step_ms, statistics.median(flushes), blocks_ms, statistics.median(saves), size


def _blocks(metrics: object, batch: object) -> None:
    metrics.append_blocks(1, batch)
    metrics.blocks[-1][2].sum().item()  # waits for the device


def _timed(call: Callable) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return 1000 * (time.perf_counter() - start), result


if __name__ == "__main__":
    run_command(main, "train")
