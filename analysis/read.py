"""The files of one run directory; whatever is damaged or missing in them becomes a note."""

import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from upath import UPath

from analysis.damage import config_faults, tensor_faults
from lowprec.config.schema import Config
from lowprec.runs.identity import to_dict
from lowprec.runs.read import STATES, TABLES, find_runs, read_status, read_tensors, scan_rows

ENDED = ("finished", "diverged")
NEEDED = (  # keys without which a run cannot be named
    *("experiment", "scale", "seed", "num_steps", "model.name", "optimizer.name"),
    *("precision.autocast", "precision.recipe"),
)
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def place(address: Path | str) -> Path:
    """A file or folder by its path, or by a URL that fsspec knows (`s3://bucket/runs`)."""
    return UPath(address) if "://" in str(address) else Path(address)


def find(root: Path) -> list[Path]:
    """As `find_runs`, also below a URL."""
    if isinstance(root, Path):
        return find_runs(root)
    found = {path.parent for path in root.glob("**/status.json")}
    return sorted(path for path in found if (path / "config.yaml").exists())


def flatten(config: dict, prefix: str = "") -> dict:
    """Nested config as dotted keys; a list becomes a tuple, so that it can be grouped by."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = tuple(value) if isinstance(value, list) else value
    return flat


DEFAULTS = flatten(to_dict(Config()))


def read_head(run: Path) -> dict:
    """Status and config of a run, flat.

    A key that did not exist when the run was made has its default. `data.digest`: what the data
    held, "" where the run does not say.
    """
    notes = []
    try:
        status = dict(read_status(run))
        status = {name: status[name] for name in ("state", "step", "reason")}
        if status["state"] not in STATES or type(status["step"]) is not int:
            raise ValueError
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        status = {"state": "unknown", "step": 0, "reason": ""}
        notes.append("status.json is damaged")
    try:
        config = flatten(yaml.load((run / "config.yaml").read_text(), _YAML))
        damaged = any(name not in config for name in NEEDED)
        faults = [] if damaged else config_faults(config)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, yaml.YAMLError):
        damaged, faults = True, []
    if damaged or faults:
        notes.append(": ".join(["config.yaml is damaged", *faults[:1]]))
        config = {"experiment": run.resolve().parent.name, "scale": None}
    else:
        recipe, autocast = config["precision.recipe"], config["precision.autocast"]
        config["precision.label"] = autocast if recipe == "high" else recipe
        config = {**DEFAULTS, **config}
        if status["state"] in ENDED and status["step"] and config["diagnostics.statistics"]:
            notes += tensor_faults(run)
    name = run.resolve().name
    return {
        "run": name,
        "digest": name.rpartition("-")[2],
        "path": str(run),
        **status,
        "note": "; ".join(notes),
        "data.digest": _data_digest(run),
        **config,
    }


def _data_digest(run: Path) -> str:
    """First ten digits of the digest that the newest attempt noted."""
    rows, _ = read_row_file(run / "attempts.jsonl")
    sources = [row["sources"] for row in rows if isinstance(row.get("sources"), dict)]
    return str(sources[-1].get("data", ""))[:10] if sources else ""


def read_row_file(path: Path) -> tuple[list[dict], list[str]]:
    """Rows of a .jsonl file without its damaged lines, and a note on those."""
    try:
        rows, faults = scan_rows(path)
    except OSError as error:
        return [], [f"{path.name} cannot be read: {error.strerror or error}"]
    if not faults:
        return rows, []
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    return rows, [f"{path.name}: {faults[0].removeprefix(f'{path}, ')}{more}"]


def read_metrics(path: Path, num_steps: float, last: int | None) -> tuple[list[dict], list[str]]:
    """The row of each step in order, and notes on damaged lines, steps twice and steps missing.

    num_steps: of the config, nan if that is damaged; `last`: the step at which the run ended, None
    while it has not. Of two rows of a step the later one counts: it is a later attempt's.
    """
    rows, notes = read_row_file(path)
    found = [row for row in rows if _is_step(row, num_steps)]
    by_step = {row["step"]: row for row in found}
    steps = sorted(by_step)
    if len(found) < len(rows):
        notes.append(f"{path.name}: {len(rows) - len(found)} lines are no row of a step")
    if len(steps) < len(found):
        seen, twice = set(), []
        for row in found:
            (twice.append if row["step"] in seen else seen.add)(row["step"])
        notes.append(f"{path.name}: {len(twice)} rows of a step before, first of {twice[0]}")
    missing = max(last or 0, *steps[-1:], 0) - len(steps)
    if missing:
        first = next((n for n, step in enumerate(steps, 1) if n != step), len(steps) + 1)
        notes.append(f"{path.name}: {missing} steps are missing, first {first}")
    return [by_step[step] for step in steps], notes


def _is_step(row: dict, num_steps: float) -> bool:
    step = row.get("step")
    whole = type(step) is int and step >= 1 and not step > num_steps
    return whole and all(type(value) in (int, float) for value in row.values())


def read_tensor_columns(
    run: Path, state: str, pattern: str, stat: str
) -> tuple[pd.DataFrame, list[str]]:
    """Column `step` and the tensors that match; names `<statistic>/<tensor>` of all there are.

    The statistic says which of the run's tables it is of; that of no table gives no column.
    """
    known = []
    for table in TABLES:
        frame, names = _read_table(run, table, state, pattern, stat)
        known += names
        if any(name.startswith(f"{stat}/") for name in names):
            return frame, known
    return pd.DataFrame({"step": []}), known


def _read_table(
    run: Path, table: str, state: str, pattern: str, stat: str
) -> tuple[pd.DataFrame, list[str]]:
    """As `read_tensor_columns`, of one table.

    The .parquet is the copy made when a run ended. A run continued since then has more in its
    streams, and one whose .parquet is damaged has all in them.
    """
    path, has_streams = run / f"{table}.parquet", any((run / table).glob("*.arrows"))
    if path.exists() and not (has_streams and state not in ENDED):
        try:
            return _read_parquet(path, pattern, stat)
        except (pa.ArrowException, OSError):
            if not has_streams:
                raise
    return _read_streams(run, table, pattern, stat)


def _read_parquet(path: Path, pattern: str, stat: str) -> tuple[pd.DataFrame, list[str]]:
    """Reads the end of the file, which lists thousands of columns, once; then the columns."""
    # without a cache only what parquet asks for comes over the network
    source = path if isinstance(path, Path) else path.open("rb", cache_type="none")
    with pq.ParquetFile(source, pre_buffer=True) as file:
        names = [name for name in file.schema_arrow.names if name != "step"]
        wanted = [name for name in names if fnmatchcase(name, f"{stat}/{pattern}")]
        frame = file.read(columns=["step", *wanted], use_threads=False).to_pandas()
    return frame.rename(columns=lambda name: name.removeprefix(f"{stat}/")), names


def _read_streams(run: Path, table: str, pattern: str, stat: str) -> tuple[pd.DataFrame, list[str]]:
    names, chosen, known, parts = None, [], [], []
    for steps, statistics, tensors in _flushes(run, table):
        if tensors != names:  # else the same patterns are matched at every flush
            names = tensors
            chosen = [i for i, name in enumerate(names) if fnmatchcase(name, pattern)]
            known = [f"{name}/{tensor}" for name in statistics for tensor in names]
        columns = [names[i] for i in chosen if stat in statistics]
        values = statistics[stat][:, chosen] if columns else np.empty((len(steps), 0))
        if parts and parts[-1][0] == columns:
            parts[-1][1].append(steps)
            parts[-1][2].append(values)
        else:
            parts.append((columns, [steps], [values]))
    frames = []
    for columns, steps, values in parts:
        frames.append(pd.DataFrame(np.concatenate(values), columns=columns))
        frames[-1].insert(0, "step", np.concatenate(steps))
    return (pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"step": []})), known


def _flushes(run: Path, table: str) -> Iterator:
    """`read_tensors`, which maps local files to memory; those elsewhere are copied first."""
    if isinstance(run, Path):
        yield from read_tensors(run, table)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / table).mkdir()
        for stream in (run / table).glob("*.arrows"):
            (Path(folder) / table / stream.name).write_bytes(stream.read_bytes())
        yield from read_tensors(Path(folder), table)
