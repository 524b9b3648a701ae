"""Attempts of a run: exit statuses, checkpoint errors, and the limit on fruitless requeues."""

import os
import signal
from pathlib import Path

from lowprec.config.check import RunError
from lowprec.runs.read import scan_rows

STOPPING = frozenset({signal.SIGTERM, signal.SIGUSR2, signal.SIGINT})  # ask a run to stop
STOPPED = 75  # exit status of a run that was asked to stop: the same command resumes it
LOST = 76  # exit status of a process that the watchdog ended
MAX_ATTEMPTS = 3  # attempts of one job that may begin at the same checkpoint


class CheckpointError(RunError):
    """A checkpoint cannot be written or used; the message names it and says why."""


class DamagedError(CheckpointError):
    """A checkpoint differs from what was written; an older one may be intact."""


def last_saved(run: Path) -> int:
    """The step of a run's newest checkpoint, 0 if it has none."""
    names = [path.name.removeprefix("step_") for path in (run / "checkpoints").glob("step_*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


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
