"""The SLURM launcher: submitit submits runs as one job array; the queue says which wait and train.

The array has the sweep's name and a run's task its index, so a submission needs no record. SLURM's
commands fail while its controller restarts, so each is tried up to five times. Before a submission
is repeated, its tasks are looked for in the queue.
"""

import getpass
import hashlib
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowprec.config.check import RunError
from lowprec.sweep.plan import TRAIN, Plan

TRIES, TIMEOUT_S = 5, 60.0
FIRST_WAIT_S = 1.0  # doubled after each failure
REQUEUE = Path(__file__).parents[2] / "slurm" / "requeue.sh"
OWN_FLAGS = ("job_name", "array", "output", "chdir", "open_mode")  # by them jobs and logs are found
WAITS = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")


class SlurmError(RunError):
    """A SLURM command failed each time; the message ends with its last line."""


def submit(plan: Plan, runs: list[int], launcher: dict) -> None:
    """Submits runs as one job array. Raises SlurmError."""
    executor = _executor(plan, runs, launcher)
    folder = shlex.quote(str(plan.folder))
    command = f"{shlex.join(TRAIN)} {folder} $SLURM_ARRAY_TASK_ID"
    before = {job for job, _, _ in tasks(plan, queue())}  # jobs that are being cancelled

    def call() -> None:
        executor._submit_command(command)

    def has_arrived() -> bool:
        new = {index for job, index, _ in tasks(plan, queue()) if job not in before}
        return new >= set(runs)

    _retried("sbatch", call, unless=has_arrived)


def cancel(plan: Plan) -> None:
    """Cancels this sweep's jobs in the queue. Raises SlurmError."""
    if "slurm" in plan.launchers and (jobs := [job for job, _, _ in tasks(plan, queue())]):
        _ask(["scancel", "--quiet", *jobs])


def queue() -> list[tuple[str, str, str]]:
    """The id, state and name of this user's jobs. Raises SlurmError if squeue does not answer."""
    command = ["squeue", "--noheader", "--array", "--format=%i|%T|%j"]
    lines = _ask([*command, f"--user={getpass.getuser()}"]).splitlines()
    return [tuple(line.strip().split("|", 2)) for line in lines if line.count("|") >= 2]


def tasks(plan: Plan, jobs: list[tuple[str, str, str]]) -> list[tuple[str, int, str]]:
    """The id, run index and state of the jobs of a sweep."""
    own = [
        (job, job.partition("_")[2], state) for job, state, name in jobs if name == job_name(plan)
    ]
    return [(job, int(task), state) for job, task, state in own if task.isdecimal()]


def job_name(plan: Plan) -> str:
    """The name of a sweep's jobs in the queue, where another folder may have one of its name."""
    folder = plan.folder.resolve()  # the same through a link
    return f"{folder.name}-{hashlib.sha256(bytes(folder)).hexdigest()[:8]}"


def _executor(plan: Plan, runs: list[int], launcher: dict) -> Any:
    """Submitit's executor; its jobs train one run each, in a task per GPU."""
    from submitit.slurm.slurm import SlurmExecutor  # slow, and needed here only

    class Executor(SlurmExecutor):
        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            command = super()._make_submission_command(submission_file_path)
            return ["timeout", str(TIMEOUT_S), *command]  # it hangs without a controller

    count, folder = max(1, launcher["gpus"]), plan.folder / "slurm"
    folder.mkdir(exist_ok=True)
    log = str(plan.folder / "logs" / "%a.log")
    parameters = {
        "job_name": job_name(plan),
        "time": launcher["timeout_min"],
        "signal_delay_s": launcher["signal_s"],
        "partition": launcher["partition"],
        "nodes": 1,
        "ntasks_per_node": count,
        "gpus_per_node": launcher["gpus"] or None,
        "cpus_per_task": launcher["cpus"] and max(1, launcher["cpus"] // count),
        "mem": launcher["mem_gb"] and f"{launcher['mem_gb']}G",
    }
    flags = {
        "array": f"{','.join(map(str, runs))}%{launcher['parallel']}",
        "chdir": Path.cwd(),
        "output": log,
        "requeue": True,
        **{
            str(name).replace("-", "_"): value for name, value in (launcher["sbatch"] or {}).items()
        },
    }
    for name, value in (parameters | flags).items():
        if not f"{name}{value}".isprintable():  # what follows a line break would be a command
            raise SlurmError(f"sbatch: {name}={value!r} has a character that cannot be printed")
    try:
        executor = Executor(folder)
    except RuntimeError as error:  # no srun
        raise SlurmError(str(error)) from error
    executor.update_parameters(
        **parameters,
        wckey=None,
        additional_parameters={k: v for k, v in flags.items() if v is not None and v is not False},
        # submitit's srun gives training a terminal, where a progress bar would be drawn
        setup=[*launcher["setup"], "export TERM=dumb", f"source {shlex.quote(str(REQUEUE))}"],
        srun_args=["--output", log, "--open-mode=append"],
        stderr_to_stdout=True,
    )
    return executor


def _ask(command: list[str]) -> str:
    """What a command prints. Raises SlurmError."""

    def call() -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout

    return _retried(command[0], call)


def _retried(
    name: str, call: Callable[[], str | None], unless: Callable[[], bool] = lambda: False
) -> str | None:
    """What a call returns; tried up to five times, with growing waits. Raises SlurmError.

    After a failure, returns None if `unless()` says that the call has worked nevertheless.
    """
    for attempt in range(TRIES):
        try:
            return call()
        except subprocess.TimeoutExpired:
            reason = f"no answer in {TIMEOUT_S:g} s"
        except FileNotFoundError as error:
            raise SlurmError(f"{name}: no such command; is this a login node?") from error
        except RuntimeError as error:  # of submitit, too
            lines = str(error).strip().splitlines()
            reason = lines[-1].strip() if lines else f"no answer in {TIMEOUT_S:g} s"
        if unless():
            return None
        if attempt < TRIES - 1:
            time.sleep(FIRST_WAIT_S * 2**attempt)
    raise SlurmError(f"{name} failed {TRIES} times: {reason}")
