"""Reads the files of one run, and notes what is damaged or missing.

A damaged file makes no reader fail or hang: it is left out and named in the run's note.
"""

import difflib
import functools
import math
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd
from upath import UPath

from lowprec.config.check import REMOVED, allows
from lowprec.config.schema import MAPS, Config, PrecisionConfig, is_sampled
from lowprec.nearest import nearest_path
from lowprec.runs import read
from lowprec.runs.tables import MAX_BYTES, TABLES, read_parquet, read_tensors

TYPES = {
    "timing": {"attempt": int, "wall_s": float, "images_per_s": float, "data_wait": float},
    "events": {"step": int, "rms": dict},
    "retrieved": {"jpeg": str, "caption": str, "nearest": list},
}
ARCHIVE = "runs.zip"  # an archive of run directories, as experiments.compact writes
MAX_STEPS, MAX_GAP = 10**8, 10**5  # steps; those that a record may lack, and ten times its own
NO_TENSORS = "tensors are not there"
NO_LOSS = "no loss is recorded: call monitor.loss(loss) before each optimizer.step()"  # of `watch`
UNKNOWN = {"state": "unknown", "step": 0, "reason": ""}  # a status that cannot be read
UNUSED = {"data.digest": "", "init.digest": "", "gpu": ""}  # of a run without attempts
PRECISION = ("precision.autocast", "precision.recipe")
REQUIRED = ("experiment", "scale", "model.name", "optimizer.name", *PRECISION)  # by a figure


def as_path(address: Path | str) -> Path:
    """Returns a file or folder by its path, its path in a zip archive, or a URL for fsspec.

    For example `runs/run`, `results/runs.zip/run` or `s3://bucket/runs`.
    """
    text = str(address)
    if archive := _archive_of(text):
        inner = text.removeprefix(str(archive)).strip("/")
        root = _open_archive(archive.absolute(), archive.stat().st_mtime_ns)
        return root / inner if inner else root
    return UPath(text) if "://" in text else Path(text)


@functools.lru_cache(maxsize=16)
def _open_archive(archive: Path, changed: int) -> UPath:
    """Returns the root of an archive, whose directory is read again only after a change."""
    return UPath("", protocol="zip", fo=str(archive))


def _archive_of(address: str) -> Path | None:
    """Returns the archive that an address points into, if any."""
    if "://" in address:
        return None
    path = Path(address)
    return next((p for p in (path, *path.parents) if p.name == ARCHIVE and p.is_file()), None)


def find_addresses(root: Path | str) -> list[str]:
    """Returns the addresses of the runs at or below `root`, and of those in archives named ARCHIVE.

    If `root` does not exist, finds the run of that name in the archive beside it. Warns about
    archives that cannot be read or that unpack to more than MAX_BYTES, and about runs without a
    config or status.
    """
    archive = _archive_of(str(root))
    start = Path() if archive else as_path(root)
    if isinstance(start, Path) and not start.exists() and (start.parent / ARCHIVE).is_file():
        inside = find_addresses(start.parent / ARCHIVE)
        return [address for address in inside if Path(address).name == start.name]
    addresses = [] if archive else [str(run) for run in read.find_runs(start)]
    is_folder = not archive and isinstance(start, Path)
    archives = sorted(start.glob(f"**/{ARCHIVE}")) if is_folder else [archive] if archive else []
    for path in archives:
        try:
            if not path.is_file():
                raise read.RecordFileError("it is not a regular file")
            with zipfile.ZipFile(path) as file:
                if sum(info.file_size for info in file.infolist()) > MAX_BYTES:
                    raise read.RecordFileError(f"it unpacks to more than {MAX_BYTES:,} bytes")
            inside = read.find_runs(as_path(root if archive else path))
            addresses += [f"{path}/{run.path}" for run in inside]
        except (*read.BAD_ARCHIVE, OSError, ValueError) as error:
            warnings.warn(f"{path}: left out: {error}", stacklevel=2)
    known = set(addresses)
    for path in sorted(start.glob("**/metrics.jsonl")) if is_folder else []:
        is_copy = read.is_copy(path.parts[len(start.parts) :])
        if not is_copy and str(path.parent) not in known:
            lacking = "it has no config.yaml or no status.json"
            warnings.warn(f"{path.parent}: left out: {lacking}", stacklevel=2)
    return addresses


def nearest_address(root: Path | str) -> str:
    """`; nearest: x`, as `nearest_path`, where x may also be a run in the archive of the folder."""
    path = Path(root)
    archive = _archive_of(str(root)) or path.parent / ARCHIVE
    if path.exists() or not archive.is_file():
        return nearest_path(path)
    runs = {Path(address).name: address for address in find_addresses(archive)}
    runs |= {sibling.name: str(sibling) for sibling in archive.parent.iterdir()}
    near = difflib.get_close_matches(path.name, runs, n=1, cutoff=0.6)
    return f"; nearest: {runs[near[0]]}" if near else nearest_path(path)


def flatten(config: dict, prefix: str = "") -> dict:
    """Flattens a nested config to dotted keys; lists become tuples of text, to group runs by."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = tuple(map(str, value)) if isinstance(value, list) else value
    return flat


DEFAULTS = flatten(asdict(Config()))
OF_RECORDS = DEFAULTS | flatten(REMOVED)  # old and new records have the same keys
IN_MAPS = tuple(f"{key}." for key in MAPS)  # beginnings of the keys of maps


def read_summary(address: str) -> dict:
    """Returns the status and the flat config of a run, with a note on damage.

    Keys that did not exist when the run was made have their defaults. `gpu` names every kind of GPU
    that the run used; `data.digest` and `init.digest` identify what its newest attempt read, or are
    "".
    """
    run = as_path(address)
    name, folder = run.resolve().name, run.resolve().parent.name
    status, faults = _guarded(_read_status, UNKNOWN, run)
    config, more = _guarded(_read_config, {"experiment": folder, "scale": None}, run)
    used, _ = _guarded(_read_attempts, UNUSED, run)
    facts = {"run": name, "digest": name.rpartition("-")[2], "path": address, **status}
    facts |= {"note": "; ".join(faults + more), **used}
    return facts | config | facts  # no key of a config replaces a fact


def _guarded(read_part: Callable, default: object, *args: object) -> tuple[object, list[str]]:
    """Returns what a reader returns: values, or None for the default, and notes.

    An unexpected error in one run must not prevent the others from being read.
    """
    try:
        values, notes = read_part(*args)
        return default if values is None else values, notes
    except Exception as error:
        return default, [f"the run cannot be read: {type(error).__name__}: {error}"[:200]]


def _read_status(run: Path) -> tuple[dict | None, list[str]]:
    try:
        status = read.read_status(run)
        status = {name: status[name] for name in UNKNOWN}
        if status["state"] in read.STATES and 0 <= status["step"] <= MAX_STEPS:
            return status, []
    except (OSError, ValueError, LookupError):
        pass
    return None, ["status.json is damaged"]


def _read_attempts(run: Path) -> tuple[dict, list[str]]:
    attempts, _ = read.scan_rows(run / "attempts.jsonl")
    sources = [row["sources"] for row in attempts if isinstance(row.get("sources"), dict)]
    newest = sources[-1] if sources else {}
    gpus = sorted({str(row["gpu"]) for row in attempts if row.get("gpu")})
    digests = [str(newest.get(name) or "")[:10] for name in ("data", "init_from")]
    return dict(zip(UNUSED, (*digests, " and ".join(gpus)), strict=True)), []


def _read_config(run: Path) -> tuple[dict | None, list[str]]:
    """Returns the flat config, or None if it is damaged, and what is wrong with it.

    Keys that the schema neither has nor had are left out.
    """
    fault = "config.yaml is damaged"
    try:
        written = flatten(read.read_yaml(run / "config.yaml"))
        wrong = [key for key in written if key in DEFAULTS and not _may_be(key, written[key])]
        if not wrong and all(key in written for key in REQUIRED):
            known = {k: v for k, v in written.items() if k in OF_RECORDS or k.startswith(IN_MAPS)}
            label = PrecisionConfig(*(known[key] for key in PRECISION)).label
            return {**OF_RECORDS, **known, "precision.label": label}, []
        fault += "".join(f": {key}={written[key]!r}"[:200] for key in wrong[:1])
    except (OSError, ValueError, AttributeError):  # no file, no YAML, no map
        pass
    return None, [fault]


def _may_be(key: str, value: object) -> bool:
    """Whether the schema allows a value, perhaps as the one item of what is a list now."""
    value = list(value) if isinstance(value, tuple) else value
    is_huge = isinstance(value, int | float) and abs(value) >= 1e12
    return not is_huge and (allows(key, value) or allows(key, [value]))


def read_row_file(summary: dict, name: str) -> tuple[list[dict], list[str]]:
    """Returns the undamaged rows of a run's .jsonl file, and a note on the damaged lines."""
    path = as_path(summary["path"]) / f"{name}.jsonl"
    rows, fault = read.scan_rows(path, TYPES.get(name))
    return rows, [f"{path.name}: {fault.removeprefix(f'{path}, ')}"] if fault else []


def read_tables(summary: dict) -> dict[str, tuple[pd.DataFrame, list[str]]]:
    """Returns the rows of each of a run's .jsonl files, and notes on damage."""

    def table(read_part: Callable, *args: object) -> tuple[pd.DataFrame, list[str]]:
        rows, notes = read_part(*args)
        return pd.DataFrame(rows).drop(columns="run", errors="ignore"), notes

    tables = {"metrics": _guarded(table, pd.DataFrame(), read_metrics, summary)}
    for name in TYPES:
        tables[name] = _guarded(table, pd.DataFrame(), read_row_file, summary, name)
    return tables


def read_metrics(summary: dict) -> tuple[list[dict], list[str]]:
    """Returns one row per step in order, and notes on damaged lines and repeated or missing steps.

    If a step has several rows, the last one counts: a later attempt wrote it.
    """
    rows, notes = read_row_file(summary, "metrics")
    largest = np.fmin(summary.get("num_steps", np.nan), MAX_GAP + 10 * len(rows))
    valid = [row for row in rows if _is_step_row(row, largest)]
    by_step = {row["step"]: row for row in valid}
    steps = sorted(by_step)
    last = summary["step"] if summary["state"] in read.ENDED else 0
    missing = max(last, *steps[-1:], 0) - len(steps)
    first = next((n for n, step in enumerate(steps, 1) if n != step), len(steps) + 1)
    for count, text in (
        (len(rows) - len(valid), "lines are not rows of a step"),
        (len(valid) - len(steps), "rows repeat a step"),
        (missing, f"steps are missing, first {first}"),
    ):
        notes += [f"metrics.jsonl: {count} {text}"] if count else []
    is_watched = summary.get("data.name") == "unknown" and summary["state"] == "finished"
    if is_watched and valid and all(math.isnan(row["loss"]) for row in valid):
        notes.append(NO_LOSS)
    return [by_step[step] for step in steps], notes


def _is_step_row(row: dict, largest: float) -> bool:
    has_both = read.METRICS.keys() <= row.keys() and type(row["step"]) is int
    are_numbers = all(type(value) in (int, float) for value in row.values())
    return has_both and are_numbers and 1 <= row["step"] <= largest


def compare_steps(summary: dict, steps: list[int]) -> list[str]:
    """Returns a note if a run's tensors cannot be read or lack any of `steps`, its metrics' steps.

    The last flush of a run that has not ended may be incomplete. A run that is kept without its
    tensors looks like one that lost all of them; both get the note NO_TENSORS.
    """
    interval = summary.get("diagnostics.every")
    if pd.isna(interval) or not summary["diagnostics.statistics"]:  # damaged, or not recorded
        return []
    steps = steps if summary["state"] in read.ENDED else steps[: -int(summary["log_every"])]
    try:
        recorded = _read_table(summary, "tensors", "", "")[0].get("step", [])
    except Exception as error:  # one run must not blind all
        return [f"tensors cannot be read: {error}"]
    expected = {step for step in steps if is_sampled(step, interval)}
    run = as_path(summary["path"])
    has_tensors = (run / "tensors.parquet").exists() or any(run.glob("tensors/*.arrows"))
    if expected and not has_tensors:
        return [NO_TENSORS]
    lacking = sorted(expected.difference(recorded))
    return [f"tensors: {len(lacking)} steps are missing, first {lacking[0]}"] if lacking else []


def read_tensor_columns(summary: dict, pattern: str, stat: str) -> tuple[pd.DataFrame, list[str]]:
    """Returns `step` and the matching tensors of a run, and all recorded `<statistic>/<tensor>`.

    Each statistic belongs to one of the run's tables; an unknown statistic gives no columns.
    """
    recorded = []
    for table in TABLES:
        frame, names = _read_table(summary, table, pattern, stat)
        recorded += names
        if any(name.startswith(f"{stat}/") for name in names):
            return frame, recorded
    return pd.DataFrame(), recorded


def _read_table(
    summary: dict, table: str, pattern: str, stat: str
) -> tuple[pd.DataFrame, list[str]]:
    """Returns `step` and the matching columns of one table, and the names of all its columns.

    A parquet file is the copy made when the run ended. If the run has continued since then, its
    streams hold more.
    """
    run = as_path(summary["path"])
    path, has_streams = run / f"{table}.parquet", any((run / table).glob("*.arrows"))
    if path.exists() and (summary["state"] in read.ENDED or not has_streams):
        whole, names = read_parquet(path, lambda name: fnmatchcase(name, f"{stat}/{pattern}"))
        return whole.to_pandas().rename(columns=lambda n: n.removeprefix(f"{stat}/")), names
    frames, tensors, columns, recorded = [], None, [], {}
    for steps, statistics, names in read_tensors(run, table):
        if names != tensors:  # another attempt; matching names at every flush would be slow
            tensors = names
            columns = [i for i, name in enumerate(names) if fnmatchcase(name, pattern)]
            seen = set()
        if new := statistics.keys() - seen:
            seen |= new
            recorded |= {f"{statistic}/{name}": None for statistic in new for name in names}
        values = statistics.get(stat, np.full((len(steps), len(names)), np.nan))[:, columns]
        frames.append(pd.DataFrame(values, steps, [names[i] for i in columns]))
    frame = pd.concat(frames).rename_axis("step").reset_index() if frames else pd.DataFrame()
    return frame, list(recorded)
