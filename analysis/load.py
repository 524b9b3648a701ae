"""Runs as tidy tables: `load_runs(root)` reads every run directory at or below a folder.

`root` may be a URL that fsspec can open (`s3://bucket/runs`). Runs in local archives (`runs.zip`)
are read without unpacking. A run that is unfinished, was killed or is damaged loads with its good
rows and a note that says what is missing. Files are read when a table is first accessed.
"""

import contextlib
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import pandas as pd

from analysis import run_files
from analysis.comparison import counted
from lowprec.config.compose import compose_command
from lowprec.nearest import nearest
from lowprec.runs.read import ENDED

EMPTY = ("run", "path", "experiment", "state", "scale")  # columns of `summaries` without runs
EXPERIMENTS = Path(__file__).parents[1] / "conf" / "experiment"


class NoRunsError(LookupError):
    """No run matches; the message lists what exists and the command that makes the rest."""


class NotMadeError(NoRunsError):
    """No run of an experiment, or no line of a benchmark, has been made."""


class Runs:
    """The records of runs as tables that share the column `run`, a run directory's name.

    `summaries` has one row per run, from its status and config alone; `root` is the folder or URL.
    `files` holds what was read of each run, by its path.
    """

    def __init__(
        self, summaries: pd.DataFrame, root: Path | str | None = None, files: dict | None = None
    ):
        self.summaries, self.root = summaries.reset_index(drop=True), root
        self.files = {} if files is None else files

    def __len__(self) -> int:
        return len(self.summaries)

    def __repr__(self) -> str:
        states = self.summaries["state"].value_counts()
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        return f"{counted(len(self), 'run')} ({counts}) of {_experiments(self.summaries)}"

    def only(self, run: str) -> "Runs":
        """One run by name; no other run's files are read."""
        return self.where(self.summaries["run"] == run)

    def where(self, mask: pd.Series) -> "Runs":
        """The runs of some rows of `summaries`; no file is read twice."""
        return Runs(self.summaries[mask], self.root, self.files)

    def select(self, experiment: str | None = None, scale: str | None = None) -> "Runs":
        """The runs of an experiment and a scale, or of any; see `load_runs`."""
        to_make = f"to make some: {command(experiment or 'loss_curves', scale)}"
        if not len(self):
            near = "" if "://" in str(self.root) else run_files.nearest_address(self.root)
            if near and experiment is None:  # perhaps one run, which no study makes
                raise NoRunsError(f"{self.root}: no such folder{near}")
            why = f"no such folder{near}" if near else "no runs at or below this folder"
            raise NotMadeError(f"{self.root}: {why}; {to_make}")
        scales = self.summaries["scale"]
        matches = (experiment is None) | (self.summaries["experiment"] == experiment)
        matches &= (scale is None) | (scales == scale) | scales.isna()
        if not matches.any():
            query = f"experiment={experiment or 'any'} and scale={scale or 'any'}"
            others = _experiments(self.summaries)
            raise NotMadeError(
                f"{self.root}: no runs with {query}; the runs are of {others}; {to_make}"
            )
        return self.where(matches)

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row per run: run, digest, path, state, step, reason, note, dotted config keys.

        `note` is empty if the run has ended and its files are whole. `precision.label` is the
        recipe's name or, for recipe `high`, the autocast dtype.
        """
        notes = []
        for summary, tables in zip(self.summaries.to_dict("records"), self._tables, strict=True):
            parts, steps = [summary["note"]], list(tables["metrics"][0].get("step", []))
            if summary["state"] not in ENDED:
                total = summary.get("num_steps")
                of_total = "" if pd.isna(total) else f" of {int(total)}"
                parts.append(f"{summary['state']}: {max(steps, default=0)}{of_total} steps")
            if "tensors" not in tables:
                tables["tensors"] = pd.DataFrame(), run_files.compare_steps(summary, steps)
            parts += [note for _, of_file in tables.values() for note in of_file]
            notes.append("; ".join(filter(None, parts)))
        return self.summaries.assign(note=notes)

    @property
    def notes(self) -> str:
        """` (NOTE; NOTE)`: the first notes of the runs, for messages, or ""."""
        notes = list(dict.fromkeys(filter(None, self.runs["note"])))[:3]
        return f" ({'; '.join(notes)})" if notes else ""

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per step: run, step, loss, lr, ...; evaluations are in the row of their step."""
        return self._table("metrics")

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

        Runs whose tensors cannot be read or that recorded none that match are left out with a
        warning. Raises LookupError if no tensor of any run matches.
        """
        recorded, frames, num_without = set(), [], 0
        for summary in self.summaries.to_dict("records"):
            try:
                frame, names = run_files.read_tensor_columns(summary, pattern, stat)
            except Exception as error:  # one run must not blind all
                warnings.warn(f"{summary['path']}: tensors left out: {error}", stacklevel=2)
                continue
            recorded.update(names)
            if len(frame.columns) > 1:
                frame.insert(0, "run", summary["run"])
                frames.append(frame)
            else:
                num_without += 1
        if frames and num_without:
            without = f"{num_without} of {counted(len(self), 'run')} did not record"
            warnings.warn(f"{without} {stat}/{pattern}", stacklevel=2)
        if frames:
            return pd.concat(frames, ignore_index=True)
        stats = ", ".join(sorted({name.partition("/")[0] for name in recorded})) or "none"
        tensors = sorted({name.partition("/")[2] for name in recorded})
        raise LookupError(
            f"no tensor matches {pattern!r} with stat={stat!r}; recorded statistics: {stats}; "
            f"{counted(len(tensors), 'tensor')}, such as: {', '.join(tensors[:6]) or 'none'}"
            f"{nearest(pattern, tensors)}"
        )

    def statistics(self) -> list[str]:
        """`STATISTIC/TENSOR` for each tensor or block of which a run recorded a statistic."""
        names: set[str] = set()
        for summary in self.summaries.to_dict("records"):
            with contextlib.suppress(Exception):  # one run must not blind all
                names.update(run_files.read_tensor_columns(summary, "", "")[1])
        return sorted(names)

    def series(self, name: str, stat: str) -> pd.Series:
        """One statistic of one tensor or block by step, for a single run; empty if not recorded."""
        try:
            frame = self.tensors(name, stat)
        except LookupError:
            return pd.Series(dtype=float, index=pd.Index([], name="step", dtype=int))
        return frame.drop_duplicates("step", keep="last").set_index("step")[name].astype(float)

    @cached_property
    def _tables(self) -> list[dict[str, tuple[pd.DataFrame, list[str]]]]:
        """For each run: the rows of each of its files, and notes on damage."""
        unread = self.summaries[~self.summaries["path"].isin(list(self.files))]
        for run in unread.to_dict("records"):
            self.files[run["path"]] = run_files.read_tables(run)
        return [self.files[path] for path in self.summaries["path"]]

    def _table(self, name: str) -> pd.DataFrame:
        pairs = zip(self.summaries["run"], self._tables, strict=True)
        frames = {run: tables[name][0] for run, tables in pairs if len(tables[name][0])}
        if not frames:
            return pd.DataFrame(columns=["run", "step", *(["loss"] if name == "metrics" else [])])
        return pd.concat(frames, names=["run"]).reset_index("run").reset_index(drop=True)


def load_all(root: Path | str) -> Runs:
    """Loads all runs at or below `root`, a folder of runs or one run directory, by path or URL."""
    with ThreadPoolExecutor() as pool:  # hides the latency of a server
        rows = list(pool.map(run_files.read_summary, run_files.find_addresses(root)))
    summaries = pd.DataFrame(rows, columns=None if rows else EMPTY)
    copied = summaries["run"].duplicated(keep=False)
    summaries.loc[copied, "run"] = summaries.loc[copied, "path"]
    return Runs(summaries, root)


def load_runs(root: Path | str, *, experiment: str | None = None, scale: str | None = None) -> Runs:
    """Loads the runs at or below `root`, a folder of runs or one run directory, by path or URL.

    A run whose config is damaged belongs to the experiment that its folder is named after, and
    matches any `scale`. Raises NoRunsError if nothing matches.
    """
    return load_all(root).select(experiment, scale)


def command(experiment: str, scale: str | None = None) -> str:
    """The command that makes an experiment's runs, at its smallest scale if none is given."""
    names = [
        f"{experiment}_{each}" for each in ([scale] if scale else ["demo", "mini", "true_size"])
    ]
    name = next((n for n in names if (EXPERIMENTS / f"{n}.yaml").exists()), experiment)
    return f"python -m experiments.train -m experiment={name}"


def planned(study: str) -> pd.DataFrame:
    """The flat configs of the runs that `conf/experiment/<study>.yaml` names, a row each."""
    configs = [run.config for run in compose_command([f"experiment={study}"], multirun=True)]
    labels = [config.precision.label for config in configs]
    table = pd.DataFrame([run_files.flatten(asdict(config)) for config in configs])
    return table.assign(**{"precision.label": labels})


def _experiments(summaries: pd.DataFrame) -> str:
    """`loss_curves (demo, paper), fp8_fixes (mini), no experiment`."""
    scales = summaries["scale"].fillna("unknown scale").groupby(summaries["experiment"]).unique()
    texts = [f"{name} ({', '.join(sorted(each))})" for name, each in scales.items()]
    return ", ".join(texts + ["no experiment"] * summaries["experiment"].hasnans)
