"""Runs as tidy tables: `load_runs(root)` reads every run directory at or below a folder.

`root` may be a URL that fsspec can open (`s3://bucket/runs`). A run that is unfinished, was killed
or is damaged loads with its good rows and a note that says what is missing. Files are read when a
table is first accessed.
"""

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from upath import UPath

from lowprec.config.schema import Config, PrecisionConfig, SpikeConfig
from lowprec.runs.identity import to_dict
from lowprec.runs.read import (
    ENDED,
    STATES,
    TABLES,
    find_runs,
    read_status,
    read_tensors,
    scan_rows,
)

ROW_FILES = ("metrics", "timing", "events")
EXPERIMENTS = Path(__file__).parents[1] / "conf" / "experiment"
TEXT_KEYS = ("model.name", "optimizer.name", "precision.autocast", "precision.recipe")
REQUIRED_KEYS = ("experiment", "scale", "seed", "num_steps", *TEXT_KEYS)  # needed to name a run
NUMBERS = (  # tables and figures calculate with these
    *("seed", "num_steps", "batch_size", "model.vision_layers"),
    *("optimizer.lr", "optimizer.beta2", "optimizer.beta2_decay"),
    *(f"diagnostics.spikes.{name.name}" for name in fields(SpikeConfig) if name.name != "protocol"),
)
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class NoRunsError(LookupError):
    """No run matches; the message lists what exists and the command that makes the rest."""


class Runs:
    """The records of runs as tables that share the column `run`, a run directory's name.

    `summaries` has one row per run, from its status and config alone; `root` is the folder or URL.
    """

    def __init__(self, summaries: pd.DataFrame, root: Path | str | None = None):
        self.summaries, self.root = summaries.reset_index(drop=True), root

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.summaries)

    def __repr__(self) -> str:
        """Number of runs, their states and their experiments."""
        states = self.summaries["state"].value_counts()
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        return f"{len(self)} runs ({counts}) of {_experiments(self.summaries)}"

    def only(self, run: str) -> "Runs":
        """One run by name; no other run's files are read."""
        return Runs(self.summaries[self.summaries["run"] == run])

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row per run: run, digest, path, state, step, reason, note, dotted config keys.

        `note` is empty if the run has ended and its files are whole. `precision.label` is the
        recipe's name or, for recipe `high`, the autocast dtype.
        """
        last = self.metrics.groupby("run")["step"].max()
        notes = []
        for summary in self.summaries.to_dict("records"):
            parts = [summary["note"]]
            if summary["state"] not in ENDED:
                total = summary.get("num_steps", np.nan)
                of_total = "" if pd.isna(total) else f" of {int(total)}"
                parts.append(f"{summary['state']}: {last.get(summary['run'], 0)}{of_total} steps")
            parts += [self._row_files[name][1][summary["run"]] for name in ROW_FILES]
            notes.append("; ".join(filter(None, parts)))
        return self.summaries.assign(note=notes)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per step: run, step, loss, lr, ...; evaluations are in the row of their step."""
        return self._row_files["metrics"][0]

    @cached_property
    def timing(self) -> pd.DataFrame:
        """One row per step: run, step and values that depend on the machine."""
        return self._row_files["timing"][0]

    @cached_property
    def events(self) -> pd.DataFrame:
        """One row per event: run, step and the event's fields."""
        return self._row_files["events"][0]

    def tensors(self, pattern: str, stat: str = "rms") -> pd.DataFrame:
        """One row per recorded step: run, step and a column for each tensor that matches a glob.

        A file of tensors that cannot be read is left out with a warning. Raises LookupError if no
        tensor of any run matches.
        """
        frames, known = [], set()
        summaries = self.summaries.to_dict("records")
        with ThreadPoolExecutor() as pool:
            results = list(pool.map(lambda row: _try_columns(row, pattern, stat), summaries))
        for summary, (frame, names, error) in zip(summaries, results, strict=True):
            if error is not None:
                warnings.warn(f"{summary['path']}: tensors left out: {error}", stacklevel=2)
            known.update(names)
            if len(frame.columns) > 1:
                frame.insert(0, "run", summary["run"])
                frames.append(frame)
        if frames:
            return pd.concat(frames, ignore_index=True)
        stats = ", ".join(sorted({name.partition("/")[0] for name in known})) or "none"
        tensors = sorted({name.partition("/")[2] for name in known})
        raise LookupError(
            f"no tensor matches {pattern!r} with stat={stat!r}; recorded statistics: {stats}; "
            f"{len(tensors)} tensors, such as: {', '.join(tensors[:6]) or 'none'}"
        )

    def series(self, name: str, stat: str) -> pd.Series:
        """One statistic of one tensor or block by step, for a single run; empty if not recorded."""
        try:
            frame = self.tensors(name, stat)
        except LookupError:
            return pd.Series(dtype=float, index=pd.Index([], name="step", dtype=int))
        return frame.drop_duplicates("step", keep="last").set_index("step")[name].astype(float)

    @cached_property
    def _row_files(self) -> dict[str, tuple[pd.DataFrame, dict[str, str]]]:
        """For each .jsonl file: the rows of all runs, and a note on damage by run."""
        return {name: self._read_row_files(name) for name in ROW_FILES}

    def _read_row_files(self, name: str) -> tuple[pd.DataFrame, dict[str, str]]:
        frames, notes = [], {}
        for summary in self.summaries.to_dict("records"):
            path = as_path(summary["path"]) / f"{name}.jsonl"
            if name == "metrics":
                last = summary["step"] if summary["state"] in ENDED else None
                rows, faults = read_metrics(path, summary.get("num_steps", np.nan), last)
            else:
                rows, faults = read_row_file(path)
            notes[summary["run"]] = "; ".join(faults)
            if rows:
                frames.append(pd.DataFrame(rows))
                frames[-1].insert(0, "run", summary["run"])
        empty = pd.DataFrame(columns=["run", "step", *(["loss"] if name == "metrics" else [])])
        return (pd.concat(frames, ignore_index=True) if frames else empty), notes


def load_runs(root: Path | str, *, experiment: str | None = None, scale: str | None = None) -> Runs:
    """Loads the runs at or below `root`, a folder of runs or one run directory, by path or URL.

    A run whose config is damaged belongs to the experiment that its folder is named after, and
    matches any `scale`. Raises NoRunsError if nothing matches.
    """
    folders = find_runs(as_path(root))
    if not folders:
        example = command(experiment or "loss_curves", scale)
        raise NoRunsError(f"{root}: no runs at or below this folder; to make some: {example}")
    with ThreadPoolExecutor() as pool:  # hides the latency of a server
        summaries = pd.DataFrame(list(pool.map(read_summary, folders)))
    copied = summaries["run"].duplicated(keep=False)
    summaries.loc[copied, "run"] = summaries.loc[copied, "path"]
    matches = (experiment is None) | (summaries["experiment"] == experiment)
    matches &= (scale is None) | (summaries["scale"] == scale) | summaries["scale"].isna()
    if not matches.any():
        query = f"experiment={experiment}" if experiment else "any experiment"
        query += f" at scale={scale}" if scale else ""
        raise NoRunsError(
            f"{root}: no runs of {query}; there are {_experiments(summaries)}; "
            f"to make them: {command(experiment or 'loss_curves', scale)}"
        )
    return Runs(summaries[matches], root)


def command(experiment: str, scale: str | None = None) -> str:
    """The command that makes an experiment's runs, at its smallest scale if none is given."""
    names = {path.stem for path in EXPERIMENTS.glob(f"{experiment}*.yaml")}
    demo, mini = f"{experiment}_demo", f"{experiment}_mini"
    order = (f"{experiment}_{scale}", experiment, mini) if scale else (demo, mini, experiment)
    name = next((name for name in order if name in names), experiment)
    return f"python -m experiments.train -m experiment={name}"


def as_path(address: Path | str) -> Path:
    """A file or folder by its path, or by a URL that fsspec can open (`s3://bucket/runs`)."""
    return UPath(address) if "://" in str(address) else Path(address)


def flatten(config: dict, prefix: str = "") -> dict:
    """Nested config as dotted keys; lists become tuples, so that runs can be grouped by them."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = tuple(value) if isinstance(value, list) else value
    return flat


DEFAULTS = flatten(to_dict(Config()))


def read_summary(run: Path) -> dict:
    """The status and flat config of a run.

    Keys that did not exist when the run was made have their defaults.
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
    config, fault = _read_config(run)
    if fault:
        notes.append(fault)
    elif status["state"] in ENDED and status["step"] and config["diagnostics.statistics"]:
        notes += filter(None, [_tensor_fault(run)])
    name = run.resolve().name
    return {
        "run": name,
        "digest": name.rpartition("-")[2],
        "path": str(run),
        **status,
        "note": "; ".join(notes),
        **_attempt_facts(run),
        **config,
    }


def _attempt_facts(run: Path) -> dict[str, str]:
    """`data.digest` and `init.digest` of what the newest attempt read; `gpu`, all kinds used.

    Each is "" if the run does not record it.
    """
    rows, _ = read_row_file(run / "attempts.jsonl")
    sources = [row["sources"] for row in rows if isinstance(row.get("sources"), dict)]
    digests = {"data.digest": "data", "init.digest": "init_from"}
    newest = sources[-1] if sources else {}
    facts = {name: str(newest.get(role) or "")[:10] for name, role in digests.items()}
    kinds = sorted({str(row["gpu"]) for row in rows if row.get("gpu")})
    return {**facts, "gpu": " and ".join(kinds)}


def read_row_file(path: Path) -> tuple[list[dict], list[str]]:
    """Undamaged rows of a .jsonl file, and a note on the damaged lines."""
    try:
        rows, faults = scan_rows(path)
    except OSError as error:
        return [], [f"{path.name} cannot be read: {error.strerror or error}"]
    if not faults:
        return rows, []
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    return rows, [f"{path.name}: {faults[0].removeprefix(f'{path}, ')}{more}"]


def read_metrics(path: Path, num_steps: float, last: int | None) -> tuple[list[dict], list[str]]:
    """One row per step in order, and notes on damaged lines and on repeated and missing steps.

    Args:
        path: metrics.jsonl. If a step has several rows, the last one counts: a later attempt
            wrote it.
        num_steps: from the config; NaN if the config is damaged.
        last: step at which the run ended; None while it has not.
    """
    rows, notes = read_row_file(path)
    valid = [row for row in rows if _is_step_row(row, num_steps)]
    by_step, repeated = {}, []
    for row in valid:
        if row["step"] in by_step:
            repeated.append(row["step"])
        by_step[row["step"]] = row
    steps = sorted(by_step)
    if len(valid) < len(rows):
        notes.append(f"{path.name}: {len(rows) - len(valid)} lines are not rows of a step")
    if repeated:
        notes.append(f"{path.name}: {len(repeated)} rows repeat a step, first step {repeated[0]}")
    missing = max(last or 0, *steps[-1:], 0) - len(steps)
    if missing:
        first = next((n for n, step in enumerate(steps, 1) if n != step), len(steps) + 1)
        notes.append(f"{path.name}: {missing} steps are missing, first {first}")
    return [by_step[step] for step in steps], notes


def read_tensor_columns(
    run: Path, state: str, pattern: str, stat: str
) -> tuple[pd.DataFrame, list[str]]:
    """Column `step` and the matching tensors, and all recorded names `<statistic>/<tensor>`.

    Each statistic belongs to one of the run's tables; an unknown one gives no columns. A parquet
    file is the copy made when a run ended: the streams of a run that continued since then hold
    more, and they replace a parquet file that cannot be read.
    """
    known = []
    for table in TABLES:
        path, has_streams = run / f"{table}.parquet", any((run / table).glob("*.arrows"))
        is_copy_current = path.exists() and (state in ENDED or not has_streams)
        try:
            read = _read_parquet if is_copy_current else _read_streams
            frame, names = read(run, table, pattern, stat)
        except (pa.ArrowException, OSError):
            if not is_copy_current or not has_streams:
                raise
            frame, names = _read_streams(run, table, pattern, stat)
        known += names
        if any(name.startswith(f"{stat}/") for name in names):
            return frame, known
    return pd.DataFrame({"step": []}), known


def _experiments(summaries: pd.DataFrame) -> str:
    """`loss_curves (demo, paper), fp8_fixes (mini)`."""
    experiments = summaries["experiment"].fillna("(no experiment)")
    scales = summaries["scale"].fillna("unknown scale").groupby(experiments).unique()
    return ", ".join(f"{name} ({', '.join(sorted(each))})" for name, each in scales.items())


def _read_config(run: Path) -> tuple[dict, str]:
    """The flat config and what is wrong with it; a damaged one is replaced by its folder's name."""
    faults = []
    try:
        config = flatten(yaml.load((run / "config.yaml").read_text(), _YAML))
        is_damaged = any(name not in config for name in REQUIRED_KEYS)
        faults = [] if is_damaged else _config_faults(config)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, yaml.YAMLError):
        is_damaged = True
    if is_damaged or faults:
        fault = ": ".join(["config.yaml is damaged", *faults[:1]])
        return {"experiment": run.resolve().parent.name, "scale": None}, fault
    precision = PrecisionConfig(config["precision.autocast"], config["precision.recipe"])
    return {**DEFAULTS, **config, "precision.label": precision.label}, ""


def _config_faults(config: dict) -> list[str]:
    """A sentence for each value of the wrong type among the keys that tables and figures use."""
    texts = {name: config[name] for name in TEXT_KEYS}
    texts |= {name: config[name] or "" for name in ("experiment", "scale")}  # null: of no study
    faults = [f"{k}={v!r}: text is expected" for k, v in texts.items() if not isinstance(v, str)]
    for name in NUMBERS:
        value = config.get(name, DEFAULTS.get(name))
        optional = value is None and DEFAULTS.get(name) is None
        if not optional and (isinstance(value, bool) or not isinstance(value, int | float)):
            faults.append(f"{name}={value!r}: a number is expected")
    return faults


def _tensor_fault(run: Path) -> str:
    """A note if an ended run has no tensors; its streams can replace a missing file."""
    exists = (run / "tensors.parquet").exists() or any((run / "tensors").glob("*.arrows"))
    return "" if exists else "tensors.parquet is missing"


def _is_step_row(row: dict, num_steps: float) -> bool:
    step = row.get("step")
    in_range = type(step) is int and step >= 1 and not step > num_steps
    return in_range and all(type(value) in (int, float) for value in row.values())


def _try_columns(summary: dict, pattern: str, stat: str) -> tuple[pd.DataFrame, list[str], object]:
    """Like `read_tensor_columns`, but also returns the error if the file cannot be read."""
    try:
        path = as_path(summary["path"])
        return *read_tensor_columns(path, summary["state"], pattern, stat), None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        return pd.DataFrame(), [], error


def _read_parquet(run: Path, table: str, pattern: str, stat: str) -> tuple[pd.DataFrame, list[str]]:
    """Reads the footer, which lists thousands of columns, once, and then the matching columns."""
    path = run / f"{table}.parquet"
    # without a cache only the requested bytes come over the network
    source = path if isinstance(path, Path) else path.open("rb", cache_type="none")
    with pq.ParquetFile(source, pre_buffer=True) as file:
        names = [name for name in file.schema_arrow.names if name != "step"]
        matching = [name for name in names if fnmatchcase(name, f"{stat}/{pattern}")]
        frame = file.read(columns=["step", *matching], use_threads=False).to_pandas()
    return frame.rename(columns=lambda name: name.removeprefix(f"{stat}/")), names


def _read_streams(run: Path, table: str, pattern: str, stat: str) -> tuple[pd.DataFrame, list[str]]:
    tensors, matching, known = None, [], []
    parts: dict[tuple[str, ...], list] = {}  # attempts may record different tensors
    for steps, statistics, names in read_tensors(run, table):
        if names != tensors:  # matching at every flush would be slow
            tensors = names
            matching = [i for i, name in enumerate(names) if fnmatchcase(name, pattern)]
            known = [f"{statistic}/{name}" for statistic in statistics for name in names]
        if stat in statistics and matching:
            columns = tuple(names[i] for i in matching)
            parts.setdefault(columns, []).append((steps, statistics[stat][:, matching]))
    frames = []
    for columns, flushes in parts.items():
        steps, values = (np.concatenate(part) for part in zip(*flushes, strict=True))
        frames.append(pd.DataFrame(values, columns=list(columns)))
        frames[-1].insert(0, "step", steps)
    return (pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"step": []})), known
