"""Times reading one tensor's RMS_t out of many full-size runs, as notebooks and figures do.

    python -m experiments.benchmarks.load
    python -m experiments.benchmarks.load runs=[1,2] steps=2000 tensors=100

Generates runs with the project's own writer, then times `load_runs(...).tensors("*conv1*")` in a
fresh process each: by the clock, by how long the processors were busy (`cpu_ms`), and its largest
memory. Cases: `ended` (one parquet file a run) with the files in the system's cache, or not
(`ended, cold`), and `running` (streams). More runs than `generated` are hard links to those, which
the cache holds once: there the cold case is a line fitted through its measurements, and says
`extrapolated`. One JSON line a case goes to `runs/bench/load/<time>.jsonl`; what was generated is
deleted.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from experiments.benchmarks.report import reporter
from experiments.entry import run_command
from lowprec.config.schema import Config, key
from lowprec.runs.identity import to_dict
from lowprec.runs.record import Record

FLUSH = 50  # steps a batch of the stream, the default of log_every
STATISTICS = ("rms", "grad_norm", "update_norm")
CHOSEN = "visual.conv1.weight"
PROGRAM = """
import json, re, sys, time
from analysis import load_runs
start, busy = time.perf_counter(), time.process_time()
frame = load_runs(sys.argv[1]).tensors("*conv1*", stat="rms")
seconds, busy = time.perf_counter() - start, time.process_time() - busy
rows, total = len(frame), float(frame["visual.conv1.weight"].sum())
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 2**20
print(json.dumps([seconds, busy, peak, rows, frame["run"].nunique(), total]))
"""


@dataclass
class BenchLoadConfig:
    """What is generated, and read how often."""

    runs: list[int] = key([1, 2, 5, 10, 30, 100], "how many are read", least=1)
    generated: int = key(10, "runs generated; 400 MB each at full size", least=1)
    steps: int = key(20000, "steps of a run", least=FLUSH)
    tensors: int = key(686, "tensors, each with three statistics; ViT-H/14 has 686", least=1)
    repeats: int = key(3, "readings of which the median is kept", least=1)
    run_dir: str = key("runs", "the lines go into its bench/load")


def main(config: BenchLoadConfig) -> None:
    """Generates, measures and deletes; exits with 1 if a reading was wrong."""
    report = reporter(config.run_dir, "load")
    scratch = Path(config.run_dir) / "bench" / ".load"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        sums = [generate(scratch / f"run-{i:03d}", i, config) for i in range(config.generated)]
        wrong = [
            f"{case} {count}"
            for case in ("ended", "ended, cold", "running")
            for count, right in bench_case(case, scratch, sums, config, report)
            if not right
        ]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if wrong:
        sys.exit(f"read wrongly: {', '.join(wrong)}")


def generate(run: Path, seed: int, config: BenchLoadConfig) -> float:
    """Writes an ended run with its stream; returns the sum of the column that is read."""
    names = [CHOSEN, *(f"visual.resblocks.{i // 12}.w{i % 12}" for i in range(config.tensors - 1))]
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
    record.write_parquet()
    record.status("finished", config.steps)
    record.close()
    return total


def bench_case(
    case: str, scratch: Path, sums: list[float], config: BenchLoadConfig, report: Callable
) -> list[tuple[int, bool]]:
    """Measures a case for each count of runs; returns the counts and whether each was read right.

    Cold, more runs than were generated cannot be measured.
    """
    measured, found = {}, []
    for count in sorted(config.runs):
        shape = f"{count} runs x {config.steps} steps x {config.tensors} tensors"
        if count > config.generated and case == "ended, cold":
            if len(measured) < 2:
                continue
            counts = list(measured)
            seconds, busy, peak = (
                float(np.polyval(np.polyfit(counts, [m[i] for m in measured.values()], 1), count))
                for i in range(3)
            )
            correct, extrapolated = None, True
        else:
            chosen = link(scratch, case, count, config.generated)
            seconds, busy, peak, correct = read(chosen, sums, config, cold=case.endswith("cold"))
            shutil.rmtree(chosen)
            measured[count], extrapolated = (seconds, busy, peak), False
            found.append((count, correct))
        report(
            case, shape, "float32", 1000 * seconds, count / seconds, correct=correct,
            rate_unit="runs/s", cpu_ms=round(1000 * busy, 3), peak_gib=round(peak, 3),
            extrapolated=extrapolated,
        )  # fmt: skip
    return found


def link(scratch: Path, case: str, count: int, generated: int) -> Path:
    """A folder of `count` runs, hard links to those generated, with what the case has of them."""
    folder = scratch / "chosen"
    for i in range(count):
        source, run = scratch / f"run-{i % generated:03d}", folder / f"copy-{i:03d}"
        streams = [] if case != "running" else list((source / "tensors").iterdir())
        (run / "tensors").mkdir(parents=True)
        for name in ("config.yaml", "metrics.jsonl"):
            os.link(source / name, run / name)
        status = json.loads((source / "status.json").read_text())
        status["state"] = "running" if streams else "finished"
        (run / "status.json").write_text(json.dumps(status))
        for path in streams or [source / "tensors.parquet"]:
            os.link(path, run / path.relative_to(source))
    return folder


def read(
    folder: Path, sums: list[float], config: BenchLoadConfig, *, cold: bool
) -> tuple[float, float, float, bool]:
    """Medians of reading in a new process: seconds, busy seconds, GiB; and whether it was right."""
    times, count = [], len(list(folder.iterdir()))
    for _ in range(config.repeats):
        if cold:
            drop_cache(folder)
        command = [sys.executable, "-c", PROGRAM, str(folder)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, busy, peak, rows, runs, total = json.loads(done.stdout)
        times.append((seconds, busy, peak))
    expected = sum(sums[i % len(sums)] for i in range(count))
    right = (rows, runs) == (count * config.steps, count)
    return *np.median(times, axis=0).tolist(), right and abs(total / expected - 1) < 1e-4


def drop_cache(folder: Path) -> None:
    """Asks the system to forget what it holds of these files in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    run_command(main, "bench_load", BenchLoadConfig)
