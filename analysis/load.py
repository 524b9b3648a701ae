"""Runs as tidy tables: `load_runs(root)` reads every run directory at or below a folder.

`root` may be the URL of a folder elsewhere, of any kind that fsspec reads (`s3://bucket/runs`).
What is on disk decides: a run that is unfinished, killed or damaged loads with its good rows and a
note that says what is missing. Files are read when a table is first asked for.
"""

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from analysis.read import (
    ENDED,
    find,
    place,
    read_head,
    read_metrics,
    read_row_file,
    read_tensor_columns,
)

ROW_FILES = ("metrics", "timing", "events")
EXPERIMENTS = Path(__file__).parents[1] / "conf" / "experiment"


class NoRunsError(LookupError):
    """No run matches; the message says what there is and which command makes the rest."""


class Runs:
    """The record of some runs as tables that share the column `run`, a run directory's name.

    `heads` has a row a run, of its status and config alone; `root` is where they were found.
    """

    def __init__(self, heads: pd.DataFrame, root: Path | str | None = None):
        self.heads, self.root = heads.reset_index(drop=True), root

    def __len__(self) -> int:
        """How many runs."""
        return len(self.heads)

    def __repr__(self) -> str:
        """How many runs, in which state, of what."""
        states = self.heads["state"].value_counts()
        counts = ", ".join(f"{n} {state}" for state, n in states.items())
        return f"{len(self)} runs ({counts}) of {_contents(self.heads)}"

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row a run: run, digest, path, state, step, reason, note, config keys (dotted).

        `note` is empty for a run that ended and is whole on disk. `precision.label` is the
        recipe's name, or under recipe `high` the autocast dtype's.
        """
        last = self.metrics.groupby("run")["step"].max()
        notes = []
        for head in self.heads.to_dict("records"):
            found = [head["note"]]
            if head["state"] not in ENDED:
                total = head.get("num_steps", np.nan)
                of_all = "" if pd.isna(total) else f" of {int(total)}"
                found.append(f"{head['state']}: {last.get(head['run'], 0)}{of_all} steps")
            found += [self._row_files[name][1][head["run"]] for name in ROW_FILES]
            notes.append("; ".join(filter(None, found)))
        return self.heads.assign(note=notes)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row a step: run, step, loss, lr, ...; evaluation values in the row of their step."""
        return self._row_files["metrics"][0]

    @cached_property
    def timing(self) -> pd.DataFrame:
        """A row a step: run, step, and what depends on the machine."""
        return self._row_files["timing"][0]

    @cached_property
    def events(self) -> pd.DataFrame:
        """A row an event: run, step, and its fields."""
        return self._row_files["events"][0]

    @cached_property
    def bench(self) -> pd.DataFrame:
        """A row a line of the benchmarks in `bench/` of the folder: slug, file, device, case, ...

        Damaged lines are left out with a warning.
        """
        rows = []
        for file in sorted(place(self.root).glob("bench/*/*.jsonl")) if self.root else ():
            found, faults = read_row_file(file)
            rows += [{"slug": file.parent.name, "file": str(file), **row} for row in found]
            for fault in faults:
                warnings.warn(f"{file}: left out: {fault}", stacklevel=2)
        return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["slug", "file"])

    def tensors(self, pattern: str, stat: str = "rms") -> pd.DataFrame:
        """A row a recorded step: run, step, and a column for each tensor that matches a glob.

        A file of tensors that cannot be read is left out with a warning. Raises LookupError when
        no tensor of any run matches.
        """
        frames, known = [], set()
        heads = self.heads.to_dict("records")
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda head: _try_tensors(head, pattern, stat), heads))
        for head, (frame, names, error) in zip(heads, found, strict=True):
            if error is not None:
                warnings.warn(f"{head['path']}: tensors left out: {error}", stacklevel=2)
                continue
            known.update(names)
            if len(frame.columns) > 1:
                frame.insert(0, "run", head["run"])
                frames.append(frame)
        if frames:
            return pd.concat(frames, ignore_index=True)
        stats = ", ".join(sorted({name.partition("/")[0] for name in known})) or "none"
        tensors = sorted({name.partition("/")[2] for name in known})
        raise LookupError(
            f"no tensor matches {pattern!r} with stat={stat!r}; recorded statistics: {stats}; "
            f"{len(tensors)} tensors, such as: {', '.join(tensors[:6]) or 'none'}"
        )

    @cached_property
    def _row_files(self) -> dict[str, tuple[pd.DataFrame, dict[str, str]]]:
        """Of each .jsonl file: the rows of all runs, and by run a note on what is damaged."""
        return {name: self._read_row_file(name) for name in ROW_FILES}

    def _read_row_file(self, name: str) -> tuple[pd.DataFrame, dict[str, str]]:
        frames, notes = [], {}
        for head in self.heads.to_dict("records"):
            path = place(head["path"]) / f"{name}.jsonl"
            if name == "metrics":
                last = head["step"] if head["state"] in ENDED else None
                rows, faults = read_metrics(path, head.get("num_steps", np.nan), last)
            else:
                rows, faults = read_row_file(path)
            notes[head["run"]] = "; ".join(faults)
            if rows:
                frames.append(pd.DataFrame(rows))
                frames[-1].insert(0, "run", head["run"])
        empty = pd.DataFrame(columns=["run", "step", *(["loss"] if name == "metrics" else [])])
        return (pd.concat(frames, ignore_index=True) if frames else empty), notes


def load_runs(root: Path | str, *, experiment: str | None = None, scale: str | None = None) -> Runs:
    """The runs at or below `root`, a folder of runs or one run directory, by its path or URL.

    A run whose config is damaged belongs to the experiment its folder is named after, and passes
    any `scale`. Raises NoRunsError when nothing matches.
    """
    folders = find(place(root))
    if not folders:
        example = command(experiment or "loss_curves", scale)
        raise NoRunsError(f"{root}: no runs at or below this folder; to make some: {example}")
    with ThreadPoolExecutor() as pool:  # hides the way to a server
        heads = pd.DataFrame(list(pool.map(read_head, folders)))
    twice = heads["run"].duplicated(keep=False)
    heads.loc[twice, "run"] = heads.loc[twice, "path"]  # a copied run: two rows, told apart
    fits = (experiment is None) | (heads["experiment"] == experiment)
    fits &= (scale is None) | (heads["scale"] == scale) | heads["scale"].isna()
    if not fits.any():
        wanted = f"experiment={experiment}" if experiment else "any experiment"
        wanted += f" at scale={scale}" if scale else ""
        raise NoRunsError(
            f"{root}: no runs of {wanted}; there are {_contents(heads)}; "
            f"to make them: {command(experiment or 'loss_curves', scale)}"
        )
    return Runs(heads[fits], root)


def _try_tensors(head: dict, pattern: str, stat: str) -> tuple[pd.DataFrame, list[str], object]:
    """As `read_tensor_columns`, and the error where the file cannot be read."""
    try:
        found = read_tensor_columns(place(head["path"]), head["state"], pattern, stat)
        return *found, None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        return pd.DataFrame(), [], error


def command(experiment: str, scale: str | None = None) -> str:
    """The command that makes the runs of an experiment; without a scale, of its smallest."""
    names = {path.stem for path in EXPERIMENTS.glob(f"{experiment}*.yaml")}
    demo, mini = f"{experiment}_demo", f"{experiment}_mini"
    order = (f"{experiment}_{scale}", experiment, mini) if scale else (demo, mini, experiment)
    name = next((name for name in order if name in names), experiment)
    return f"python -m experiments.train -m experiment={name}"


def _contents(heads: pd.DataFrame) -> str:
    """`loss_curves (demo, paper), fp8_fixes (mini)`: what there is."""
    studies = heads["experiment"].fillna("(no experiment)")
    scales = heads["scale"].fillna("unknown scale").groupby(studies).unique()
    return ", ".join(f"{study} ({', '.join(sorted(found))})" for study, found in scales.items())
