"""`cluster`: a real SLURM on this machine, and what its user does."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lowprec.config.compose import CONF
from lowprec.runs.attempts import last_saved
from lowprec.runs.read import read_rows, read_status

SCRIPTS = CONF.parent / "slurm" / "local"
RUN = ("model=nano", "model.vocab_size=512", "num_workers=0", "device=cpu", "precision=fp32")
RUN += ("batch_size=16", "log_every=5", "save_every=20", "evaluation=none", "data=shards")
RUN += ("data.val=null", "schedule.warmup_steps=5", "name=disturbed")


@pytest.fixture(scope="session")
def keys(squares):
    """The overrides of a small run on the CPU."""
    return (*RUN, f"data.train={squares}/train-*.tar")


@pytest.fixture(scope="session")
def cluster():
    """The SLURM that all tests of a session share; without one they fail, or skip if told to."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        for command in ([SCRIPTS / "install.sh"], [SCRIPTS / "start.sh", folder]):
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                text=True, timeout=300,
            )  # fmt: skip
            if done.returncode:
                message = f"NO SLURM HERE: {command[0].name}: {done.stdout[-2000:]}"
                is_optional = os.environ.get("ALLOW_NO_SLURM") == "1"
                (pytest.skip if is_optional else pytest.fail)(message)
        yield Cluster(folder)
    finally:
        subprocess.run([SCRIPTS / "stop.sh", folder], timeout=60, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


class Cluster:
    """A running SLURM whose files are in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # a job's `python`
        own = {"OMP_NUM_THREADS": "1", "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        self.env = kept | own

    def start(self, *command):
        return subprocess.Popen(
            command, cwd=CONF.parent, env=self.env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *command, code=0):
        process = self.start(*command)
        printed, _ = process.communicate(timeout=600)
        assert process.returncode == code, printed
        return printed

    def until(self, what, condition, seconds=120):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not in {seconds} s: {what}")
            time.sleep(0.2)

    def until_left(self, job):
        self.until(
            f"job {job} ends", lambda: job not in self.run("squeue", "-h", "-r", "-o", "%i").split()
        )

    def preempt(self):
        """A job of the higher partition takes both cores."""
        self.run("sbatch", "-p", "high", "-c", "2", "-o", "/dev/null", "--wrap", "sleep 1")

    def lose(self, node):
        """Kills all processes of a node, as when its power fails, and tells the controller."""
        daemon = int((self.folder / "run" / f"slurmd-{node}.pid").read_text())
        name = os.readlink(f"/proc/{daemon}/ns/uts")
        for path in Path("/proc").glob("[0-9]*/ns/uts"):
            with contextlib.suppress(OSError):
                if os.readlink(path) == name:
                    os.kill(int(path.parts[2]), signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def training(self, run):
        """Suspends the training of a run after its first checkpoint; returns its process id."""
        self.until(f"{run} trains", lambda: last_saved(Path(run)) >= 20)
        pid = read_rows(Path(run) / "attempts.jsonl")[-1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        assert read_status(Path(run))["state"] == "running"
        return pid

    def resume_when_signaled(self, pid):
        """Resumes a suspended process as soon as SIGUSR2 is pending for it."""

        def signaled():
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            except OSError:  # SLURM sent SIGCONT too
                return True
            masks = [int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd")]
            return masks[0] >> (signal.SIGUSR2 - 1) & 1

        self.until("SIGUSR2 reaches the training", signaled)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
