"""Runs as tidy tables: `load_runs(root)` reads every run directory at or below a folder.

`root` may be a URL that fsspec can open (`s3://bucket/runs`). Runs in archives (`runs.zip`) are
read without unpacking. A run that is unfinished, was killed or is damaged loads with its good rows
and a note that says what is missing. Files are read when a table is first accessed.
"""

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import pandas as pd

from analysis.run_files import (
    UNREADABLE,
    compare_steps,
    find_addresses,
    read_metrics,
    read_row_file,
    read_summary,
    read_tensor_columns,
)
from lowprec.runs.read import ENDED

ROW_FILES = ("metrics", "timing", "events")
EXPERIMENTS = Path(__file__).parents[1] / "conf" / "experiment"


class NoRunsError(LookupError):
    """No run matches; the message lists what exists and the command that makes the rest."""


class Runs:
    """The records of runs as tables that share the column `run`, a run directory's name.

    `summaries` has one row per run, from its status and config alone; `root` is the folder or URL.
    """

    def __init__(
        self, summaries: pd.DataFrame, root: Path | str | None = None, files: dict | None = None
    ):
        self.summaries, self.root = summaries.reset_index(drop=True), root
        self.files = {} if files is None else files  # by path: what `_rows_of` has read

    def __len__(self) -> int:
        return len(self.summaries)

    def __repr__(self) -> str:
        states = self.summaries["state"].value_counts()
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        return f"{len(self)} runs ({counts}) of {_experiments(self.summaries)}"

    def only(self, run: str) -> "Runs":
        """One run by name; no other run's files are read."""
        return Runs(self.summaries[self.summaries["run"] == run], files=self.files)

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
            parts += compare_steps(summary, [row["step"] for row in self._rows["metrics"][i][0]])
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
        recorded, frames = set(), []
        for summary in self.summaries.to_dict("records"):
            try:
                frame, names = read_tensor_columns(summary, pattern, stat)
            except UNREADABLE as error:
                warnings.warn(f"{summary['path']}: tensors left out: {error}", stacklevel=2)
                continue
            recorded.update(names)
            if len(frame.columns) > 1:
                frame.insert(0, "run", summary["run"])
                frames.append(frame)
        if frames:
            return pd.concat(frames, ignore_index=True)
        stats = ", ".join(sorted({name.partition("/")[0] for name in recorded})) or "none"
        tensors = sorted({name.partition("/")[2] for name in recorded})
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
        of_runs = [self._rows_of(run) for run in self.summaries.to_dict("records")]
        return {name: [rows[name] for rows in of_runs] for name in ROW_FILES}

    def _rows_of(self, run: dict) -> dict[str, tuple[list[dict], list[str]]]:
        if run["path"] not in self.files:
            others = {name: read_row_file(run, name) for name in ("timing", "events")}
            self.files[run["path"]] = {"metrics": read_metrics(run), **others}
        return self.files[run["path"]]

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
    addresses = find_addresses(root)
    if not addresses:
        raise NoRunsError(f"{root}: no runs at or below this folder; {to_make}")
    with ThreadPoolExecutor() as pool:  # hides the latency of a server
        summaries = pd.DataFrame(list(pool.map(read_summary, addresses)))
    copied = summaries["run"].duplicated(keep=False)
    summaries.loc[copied, "run"] = summaries.loc[copied, "path"]
    matches = (experiment is None) | (summaries["experiment"] == experiment)
    matches &= (scale is None) | (summaries["scale"] == scale) | summaries["scale"].isna()
    if not matches.any():
        query = f"experiment={experiment or 'any'} and scale={scale or 'any'}"
        others = _experiments(summaries)
        raise NoRunsError(f"{root}: no runs with {query}; there are {others}; {to_make}")
    return Runs(summaries[matches], root)


def command(experiment: str, scale: str | None = None) -> str:
    """The command that makes an experiment's runs, at its smallest scale if none is given."""
    names = [f"{experiment}_{each}" for each in ([scale] if scale else ["demo", "mini"])]
    name = next((n for n in names if (EXPERIMENTS / f"{n}.yaml").exists()), experiment)
    return f"python -m experiments.train -m experiment={name}"


def _experiments(summaries: pd.DataFrame) -> str:
    """`loss_curves (demo, paper), fp8_fixes (mini)`."""
    experiments = summaries["experiment"].fillna("(no experiment)")
    scales = summaries["scale"].fillna("unknown scale").groupby(experiments).unique()
    return ", ".join(f"{name} ({', '.join(sorted(each))})" for name, each in scales.items())
