"""The state of every cell, from its run directory first; a launcher only says who still lives.

queued, running, finished, diverged, failed (with the reason), cancelled; `new` was never submitted,
and `lost` was, but nothing runs it and it did not say how it ended (a machine that died).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lowprec.runs.read import decode_row, read_status
from lowprec.sweep import local, slurm
from lowprec.sweep.manifest import Ledger, Submission, is_locked

ACTIVE = ("queued", "running")
RESULTS = ("finished", "diverged")
TO_SUBMIT = ("new", "cancelled", "lost")
TO_RESUBMIT = ("failed", "lost")
TAIL = 65536  # bytes: more than a row


@dataclass
class State:
    """What is known of a cell. `preempted`: how often it was stopped and begun again."""

    index: int
    state: str
    step: int = 0
    loss: float | None = None
    preempted: int = 0
    reason: str = ""
    job: str | None = None


def states(ledger: Ledger, queue: dict | None) -> list[State]:
    """All cells' states. `queue`: what `slurm.queue()` says, None where it cannot be asked."""
    submissions = ledger.submissions()
    launcher_lives = is_locked(local.lock_path(ledger.folder))
    found = []
    for cell in ledger.cells:
        rows = ledger.rows(cell.index)
        run = ledger.run_of(cell.index)
        status = _read_status(run)
        last = _last_row(run)  # status.json is written at saves only
        step = max(status.get("step", 0), last.get("step", 0))
        state = State(cell.index, "new", step, last.get("loss"), _stops(rows))
        submission = submissions.get(cell.index)
        if _has_result(status, cell.config):
            state.state, state.reason = status["state"], status.get("reason", "")
        elif submission is not None:
            state.job = submission.job
            own = [row for row in rows if row["token"] == submission.token]
            _set_unfinished(state, submission, own, launcher_lives, queue)
            if state.state == "lost" and is_locked(ledger.lock_of(cell.index)):
                state.state, state.reason = "running", ""
        found.append(state)
    return found


def _set_unfinished(
    state: State, submission: Submission, rows: list, launcher_lives: bool, queue: dict | None
) -> None:
    """The state of a cell that was submitted and has no result."""
    last = rows[-1] if rows else None
    if submission.cancelled:
        state.state = "cancelled"
    elif last and last["event"] == "ended" and not last["again"]:
        state.state = "failed"
        state.reason = last["reason"] or "ended without a result"
    elif submission.launcher["name"] == "local":
        begun = last is not None and last["event"] == "started"
        state.state = "queued" if launcher_lives and not begun else "lost"
        state.reason = "" if state.state == "queued" else "its process is gone"
    elif queue is None:
        state.state = "running" if last and last["event"] == "started" else "queued"
    elif submission.job in queue:
        waits = queue[submission.job][0] in ("PENDING", "REQUEUED", "REQUEUE_HOLD")
        state.state = "queued" if waits or last is None else "running"
    elif submission.job is None:
        state.state, state.reason = "lost", "its submission failed"
    else:
        state.state, state.reason = "lost", f"job {submission.job} is no longer in the queue"


def summary(found: Iterable[State]) -> str:
    """`3 finished, 1 failed`."""
    names = [state.state for state in found]
    order = (*RESULTS, *ACTIVE, "failed", "cancelled", "lost", "new")
    return ", ".join(f"{names.count(name)} {name}" for name in order if name in names)


def ask_queue(ledger: Ledger) -> dict | None:
    """The SLURM queue where a cell may be in it ({} where none is), None if it gives no answer."""
    submissions = ledger.submissions().values()
    if all(s.cancelled or s.launcher["name"] != "slurm" for s in submissions):
        return {}
    try:
        return slurm.queue()
    except slurm.SlurmError:
        return None


def _read_status(run: Path) -> dict:
    try:
        return read_status(run)
    except (OSError, ValueError):
        return {}


def _has_result(status: dict, config: dict) -> bool:
    if status.get("state") == "diverged":
        return True
    return status.get("state") == "finished" and status.get("step", 0) >= config["num_steps"]


def _stops(rows: list[dict]) -> int:
    """Attempts that were stopped or killed and, by the same submission, begun again."""
    starts = [row["token"] for row in rows if row["event"] == "started"]
    again = bool(rows) and rows[-1].get("again", False)
    return len(starts) - len(set(starts)) + again


def _last_row(run: Path) -> dict:
    """The last whole row of metrics.jsonl, {} if there is none; only the file's end is read."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            lines = file.read().split(b"\n")[:-1]
        return decode_row(lines[-1].decode()) if lines else {}
    except (OSError, ValueError, json.JSONDecodeError):
        return {}
