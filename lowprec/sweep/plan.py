"""The plan of a sweep: its runs, each checked, and which launcher has them.

A sweep is a folder. Only `submit` and `resubmit` write `sweep.json`, one at a time. Beside it,
`runs/<index>.cancelled` says that a run must not go on, `runs/<index>.lost` that the local launcher
has died and the run was not submitted again, and `runs/<index>.ended` why training failed. Results
and locks are read from the run directories, jobs from SLURM's queue.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from lowprec.config.check import ConfigError, check
from lowprec.config.compose import compose_command
from lowprec.config.schema import Config
from lowprec.data.sources import without_secrets
from lowprec.runs import durable
from lowprec.runs.identity import directory, label
from lowprec.runs.read import ENDED, RecordFileError, read_file, read_status
from lowprec.train.preflight import preflight, process_faults

TRAIN = [sys.executable, "-m", "experiments.sweep", "train"]  # and the sweep's folder, the index
DECLINED = 4  # exit status of one of several ranks that does not train; without it, others wait
MARKS = ("cancelled", "lost", "ended")


@dataclass
class PlannedRun:
    """One run of a sweep: its directory below `run_dir`, and its whole config as plain data.

    `launcher`, by name, `gpus` and `runs_per_gpu` are those of its last submission; `launcher` is
    None before the first.
    """

    index: int
    label: str
    directory: str
    overrides: list[str]
    config: dict
    launcher: str | None = None
    gpus: int = 0
    runs_per_gpu: int = 1

    def result(self, status: dict) -> str | None:
        """`finished` or `diverged`, by the run's status.json; None if the run continues."""
        state = status.get("state")
        is_shorter = state == "finished" and status.get("step", 0) < self.config["num_steps"]
        return state if state in ENDED and not is_shorter else None


class Plan:
    """The files of one sweep: data, since `TRAIN` trains a run, where `submit` was called.

    Each read is fresh, because other processes write them too. `launchers` holds the settings of
    each launcher by name, the last used one last. Raises RecordFileError if sweep.json is not what
    was written, or if another user can have written it: it may hold commands (`pipe:`, `setup`).
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder).absolute()
        path = self.folder / "sweep.json"
        for facts in (self.folder.stat(), path.stat()):
            if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
                raise RecordFileError(
                    f"{path} can have been written by another user, whose commands it may hold: "
                    "the file and its folder must be yours, and nobody else may write to them; if "
                    f"you trust its runs: chmod go-w {path.parent} {path}"
                )
        text = read_file(path)
        try:
            plan = json.loads(text)
            if plan.pop("digest") != _digest(plan):
                raise ValueError("its digest is another")
            self.launchers = plan["launchers"]
            self.runs = [PlannedRun(**run) for run in plan["runs"]]
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise RecordFileError(
                f"{path} is damaged or from an earlier version ({error}); delete the sweep's "
                "folder and submit again: runs that have ended are not repeated"
            ) from error

    @classmethod
    def open(cls, folder: Path) -> "Plan":
        """Opens the sweep of a folder; creates one without runs if there is none."""
        for name in ("runs", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if not (folder / "sweep.json").exists():
            with contextlib.suppress(PermissionError):  # another user's, which is refused below
                folder.chmod(folder.stat().st_mode & ~0o022)  # whatever the umask
            _write(folder, {"launchers": {}, "runs": []})
        return cls(folder)

    def add(self, runs: list[PlannedRun]) -> list[int]:
        """Adds runs and returns their indexes.

        A run whose directory the sweep already has replaces that run, since keys that are not
        part of a run's identity may differ.
        """
        indexes = {run.directory: run.index for run in self.runs}
        for run in runs:
            run.index = indexes.setdefault(run.directory, len(self.runs))
            if run.index < len(self.runs):
                old = self.runs[run.index]
                run.launcher, run.gpus, run.runs_per_gpu = old.launcher, old.gpus, old.runs_per_gpu
            self.runs[run.index : run.index + 1] = [run]
        self.write()
        return sorted({run.index for run in runs})

    def hand_over(self, indexes: list[int], launcher: dict) -> None:
        """Records that a launcher is about to get these runs, and removes their marks."""
        self.launchers.pop(launcher["name"], None)
        self.launchers[launcher["name"]] = launcher
        for index in indexes:
            run = self.runs[index]
            run.launcher, run.gpus = launcher["name"], launcher["gpus"]
            run.runs_per_gpu = launcher.get("runs_per_gpu", 1)
            for mark in (self.mark(index, name) for name in MARKS):
                if mark.is_dir():
                    raise RecordFileError(f"{mark} is a folder, which no sweep makes; remove it")
                mark.unlink(missing_ok=True)
        self.write()

    def write(self) -> None:
        """Writes sweep.json, durably."""
        runs = [asdict(run) for run in self.runs]
        _write(self.folder, {"launchers": self.launchers, "runs": runs})

    @property
    def run_dir(self) -> Path:
        """The folder that holds the run directories, and in `sweeps/` this sweep."""
        return self.folder.parents[1]

    def directory_of(self, index: int) -> Path:
        """The run directory of a run."""
        return self.run_dir / self.runs[index].directory

    def log_of(self, index: int) -> Path:
        """The file that holds a run's output, over all its attempts."""
        return self.folder / "logs" / f"{index}.log"

    def mark(self, index: int, name: str) -> Path:
        """The file that says that a run is `cancelled`, `lost` or has `ended` without a result."""
        return self.folder / "runs" / f"{index}.{name}"

    def is_cancelled(self, index: int) -> bool:
        """Whether a run must not go on."""
        return self.mark(index, "cancelled").exists()

    def end(self, index: int, reason: str) -> None:
        """Records why a run failed; it is not started again before it is resubmitted."""
        durable.replace(self.mark(index, "ended"), reason.encode(errors="replace"))

    def why_ended(self, index: int) -> str | None:
        """Why a run failed; None if no reason is recorded."""
        try:
            return read_file(self.mark(index, "ended")).decode(errors="replace")[:400]
        except FileNotFoundError:
            return None
        except RecordFileError as error:
            return str(error)

    def is_over(self, index: int) -> bool:
        """Whether a run is cancelled, lost or failed, so that it waits for a command."""
        return any(self.mark(index, name).exists() for name in MARKS)

    def is_training(self, index: int) -> bool:
        """Whether a process has the run's record open."""
        return is_locked(self.directory_of(index) / ".lock")

    def waiting(self) -> list[int]:
        """The runs that the local launcher has to start or continue, in order."""
        return [
            run.index
            for run in self.runs
            if run.launcher == "local"
            and not self.is_over(run.index)
            and run.result(read_status(self.directory_of(run.index), {})) is None
        ]


def plan_runs(
    overrides: list[str], open_sources: Callable[[Config], dict[str, str]], processes: int = 1
) -> list[PlannedRun]:
    """Composes and checks every run of the overrides, for a number of processes per run.

    `open_sources(config)` opens the data and returns the digests that name a run; it is called
    once per data set. Raises ConfigError with the faults of all runs.
    """
    if foreign := [text for text in overrides if text.lstrip("+~").startswith("hydra")]:
        raise ConfigError([f"{text}: use launcher=local or slurm" for text in foreign])
    check_planned = partial(preflight, planned=processes)
    composed = compose_command(overrides, multirun=True, preflight=check_planned)
    sources: dict[str, dict[str, str]] = {}
    runs = []
    for run in composed:
        config = run.config
        paths = (config.data, config.evaluation, config.model.init_from, config.resume)
        opened = repr((*paths, config.batch_size, config.num_workers))
        if opened not in sources:
            sources[opened] = open_sources(config)
        place = str(directory(config, sources[opened]).relative_to(config.run_dir))
        train = f"data.train={without_secrets(config.data.train)}"
        public = [train if text.startswith("data.train=") else text for text in run.overrides]
        runs.append(PlannedRun(-1, label(config), place, public, asdict(config)))
    return runs


def refuse_processes(runs: list[PlannedRun], processes: int) -> None:
    """Raises ConfigError if a planned run cannot be split over this many processes."""
    faults = [f for run in runs for f in process_faults(check(run.config), processes)]
    if faults:
        raise ConfigError(faults)


def _digest(plan: dict) -> str:
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()


def _write(folder: Path, plan: dict) -> None:
    plan = {**plan, "digest": _digest(plan)}
    before = os.umask(0o077)  # readable by the owner only: a URL in a config may hold a secret
    try:
        durable.replace(folder / "sweep.json", json.dumps(plan, indent=1).encode())
    finally:
        os.umask(before)
    durable.sync(folder)


def take_lock(path: Path, patience_s: float = 0.0) -> int | None:
    """A descriptor that holds a file's lock until it is closed; None if another holder keeps it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if durable.try_lock(descriptor, path, patience_s):
        return descriptor
    os.close(descriptor)
    return None


def is_locked(path: Path) -> bool:
    """Whether a process holds a file's lock. Writes nothing; holds the lock for a moment."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # it does not exist
        return False
    try:
        return not durable.try_lock(descriptor, path, shared=True)
    finally:
        os.close(descriptor)
