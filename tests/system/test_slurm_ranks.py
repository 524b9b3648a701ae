"""One run as one job with two ranks, by slurm/one_node.sbatch on a real SLURM, on the CPU."""

import os
import re
import signal
import sys
import time

import pytest

from lowprec.runs.read import read_rows, read_status

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
SBATCH = ("sbatch", "--parsable", "-p", "low", "--mem=2G", "--cpus-per-task=1")
SBATCH += ("--gpus-per-node=0", "--ntasks-per-node=2")
RUN = ("num_steps=60", "num_workers=1")  # a worker, which SLURM signals too


class Jobs:
    """Jobs that train the same run, each in a folder of its own."""

    def __init__(self, cluster, folder, keys):
        self.cluster, self.folder, self.keys = cluster, folder, (*keys, *RUN)

    def submit(self, name):
        log = ("--output", self.log(name))
        keys = (*self.keys, "distributed=ddp", f"run_dir={self.folder / name}")
        return self.cluster.run(*SBATCH, *log, "slurm/one_node.sbatch", *keys).strip()

    def log(self, name):
        return self.folder / f"{name}.log"

    def directory_of(self, name):
        """The run directory of a job, once there is one."""
        directories = []
        where = self.folder / name / "disturbed"
        self.cluster.until(
            f"{name} has a run", lambda: directories.extend(where.glob("*-*")) or directories
        )
        return directories[0]

    def states(self, job):
        """The states of a job in SLURM's accounting, one per start."""
        return self.cluster.run(
            "sacct", "-D", "-X", "-n", "-P", "-o", "State", "-j", job
        ).splitlines()

    def final_states(self, job):
        """The same once the job has ended, which accounting learns after the queue."""
        self.cluster.until_left(job)
        states = []

        def ended():
            states[:] = self.states(job)
            return states and states[-1] not in ("RUNNING", "PENDING", "COMPLETING")

        self.cluster.until(f"accounting has the end of job {job}", ended)
        return states


@pytest.fixture(scope="module")
def jobs(cluster, keys, tmp_path_factory):
    return Jobs(cluster, tmp_path_factory.mktemp("ranks"), keys)


@pytest.fixture(scope="module")
def whole(jobs):
    """The run directory of an undisturbed job."""
    job = jobs.submit("whole")
    assert jobs.final_states(job) == ["COMPLETED"], jobs.log("whole").read_text()
    return jobs.directory_of("whole")


def test_the_tasks_of_a_job_train_together_like_one_process(jobs, whole):
    alone = jobs.folder / "alone"
    command = (sys.executable, "-m", "experiments.train", *jobs.keys, f"run_dir={alone}")
    jobs.cluster.run(*command)
    assert read_rows(whole / "attempts.jsonl")[0]["processes"] == 2
    losses = [row["loss"] for row in read_rows(whole / "metrics.jsonl")]
    expected = [row["loss"] for row in read_rows(jobs.directory_of("alone") / "metrics.jsonl")]
    assert len(losses) == 60 and losses == pytest.approx(expected, rel=2e-5)


def test_a_job_signaled_early_and_preempted_ends_with_the_undisturbed_record(jobs, whole):
    cluster = jobs.cluster
    job = jobs.submit("disturbed")
    cluster.until("its step", lambda: f"{job}.0" in cluster.run("squeue", "-s", "-h", "-o", "%i"))
    cluster.run("scancel", "--signal=USR2", job)  # before Python can catch it
    cluster.until("the second start", lambda: "REQUEUED" in jobs.states(job))
    stopped = cluster.training(jobs.directory_of("disturbed"))
    cluster.preempt()
    cluster.resume_when_signaled(stopped)
    states, printed = jobs.final_states(job), jobs.log("disturbed").read_text()
    assert states == ["REQUEUED", "REQUEUED", "COMPLETED"], printed
    assert len(re.findall("tasks? 0(-1)?: Exited with exit code 75", printed)) == 1
    run = jobs.directory_of("disturbed")
    assert [row["processes"] for row in read_rows(run / "attempts.jsonl")] == [2, 2]
    for name in ("metrics.jsonl", "tensors.parquet"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_killed_rank_is_named_and_fails_its_job_within_seconds(jobs):
    job = jobs.submit("killed")
    first = jobs.cluster.training(jobs.directory_of("killed"))
    listed = jobs.cluster.run("scontrol", "listpids", f"{job}.0").split("\n")
    [second] = [int(row.split()[0]) for row in listed if row.split()[3:4] == ["1"]]
    os.kill(second, signal.SIGKILL)
    killed = time.monotonic()
    os.kill(first, signal.SIGCONT)
    jobs.cluster.until_left(job)
    assert time.monotonic() - killed < 20
    printed = jobs.log("killed").read_text()
    assert jobs.final_states(job) == ["FAILED"], printed
    assert f"no heartbeats for 12 s from rank 1 (process {second} on " in printed
    assert "rank 1" in read_status(jobs.directory_of("killed"))["reason"]


def test_a_cancelled_job_saves_and_stays_cancelled(jobs):
    training = "srun bash -c 'trap \"exit 75\" TERM; sleep 60 & wait'"
    script, log = jobs.folder / "cancelled.sbatch", jobs.log("cancelled")
    script.write_text(f"#!/bin/bash\nsource slurm/requeue.sh\n{training}\n")
    job = jobs.cluster.run(*SBATCH, "--requeue", "--output", log, script).strip()
    running = ("squeue", "-s", "-h", "-o", "%i")
    jobs.cluster.until("its step", lambda: f"{job}.0" in jobs.cluster.run(*running))
    time.sleep(1)  # for the trap
    jobs.cluster.run("scancel", job)
    assert [state.split()[0] for state in jobs.final_states(job)] == ["CANCELLED"]
    assert "was cancelled; its checkpoint is kept" in log.read_text()
