"""Copies a run's record without checkpoints and with chosen tensors only, small enough to keep.

    python -m experiments.compact run=runs/run/nano-bf16-adamw-s0-0123456789 out=results/nano \
        'tensors=[visual.conv1.weight,*resblocks.0.*]'

The copy loads like a run: in figures, in notebooks, in `load_runs`.
"""

import shutil
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pyarrow.parquet

from experiments import cli
from lowprec.config import key

FILES = ("config.yaml", "environment.json", "status.json", "metrics.jsonl", "timing.jsonl")
FILES += ("attempts.jsonl", "events.jsonl", "skips.jsonl", "evaluations.jsonl")


@dataclass
class CompactConfig:
    """Which run, where to, what of it."""

    run: str = key("???", "a run directory whose run has ended")
    out: str = key("???", "the copy's folder, which must not exist yet")
    tensors: list[str] = key(["visual.conv1.weight"], "name patterns of the tensors kept")


def main(config: CompactConfig) -> None:
    """Copies the small files, then the chosen columns of the tables; of blocks all."""
    run, out = Path(config.run), Path(config.out)
    if not (run / "tensors.parquet").exists():
        sys.exit(f"run={run}: no ended run (it has no tensors.parquet)")
    if out.exists():
        sys.exit(f"out={out} exists already")
    names = pyarrow.parquet.read_schema(run / "tensors.parquet").names
    kept = [name for name in names if name == "step" or _wanted(name, config.tensors)]
    if len(kept) == 1:
        tensors = sorted({name.partition("/")[2] for name in names} - {""})
        sys.exit(f"tensors={config.tensors}: none of {len(tensors)} tensors, such as {tensors[:5]}")
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
    cli.main(main, "compact", CompactConfig)
