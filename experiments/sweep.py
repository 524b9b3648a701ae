"""Runs a sweep in the background, here or on SLURM, so that nothing is lost and nothing runs twice.

    python -m experiments.sweep submit experiment=loss_curves_mini seed=0,1 launcher=slurm
    python -m experiments.sweep status experiment=loss_curves_mini
    python -m experiments.sweep wait experiment=loss_curves_mini
    python -m experiments.sweep resubmit --failed experiment=loss_curves_mini launcher.mem_gb=128
    python -m experiments.sweep cancel experiment=loss_curves_mini

`submit` takes the keys of a run (a value may be a list), `launcher=local|slurm`, `launcher.*` and
`dry_run=true`, which only prints the cells and what they cost. All faults of all cells are named
before anything is submitted. The cells are written to `<run_dir>/sweeps/<experiment or name>/`
first; the command returns at once. The same `submit` again adds what is new and submits what was
cancelled or lost; a cell that waits, runs or has its result is left alone. The other verbs find the
sweep by `experiment=` or `name=` and `run_dir=`, or take the only one there is. `wait` shows the
table of `status` until nothing runs, and exits 1 if a cell failed. `resubmit` takes the launcher
that was used last, with what `launcher.*` changes of it, or another by `launcher=`.
"""

import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live

from experiments.entry import refuse
from lowprec.config.check import ConfigError, RunError, unknown_key
from lowprec.config.compose import CONF, compose_command
from lowprec.config.schema import key
from lowprec.nearest import nearest
from lowprec.runs.durable import DiskError
from lowprec.sweep import local, slurm
from lowprec.sweep.estimate import print_estimate
from lowprec.sweep.manifest import Ledger, locked
from lowprec.sweep.plan import cells_of, refuse_processes
from lowprec.sweep.status import ACTIVE, RESULTS, TO_RESUBMIT, TO_SUBMIT, ask_queue, states, summary
from lowprec.sweep.table import show, table

COMMAND = [sys.executable, "-m", "experiments.sweep_cell"]
WHERE = ("experiment", "name", "run_dir")  # keys that say which sweep
POLL_S = 2.0


@dataclass
class LauncherConfig:
    """How cells are run; conf/launcher/ has a file a launcher."""

    name: str = key("local", "who runs the cells", choices=("local", "slurm"))
    parallel: int = key(1, "cells at once", least=1)
    gpus: int = key(0, "GPUs a cell, a process each; 0: what is visible", least=0)
    cpus: int | None = key(None, "cores a cell (slurm)", least=1)
    mem_gb: int | None = key(None, "memory a cell (slurm)", least=1)
    timeout_min: int = key(60, "time limit; a run that reaches it goes on (slurm)", least=1)
    signal_s: int = key(180, "seconds before the limit at which it is told to save", least=1)
    partition: str | None = key(None, "a cluster's partition (slurm)")
    setup: list[str] = key([], "lines of the batch script, such as 'module load cuda' (slurm)")
    sbatch: dict | None = key(None, "other flags of sbatch, such as {account: NAME} (slurm)")


@dataclass
class SweepConfig:
    """What a sweep takes beside the keys of its runs."""

    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    dry_run: bool = key(False, "print cells, hours and disk, and submit nothing")


def submit(texts: list[str]) -> None:
    """Writes the cells, then hands over those that nobody runs and that have no result."""
    options, overrides = _own(texts)
    processes = max(1, options.launcher.gpus)
    cells = cells_of(overrides, processes)
    if options.dry_run:
        print_estimate(cells, processes)
        return
    folder = _folder(overrides)
    with locked(folder):
        ledger = Ledger.open(folder, COMMAND, Path.cwd())
        chosen = ledger.add(cells)
        hand_over(ledger, chosen, TO_SUBMIT, asdict(options.launcher))


def resubmit(texts: list[str]) -> None:
    """Hands over once more what failed or was lost."""
    if "--failed" not in texts:
        sys.exit("which cells? python -m experiments.sweep resubmit --failed ...")
    texts = [text for text in texts if text != "--failed"]
    given = [text for text in texts if text.partition("=")[0].partition(".")[0] == "launcher"]
    ledger = _find([text for text in texts if text not in given])
    with locked(ledger.folder):
        ledger = Ledger(ledger.folder)
        launcher = ledger.last_launcher()
        if launcher is None:
            sys.exit("nothing of this sweep was ever submitted: python -m experiments.sweep submit")
        chosen = [text for text in given if text.startswith("launcher=")]
        checked = asdict(_own([*given, *([] if chosen else [f"launcher={launcher['name']}"])])[0])
        named = {text.partition("=")[0].partition(".")[2] for text in given}
        changes = {name: value for name, value in checked["launcher"].items() if name in named}
        launcher = checked["launcher"] if chosen else launcher | changes
        hand_over(ledger, [cell.index for cell in ledger.cells], TO_RESUBMIT, launcher)


def status(texts: list[str]) -> None:
    """Prints the table once."""
    ledger = _find(texts)
    queue = ask_queue(ledger)
    show(ledger, states(ledger, queue), queue, Console())


def wait(texts: list[str]) -> None:
    """Shows the table until nothing waits or runs; exits 1 if a cell has no result then."""
    folder, console, looks = _find(texts).folder, Console(), 0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            ledger = Ledger(folder)
            queue = ask_queue(ledger)
            found = states(ledger, queue)
            looks = 0 if any(state.state in ACTIVE for state in found) else looks + 1
            if looks == 2 or (looks and not any(state.state == "lost" for state in found)):
                break  # a cell seems lost for a moment between two launchers
            if console.is_terminal:
                live.update(table(ledger, found, queue), refresh=True)
            time.sleep(POLL_S)
    show(ledger, found, queue, console)
    if any(state.state in (*TO_RESUBMIT, *TO_SUBMIT) for state in found):
        sys.exit(1)


def cancel(texts: list[str]) -> None:
    """Takes back what waits and stops what runs, which saves first."""
    ledger = _find(texts)
    with locked(ledger.folder):
        ledger = Ledger(ledger.folder)
        found = states(ledger, ask_queue(ledger))
        active = [state.index for state in found if state.state in ACTIVE]
        if active:  # written first: a cell that is told to stop must not go back into the queue
            ledger.record({"event": "cancelled", "cells": active})
        print(f"{len(active)} cells cancelled; submit goes on with them")
        local.stop(ledger, [s.index for s in found if s.state not in RESULTS and not s.job])
        slurm.cancel(slurm.own_jobs(ledger))  # also of cells that an earlier `cancel` did not reach


def _own(texts: list[str]) -> tuple[SweepConfig, list[str]]:
    """The sweep's own keys, checked, and the overrides of its runs."""
    own = [t for t in texts if t.partition("=")[0].partition(".")[0] in ("launcher", "dry_run")]
    options = compose_command(own, "sweep", SweepConfig)[0].config
    launcher, gpus = options.launcher, len(local.visible_gpus())
    if launcher.name == "local" and launcher.gpus * launcher.parallel > gpus and launcher.gpus:
        fault = f"launcher.parallel={launcher.parallel} cells of launcher.gpus={launcher.gpus}: "
        raise ConfigError([f"{fault}{gpus} GPUs are visible here"])
    return options, [text for text in texts if text not in own]


def _folder(overrides: list[str]) -> Path:
    """Where the sweep of these overrides is kept."""
    given = dict(text.split("=", 1) for text in overrides if "=" in text)
    name = given.get("experiment") or given.get("name") or "run"
    return Path(given.get("run_dir", "runs")) / "sweeps" / name


def _find(texts: list[str]) -> Ledger:
    """The sweep that `experiment=`, `name=` and `run_dir=` name, or the only one there is."""
    given = {text.partition("=")[0] for text in texts}
    if unknown := sorted(given - set(WHERE)):
        raise ConfigError([unknown_key(name, WHERE) for name in unknown])
    folder = _folder(texts)
    names = sorted(path.parent.name for path in folder.parent.glob("*/sweep.json"))
    if not given & {"experiment", "name"} and len(names) == 1:
        folder = folder.parent / names[0]
    if not (folder / "sweep.json").exists():
        there = f"there are {', '.join(names)}" if names else "nothing was submitted there"
        raise ConfigError([f"{folder}: no such sweep; {there}{nearest(folder.name, names)}"])
    return Ledger(folder)


def hand_over(ledger: Ledger, chosen: list[int], which: tuple[str, ...], launcher: dict) -> None:
    """Submits the chosen cells whose state is one of `which`, and says what it left alone."""
    if launcher["name"] == "slurm":
        slurm.require()
    queue = _settled_queue(ledger)
    found = [state for state in states(ledger, queue) if state.index in chosen]
    cells = [state.index for state in found if state.state in which]
    left = [state for state in found if state.state not in which]
    if cells:
        if launcher["gpus"] > 1:  # `resubmit` may have changed it
            refuse_processes([ledger.cells[index] for index in cells], launcher["gpus"])
        token = secrets.token_hex(4)
        row = {"event": "submitting", "token": token, "cells": cells, "launcher": launcher}
        ledger.record(row)
        if launcher["name"] == "slurm":
            jobs = slurm.submit(ledger, cells, token, launcher)
            ledger.record({"event": "submitted", "token": token, "jobs": jobs})
    if any(submission.launcher["name"] == "local" for submission in ledger.submissions().values()):
        local.start(ledger)
    said = f"{len(cells)} of {len(chosen)} cells submitted"
    print(f"{ledger.folder}: {said}" + (f"; {summary(left)}" if left else ""))
    print(f"python -m experiments.sweep status {_words(ledger)}")


def _settled_queue(ledger: Ledger) -> dict | None:
    """The queue, when every submission whose end nobody saw has been looked for in it."""
    queue = ask_queue(ledger)
    if queue is None:
        raise slurm.SlurmError("squeue gives no answer, so it is not known what runs; try again")
    newest = [s for s in ledger.submissions().values() if not s.cancelled]
    open_ = {s.token for s in newest if s.launcher["name"] == "slurm" and not s.job}
    rows = [r for r in ledger.events() if r["event"] == "submitting" and r["token"] in open_]
    for row in rows:
        if jobs := slurm.adopt(ledger, row["cells"], row["token"], row["launcher"]):
            ledger.record({"event": "submitted", "token": row["token"], "jobs": jobs})
    return queue


def _words(ledger: Ledger) -> str:
    """The keys by which the other verbs find a sweep."""
    folder = ledger.folder
    kind = "experiment" if (CONF / "experiment" / f"{folder.name}.yaml").exists() else "name"
    run_dir = folder.parent.parent
    here = run_dir == Path("runs").absolute()
    return f"{kind}={folder.name}" + ("" if here else f" run_dir={run_dir}")


VERBS: dict[str, Callable[[list[str]], None]] = {
    verb.__name__: verb for verb in (submit, status, resubmit, cancel, wait)
}


def command(arguments: list[str]) -> None:
    """`<verb> key=value ...`; faults are a list and exit 2, what cannot be done is a sentence."""
    verb, *texts = arguments or [""]
    if verb in ("-h", "--help"):
        print(__doc__.strip())
        return
    if verb not in VERBS:
        shown = f"{verb}: no such verb{nearest(verb, list(VERBS))}\n" if verb else ""
        sys.exit(f"{shown}python -m experiments.sweep {'|'.join(VERBS)} key=value ...")
    try:
        VERBS[verb](texts)
    except ConfigError as error:
        refuse(error)
    except (RunError, slurm.SlurmError, DiskError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    command(sys.argv[1:])
