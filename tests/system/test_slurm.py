"""A sweep on a real SLURM of this machine: killed, preempted, out of time, controller restarted."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from experiments.cli import CONF
from lowprec.run import read_rows, read_status
from lowprec.sweep.cell import last_saved
from lowprec.sweep.ledger import Ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
SCRIPTS = CONF.parent / "slurm" / "local"
NANO = ("model=nano", "model.vocab_size=512", "num_workers=0", "device=cpu", "precision=fp32")
NANO += ("batch_size=16", "log_every=5", "save_every=20", "evaluation=none", "data=shards")
NANO += ("data.val=null", "schedule.warmup_steps=5", "name=disturbed")
SLURM = ("launcher=slurm", "launcher.partition=low", "launcher.gpus=0", "launcher.cpus=1")
SLURM += ("launcher.mem_gb=2", "launcher.timeout_min=15")
SHORT, LONG = ("num_steps=6",), ("num_steps=60",)
BAD = ("precision=switchback", "precision.backend=triton")  # needs a GPU, known at run time only


@pytest.fixture(scope="module")
def cluster():
    """The folder of a running SLURM; a failure where there can be none, unless ALLOW_NO_SLURM=1."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    told = ""
    for script in ("install.sh", "start.sh"):
        command = [SCRIPTS / script, *([folder] if script == "start.sh" else [])]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            text=True, timeout=300,
        )  # fmt: skip
        told = done.stdout[-2000:]
        if done.returncode:
            break
    try:
        if done.returncode:
            message = f"NO SLURM HERE, so its tests cannot run ({script}):\n{told}"
            if os.environ.get("ALLOW_NO_SLURM") == "1":
                pytest.skip(message)
            pytest.fail(message)
        yield folder
    finally:
        subprocess.run([SCRIPTS / "stop.sh", folder], timeout=60, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


class Bench:
    """Commands of a user of the cluster, whose runs are in one folder."""

    def __init__(self, cluster: Path, runs: Path, squares: Path):
        self.cluster, self.runs = cluster, runs
        self.keys = (*NANO, f"data.train={squares}/train-*.tar")
        kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.env = kept | {"OMP_NUM_THREADS": "1", "SLURM_CONF": str(cluster / "slurm.conf")}

    def start(self, *command):
        return subprocess.Popen(
            command, cwd=CONF.parent, env=self.env, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *command, code=0):
        process = self.start(*command)
        said, _ = process.communicate(timeout=600)
        assert process.returncode == code, said
        return said

    def sweep(self, verb, *texts, code=0):
        where = ("name=disturbed", f"run_dir={self.runs}")
        return self.run(sys.executable, "-m", "experiments.sweep", verb, *where, *texts, code=code)

    def submit_command(self, *texts):
        keys = (*self.keys, f"run_dir={self.runs}", *SLURM)
        return (sys.executable, "-m", "experiments.sweep", "submit", *keys, *texts)

    @property
    def ledger(self):
        return Ledger(self.runs / "sweeps" / "disturbed")

    def cell(self, seed):
        return next(c.index for c in self.ledger.cells if f"seed={seed}" in c.overrides)

    def folder(self, seed):
        return self.ledger.run_of(self.cell(seed))

    def rows(self, seed, event):
        return [row for row in self.ledger.rows(self.cell(seed)) if row["event"] == event]

    def until(self, what, is_so, seconds=120):
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                pytest.fail(f"not in {seconds} s: {what}\n{self.sweep('status')}")
            time.sleep(0.2)

    def training(self, seed):
        """Process of a cell's training once it has a checkpoint and more to do; it is stopped."""
        run = self.folder(seed)
        self.until(f"seed={seed} trains", lambda: last_saved(run) >= 20)
        pid = read_rows(run / "attempts.jsonl")[-1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        assert read_status(run)["state"] == "running"
        return pid

    def go_on_when_signaled(self, pid):
        """Lets a stopped process go on as soon as SIGUSR2 waits for it."""

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

    def left_queue(self, seed):
        job = self.ledger.submissions()[self.cell(seed)].job
        self.until(f"job {job} ends", lambda: job not in self.run("squeue", "-h", "-r", "-o", "%i"))


@pytest.fixture(scope="module")
def swept(cluster, squares, tmp_path_factory):
    """The 12 cells after all that happens to them, and what `wait` and `status` said."""
    bench = Bench(cluster, tmp_path_factory.mktemp("swept"), squares)
    bench.run(*bench.submit_command("seed=8,9", *LONG))
    killed, preempted = bench.training(8), bench.training(9)
    os.kill(killed, signal.SIGKILL)
    bench.left_queue(8)
    # two cores for a job of the higher partition: it has to preempt the cell that is left
    bench.run("sbatch", "-p", "high", "-c", "2", "-o", "/dev/null", "--wrap", "sleep 1")
    bench.go_on_when_signaled(preempted)
    bench.until("seed=9 is requeued", lambda: bench.rows(9, "ended"))

    pid = int((cluster / "run" / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    bench.until("the controller ends", lambda: not Path(f"/proc/{pid}").exists())
    limits = ("launcher.timeout_min=2", "launcher.signal_s=70")
    submitting = bench.start(*bench.submit_command("seed=10", *LONG, *limits))
    time.sleep(3)
    assert submitting.poll() is None  # it is tried again
    bench.run("slurmctld", "-f", bench.env["SLURM_CONF"])
    said, _ = submitting.communicate(timeout=120)
    assert submitting.returncode == 0, said
    seeds = "seed=" + ",".join(map(str, range(8)))
    bench.run(*bench.submit_command(seeds, *SHORT))
    bench.go_on_when_signaled(bench.training(10))
    bench.run(*bench.submit_command("seed=11", *SHORT, *BAD))
    bench.again = bench.run(*bench.submit_command(seeds, *SHORT))  # nothing twice
    bench.first = bench.sweep("wait", code=1)
    bench.resubmitted = bench.sweep("resubmit", "--failed")
    bench.last = bench.sweep("wait", code=1)
    bench.left_queue(8)  # a run has its result a moment before its process ends
    return bench


def test_eleven_cells_have_results_and_one_failure_is_named(swept):
    assert len(swept.ledger.cells) == 12
    states = [read_status(swept.folder(seed))["state"] for seed in range(11)]
    assert states == ["finished"] * 11
    assert "11 finished, 1 failed" in swept.last
    assert re.search(r"cell 11 \(.*precision.backend=triton.*\) failed: .*needs a GPU", swept.last)
    assert re.search(r"cell 0 \(.*seed=8.*\) failed: killed by SIGKILL", swept.first)
    assert "killed by SIGKILL" not in swept.last


def test_each_cell_was_disturbed_as_planned_and_none_ran_twice(swept):
    for seed in (9, 10):
        *stopped, last = [row["again"] for row in swept.rows(seed, "ended")]
        assert stopped and all(stopped) and not last
    assert [row["code"] for row in swept.rows(8, "ended")] == [137, 0]
    assert [len(swept.rows(seed, "started")) for seed in range(8)] == [1] * 8
    assert [len(swept.rows(seed, "started")) for seed in (8, 9, 11)] == [2] * 3
    assert "0 of 8 cells submitted" in swept.again
    assert "2 of 12 cells submitted" in swept.resubmitted


def test_slurm_shows_a_failed_cell_as_failed(swept):
    job = swept.ledger.submissions()[swept.cell(11)].job
    shown = swept.run("sacct", "-X", "-n", "-P", "-o", "State", "-j", job)
    assert shown.split() == ["FAILED"]


def test_disturbed_records_are_byte_identical_to_undisturbed_ones(swept, tmp_path):
    where = f"run_dir={tmp_path}"
    running = [
        swept.start(sys.executable, "-m", "experiments.train", *swept.keys, f"seed={seed}",
                    *LONG, where)
        for seed in (8, 9, 10)
    ]  # fmt: skip
    for process in running:
        said, _ = process.communicate(timeout=400)
        assert process.returncode == 0, said
    for seed in (8, 9, 10):
        disturbed = swept.folder(seed)
        whole = tmp_path / "disturbed" / disturbed.name
        assert len(read_rows(disturbed / "attempts.jsonl")) > 1
        for name in ("metrics.jsonl", "tensors.parquet"):
            assert (disturbed / name).read_bytes() == (whole / name).read_bytes(), (seed, name)


def test_hydra_launcher_takes_the_preset_and_returns_what_was_trained(cluster, squares, tmp_path):
    bench = Bench(cluster, tmp_path, squares)
    own = ("hydra.launcher.partition=low", "hydra.launcher.gpus_per_node=null")
    own += ("hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=2")
    own += ("hydra/launcher=submitit_slurm", f"hydra.sweep.dir={tmp_path}/multirun")
    bench.run(sys.executable, "-m", "experiments.train", "-m", *bench.keys, "seed=0,1",
              "num_steps=6", f"run_dir={tmp_path}", *own)  # fmt: skip
    states = [read_status(run.parent)["state"] for run in tmp_path.glob("disturbed/*/status.json")]
    assert states == ["finished"] * 2
