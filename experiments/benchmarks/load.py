"""Times reading one tensor's RMS_t out of many full-size runs, as notebooks and figures do.

    python -m experiments.benchmarks.load
    python -m experiments.benchmarks.load runs=[1,2] steps=2000 tensors=100

Generates runs with the project's own writer, then times `load_runs(...).tensors("*conv1*")` in
fresh processes: by the clock and by processor time (`cpu_ms`), with the peak memory. Cases:
`running` (streams) and `ended` (one parquet file per run), both in the system's cache. Lines go to
`runs/bench/load/<time>.jsonl`; what was generated is deleted.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml

from experiments.benchmarks.report import Lines, Wrong
from experiments.entry import run_command
from lowprec.config.schema import Config, key
from lowprec.runs.identity import to_dict
from lowprec.runs.record import Record

FLUSH = 50  # steps per batch of the stream
STATISTICS = ("rms", "grad_norm", "update_norm")
TENSOR = "visual.conv1.weight"
PROGRAM = """
import json, re, sys, time
from analysis import load_runs
start, busy = time.perf_counter(), time.process_time()
frame = load_runs(sys.argv[1]).tensors("*conv1*", stat="rms")
seconds, busy = time.perf_counter() - start, time.process_time() - busy
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 2**20
print(json.dumps([seconds, busy, peak, len(frame), float(frame["visual.conv1.weight"].sum())]))
"""


@dataclass
class LoadConfig:
    """Keys of the command."""

    runs: list[int] = key([1, 2, 5, 10], "how many are read; 400 MB each at full size", least=1)
    steps: int = key(20000, "steps of a run", least=FLUSH)
    tensors: int = key(686, "tensors, each with three statistics; ViT-H/14 has 686", least=1)
    repeats: int = key(3, "readings of which the median is kept", least=1)
    run_dir: str = key("runs", "the lines go into its bench/load")


def main(config: LoadConfig) -> None:
    """Generates, measures and deletes; exits with 1 if a reading was wrong."""
    lines = Lines(config.run_dir, "load", torch.device("cpu"))
    folder = Path(config.run_dir) / "bench" / ".load"
    shutil.rmtree(folder, ignore_errors=True)
    sums: list[float] = []  # of the column that is read, by run
    try:
        for count in sorted(config.runs):
            while len(sums) < count:
                sums.append(generate(folder / f"run-{len(sums):03d}", len(sums), config))
            bench_reading("running", folder, sums, config, lines)
        for run in folder.iterdir():
            finish(run, config.steps)
        for count in sorted(config.runs, reverse=True):
            for run in sorted(folder.iterdir())[count:]:
                shutil.rmtree(run)
            bench_reading("ended", folder, sums[:count], config, lines)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines.exit_if_failed()


def generate(run: Path, seed: int, config: LoadConfig) -> float:
    """Writes a running run's record; returns the sum of the column that is read."""
    names = [TENSOR, *(f"visual.resblocks.{i // 12}.w{i % 12}" for i in range(config.tensors - 1))]
    rng, total = np.random.default_rng(seed), 0.0
    record = Record(run)
    settings = to_dict(Config(seed=seed, num_steps=config.steps))
    (run / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    for first in range(1, config.steps + 1, FLUSH):
        steps = np.arange(first, min(first + FLUSH, config.steps + 1))
        values = {
            name: np.exp(0.3 * rng.standard_normal((len(steps), len(names)), dtype=np.float32))
            for name in STATISTICS
        }
        total += float(values["rms"][:, 0].astype(float).sum())
        record.append_tensors(steps, values, names)
        record.append("metrics", [{"step": int(step), "loss": 1.0} for step in steps])
    record.status("running", config.steps)
    record.close()
    return total


def finish(run: Path, steps: int) -> None:
    """Ends a generated run as training does."""
    record = Record(run)
    record.write_parquet()
    record.status("finished", steps)
    record.close()


def bench_reading(
    case: str, folder: Path, sums: list[float], config: LoadConfig, lines: Lines
) -> None:
    """Reads all runs of a folder in new processes and writes a line."""
    shape = f"{len(sums)} runs x {config.steps} steps x {config.tensors} tensors"
    with lines.measurement(case, shape, "float32") as row:
        times = []
        for _ in range(config.repeats):
            command = [sys.executable, "-c", PROGRAM, str(folder)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            *measured, num_rows, total = json.loads(done.stdout)
            if num_rows != len(sums) * config.steps or not abs(total / sum(sums) - 1) < 1e-4:
                raise Wrong(f"read {num_rows} rows with sum {total:g}, expected {sum(sums):g}")
            times.append(measured)
        seconds, busy, peak_gib = np.median(times, axis=0).tolist()
        row.update(ms=1000 * seconds, rate=len(sums) / seconds, rate_unit="runs/s")
        row.update(cpu_ms=round(1000 * busy, 3), peak_gib=round(peak_gib, 3))


if __name__ == "__main__":
    run_command(main, "benchmark", LoadConfig)
