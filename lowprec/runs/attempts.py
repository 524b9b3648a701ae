"""Attempts of a run: exit statuses, checkpoint errors, and the limit on fruitless requeues."""

import ctypes
import os
import signal
from pathlib import Path

from lowprec.config.check import RunError
from lowprec.runs.read import scan_rows

STOPPING = frozenset({signal.SIGTERM, signal.SIGUSR2, signal.SIGINT})  # ask a run to stop
STOPPED = 75  # exit status of a run that was asked to stop: the same command resumes it
LOST = 76  # exit status of a process that the watchdog ended
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
MAX_ATTEMPTS = 3  # attempts of one job that may begin at the same checkpoint


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Has the kernel send this process a signal when its parent process ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)


def follow_parent(*_: object) -> None:
    """Leaves the stopping signals to the parent process, whose end is this process's end too.

    Called in a new process: a data worker, a job, or a command that reads a shard.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    end_with_parent()


class CheckpointError(RunError):
    """A checkpoint cannot be written or used; the message names it and says why."""


class DamagedError(CheckpointError):
    """A checkpoint differs from what was written; an older one may be intact."""


def saved_steps(folder: Path) -> list[Path]:
    """Folders named `step_<number>`, sorted; others, such as `step_000000004.bak`, are left out."""
    paths = sorted(folder.glob("step_*"))
    return [path for path in paths if path.name.removeprefix("step_").isdecimal()]


def step_of(path: Path) -> int:
    """The step of a checkpoint's or snapshot's folder."""
    return int(path.name.removeprefix("step_"))


def last_saved(run: Path) -> int:
    """The step of a run's newest checkpoint, 0 if it has none."""
    return max(map(step_of, saved_steps(run / "checkpoints")), default=0)


def no_progress(attempts: list[dict], saved: int) -> str | None:
    """Why a job must not start again if its last MAX_ATTEMPTS attempts began at step `saved`.

    A job that is always preempted before it can save must not run forever.
    """
    if [row.get("saved") for row in attempts[-MAX_ATTEMPTS:]] != [saved] * MAX_ATTEMPTS:
        return None
    return (
        f"stopped: {MAX_ATTEMPTS} attempts without a new checkpoint (the last is of step {saved}); "
        "use a smaller save_every, or a longer time limit or grace period"
    )


def first_step(run: Path) -> dict:
    """`saved`, the step of the newest checkpoint, at which an attempt begins, and its SLURM `job`.

    Raises CheckpointError if a requeued job makes no progress. Manual starts are not limited.
    """
    saved, job = last_saved(run), os.environ.get("SLURM_JOB_ID")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    rows = scan_rows(run / "attempts.jsonl")[0] if "SLURM_RESTART_COUNT" in os.environ else []
    if reason := no_progress([row for row in rows if row.get("job") == job], saved):
        raise CheckpointError(reason)
    return {"saved": saved, "job": job}
