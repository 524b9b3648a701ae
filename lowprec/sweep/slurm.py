"""The SLURM launcher: submits runs as a job array and asks the queue about them.

SLURM's commands fail while its controller restarts, so each is tried up to five times. Before a
submission is repeated, the queue is searched for its job name, which has its token.
"""

import getpass
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lowprec.config.check import ConfigError, RunError
from lowprec.sweep.plan import Manifest

TRIES, TIMEOUT_S = 5, 60.0
FIRST_WAIT_S = 1.0  # doubled after each failure
REQUEUE = Path(__file__).parents[2] / "slurm" / "requeue.sh"


class SlurmError(RunError):
    """A SLURM command failed each time; the message ends with its last line."""


def submit(manifest: Manifest, runs: list[int], token: str, launcher: dict) -> None:
    """Submits runs as one job array and records its job if sbatch prints it. Raises SlurmError."""
    script = manifest.folder / "slurm" / f"{token}.sh"
    script.parent.mkdir(exist_ok=True)
    script.write_text(_script(manifest, runs, token, launcher))
    name = job_name(manifest, token)
    answer = _ask(
        ["sbatch", str(script)], unless=lambda: name in (other for _, other in queue().values())
    )
    if job := re.search(r"job (\d+)", answer or ""):
        manifest.record({"event": "submitted", "token": token, "job": job[1]})


def cancel(manifest: Manifest) -> None:
    """Cancels this sweep's jobs in the queue, recorded or not. Raises SlurmError."""
    rows = [row for row in manifest.events() if row["event"] == "submitting"]
    tokens = [row["token"] for row in rows if row["launcher"]["name"] == "slurm"]
    names = {job_name(manifest, token) for token in tokens}
    jobs = [job for job, (_, name) in queue().items() if name in names] if names else []
    if jobs:
        _ask(["scancel", "--quiet", *jobs])


def queue() -> dict[str, tuple[str, str]]:
    """This user's jobs: {id: (state, name)}. Raises SlurmError if squeue gives no answer."""
    command = ["squeue", "--noheader", "--array", "--format=%i|%T|%j"]
    lines = _ask([*command, f"--user={getpass.getuser()}"]).splitlines()
    rows = [line.strip().split("|", 2) for line in lines if line.strip()]
    return {job: (state, name) for job, state, name in rows}


def _script(manifest: Manifest, runs: list[int], token: str, launcher: dict) -> str:
    """A batch script whose array has a task per run; a task starts one process per GPU."""
    output = manifest.folder / "slurm" / "%A_%a.log"
    flags = {
        "job-name": job_name(manifest, token),
        "array": f"0-{len(runs) - 1}%{launcher['parallel']}",
        "chdir": Path.cwd(),
        "output": output,
        "open-mode": "append",
        "requeue": True,
        "nodes": 1,
        "ntasks": 1,
        "time": launcher["timeout_min"],
        "signal": f"USR2@{launcher['signal_s']}",
        "partition": launcher["partition"],
        "gpus-per-node": launcher["gpus"] or None,
        "cpus-per-task": launcher["cpus"],
        "mem": launcher["mem_gb"] and f"{launcher['mem_gb']}G",
        **(launcher["sbatch"] or {}),
    }
    written = {name: value for name, value in flags.items() if value not in (None, False)}
    if torn := [name for name, value in written.items() if "\n" in f"{name}{value}"]:
        raise ConfigError([f"--{name}: one line is expected" for name in torn])
    python = [sys.executable, "-m", "lowprec.sweep.supervisor", str(manifest.folder)]
    lines = ["#!/bin/bash"]
    for name, value in written.items():
        flag = f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
        if not flag.isprintable():  # what follows a line break would be a command
            raise SlurmError(f"sbatch: {flag!r} has a character that cannot be printed")
        lines.append(flag)
    lines += launcher["setup"]
    lines += [f"runs=({' '.join(map(str, runs))})", f"source {shlex.quote(str(REQUEUE))}"]
    lines += [f'srun --unbuffered {shlex.join(python)} "${{runs[$SLURM_ARRAY_TASK_ID]}}" {token}']
    return "\n".join(lines) + "\n"


def job_name(manifest: Manifest, token: str) -> str:
    """The name of a submission in the queue."""
    return f"{manifest.folder.name}-{token}"


def _ask(command: list[str], unless: Callable[[], bool] = lambda: False) -> str | None:
    """What a command prints; tried up to five times, with growing waits. Raises SlurmError.

    After a failure, returns None if `unless()` says that the command has worked nevertheless.
    """
    for attempt in range(TRIES):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
            if not done.returncode:
                return done.stdout
            reason = (done.stderr.strip() or "it printed nothing").splitlines()[-1].strip()
        except subprocess.TimeoutExpired:
            reason = f"no answer in {TIMEOUT_S:g} s"
        except FileNotFoundError as error:
            raise SlurmError(f"{command[0]}: no such command; is this a login node?") from error
        if unless():
            return None
        if attempt < TRIES - 1:
            time.sleep(FIRST_WAIT_S * 2**attempt)
    raise SlurmError(f"{command[0]} failed {TRIES} times: {reason}")
