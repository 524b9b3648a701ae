"""Copies runs' records without checkpoints and with chosen tensors only, small enough to keep.

    python -m experiments.compact run=runs/run/nano-bf16-adamw-s0-0123456789 out=results/nano \
        'tensors=[visual.conv1.weight,*resblocks.0.*]'
    python -m experiments.compact run=runs/update_clipping out=results/update_clipping

A copy loads like a run: in figures, in notebooks, in `load_runs`. Of a folder of runs those that
have ended are copied, each to its place below `out`.
"""

import shutil
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pyarrow.parquet

from experiments.entry import run_command
from lowprec.config.schema import key
from lowprec.runs.read import find_runs

FILES = ("config.yaml", "environment.json", "status.json", "metrics.jsonl", "timing.jsonl")
FILES += ("attempts.jsonl", "events.jsonl", "skips.jsonl", "evaluations.jsonl")


@dataclass
class CompactConfig:
    """Which runs, where to, what of them."""

    run: str = key("???", "a run directory whose run has ended, or a folder of such")
    out: str = key("???", "the copy's folder, which must not exist yet")
    tensors: list[str] = key(["visual.conv1.weight"], "name patterns of the tensors kept")


def main(config: CompactConfig) -> None:
    """Copies every run that has ended at or below `run`."""
    root, out = Path(config.run), Path(config.out)
    runs = find_runs(root)
    ended = [run for run in runs if (run / "tensors.parquet").exists()]
    if not ended:
        sys.exit(f"run={root}: no ended run (it has no tensors.parquet)")
    if out.exists():
        sys.exit(f"out={out} exists already")
    for run in sorted(set(runs) - set(ended)):
        print(f"{run}: left out, it has not ended (it has no tensors.parquet)", file=sys.stderr)
    kept = {run: _kept(run, config.tensors) for run in ended}  # all, before any is copied
    for run in ended:
        compact(run, out / run.relative_to(root), config, kept[run])


def _kept(run: Path, tensors: list[str]) -> list[str]:
    """The columns of tensors.parquet to copy; the end of the command where there are none."""
    try:
        names = pyarrow.parquet.read_schema(run / "tensors.parquet").names
    except (pyarrow.ArrowException, OSError) as error:
        sys.exit(f"{run}/tensors.parquet is damaged: {error}; nothing was copied")
    kept = [name for name in names if name == "step" or _wanted(name, tensors)]
    if len(kept) == 1:
        there = sorted({name.partition("/")[2] for name in names} - {""})
        sys.exit(
            f"{run}: tensors={tensors}: none of {len(there)} tensors, such as {there[:5]}; nothing "
            "was copied"
        )
    return kept


def compact(run: Path, out: Path, config: CompactConfig, kept: list[str]) -> None:
    """Copies the small files, then the columns `kept` and the chosen of details; of blocks all."""
    out.mkdir(parents=True)
    for name in FILES:
        if (run / name).exists():
            shutil.copyfile(run / name, out / name)
    table = pyarrow.parquet.read_table(run / "tensors.parquet", columns=kept)
    pyarrow.parquet.write_table(table, out / "tensors.parquet", compression="zstd")
    for name, patterns in (("details.parquet", config.tensors), ("blocks.parquet", ["*"])):
        if (run / name).exists():
            columns = pyarrow.parquet.read_schema(run / name).names
            chosen = [c for c in columns if c == "step" or _wanted(c, patterns)]
            few = pyarrow.parquet.read_table(run / name, columns=chosen)
            pyarrow.parquet.write_table(few, out / name, compression="zstd")
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {table.num_rows} steps, {len(kept) - 1} columns, {size / 1e6:.2f} MB")


def _wanted(column: str, patterns: list[str]) -> bool:
    return any(fnmatch(column.partition("/")[2], pattern) for pattern in patterns)


if __name__ == "__main__":
    run_command(main, "compact", CompactConfig)
