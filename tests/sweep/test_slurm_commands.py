"""SLURM's commands fail, hang or do more than they say: shims of them, first on PATH."""

import time

import pytest

from experiments import sweep
from lowprec.sweep import slurm
from lowprec.sweep.manifest import Ledger
from lowprec.sweep.slurm import SlurmError

LAUNCHER = {"name": "slurm", "parallel": 8, "gpus": 0, "cpus": 1, "mem_gb": 1, "timeout_min": 60}
LAUNCHER |= {"signal_s": 60, "partition": "low", "setup": [], "sbatch": None}


@pytest.mark.parametrize("failures", [0, 4])
def test_a_submission_is_tried_until_it_goes_through_and_is_one(cluster, sweeps, shim, failures):
    cluster(failures)
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    assert [sweeps.ledger.submissions()[i].job for i in range(3)] == ["77_0", "77_1", "77_2"]
    assert sweeps.names() == ["queued"] * 3
    assert len(shim.calls("sbatch")) == failures + 1
    sweeps.submit(**LAUNCHER)
    assert len(shim.calls("sbatch")) == failures + 1


def test_a_cluster_that_never_answers_ends_in_a_sentence_and_the_cells_wait(cluster, sweeps):
    cluster(99)
    sweeps.make(3)
    with pytest.raises(SlurmError, match="sbatch.*Unable to contact|squeue.*Unable to contact"):
        sweeps.submit(**LAUNCHER)
    cluster(0)
    sweeps.submit(**LAUNCHER)
    assert sweeps.names() == ["queued"] * 3


def test_a_submission_that_went_through_and_failed_all_the_same_is_not_made_twice(
    cluster, sweeps, shim
):
    shim("sbatch", cluster.sbatch + "echo 'Socket timed out on send/recv operation' >&2; exit 1")
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    assert len(shim.calls("sbatch")) == 1
    assert [sweeps.ledger.submissions()[i].job for i in range(3)] == ["77_0", "77_1", "77_2"]
    pickles = sorted(path.name for path in (sweeps.folder / "slurm").glob("*_submitted.pkl"))
    assert pickles == [f"77_{i}_submitted.pkl" for i in range(3)]  # what the jobs wait for


def test_a_launcher_killed_between_sbatch_and_its_ledger_submits_nothing_twice(
    cluster, sweeps, shim, monkeypatch
):
    sweeps.make(3)
    record = Ledger.record

    def die(ledger, row):
        if row["event"] == "submitted":
            raise KeyboardInterrupt
        record(ledger, row)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "record", die)
        with pytest.raises(KeyboardInterrupt):
            sweeps.submit(**LAUNCHER)
    assert [sweeps.ledger.submissions()[i].job for i in range(3)] == [None] * 3
    sweeps.submit(**LAUNCHER)
    assert len(shim.calls("sbatch")) == 1
    assert [sweeps.ledger.submissions()[i].job for i in range(3)] == ["77_0", "77_1", "77_2"]


def test_a_command_that_hangs_is_given_up_in_time(cluster, shim, monkeypatch):
    shim("squeue", "exec sleep 60")
    monkeypatch.setattr(slurm, "TIMEOUT_S", 0.2)
    start = time.monotonic()
    with pytest.raises(SlurmError, match="squeue failed 5 times: no answer in 0.2 s"):
        slurm.queue()
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("arrives", [False, True])
def test_an_sbatch_that_hangs_is_given_up_and_looked_for_in_the_queue(
    cluster, sweeps, shim, monkeypatch, arrives
):
    shim("sbatch", (cluster.sbatch if arrives else "") + "exec sleep 60 > /dev/null 2>&1")
    monkeypatch.setattr(slurm, "TIMEOUT_S", 0.5)
    sweeps.make(3)
    start = time.monotonic()
    if arrives:
        sweeps.submit(**LAUNCHER)
        assert sweeps.names() == ["queued"] * 3
    else:
        with pytest.raises(SlurmError, match="sbatch failed 5 times: no answer in 0.5 s"):
            sweeps.submit(**LAUNCHER)
    assert len(shim.calls("sbatch")) == (1 if arrives else 5)
    assert time.monotonic() - start < 20


TWICE = """
name=$(sed -n 's/^#SBATCH --job-name=//p' "${@: -1}")
for job in 9 10; do for task in 0 1 2; do echo "${job}_$task|PENDING|$name" >> queue; done; done
"""


@pytest.mark.parametrize("end", ["exit 1", '[ -e tried ] && echo "Submitted batch job 10"'])
def test_of_a_submission_that_went_through_twice_the_later_is_cancelled_and_said(
    cluster, sweeps, shim, capsys, end
):
    late = "if [ ! -e tried ]; then touch tried; exit 1; fi\n" if "tried" in end else ""
    shim("sbatch", late + TWICE + end)
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    assert shim.calls("scancel") == ["scancel --quiet 10"]
    assert "submitted more than once: job 9 stays, 10 cancelled" in capsys.readouterr().out
    assert [sweeps.ledger.submissions()[i].job for i in range(3)] == ["9_0", "9_1", "9_2"]
    pickles = {path.name for path in (sweeps.folder / "slurm").glob("9_*_submitted.pkl")}
    assert len(pickles) == 3


def test_a_machine_without_slurm_says_so(sweeps, monkeypatch):
    monkeypatch.setenv("PATH", "")
    sweeps.make(1)
    with pytest.raises(SlurmError, match="sbatch: no such command; is this a login node"):
        sweeps.submit(**LAUNCHER)
    assert sweeps.names() == ["new"]  # so that another launcher may have it


def test_a_cancelled_sweep_goes_to_another_launcher_without_the_queue(cluster, sweeps, monkeypatch):
    sweeps.make(1)
    sweeps.submit(**LAUNCHER)
    sweeps.ledger.record({"event": "cancelled", "cells": [0]})
    monkeypatch.setattr(slurm, "queue", lambda: pytest.fail("the queue was asked"))
    monkeypatch.setattr(sweep.local, "start", lambda ledger: None)
    sweeps.submit()
    assert sweeps.ledger.submissions()[0].launcher["name"] == "local"


def test_a_cancelled_submission_that_nobody_saw_succeed_holds_no_other_launcher_back(
    cluster, sweeps, shim, monkeypatch
):
    shim("sbatch", "exit 1")
    sweeps.make(1)
    with pytest.raises(SlurmError, match="sbatch failed"):
        sweeps.submit(**LAUNCHER)
    cluster(10**6)
    with pytest.raises(SlurmError, match="squeue failed"):
        sweep.cancel([])
    monkeypatch.setattr(sweep.local, "start", lambda ledger: None)
    sweeps.submit()
    assert sweeps.ledger.submissions()[0].launcher["name"] == "local"


def test_the_flags_of_the_launcher_are_in_the_batch_script(cluster, sweeps):
    sweeps.make(3)
    more = {"setup": ["module load cuda"], "sbatch": {"account": "us"}, "gpus": 2}
    sweeps.submit(**LAUNCHER | more)
    (script,) = [path.read_text() for path in (sweeps.folder / "slurm").glob("*.sh")]
    for line in ("--array=0-2%3", "--partition=low", "--time=60", "--mem=1GB", "--requeue"):
        assert f"#SBATCH {line}\n" in script
    for line in ("--signal=USR2@60", "--account=us", "--gpus-per-node=2", "--cpus-per-task=1"):
        assert f"#SBATCH {line}\n" in script
    assert script.index("module load cuda") < script.index("requeue.sh") < script.index("srun")


def test_a_queue_that_cannot_be_asked_changes_no_state(cluster, sweeps):
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    cluster(10**6)
    assert sweeps.names() == ["queued"] * 3
    with pytest.raises(SlurmError, match="squeue.*Unable to contact"):
        sweeps.submit(**LAUNCHER)


def test_cancel_is_written_before_it_is_done(cluster, sweeps, shim, capsys):
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    shim("scancel", "grep -c cancelled runs/sweeps/t/submissions.jsonl > seen; rm queue")
    sweep.cancel([])
    assert shim.calls("scancel") == ["scancel --quiet 77_0 77_1 77_2"]
    assert (sweeps.here / "seen").read_text() == "1\n"
    assert sweeps.names() == ["cancelled"] * 3


def test_a_cancel_that_failed_can_be_repeated(cluster, sweeps, shim):
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    shim("scancel", "exit 1")
    with pytest.raises(SlurmError, match="scancel failed 5 times"):
        sweep.cancel([])
    shim("scancel", "rm queue")
    sweep.cancel([])
    assert shim.calls("scancel")[-1] == "scancel --quiet 77_0 77_1 77_2"
    assert not (sweeps.here / "queue").exists()
    sweep.cancel([])
    assert len(shim.calls("scancel")) == 6  # none where nothing is in the queue


def test_a_job_of_another_name_may_hold_any_character(cluster, shim):
    shim("squeue", "echo '7|RUNNING|a|b|c'")
    assert slurm.queue() == {"7": ("RUNNING", "a|b|c")}


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ([], {}),
        (["launcher.mem_gb=7"], {"mem_gb": 7}),
        (["launcher=local"], {"name": "local", "parallel": 1, "mem_gb": None, "partition": None}),
    ],
)
def test_resubmit_takes_the_last_launcher_with_what_is_changed_of_it(
    cluster, sweeps, monkeypatch, words, changed
):
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    token = sweeps.ledger.submissions()[1].token
    sweeps.ledger.append(
        1, {"event": "ended", "token": token, "code": 1, "reason": "no", "again": False}
    )
    monkeypatch.setattr(sweep.local, "start", lambda ledger: None)
    sweep.resubmit(["--failed", *words])
    rows = [row for row in sweeps.ledger.events() if row["event"] == "submitting"]
    assert rows[-1]["cells"] == [1]
    launcher = rows[-1]["launcher"]
    assert launcher["name"] == changed.get("name", "slurm")
    assert {name: launcher[name] for name in changed} == changed
    assert changed or launcher == rows[0]["launcher"]
