"""Sweeps whose runs take milliseconds: a shell script in place of training.

`python -m` finds modules in the working directory first: there, `experiments.sweep` is the script.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from experiments import sweep
from lowprec import ops  # noqa: F401 (as TRITON_INTERPRET says now: `here` unsets it)
from lowprec.config.compose import CONF
from lowprec.runs import durable
from lowprec.runs.attempts import STOPPING
from lowprec.sweep import slurm
from lowprec.sweep.plan import Plan, PlannedRun
from lowprec.sweep.status import TO_SUBMIT, ask_queue, states
from tests.small import WORDS

# Like training, it keeps the record of its run locked.
REPLACED = """
import os, sys
from lowprec.runs.durable import try_lock
run = f"runs/t/{sys.argv[3]}"
os.makedirs(run, exist_ok=True)
with open("starts", "a") as starts:
    starts.write(f"{sys.argv[3]} ")
lock = os.open(f"{run}/.lock", os.O_RDWR | os.O_CREAT)
if not os.environ.get("RANK", "0").strip("0"):
    assert try_lock(lock, 1.0)  # like training, it waits while others look whether it is locked
    os.set_inheritable(lock, True)
os.execvp("sh", ["sh", "run.sh", *sys.argv[2:]])
"""
# $1: the sweep, $2: the run. Runs listed in the file `bad` fail, those in `slow` take a second.
SCRIPT = """
run=runs/t/$2
echo "$2" >> order
grep -qx "$2" slow && sleep 1
grep -qx "$2" bad && { echo "ValueError: run $2 is bad"; exit 3; }
mkdir -p "$run"
echo '{"state": "finished", "step": 1}' > "$run/status.json"
"""
LOCAL = {"name": "local", "parallel": 2, "gpus": 0}
CONFIG = {"num_steps": 1, "evaluation": {"name": "none"}, "distributed": {"name": "ddp"}}
# fails the first $FAIL times it is called
FAILING = """
n=$(grep -c "^$(basename "$0") " calls)
if [ "$n" -le "${FAIL:-0}" ]; then echo 'Unable to contact slurm controller' >&2; exit 1; fi
"""
# adds the tasks of the array to the queue under its name
SBATCH = """
name=$(sed -n 's/^#SBATCH --job-name=//p' "${@: -1}")
tasks=$(sed -n "s/^#SBATCH --array='*\\([0-9,]*\\).*/\\1/p" "${@: -1}")
for task in ${tasks//,/ }; do echo "77_$task|PENDING|$name" >> queue; done
echo "Submitted batch job 77"
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory; processes that a failed test leaves behind are killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(CONF.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(sweep, "POLL_S", 0.05)
    for name in ("bad", "slow", "order"):
        (tmp_path / name).write_text("")
    yield tmp_path
    deadline = time.monotonic() + 10
    while (left := processes_in(tmp_path)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start_nothing(monkeypatch):
    monkeypatch.setattr(sweep.local, "start", lambda *_: None)


@pytest.fixture
def no_launcher(monkeypatch):
    """Submitted runs wait: no launcher is started."""
    start_nothing(monkeypatch)


def processes_in(folder):
    """Other processes whose working directory is a folder, as Linux shows them."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or it is another user's
            if os.readlink(process / "cwd") == str(folder) and int(process.name) != os.getpid():
                pids.append(int(process.name))
    return pids


class Sweeps:
    """A sweep in a folder of its own, and what tests ask about it."""

    script = SCRIPT

    def __init__(self, here):
        self.here, self.folder = here, here / "runs" / "sweeps" / "t"

    def make(self, count, script=SCRIPT):
        """The plan of so many runs of a script."""
        (self.here / "run.sh").write_text(script)
        (self.here / "experiments").mkdir(exist_ok=True)
        (self.here / "experiments" / "__init__.py").touch()
        (self.here / "experiments" / "sweep.py").write_text(REPLACED)
        Plan.open(self.folder)
        return self.add(count)

    def add(self, count):
        """Adds runs whose directories are runs/t/<index>."""
        plan = self.plan
        first = len(plan.runs)
        plan.add([
            PlannedRun(-1, f"t{i}", f"t/{i}", [f"seed={i}"], CONFIG)
            for i in range(first, first + count)
        ])  # fmt: skip
        return plan

    @property
    def plan(self):
        return Plan(self.folder)

    def submit(self, runs=None, **launcher):
        """What the verb does after it has planned the runs; `runs`: of these alone."""
        with durable.locked(self.folder / ".lock"):
            plan = self.plan
            runs = [run.index for run in plan.runs] if runs is None else runs
            sweep.hand_over(plan, runs, TO_SUBMIT, LOCAL | launcher)

    def train(self, monkeypatch, **launcher):
        """Submits and trains in this process."""
        start_nothing(monkeypatch)
        monkeypatch.setattr(sweep.local, "LOOK_S", 0.1)
        self.submit(**launcher)
        handlers = {number: signal.getsignal(number) for number in STOPPING}
        sweep.local.launch(self.folder)
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def states(self):
        plan = self.plan
        return states(plan, ask_queue(plan))

    def names(self):
        return [state.state for state in self.states()]

    def starts(self):
        """How often each run was started."""
        path = self.here / "starts"
        started = path.read_text().split() if path.exists() else []
        return [started.count(str(run.index)) for run in self.plan.runs]

    def end(self):
        """Waits until no run waits or trains."""
        self.until(lambda: not {"queued", "running"} & set(self.names()))

    def until(self, condition, seconds=90):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not in time: {self.names()}"
            time.sleep(0.05)


@pytest.fixture
def sweeps(here):
    return Sweeps(here)


@pytest.fixture
def shim(here, monkeypatch):
    """`shim("squeue", script)`: a command of that name, first on PATH; its calls are in `calls`."""
    folder = here / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name, script):
        path = folder / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {here}/calls\n{script}\n')
        path.chmod(0o755)

    def calls(name):
        lines = (here / "calls").read_text().splitlines()
        return [call for call in lines if call.split()[0] == name]

    make.calls = calls
    return make


@pytest.fixture
def cluster(here, shim, monkeypatch):
    """Shims of SLURM's commands that fail `cluster(times)`, with short waits between tries.

    `cluster.sbatch` is the script of one that succeeds.
    """
    monkeypatch.setattr(slurm, "FIRST_WAIT_S", 0.01)
    monkeypatch.setenv("REQUEUE_WAIT_S", "0")
    shim("srun", "")
    shim("sbatch", FAILING + SBATCH)
    shim("squeue", FAILING + "[ ! -e queue ] || cat queue")
    shim("scontrol", FAILING)
    shim("scancel", FAILING)
    (here / "calls").write_text("")

    def fail(times):
        monkeypatch.setenv("FAIL", str(times))

    fail.sbatch = SBATCH
    return fail


@pytest.fixture
def tiny(squares):
    """The keys of a run that trains for two steps on the CPU."""
    keys = [*WORDS, "num_steps=2", "num_workers=0", "batch_size=16", "evaluation=none"]
    return [*keys, "data=shards", "data.val=null", f"data.train={squares}/train-*.tar"]
