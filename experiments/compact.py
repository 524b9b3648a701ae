r"""Copies run records without checkpoints and with only some tensors, so that they are small.

    python -m experiments.compact run=runs/run/nano-bf16-adamw-s0-0123456789 out=results/nano \
        'tensors=[visual.conv1.weight,*resblocks.0.*]'
    python -m experiments.compact run=runs/update_clipping out=results/update_clipping

Figures, notebooks and `load_runs` read a copy like a run. If `run` is a folder, all runs in it that
have ended are copied, each to the same place below `out`. With `out=.../runs.zip`, they are written
to one archive, which is read like a folder.
"""

import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pyarrow.parquet

from analysis.run_files import ARCHIVE
from experiments.entry import run_command
from lowprec.config.check import RunError
from lowprec.config.schema import key
from lowprec.runs.read import find_runs

FILES = ("config.yaml", "environment.json", "status.json", "metrics.jsonl", "timing.jsonl")
FILES += ("attempts.jsonl", "events.jsonl", "skips.jsonl", "evaluations.jsonl")
FILES += ("quant_error.jsonl", "retrieved.jsonl", "predictors.jsonl")
SMALLER = zipfile.ZIP_BZIP2  # for lines of JSON, by a sixth


@dataclass
class CompactConfig:
    """Which runs to copy, where to, and which tensors."""

    run: str = key("???", "directory of a run that has ended, or a folder of such directories")
    out: str = key("???", "folder of the copy, or .../runs.zip; must not exist yet")
    tensors: list[str] = key(
        ["visual.conv1.weight"], "patterns for the names of the tensors to keep"
    )


def main(config: CompactConfig) -> None:
    """Copies every ended run at or below `run`; copies nothing if one of them is unreadable."""
    root, out = Path(config.run).resolve(), Path(config.out)
    runs = find_runs(root)
    ended = [run for run in runs if (run / "tensors.parquet").exists()]
    if not ended:
        raise RunError(f"run={root}: no run has ended (there is no tensors.parquet)")
    if out.exists():
        raise RunError(f"out={out} already exists")
    for archive in root.glob(f"**/{ARCHIVE}"):
        print(f"{archive}: left out: an archive is not copied", file=sys.stderr)
    for run in sorted(set(runs) - set(ended)):
        print(f"{run}: left out because it has not ended (no tensors.parquet)", file=sys.stderr)
    for run in ended:
        try:
            names = pyarrow.parquet.read_schema(run / "tensors.parquet").names
        except (pyarrow.ArrowException, OSError) as error:
            text = f"{run}/tensors.parquet is damaged: {error}; nothing was copied"
            raise RunError(text) from error
        if _matching(names, config.tensors) == ["step"]:
            few = sorted({name.partition("/")[2] for name in names} - {""})[:5]
            text = f"tensors={config.tensors} matches none of its tensors, such as {few}"
            raise RunError(f"{run}: {text}")
    if out.name != ARCHIVE:
        for run in ended:
            compact(run, out / run.relative_to(root), config.tensors)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        for run in ended:
            compact(run, Path(folder, run.relative_to(root.parent)), config.tensors)
        with zipfile.ZipFile(out, "w") as archive:
            for path in sorted(Path(folder).rglob("*")):
                method = SMALLER if path.suffix == ".jsonl" else zipfile.ZIP_DEFLATED
                archive.write(path, path.relative_to(folder), method)
    print(f"{out}: {len(ended)} runs, {out.stat().st_size / 1e6:.2f} MB")


def compact(run: Path, out: Path, patterns: list[str]) -> None:
    """Copies the small files, replays, matching columns of tensors and details, blocks."""
    out.mkdir(parents=True)
    for name in FILES:
        if (run / name).exists():
            shutil.copyfile(run / name, out / name)
    for path in run.glob("replays/*.csv"):
        (out / "replays").mkdir(exist_ok=True)
        shutil.copyfile(path, out / "replays" / path.name)
    tables = {"tensors.parquet": patterns, "details.parquet": patterns, "blocks.parquet": ["*"]}
    for name, globs in tables.items():
        if (run / name).exists():
            columns = _matching(pyarrow.parquet.read_schema(run / name).names, globs)
            table = pyarrow.parquet.read_table(run / name, columns=columns)
            pyarrow.parquet.write_table(table, out / name, **encoding(table.schema))
    size = sum(path.stat().st_size for path in out.rglob("*"))
    print(f"{run}: {size / 1e6:.2f} MB of its files are copied")


def encoding(schema: pyarrow.Schema) -> dict:
    """Options of `write_table` that make files of float32 columns by a sixth to a third smaller."""
    floats = [field.name for field in schema if pyarrow.types.is_floating(field.type)]
    level = {"compression": "zstd", "compression_level": 19}
    return {**level, "use_dictionary": False, "use_byte_stream_split": floats}


def _matching(names: list[str], patterns: list[str]) -> list[str]:
    """Returns "step" and the columns `<statistic>/<tensor>` whose tensor matches a pattern."""
    return [
        name
        for name in names
        if name == "step" or any(fnmatch(name.partition("/")[2], pattern) for pattern in patterns)
    ]


if __name__ == "__main__":
    run_command(main, "compact", CompactConfig)
