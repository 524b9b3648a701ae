"""One run as one job with two ranks, on one node or on two, on a real SLURM and the CPU."""

import os
import re
import signal
import sys
import time

import pytest

from lowprec.runs.read import read_rows, read_status

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
SBATCH = ("sbatch", "--parsable", "--mem=2G", "--cpus-per-task=1", "--gpus-per-node=0")
ONE_NODE = ("-p", "low", "--ntasks-per-node=2", "slurm/nodes.sbatch")
TWO_NODES = ("-p", "nodes", "--nodes=2", "--ntasks-per-node=1", "slurm/nodes.sbatch")
RUN = ("num_steps=60", "num_workers=1")  # a worker, which SLURM signals too


class Jobs:
    """Jobs that train the same run, each in a folder of its own."""

    def __init__(self, cluster, folder, keys):
        self.cluster, self.folder, self.keys = cluster, folder, (*keys, *RUN)

    def submit(self, name, where=ONE_NODE):
        log = ("--output", self.log(name))
        keys = (*self.keys, "distributed=ddp", f"run_dir={self.folder / name}")
        return self.cluster.run(*SBATCH, *log, *where, *keys).strip()

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

    def pids_by_task(self, job):
        """The process of each task of a job's step; none before they have started."""
        listed = self.cluster.start("scontrol", "listpids", f"{job}.0").communicate()[0]
        rows = [row.split() for row in listed.splitlines()]
        return {row[3]: int(row[0]) for row in rows if row[3:4] and row[3].isdigit()}

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
    cluster.until("its tasks", lambda: len(jobs.pids_by_task(job)) == 2)
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
    same_record(run, whole)


def test_a_killed_rank_is_named_and_fails_its_job_within_seconds(jobs):
    job = jobs.submit("killed")
    first = jobs.cluster.training(jobs.directory_of("killed"))
    second = jobs.pids_by_task(job)["1"]
    os.kill(second, signal.SIGKILL)
    killed = time.monotonic()
    os.kill(first, signal.SIGCONT)
    jobs.cluster.until_left(job)
    assert time.monotonic() - killed < 20
    printed = jobs.log("killed").read_text()
    assert jobs.final_states(job) == ["FAILED"], printed
    assert "rank 1 had not reported within 5 s; rank 0 (process " in printed
    assert "rank 1" in read_status(jobs.directory_of("killed"))["reason"]


def same_record(run, whole):
    for name in ("metrics.jsonl", "tensors.parquet"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


def test_ranks_on_two_nodes_that_are_preempted_resume_to_the_record_of_one_node(jobs, whole):
    job = jobs.submit("nodes", TWO_NODES)
    stopped = jobs.cluster.training(jobs.directory_of("nodes"))
    jobs.cluster.run("sbatch", "-p", "high", "-w", "node2", "-o", "/dev/null", "--wrap", "sleep 1")
    jobs.cluster.resume_when_signaled(stopped)
    assert jobs.final_states(job) == ["REQUEUED", "COMPLETED"], jobs.log("nodes").read_text()
    run = jobs.directory_of("nodes")
    attempts = read_rows(run / "attempts.jsonl")
    assert [row["processes"] for row in attempts] == [2, 2] and attempts[1]["saved"] >= 20
    same_record(run, whole)


def test_a_job_that_loses_a_node_resumes_when_the_node_is_back(jobs, whole):
    cluster = jobs.cluster
    job = jobs.submit("lost", TWO_NODES)
    first = cluster.training(jobs.directory_of("lost"))
    cluster.lose("node2")
    os.kill(first, signal.SIGCONT)
    cluster.until("the job waits for the node", lambda: jobs.states(job)[-1] == "PENDING")
    cluster.run("slurm/local/node.sh", cluster.folder, "node2")
    states, printed = jobs.final_states(job), jobs.log("lost").read_text()
    assert states == ["NODE_FAIL", "COMPLETED"], printed
    same_record(jobs.directory_of("lost"), whole)


def test_submitit_trains_a_run_on_two_nodes(jobs, whole):
    own = ("partition=nodes", "nodes=2", "tasks_per_node=1", "gpus_per_node=null")
    own += ("cpus_per_task=1", "mem_gb=2", f"submitit_folder={jobs.folder}/submitit/%j")
    launcher = ("hydra/launcher=submitit_slurm", *(f"hydra.launcher.{text}" for text in own))
    keys = (*jobs.keys, "distributed=ddp", f"run_dir={jobs.folder / 'submitit_runs'}")
    jobs.cluster.run(sys.executable, "-m", "experiments.train", "-m", *keys, *launcher)
    same_record(jobs.directory_of("submitit_runs"), whole)


def test_a_cancelled_job_saves_and_stays_cancelled(jobs):
    ready = [jobs.folder / f"ready.{rank}" for rank in range(2)]
    begin = f'trap "exit 75" TERM; touch {jobs.folder}/ready.$SLURM_PROCID'
    training = f"srun bash -c '{begin}; sleep 60 & wait'"
    script, log = jobs.folder / "cancelled.sbatch", jobs.log("cancelled")
    script.write_text(f"#!/bin/bash\nsource slurm/requeue.sh\n{training}\n")
    options = ("-p", "low", "--ntasks-per-node=2", "--requeue", "--output", log)
    job = jobs.cluster.run(*SBATCH, *options, script).strip()
    jobs.cluster.until("both ranks", lambda: all(path.exists() for path in ready))
    jobs.cluster.run("scancel", job)
    assert [state.split()[0] for state in jobs.final_states(job)] == ["CANCELLED"]
    assert "was cancelled; its checkpoint is kept" in log.read_text()
