"""A sweep on a real SLURM: runs are killed, preempted and out of time, the controller restarts."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from lowprec.runs.read import read_rows, read_status
from lowprec.sweep.plan import Plan
from lowprec.sweep.slurm import job_name

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
SLURM = ("launcher=slurm", "launcher.partition=low", "launcher.gpus=0", "launcher.cpus=1")
SLURM += ("launcher.mem_gb=2", "launcher.timeout_min=15")
SHORT, LONG = ("num_steps=6",), ("num_steps=60",)
BAD = ("precision=switchback", "precision.backend=triton")  # needs a GPU, known at run time only


class Bench:
    """A user's sweep on the cluster, in one folder."""

    def __init__(self, cluster, runs: Path, keys: tuple[str, ...]):
        self.cluster, self.runs, self.keys = cluster, runs, keys
        self.run, self.start = cluster.run, cluster.start

    def sweep(self, verb, *texts, code=0):
        where = ("name=disturbed", f"run_dir={self.runs}")
        return self.run(sys.executable, "-m", "experiments.sweep", verb, *where, *texts, code=code)

    def submit_command(self, *texts):
        keys = (*self.keys, f"run_dir={self.runs}", *SLURM)
        return (sys.executable, "-m", "experiments.sweep", "submit", *keys, *texts)

    @property
    def plan(self):
        return Plan(self.runs / "sweeps" / "disturbed")

    def index(self, seed):
        return next(r.index for r in self.plan.runs if f"seed={seed}" in r.overrides)

    def directory(self, seed):
        return self.plan.directory_of(self.index(seed))

    def starts(self, seed):
        return len(read_rows(self.directory(seed) / "attempts.jsonl"))

    def until_left(self, seed):
        """Waits until no job of a run is in the queue."""
        name, ending = job_name(self.plan), f"_{self.index(seed)}"

        def has_left():
            jobs = self.run("squeue", "-h", "-r", "-n", name, "-o", "%i").split()
            return not any(job.endswith(ending) for job in jobs)

        self.cluster.until(f"the job of seed={seed} ends", has_left)


@pytest.fixture(scope="module")
def swept(cluster, keys, tmp_path_factory):
    """Twelve runs after all disturbances, with the output of `wait` and `resubmit`."""
    bench = Bench(cluster, tmp_path_factory.mktemp("swept"), keys)
    bench.run(*bench.submit_command("seed=8,9", *LONG))
    killed, preempted = (cluster.training(bench.directory(seed)) for seed in (8, 9))
    os.kill(killed, signal.SIGKILL)
    bench.until_left(8)
    cluster.preempt()
    cluster.resume_when_signaled(preempted)
    preempted = bench.directory(9)
    cluster.until("seed=9 has saved", lambda: read_status(preempted)["state"] == "preempted")

    pid = int((cluster.folder / "run" / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    cluster.until("the controller ends", lambda: not Path(f"/proc/{pid}").exists())
    limits = ("launcher.timeout_min=2", "launcher.signal_s=70")
    submitting = bench.start(*bench.submit_command("seed=10", *LONG, *limits))
    time.sleep(3)
    assert submitting.poll() is None  # it is tried again
    bench.run("slurmctld", "-f", cluster.env["SLURM_CONF"])
    printed, _ = submitting.communicate(timeout=120)
    assert submitting.returncode == 0, printed
    seeds = "seed=" + ",".join(map(str, range(8)))
    bench.run(*bench.submit_command(seeds, *SHORT))
    cluster.resume_when_signaled(cluster.training(bench.directory(10)))
    bench.run(*bench.submit_command("seed=11", *SHORT, *BAD))
    bench.again = bench.run(*bench.submit_command(seeds, *SHORT))  # nothing twice
    bench.first = bench.sweep("wait", code=1)
    bench.resubmitted = bench.sweep("resubmit", "--failed")
    bench.last = bench.sweep("wait", code=1)
    bench.until_left(8)  # a run has its result a moment before its process ends
    return bench


def test_eleven_runs_have_results_and_one_failure_is_named(swept):
    assert len(swept.plan.runs) == 12
    states = [read_status(swept.directory(seed))["state"] for seed in range(11)]
    assert states == ["finished"] * 11
    assert "11 finished, 1 failed" in swept.last
    assert re.search(r"run 11 \(.*precision.backend=triton.*\) failed: .*needs a GPU", swept.last)
    assert re.search(r"run 0 \(.*seed=8.*\) lost: its job .*log ends with: .*Killed", swept.first)
    assert " lost: " not in swept.last


def test_each_run_was_disturbed_as_planned_and_none_ran_twice(swept):
    assert [swept.starts(seed) for seed in range(8)] == [1] * 8
    assert swept.starts(8) == 2 and min(swept.starts(9), swept.starts(10)) > 1
    assert "0 of 8 runs submitted" in swept.again
    assert "2 of 12 runs submitted" in swept.resubmitted


def test_slurm_shows_a_failed_run_as_failed(swept):
    columns = ("sacct", "-X", "-n", "-P", "-o", "JobID,State", "--name", job_name(swept.plan))
    rows = [line.split("|") for line in swept.run(*columns).splitlines()]
    assert {s for job, s in rows if job.endswith(f"_{swept.index(11)}")} == {"FAILED"}


def test_disturbed_records_are_byte_identical_to_undisturbed_ones(swept, tmp_path):
    where = f"run_dir={tmp_path}"
    running = [
        swept.start(sys.executable, "-m", "experiments.train", *swept.keys, f"seed={seed}",
                    *LONG, where)
        for seed in (8, 9, 10)
    ]  # fmt: skip
    for process in running:
        printed, _ = process.communicate(timeout=400)
        assert process.returncode == 0, printed
    for seed in (8, 9, 10):
        disturbed = swept.directory(seed)
        whole = tmp_path / "disturbed" / disturbed.name
        assert len(read_rows(disturbed / "attempts.jsonl")) > 1
        for name in ("metrics.jsonl", "tensors.parquet"):
            assert (disturbed / name).read_bytes() == (whole / name).read_bytes(), (seed, name)


def test_hydras_launcher_trains_the_runs_of_the_preset(cluster, keys, tmp_path):
    own = ("hydra.launcher.partition=low", "hydra.launcher.gpus_per_node=null")
    own += ("hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=2")
    own += ("hydra/launcher=submitit_slurm",)
    own += (f"hydra.launcher.submitit_folder={tmp_path}/multirun/%j",)
    cluster.run(sys.executable, "-m", "experiments.train", "-m", *keys, "seed=0,1",
                "num_steps=6", f"run_dir={tmp_path}", *own)  # fmt: skip
    states = [read_status(run.parent)["state"] for run in tmp_path.glob("disturbed/*/status.json")]
    assert states == ["finished"] * 2
