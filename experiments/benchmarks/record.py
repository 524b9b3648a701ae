"""Times the record and the checkpoints, as a share of a training step.

    python -m experiments.benchmarks.record model=mini_l model.patch_dropout=0.5 batch_size=1024 \
        optimizer=stable_adamw compile=true

Takes the keys of `train`; random pairs, real files in `run_dir`. `flush`: `log_every` steps are
read from the device, searched for spikes and written; `blocks`: the pass that measures the blocks.
`diagnostics` is the time that a flush every `log_every` and a pass every `diagnostics.block_every`
steps add to a step, `overhead` also includes a checkpoint every `save_every` steps. A checkpoint
counts only if it verifies. Lines go to `runs/bench/record/<time>.jsonl`.
"""

import shutil
import statistics
from pathlib import Path

from experiments.benchmarks.report import Lines, clock_ms, median_ms
from experiments.benchmarks.step import prepare
from experiments.entry import run_command
from lowprec.config.schema import Config
from lowprec.runs.identity import label
from lowprec.runs.record import Record
from lowprec.train.build import Built, build, pick_device
from lowprec.train.checkpoint import save_checkpoint, verify
from lowprec.train.metrics import MetricsBuffer
from lowprec.train.step import can_capture

STEPS, FLUSHES, SAVES = 40, 5, 3  # measured of each, the median is kept


def main(config: Config) -> None:
    """Measures one config and writes its lines."""
    lines = Lines(config.run_dir, "record", pick_device(config.device))
    scratch = Path(config.run_dir) / "bench" / "record" / ".scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        times, size = measure(config, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    block_every = config.diagnostics.block_every
    times["diagnostics"] = times["flush"] / config.log_every
    times["diagnostics"] += times["blocks"] / block_every if block_every else 0.0
    times["overhead"] = times["diagnostics"] + times["checkpoint"] / config.save_every
    shape = (
        f"{label(config)}, batch {config.batch_size}, checkpoint {size / 2**20:.0f} MiB, "
        f"log_every {config.log_every}, block_every {block_every}, save_every {config.save_every}"
    )
    for case, ms in times.items():
        rate, ratio = 1000 / ms if ms else None, ms / times["step"]
        lines.write(case, shape, config.precision.autocast, ms, rate, "step", ratio)


def measure(config: Config, run: Path) -> tuple[dict[str, float], int]:
    """Returns milliseconds of a step, a flush, a pass over blocks, a checkpoint; and its bytes."""
    built = build(config, None)
    graphed = can_capture(config, built.device)
    step, batch = prepare(built, config.batch_size, graphed=graphed)
    times = {"step": median_ms(lambda: step(batch), built.device, STEPS)}
    record = Record(run)
    metrics = MetricsBuffer(built, record)
    flushes = []
    for first in range(1, FLUSHES * config.log_every + 1, config.log_every):
        for number in range(first, first + config.log_every):
            metrics.append(number, {"lr": config.optimizer.lr, **step(batch)})
        flushes.append(clock_ms(metrics.flush, built.device))
    times["flush"] = statistics.median(flushes)
    times["blocks"] = 0.0
    if config.diagnostics.block_every:
        times["blocks"] = median_ms(lambda: metrics.append_blocks(1, batch), built.device, FLUSHES)
    times["checkpoint"], size = _checkpoint(run, built, record)
    record.close()
    return times, size


def _checkpoint(run: Path, built: Built, record: Record) -> tuple[float, int]:
    """Returns the median milliseconds of a checkpoint, and its bytes."""
    paths = []

    def save() -> None:
        step = len(paths) + 1
        paths.append(
            save_checkpoint(run, step, built.state, record.offsets(), keep=2, provenance={})
        )

    times = []
    for _ in range(SAVES):
        times.append(clock_ms(save, built.device))
        verify(paths[-1])
    return statistics.median(times), sum(file.stat().st_size for file in paths[-1].iterdir())


if __name__ == "__main__":
    run_command(main, "train")
