"""Reads the files of one run, and notes what is damaged or missing.

A damaged file makes no reader fail or hang: it is left out and named in the run's note.
"""

import functools
import warnings
import zipfile
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from upath import UPath

from lowprec.config.check import REMOVED, allows
from lowprec.config.schema import Config, PrecisionConfig, SpikeConfig
from lowprec.runs import read
from lowprec.runs.identity import to_dict
from lowprec.runs.read import UNREADABLE

TYPES = {
    "timing": {"attempt": int, "wall_s": float, "images_per_s": float, "data_wait": float},
    "events": {"step": int, "rms": dict},
}
ARCHIVE = "runs.zip"  # an archive of run directories, as experiments.compact writes
MAX_STEPS, MAX_GAP = 10**8, 10**5  # steps; those that a record may lack, and ten times its own
MAX_KEYS, MAX_DEPTH = 10_000, 100  # of a config
NO_TENSORS = "tensors are not there"
UNKNOWN = {"state": "unknown", "step": 0, "reason": ""}  # a status that cannot be read
PRECISION = ("precision.autocast", "precision.recipe")
TEXTS = ("experiment", "scale", "model.name", "optimizer.name", *PRECISION)
NUMBERS = (  # tables and figures compute with these, and group by the texts
    *("seed", "num_steps", "batch_size", "model.vision_layers", "log_every", "diagnostics.every"),
    *("optimizer.lr", "optimizer.beta2", "optimizer.beta2_decay", "schedule.warmup_steps"),
    *(f"diagnostics.spikes.{name.name}" for name in fields(SpikeConfig) if name.name != "protocol"),
)
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
    archives that cannot be read or that unpack to more than MAX_BYTES.
    """
    archive = _archive_of(str(root))
    start = Path() if archive else as_path(root)
    if isinstance(start, Path) and not start.exists() and (start.parent / ARCHIVE).is_file():
        inside = find_addresses(start.parent / ARCHIVE)
        return [address for address in inside if Path(address).name == start.name]
    addresses = [] if archive else [str(run) for run in read.find_runs(start)]
    if archive:
        archives = [archive]
    else:
        archives = sorted(start.glob(f"**/{ARCHIVE}")) if isinstance(start, Path) else []
    for path in archives:
        try:
            if not path.is_file():
                raise read.RecordFileError("it is not a regular file")
            with zipfile.ZipFile(path) as file:
                if sum(info.file_size for info in file.infolist()) > read.MAX_BYTES:
                    raise read.RecordFileError(f"it unpacks to more than {read.MAX_BYTES:,} bytes")
            inside = read.find_runs(as_path(root if archive else path))
            addresses += [f"{path}/{run.path}" for run in inside]
        except (*read.BAD_ARCHIVE, OSError, ValueError) as error:
            warnings.warn(f"{path}: left out: {error}", stacklevel=2)
    return addresses


def flatten(config: dict, prefix: str = "") -> dict:
    """Flattens a nested config to dotted keys; lists become tuples, so that runs can be grouped.

    Raises ValueError for more than MAX_KEYS, since YAML aliases can nest a group in itself.
    """
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = tuple(value) if isinstance(value, list) else value
        if len(flat) > MAX_KEYS:
            raise ValueError(f"more than {MAX_KEYS:,} keys")
    return flat


DEFAULTS = flatten(to_dict(Config()))


def read_summary(address: str) -> dict:
    """Returns the status and the flat config of a run, with a note on damage.

    Keys that did not exist when the run was made have their defaults. `gpu` names every kind of GPU
    that the run used; `data.digest` and `init.digest` identify what its newest attempt read, or are
    "". A run that cannot be read for a reason that nobody thought of looks like one whose files are
    all damaged: other runs can still be read.
    """
    try:
        return _read_summary(address)
    except Exception as error:
        name, nothing = Path(address).name, dict.fromkeys(("data.digest", "init.digest", "gpu"), "")
        facts = {"run": name, "digest": name.rpartition("-")[2], "path": address, **UNKNOWN}
        return {**facts, "note": _unread(error), **nothing, **_without_config(Path(address))}


def _unread(error: Exception) -> str:
    return f"the run cannot be read: {type(error).__name__}: {error}"[:200]


def _read_summary(address: str) -> dict:
    run, notes = as_path(address), []
    try:
        status = read.read_status(run)
        status = {name: status[name] for name in ("state", "step", "reason")}
        if status["state"] not in read.STATES or not 0 <= status["step"] <= MAX_STEPS:
            raise ValueError
    except (OSError, ValueError, LookupError):
        status = UNKNOWN
        notes.append("status.json is damaged")
    config, fault = _read_config(run)
    notes += [fault] if fault else []
    attempts, _ = read_row_file({"path": address}, "attempts")
    sources = [row["sources"] for row in attempts if isinstance(row.get("sources"), dict)]
    newest = sources[-1] if sources else {}
    name = run.resolve().name
    facts = {
        "run": name,
        "digest": name.rpartition("-")[2],
        "path": address,
        **status,
        "note": "; ".join(notes),
        "data.digest": str(newest.get("data") or "")[:10],
        "init.digest": str(newest.get("init_from") or "")[:10],
        "gpu": " and ".join(sorted({str(row["gpu"]) for row in attempts if row.get("gpu")})),
    }
    return facts | config | facts  # no key of a config replaces a fact


def read_row_file(summary: dict, name: str) -> tuple[list[dict], list[str]]:
    """Returns the undamaged rows of a run's .jsonl file, and a note on the damaged lines."""
    path = as_path(summary["path"]) / f"{name}.jsonl"
    rows, faults = read.scan_rows(path, TYPES.get(name))
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    return rows, [f"{path.name}: {fault.removeprefix(f'{path}, ')}{more}" for fault in faults[:1]]


def read_tables(summary: dict) -> dict[str, tuple[pd.DataFrame, list[str]]]:
    """Returns the rows of each of a run's .jsonl files, and notes on damage.

    A run that cannot be read for a reason that nobody thought of has a note and no rows: other runs
    can still be read.
    """
    try:
        rows = {"metrics": read_metrics(summary)}
        rows |= {name: read_row_file(summary, name) for name in ("timing", "events")}
        return {name: (pd.DataFrame(part), notes) for name, (part, notes) in rows.items()}
    except Exception as error:
        nothing = {name: (pd.DataFrame(), []) for name in ("timing", "events")}
        return {"metrics": (pd.DataFrame(), [_unread(error)]), **nothing}


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
    return [by_step[step] for step in steps], notes


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
    expected = {step for step in steps if read.is_sampled(step, interval)}
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
    for table in read.TABLES:
        frame, names = _read_table(summary, table, pattern, stat)
        recorded += names
        if any(name.startswith(f"{stat}/") for name in names):
            return frame, recorded
    return pd.DataFrame(), recorded


def _read_config(run: Path) -> tuple[dict, str]:
    """Returns the flat config and what is wrong with it.

    A damaged config is replaced by its experiment's name, that of the folder.
    """
    fault = "config.yaml is damaged"
    try:
        written = flatten(_parse_yaml(read.read_file(run / "config.yaml")))
        config = DEFAULTS | REMOVED | written  # both kinds of records have the same keys
        wrong = [key for key in (*TEXTS, *NUMBERS) if not _is_of_its_type(key, config[key])]
        wrong += [key for key, value in written.items() if not _fits_a_table(key, value)]
        if all(key in written for key in TEXTS) and not wrong:
            label = PrecisionConfig(*(config[key] for key in PRECISION)).label
            return {**config, "precision.label": label}, ""
        fault += "".join(f": {key}={config[key]!r}"[:200] for key in wrong[:1])
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, yaml.YAMLError):
        pass
    return _without_config(run), fault


def _without_config(run: Path) -> dict:
    return {"experiment": run.resolve().parent.name, "scale": None}


def _parse_yaml(data: bytes) -> object:
    """Parses plain data; raises ValueError beyond MAX_DEPTH, where parsing overflows the stack."""
    depth = 0
    for event in yaml.parse(data, _YAML):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
    return yaml.load(data, _YAML)


def _is_of_its_type(key: str, value: object) -> bool:
    if key in TEXTS:
        return isinstance(value, str) or value is None and DEFAULTS[key] is None
    return allows(key, value) and not abs(value or 0) >= 1e12


def _fits_a_table(key: str, value: object) -> bool:
    """Whether a column can hold a value: no number beyond 64 bits, no list for a value or group."""
    if isinstance(value, tuple) and key in DEFAULTS:
        return allows(key, list(value))
    if isinstance(value, tuple):
        return not any(name.startswith(f"{key}.") for name in DEFAULTS)
    return type(value) is not int or abs(value) < 2**63


def _is_step_row(row: dict, largest: float) -> bool:
    step = row.get("step")
    in_range = type(step) is int and 1 <= step <= largest
    return in_range and all(
        type(value) is float or type(value) is int and abs(value) < 2**63 for value in row.values()
    )


def _read_table(
    summary: dict, table: str, pattern: str, stat: str
) -> tuple[pd.DataFrame, list[str]]:
    """Returns `step` and the matching columns of one table, and the names of all its columns.

    A parquet file is the copy made when the run ended. If the run has continued since then, its
    streams hold more; they also replace a parquet file that cannot be read.
    """
    run = as_path(summary["path"])
    path, has_streams = run / f"{table}.parquet", any((run / table).glob("*.arrows"))
    if path.exists() and (summary["state"] in read.ENDED or not has_streams):
        try:
            return _read_parquet(path, pattern, stat)
        except UNREADABLE:
            if not has_streams:
                raise
    return _read_streams(run, table, pattern, stat)


def _read_parquet(path: Path, pattern: str, stat: str) -> tuple[pd.DataFrame, list[str]]:
    """Reads the footer, which lists thousands of columns, only once; then the matching columns."""
    if not path.is_file():
        raise read.RecordFileError(f"{path} is not a regular file")
    # without a cache, only the requested bytes come over the network
    source = path if isinstance(path, Path) else path.open("rb", cache_type="none")
    with pq.ParquetFile(source, pre_buffer=True) as file:
        names = [name for name in file.schema_arrow.names if name != "step"]
        columns = ["step", *(n for n in names if fnmatchcase(n, f"{stat}/{pattern}"))]
        read.refuse_columns(file.schema_arrow, pa.types.is_floating)
        unpacked, size = 8 * file.metadata.num_rows * len(columns), path.stat().st_size
        if unpacked > read.ROOM + read.UNPACKED * size:
            raise ValueError(f"{path} has {size:,} bytes, which unpack to {unpacked:,}")
        frame = file.read(columns=columns, use_threads=False).to_pandas()
    return frame.rename(columns=lambda name: name.removeprefix(f"{stat}/")), names


def _read_streams(run: Path, table: str, pattern: str, stat: str) -> tuple[pd.DataFrame, list[str]]:
    frames, tensors, columns, recorded = [], None, [], {}
    for steps, statistics, names in read.read_tensors(run, table):
        if names != tensors:  # another attempt; matching names at every flush would be slow
            tensors = names
            columns = [i for i, name in enumerate(names) if fnmatchcase(name, pattern)]
            recorded |= {f"{statistic}/{name}": None for statistic in statistics for name in names}
        values = statistics.get(stat, np.empty((len(steps), len(names))))[:, columns]
        frames.append(pd.DataFrame(values, steps, [names[i] for i in columns]))
    frame = pd.concat(frames).rename_axis("step").reset_index() if frames else pd.DataFrame()
    return frame, list(recorded)
