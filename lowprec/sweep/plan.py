"""The plan of a sweep: its runs, each checked, and the manifest of what was submitted.

A sweep is a folder. `sweep.json` lists the runs and is on disk before anything is submitted.
`submissions.jsonl` records what was handed to a launcher or cancelled. In `runs/<index>.jsonl`,
the process that supervises a run records when each attempt started and how it ended. Results are
in the run directories.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from lowprec.config.check import ConfigError, check
from lowprec.config.compose import compose_command
from lowprec.config.schema import Config
from lowprec.data.sources import without_secrets
from lowprec.runs import durable
from lowprec.runs.identity import directory, label, to_dict
from lowprec.runs.read import ENDED, RecordFileError, checked, encode_row, read_map, scan_rows
from lowprec.train.preflight import preflight, process_faults

TRAIN = [sys.executable, "-m", "experiments.sweep", "train"]  # and the sweep's folder, the index
RUN = {"index": int, "label": str, "directory": str, "overrides": list, "config": dict}
ROW = {"event": str, "token": str, "runs": list, "launcher": dict, "job": str}
ROW |= {"again": bool, "reason": str, "code": int, "saved": int}
LAUNCHER = {"name": "local", "parallel": 1, "gpus": 0}  # keys that every launcher has
SUBMISSIONS = {  # event in submissions.jsonl: the keys of its rows
    "submitting": {"token", "runs", "launcher"},
    "submitted": {"token", "job"},
    "cancelled": {"runs"},
}
ATTEMPTS = {"started": {"token"}, "ended": {"token"}}  # the same in runs/<index>.jsonl


@dataclass
class PlannedRun:
    """One run of a sweep: its directory below `run_dir`, and its whole config as plain data."""

    index: int
    label: str
    directory: str
    overrides: list[str]
    config: dict

    def result(self, status: dict) -> str | None:
        """`finished` or `diverged`, by the run's status.json; None if the run continues."""
        state = status.get("state")
        is_shorter = state == "finished" and status.get("step", 0) < self.config["num_steps"]
        return state if state in ENDED and not is_shorter else None


@dataclass
class Submission:
    """The newest submission of a run, and its place in the job array.

    `job` is None if the launcher has not named one.
    """

    token: str
    launcher: dict
    place: int
    job: str | None = None
    cancelled: bool = False


class Manifest:
    """The files of one sweep. Each read is fresh, because other processes write them too.

    They are data: `TRAIN` trains a run, in the directory where `submit` was called. `faults` has a
    sentence about each damaged line that was left out. Raises RecordFileError if sweep.json is
    damaged.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder).absolute()
        self.faults: list[str] = []
        path = self.folder / "sweep.json"
        plan = read_map(path, {"runs": list})
        try:
            if plan.keys() != {"runs"}:
                raise ValueError(", ".join(plan))
            self.runs = [PlannedRun(**checked(run, RUN)) for run in plan["runs"]]
            for index, run in enumerate(self.runs):
                if run.index != index or type(run.config["num_steps"]) is not int:
                    raise ValueError(f"run {index}")
        except (KeyError, TypeError, ValueError) as error:
            raise RecordFileError(
                f"{path} is damaged or from an earlier version ({error}); delete the sweep's "
                "folder and submit again: runs that have ended are not repeated"
            ) from error

    @classmethod
    def open(cls, folder: Path) -> "Manifest":
        """Opens the sweep of a folder; creates one without runs if there is none."""
        folder = Path(folder)
        for name in ("runs", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if not (folder / "sweep.json").exists():
            _write_plan(folder, [])
        return cls(folder)

    def add(self, runs: list[PlannedRun]) -> list[int]:
        """Adds runs durably and returns their indexes.

        A run whose directory the sweep already has replaces that run, since keys that are not
        part of a run's identity may differ.
        """
        indexes = {run.directory: run.index for run in self.runs}
        for run in runs:
            run.index = indexes.setdefault(run.directory, len(self.runs))
            self.runs[run.index : run.index + 1] = [run]
        _write_plan(self.folder, self.runs)
        return sorted({run.index for run in runs})

    @property
    def run_dir(self) -> Path:
        """The folder that holds the run directories, and in `sweeps/` this sweep."""
        return self.folder.parents[1]

    def directory_of(self, index: int) -> Path:
        """The run directory of a run."""
        return self.run_dir / self.runs[index].directory

    def log_of(self, index: int) -> Path:
        """The file that holds a run's output, over all its attempts."""
        return self.folder / "logs" / f"{index:04d}-{self.runs[index].label}.log"

    def lock_of(self, index: int) -> Path:
        """The file that a run's supervisor keeps locked; its training keeps it locked too."""
        return self.folder / "runs" / f"{index:04d}.lock"

    def record(self, row: dict) -> None:
        """Appends a row to submissions.jsonl, durably."""
        _append_row(self.folder / "submissions.jsonl", row)

    def events(self) -> list[dict]:
        """The good rows of submissions.jsonl."""
        return self._rows("submissions.jsonl", SUBMISSIONS)

    def submissions(self) -> dict[int, Submission]:
        """The newest submission of each run of the plan that has been submitted."""
        newest: dict[int, Submission] = {}
        for row in self.events():
            if row["event"] == "submitting":
                for place, index in enumerate(row["runs"]):
                    newest[index] = Submission(row["token"], row["launcher"], place)
            elif row["event"] == "submitted":
                for submission in newest.values():
                    if submission.token == row["token"]:
                        submission.job = f"{row['job']}_{submission.place}"
            else:
                for index in newest.keys() & row["runs"]:
                    newest[index].cancelled = True
        path, planned = self.folder / "submissions.jsonl", range(len(self.runs))
        beyond = sorted(index for index in newest if index not in planned)
        self._add_faults(
            [f"{path}: a row names run {index}, which is not in the plan" for index in beyond]
        )
        return {index: one for index, one in newest.items() if index in planned}

    def is_cancelled(self, index: int, token: str) -> bool:
        """Whether a run was cancelled or resubmitted after the submission with this token."""
        newest = self.submissions().get(index)
        return newest is None or newest.token != token or newest.cancelled

    def launchers(self) -> list[dict]:
        """The settings of the launcher of each submission, in order."""
        return [row["launcher"] for row in self.events() if row["event"] == "submitting"]

    def append(self, index: int, row: dict) -> None:
        """Appends a row to the attempts at a run, durably."""
        _append_row(self.folder / "runs" / f"{index:04d}.jsonl", row)

    def attempts(self, index: int, token: str | None = None) -> list[dict]:
        """The rows about attempts at a run (under one submission): starts and ends, in order."""
        rows = self._rows(f"runs/{index:04d}.jsonl", ATTEMPTS)
        return [row for row in rows if token in (None, row["token"])]

    def _add_faults(self, faults: list[str]) -> None:
        self.faults = list(dict.fromkeys(self.faults + faults))

    def _rows(self, name: str, keys: dict[str, set[str]]) -> list[dict]:
        """The good rows of a file, each with its event's `keys`; adds its faults to `faults`."""
        rows, faults = scan_rows(self.folder / name, ROW)
        damaged = [row for row in rows if not _is_whole(row, keys)]
        faults += [f"{self.folder / name}: a row is damaged: {str(row)[:80]}" for row in damaged]
        self._add_faults(faults)
        return [row for row in rows if row not in damaged]


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
        runs.append(PlannedRun(-1, label(config), place, public, to_dict(config)))
    return runs


def refuse_processes(runs: list[PlannedRun], processes: int) -> None:
    """Raises ConfigError if a planned run cannot be split over this many processes."""
    faults = [f for run in runs for f in process_faults(check(run.config), processes)]
    if faults:
        raise ConfigError(faults)


def _is_whole(row: dict, keys: dict[str, set[str]]) -> bool:
    """Whether a row has its event's keys, with values of the right types."""
    launcher = row.get("launcher", LAUNCHER)
    return (
        row.get("event") in keys
        and keys[row["event"]] <= row.keys()
        and all(type(index) is int for index in row.get("runs", ()))
        and all(type(launcher.get(name)) is type(value) for name, value in LAUNCHER.items())
    )


def _append_row(path: Path, row: dict) -> None:
    line = encode_row({"time": round(time.time(), 3), **row}).encode()
    last = path.read_bytes()[-1:] if path.exists() else b""
    torn = last not in (b"", b"\n")  # by a crash: this row starts a new line
    durable.append(path, [b"\n" * torn + line])
    durable.sync(path)


def _write_plan(folder: Path, runs: list[PlannedRun]) -> None:
    plan = {"runs": [asdict(run) for run in runs]}
    before = os.umask(0o077)  # readable by the owner only: a URL in a config may hold a secret
    try:
        durable.replace(folder / "sweep.json", json.dumps(plan, indent=1).encode())
    finally:
        os.umask(before)
    durable.sync(folder)


def take_lock(path: Path, patience_s: float = 0.0) -> int | None:
    """A descriptor that holds a file's lock until it is closed; None if another holder keeps it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            durable.lock(descriptor, path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(0.05)


def is_locked(path: Path) -> bool:
    """Whether a process holds a file's lock. Writes nothing; holds the lock for a moment."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # for a FIFO
    except FileNotFoundError:
        return False
    try:
        durable.lock(descriptor, path, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
