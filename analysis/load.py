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
from lowprec.runs.read import ENDED, STATES, TABLES, find_runs, read_status, read_tensors, scan_rows

ROW_FILES = ("metrics", "timing", "events")
EXPERIMENTS = Path(__file__).parents[1] / "conf" / "experiment"
PRECISION = ("precision.autocast", "precision.recipe")
TEXTS = ("experiment", "scale", "model.name", "optimizer.name", *PRECISION)
NUMBERS = (  # tables and figures calculate with these, and group by the texts
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
        return len(self.summaries)

    def __repr__(self) -> str:
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
        notes = []
        for i, summary in enumerate(self.summaries.to_dict("records")):
            parts = [summary["note"]]
            if summary["state"] not in ENDED:
                rows, total = self._rows["metrics"][i][0], summary.get("num_steps")
                of_total = "" if pd.isna(total) else f" of {int(total)}"
                reached = rows[-1]["step"] if rows else 0
                parts.append(f"{summary['state']}: {reached}{of_total} steps")
            parts += [note for name in ROW_FILES for note in self._rows[name][i][1]]
            notes.append("; ".join(filter(None, parts)))
        return self.summaries.assign(note=notes)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per step: run, step, loss, lr, ...; evaluations are in the row of their step."""
        return self._table("metrics", "loss")

    @cached_property
    def timing(self) -> pd.DataFrame:
        """One row per step: run, step and values that depend on the machine."""
        return self._table("timing")

    @cached_property
    def events(self) -> pd.DataFrame:
        """One row per event: run, step and the event's fields."""
        return self._table("events")

    def tensors(self, pattern: str, stat: str = "rms") -> pd.DataFrame:
        """One row per recorded step: run, step and a column for each tensor that matches a glob.

        A file of tensors that cannot be read is left out with a warning. Raises LookupError if no
        tensor of any run matches.
        """
        known, frames = set(), []
        for summary in self.summaries.to_dict("records"):
            try:
                frame, names = read_tensor_columns(summary, pattern, stat)
            except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
                warnings.warn(f"{summary['path']}: tensors left out: {error}", stacklevel=2)
                continue
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
    def _rows(self) -> dict[str, list[tuple[list[dict], list[str]]]]:
        """For each of ROW_FILES: the rows of each run, and notes on damage."""
        runs = self.summaries.to_dict("records")
        return {
            "metrics": [read_metrics(run) for run in runs],
            **{name: [read_row_file(run, name) for run in runs] for name in ("timing", "events")},
        }

    def _table(self, name: str, *columns: str) -> pd.DataFrame:
        frames = [pd.DataFrame(columns=["run", "step", *columns])]
        for run, (rows, _) in zip(self.summaries["run"], self._rows[name], strict=True):
            if rows:
                frames.append(pd.DataFrame(rows))
                frames[-1].insert(0, "run", run)
        return pd.concat(frames[1:] or frames, ignore_index=True)


def load_runs(root: Path | str, *, experiment: str | None = None, scale: str | None = None) -> Runs:
    """Loads the runs at or below `root`, a folder of runs or one run directory, by path or URL.

    A run whose config is damaged belongs to the experiment that its folder is named after, and
    matches any `scale`. Raises NoRunsError if nothing matches.
    """
    to_make = f"to make some: {command(experiment or 'loss_curves', scale)}"
    folders = find_runs(as_path(root))
    if not folders:
        raise NoRunsError(f"{root}: no runs at or below this folder; {to_make}")
    with ThreadPoolExecutor() as pool:  # hides the latency of a server
        summaries = pd.DataFrame(list(pool.map(read_summary, folders)))
    copied = summaries["run"].duplicated(keep=False)
    summaries.loc[copied, "run"] = summaries.loc[copied, "path"]
    matches = (experiment is None) | (summaries["experiment"] == experiment)
    matches &= (scale is None) | (summaries["scale"] == scale) | summaries["scale"].isna()
    if not matches.any():
        query = f"experiment={experiment or 'any'} and scale={scale or 'any'}"
        there = _experiments(summaries)
        raise NoRunsError(f"{root}: no runs with {query}; there are {there}; {to_make}")
    return Runs(summaries[matches], root)


def command(experiment: str, scale: str | None = None) -> str:
    """The command that makes an experiment's runs, at its smallest scale if none is given."""
    names = [f"{experiment}_{each}" for each in ([scale] if scale else ["demo", "mini"])]
    name = next((n for n in names if (EXPERIMENTS / f"{n}.yaml").exists()), experiment)
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
    """The status and flat config of a run, and a note on damage.

    Keys that did not exist when the run was made have their defaults. `gpu` names all kinds that
    the run used; `data.digest` and `init.digest` are of what its newest attempt read, or "".
    """
    notes = []
    try:
        status = read_status(run)
        status = {name: status[name] for name in ("state", "step", "reason")}
        if status["state"] not in STATES or type(status["step"]) is not int:
            raise ValueError
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        status = {"state": "unknown", "step": 0, "reason": ""}
        notes.append("status.json is damaged")
    config, fault = _read_config(run)
    notes += [fault] if fault else []
    if status["state"] in ENDED and status["step"] and config.get("diagnostics.statistics"):
        has_streams = any((run / "tensors").glob("*.arrows"))  # which can replace the file
        if not has_streams and not (run / "tensors.parquet").exists():
            notes.append("tensors.parquet is missing")
    attempts, _ = read_row_file({"path": run}, "attempts")
    sources = [row["sources"] for row in attempts if isinstance(row.get("sources"), dict)]
    newest = sources[-1] if sources else {}
    name = run.resolve().name
    return {
        "run": name,
        "digest": name.rpartition("-")[2],
        "path": str(run),
        **status,
        "note": "; ".join(notes),
        "data.digest": str(newest.get("data") or "")[:10],
        "init.digest": str(newest.get("init_from") or "")[:10],
        "gpu": " and ".join(sorted({str(row["gpu"]) for row in attempts if row.get("gpu")})),
        **config,
    }


def read_row_file(summary: dict, name: str) -> tuple[list[dict], list[str]]:
    """Undamaged rows of a .jsonl file of a run, and a note on the damaged lines."""
    path = as_path(summary["path"]) / f"{name}.jsonl"
    try:
        rows, faults = scan_rows(path)
    except OSError as error:
        return [], [f"{path.name} cannot be read: {error.strerror or error}"]
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    return rows, [f"{path.name}: {fault.removeprefix(f'{path}, ')}{more}" for fault in faults[:1]]


def read_metrics(summary: dict) -> tuple[list[dict], list[str]]:
    """One row per step in order, and notes on damaged lines and on repeated and missing steps.

    If a step has several rows, the last one counts: a later attempt wrote it.
    """
    rows, notes = read_row_file(summary, "metrics")
    valid = [row for row in rows if _is_step_row(row, summary.get("num_steps", np.nan))]
    by_step = {row["step"]: row for row in valid}
    steps = sorted(by_step)
    last = summary["step"] if summary["state"] in ENDED else 0
    missing = max(last, *steps[-1:], 0) - len(steps)
    first = next((n for n, step in enumerate(steps, 1) if n != step), len(steps) + 1)
    for count, text in (
        (len(rows) - len(valid), "lines are not rows of a step"),
        (len(valid) - len(steps), "rows repeat a step"),
        (missing, f"steps are missing, first {first}"),
    ):
        notes += [f"metrics.jsonl: {count} {text}"] if count else []
    return [by_step[step] for step in steps], notes


def read_tensor_columns(summary: dict, pattern: str, stat: str) -> tuple[pd.DataFrame, list[str]]:
    """Column `step` and the matching tensors of a run, and all recorded `<statistic>/<tensor>`.

    Each statistic belongs to one of the run's tables; an unknown one gives no columns. A parquet
    file is the copy made when a run ended: the streams of a run that continued since then hold
    more, and they replace a parquet file that cannot be read.
    """
    run, known = as_path(summary["path"]), []
    for table in TABLES:
        has_streams = any((run / table).glob("*.arrows"))
        try:
            if has_streams and summary["state"] not in ENDED:
                raise FileNotFoundError  # the copy, if there is one, is older than the streams
            frame, names = _read_parquet(run / f"{table}.parquet", pattern, stat)
        except (pa.ArrowException, OSError) as error:
            if not has_streams and not isinstance(error, FileNotFoundError):
                raise
            frame, names = _read_streams(run, table, pattern, stat)
        known += names
        if any(name.startswith(f"{stat}/") for name in names):
            return frame, known
    return pd.DataFrame(), known


def _experiments(summaries: pd.DataFrame) -> str:
    """`loss_curves (demo, paper), fp8_fixes (mini)`."""
    experiments = summaries["experiment"].fillna("(no experiment)")
    scales = summaries["scale"].fillna("unknown scale").groupby(experiments).unique()
    return ", ".join(f"{name} ({', '.join(sorted(each))})" for name, each in scales.items())


def _read_config(run: Path) -> tuple[dict, str]:
    """The flat config and what is wrong with it; a damaged one is replaced by its folder's name."""
    fault = "config.yaml is damaged"
    try:
        written = flatten(yaml.load((run / "config.yaml").read_text(), _YAML))
        config = DEFAULTS | written
        wrong = [key for key in (*TEXTS, *NUMBERS) if not _is_of_its_type(key, config[key])]
        if all(key in written for key in TEXTS) and not wrong:
            label = PrecisionConfig(*(config[key] for key in PRECISION)).label
            return {**config, "precision.label": label}, ""
        fault += "".join(f": {key}={config[key]!r}" for key in wrong[:1])
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, yaml.YAMLError):
        pass
    return {"experiment": run.resolve().parent.name, "scale": None}, fault


def _is_of_its_type(key: str, value: object) -> bool:
    if value is None:
        return DEFAULTS[key] is None
    return isinstance(value, str if key in TEXTS else int | float) and not isinstance(value, bool)


def _is_step_row(row: dict, num_steps: float) -> bool:
    step = row.get("step")
    in_range = type(step) is int and step >= 1 and not step > num_steps
    return in_range and all(type(value) in (int, float) for value in row.values())


def _read_parquet(path: Path, pattern: str, stat: str) -> tuple[pd.DataFrame, list[str]]:
    """Reads the footer, which lists thousands of columns, once, and then the matching columns."""
    # without a cache only the requested bytes come over the network
    source = path if isinstance(path, Path) else path.open("rb", cache_type="none")
    with pq.ParquetFile(source, pre_buffer=True) as file:
        names = [name for name in file.schema_arrow.names if name != "step"]
        matching = [name for name in names if fnmatchcase(name, f"{stat}/{pattern}")]
        frame = file.read(columns=["step", *matching], use_threads=False).to_pandas()
    return frame.rename(columns=lambda name: name.removeprefix(f"{stat}/")), names


def _read_streams(run: Path, table: str, pattern: str, stat: str) -> tuple[pd.DataFrame, list[str]]:
    frames, tensors, columns, known = [], None, [], {}
    for steps, statistics, names in read_tensors(run, table):
        if names != tensors:  # another attempt; matching at every flush would be slow
            tensors = names
            columns = [i for i, name in enumerate(names) if fnmatchcase(name, pattern)]
            known |= {f"{statistic}/{name}": None for statistic in statistics for name in names}
        if stat in statistics and columns:
            values = statistics[stat][:, columns]
            frames.append(pd.DataFrame(values, steps, [names[i] for i in columns]))
    frame = pd.concat(frames).rename_axis("step").reset_index() if frames else pd.DataFrame()
    return frame, list(known)
