"""The ledger of a sweep: its cells, what was handed to a launcher, what each cell's process did.

A sweep is a folder. `sweep.json` has the cells and is on disk before anything is submitted;
`submissions.jsonl` says what was handed over or cancelled; in `cells/<index>.jsonl` the cell's own
process writes when it started and how it ended. Results are not here: they are in the cells'
run directories. One `submit` or `cancel` at a time holds `locked(folder)`.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lowprec.runs import durable
from lowprec.runs.read import encode_row, scan_rows


@dataclass
class Cell:
    """One run of a sweep; `run` is its directory, `config` its whole config as plain data."""

    index: int
    label: str
    digest: str
    run: str
    overrides: list[str]
    config: dict


@dataclass
class Submission:
    """What was last done about a cell: `token` names the hand-over; `job` is None if not known."""

    token: str
    launcher: dict
    job: str | None = None
    cancelled: bool = False


class Ledger:
    """The files of one sweep; every read is fresh, as other processes write them too.

    `command` starts a cell, followed by the sweep's folder and the cell's index; relative paths,
    of run directories too, are below `cwd`.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder).absolute()
        plan = json.loads((self.folder / "sweep.json").read_text())
        self.command: list[str] = plan["command"]
        self.cwd = Path(plan["cwd"])
        self.cells = [Cell(**cell) for cell in plan["cells"]]

    @classmethod
    def open(cls, folder: Path, command: list[str], cwd: Path) -> "Ledger":
        """The sweep of a folder, made without cells if there is none."""
        folder = Path(folder)
        for name in ("cells", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if not (folder / "sweep.json").exists():
            _write(folder, {"command": command, "cwd": str(cwd), "cells": []})
        return cls(folder)

    def add(self, cells: list[Cell]) -> list[int]:
        """Indexes of these cells; those whose run directory is new are added, durably.

        Others replace the cell of that directory: keys that name no run may have changed.
        """
        known = {self.run_of(cell.index).resolve(): cell.index for cell in self.cells}
        for cell in cells:
            place = (self.cwd / cell.run).resolve()
            cell.index = known.setdefault(place, len(self.cells))
            self.cells[cell.index : cell.index + 1] = [cell]
        plan = {"command": self.command, "cwd": str(self.cwd)}
        _write(self.folder, plan | {"cells": [asdict(cell) for cell in self.cells]})
        return sorted({cell.index for cell in cells})

    def run_of(self, index: int) -> Path:
        """The run directory of a cell."""
        return self.cwd / self.cells[index].run

    def log_of(self, index: int) -> Path:
        """What a cell printed, over all its attempts."""
        return self.folder / "logs" / f"{index:04d}-{self.cells[index].label}.log"

    def record(self, row: dict) -> None:
        """Appends to submissions.jsonl, durably."""
        self._append(self.folder / "submissions.jsonl", row)

    def events(self) -> list[dict]:
        """Rows of submissions.jsonl; a line that a crash has torn is no row, here and in `rows`."""
        return scan_rows(self.folder / "submissions.jsonl")[0]

    def last_launcher(self, name: str | None = None) -> dict | None:
        """The launcher (of this name) that was used last; None if there was none."""
        used = [row["launcher"] for row in self.events() if row["event"] == "submitting"]
        used = [launcher for launcher in used if name in (None, launcher["name"])]
        return used[-1] if used else None

    def submissions(self) -> dict[int, Submission]:
        """The newest submission of each cell that was ever handed over."""
        found: dict[int, Submission] = {}
        for row in self.events():
            if row["event"] == "submitting":
                for index in row["cells"]:
                    found[index] = Submission(row["token"], row["launcher"])
            elif row["event"] == "submitted":
                for index, job in row["jobs"].items():
                    if int(index) in found and found[int(index)].token == row["token"]:
                        found[int(index)].job = job
            else:
                for index in found.keys() & row["cells"]:
                    found[index].cancelled = True
        return found

    def append(self, index: int, row: dict) -> None:
        """Appends to a cell's rows, durably."""
        self._append(self.folder / "cells" / f"{index:04d}.jsonl", row)

    def rows(self, index: int) -> list[dict]:
        """A cell's rows: its starts and its ends, each with the token of its submission."""
        return scan_rows(self.folder / "cells" / f"{index:04d}.jsonl")[0]

    def _append(self, path: Path, row: dict) -> None:
        line = encode_row({"time": round(time.time(), 3), **row}).encode()
        last = path.read_bytes()[-1:] if path.exists() else b""
        torn = last not in (b"", b"\n")  # by a crash: this row is on a line of its own
        durable.append(path, [b"\n" * torn + line])
        durable.sync(path)

    def lock_of(self, index: int) -> Path:
        """A cell's process holds the lock of this file as long as it or its training lives."""
        return self.folder / "cells" / f"{index:04d}.lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Held by the one process that submits or cancels in a sweep's folder; another waits for it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder) / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def take_lock(path: Path, patience_s: float = 2.0) -> int | None:
    """A descriptor that holds the lock of a file until it is closed; None if another keeps it.

    The patience outlasts `is_locked`, which holds the lock for a moment, and a holder's last one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:  # another error: this file system has no locks
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(0.05)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file; nothing is written, a reader may ask."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _write(folder: Path, plan: dict) -> None:
    before = os.umask(0o077)  # only its owner reads it: a cell's URL may have a secret
    try:
        durable.replace(folder / "sweep.json", json.dumps(plan, indent=1).encode())
    finally:
        os.umask(before)
    durable.sync(folder)
