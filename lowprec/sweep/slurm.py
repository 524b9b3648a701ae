"""The SLURM launcher: a job array through submitit, and what is asked of the queue.

SLURM's commands fail when its controller restarts: each is tried five times, and a submission that
may or may not have gone through is looked for by its name before it is tried again.
"""

import getpass
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import submitit
from submitit.core.utils import DelayedSubmission

from lowprec.sweep.cell import run_cell
from lowprec.sweep.manifest import Ledger

TRIES, TIMEOUT_S = 5, 60.0
FIRST_WAIT_S = 1.0  # doubled after each failure
TIMEOUTS = 1000  # of submitit, which counts them; requeue.sh does without
REQUEUE = Path(__file__).parent.parent.parent / "slurm" / "requeue.sh"


class SlurmError(RuntimeError):
    """A command of SLURM that failed each time; the message has its last words."""


class Job:
    """What submitit pickles for a cell; the state of a cell is in its run directory."""

    def __init__(self, folder: Path, index: int, token: str, gpus: int):
        self.folder, self.index, self.token, self.gpus = folder, index, token, gpus

    def __call__(self) -> None:
        """Runs the cell; its exit status is the job's, and STOPPED makes requeue.sh requeue it."""
        ledger = Ledger(self.folder)
        code = run_cell(ledger, self.index, self.token, _own_id(), self.gpus)
        if code:
            sys.exit(code)


def submit(ledger: Ledger, cells: list[int], token: str, launcher: dict) -> dict[str, str]:
    """Submits cells as one job array; {cell: job id}. Raises SlurmError."""
    script = _script(ledger, len(cells), token, launcher)
    for attempt in range(TRIES):
        try:
            job = _job_of(_run(["sbatch", str(script)]))
        except SlurmError as error:
            if jobs := adopt(ledger, cells, token, launcher):  # it went through all the same
                return jobs
            if attempt == TRIES - 1:
                raise SlurmError(f"sbatch failed {TRIES} times: {error}") from error
            time.sleep(FIRST_WAIT_S * 2**attempt)
            continue
        jobs = _hand_out(ledger, cells, job, token, launcher)
        if attempt:  # what seemed to fail may be in the queue by now
            return adopt(ledger, cells, token, launcher) or jobs
        return jobs


def adopt(ledger: Ledger, cells: list[int], token: str, launcher: dict) -> dict[str, str]:
    """Jobs in the queue of a submission that nobody saw succeed; {} if there are none.

    Where it went through more than once, the first stays and the others are cancelled.
    """
    names = {job: name for job, (_, name) in queue().items()}
    found = {job.partition("_")[0] for job in names if names[job] == job_name(ledger, token)}
    if not found:
        return {}
    first, *others = sorted(found, key=int)
    if others:
        cancel(others)
        print(f"submitted more than once: job {first} stays, {', '.join(others)} cancelled")
    return _hand_out(ledger, cells, first, token, launcher)


def _script(ledger: Ledger, count: int, token: str, launcher: dict) -> Path:
    """The batch script of an array of so many jobs, as submitit writes it."""
    executor = submitit.SlurmExecutor(_folder(ledger), max_num_timeout=TIMEOUTS)
    executor.update_parameters(**_parameters(ledger, token, launcher))
    if count > 1:
        executor.parameters["map_count"] = count
    script = _folder(ledger) / f"{token}.sh"
    script.parent.mkdir(exist_ok=True)
    script.write_text(executor._make_submission_file_text(executor._submitit_command_str, token))
    return script


def _hand_out(
    ledger: Ledger, cells: list[int], job: str, token: str, launcher: dict
) -> dict[str, str]:
    """Writes what each job of an array is to run, which it waits a minute for; {cell: job id}."""
    names = [job] if len(cells) == 1 else [f"{job}_{place}" for place in range(len(cells))]
    for name, index in zip(names, cells, strict=True):
        pickle = _folder(ledger) / f"{name}_submitted.pkl"
        delayed = DelayedSubmission(Job(ledger.folder, index, token, launcher["gpus"]))
        delayed.set_timeout(launcher["timeout_min"], TIMEOUTS)
        temporary = pickle.with_suffix(".tmp")
        delayed.dump(temporary)
        os.replace(temporary, pickle)
    return dict(zip(map(str, cells), names, strict=True))


def job_name(ledger: Ledger, token: str) -> str:
    """The name under which a submission is in the queue."""
    return f"{ledger.folder.name}-{token}"


def require() -> None:
    """Raises SlurmError where nothing can be submitted: no SLURM, or its controller is silent."""
    if shutil.which("sbatch") is None:
        raise SlurmError("sbatch: no such command; is this a login node?")
    queue()


def queue() -> dict[str, tuple[str, str]]:
    """This user's jobs: {id: (state, name)}. Raises SlurmError where the queue cannot be asked."""
    command = ["squeue", "--noheader", "--array", "--format=%i|%T|%j"]
    lines = _ask([*command, f"--user={getpass.getuser()}"]).splitlines()
    rows = [line.strip().split("|", 2) for line in lines if line.strip()]
    return {job: (state, name) for job, state, name in rows}


def own_jobs(ledger: Ledger) -> list[str]:
    """Jobs in the queue of any submission of a sweep, seen to succeed or not. Raises SlurmError."""
    rows = [row for row in ledger.events() if row["event"] == "submitting"]
    tokens = [row["token"] for row in rows if row["launcher"]["name"] == "slurm"]
    names = {job_name(ledger, token) for token in tokens}
    return [job for job, (_, name) in queue().items() if name in names] if names else []


def cancel(jobs: list[str]) -> None:
    """Cancels jobs; those that have ended are no fault. Raises SlurmError."""
    if jobs:
        _ask(["scancel", "--quiet", *jobs])


def _ask(command: list[str]) -> str:
    """What a command prints, tried five times with growing waits."""
    for attempt in range(TRIES):
        try:
            return _run(command)
        except SlurmError as error:
            if attempt == TRIES - 1:
                raise SlurmError(f"{command[0]} failed {TRIES} times: {error}") from error
        time.sleep(FIRST_WAIT_S * 2**attempt)


def _run(command: list[str]) -> str:
    """What a command prints, tried once. Raises SlurmError with its last words if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"no answer in {TIMEOUT_S:g} s") from error
    except FileNotFoundError as error:
        raise SlurmError("no such command; is this a login node?") from error
    if done.returncode:
        raise SlurmError(_last_line(done.stderr))
    return done.stdout


def _job_of(said: str) -> str:
    found = re.search(r"job (\d+)", said)
    if found is None:
        raise SlurmError(f"it names no job: {_last_line(said)}")
    return found[1]


def _parameters(ledger: Ledger, token: str, launcher: dict) -> dict:
    """Sbatch flags by submitit's names. A cell is one task, which starts a process a GPU."""
    flags = {
        "job_name": job_name(ledger, token),
        "time": launcher["timeout_min"],
        "partition": launcher["partition"],
        "gpus_per_node": launcher["gpus"] or None,
        "cpus_per_task": launcher["cpus"],
        "mem": launcher["mem_gb"] and f"{launcher['mem_gb']}GB",
        "signal_delay_s": launcher["signal_s"],
        "array_parallelism": launcher["parallel"],
        "setup": [
            *launcher["setup"],
            f"source {shlex.quote(str(REQUEUE))} {shlex.quote(str(_folder(ledger)))}",
        ],
        "additional_parameters": {"requeue": True, **(launcher["sbatch"] or {})},
    }
    return {name: value for name, value in flags.items() if value is not None}


def _folder(ledger: Ledger) -> Path:
    return ledger.folder / "slurm"


def _own_id() -> str:
    return submitit.JobEnvironment().job_id


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no word")
