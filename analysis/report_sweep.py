"""Cells of a sweep that have no run to show: never begun, or ended before they wrote anything.

Only read: what `experiments.sweep` wrote in `<run_dir>/sweeps/<name>/`, and SLURM's queue where a
cell may be in it.
"""

from pathlib import Path
from typing import NamedTuple

from analysis.load import as_path
from lowprec.sweep.manifest import Ledger
from lowprec.sweep.status import ask_queue, states

WHY = {  # state of a cell without a reason: in words
    "new": "never submitted",
    "queued": "waits, as far as is known",
    "running": "has begun, and written nothing yet",
    "cancelled": "cancelled before it wrote anything",
}


class Absent(NamedTuple):
    """A cell without a run: what it was to be, its state, why, and where to look."""

    name: str
    state: str
    why: str
    where: str


def absent_cells(root: Path | str, runs: set[str], experiment: str | None) -> list[Absent]:
    """The cells, of the sweeps whose runs are at or below `root`, that are not among `runs`.

    `runs`: names of run directories. A ledger that cannot be read is a row of its own. None of a
    URL: a sweep is where it is run.
    """
    found = []
    for folder in _sweeps(as_path(root)):
        try:
            found += _of_sweep(folder, runs, experiment)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"its ledger cannot be read: {type(error).__name__}: {error}"
            found.append(Absent(f"sweep {folder.name}", "unknown", why, str(folder)))
    return found


def _sweeps(root: Path) -> list[Path]:
    """`runs` holds `sweeps/*`; the runs in `runs/<name>` are those of `runs/sweeps/<name>`."""
    if not isinstance(root, Path):
        return []
    plans = sorted(root.glob("sweeps/*/sweep.json"))
    root = root.resolve()
    plans += root.parent.glob(f"sweeps/{root.name}/sweep.json")
    return [plan.parent for plan in plans]


def _of_sweep(folder: Path, runs: set[str], experiment: str | None) -> list[Absent]:
    ledger = Ledger(folder)
    wanted = [
        cell
        for cell in ledger.cells
        if Path(cell.run).name not in runs and experiment in (None, cell.config["experiment"])
    ]
    if not wanted:
        return []
    found = states(ledger, ask_queue(ledger))
    rows = []
    for cell in wanted:
        state, log = found[cell.index], ledger.log_of(cell.index)
        why = state.reason or WHY.get(state.state, "its run directory is damaged")
        where = str(log if log.exists() else ledger.run_of(cell.index))
        rows.append(Absent(" ".join(cell.overrides) or cell.label, state.state, why, where))
    return rows
