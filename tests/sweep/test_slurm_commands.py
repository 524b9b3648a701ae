"""SLURM's commands fail, hang or do more than they say: shims of them, first on PATH."""

import os
import subprocess
import time

import pytest

from experiments import sweep
from experiments.cli import CONF
from lowprec.sweep import slurm
from lowprec.sweep.ledger import Ledger
from lowprec.sweep.slurm import SlurmError

LAUNCHER = {"name": "slurm", "parallel": 8, "gpus": 0, "cpus": 1, "mem_gb": 1, "timeout_min": 60}
LAUNCHER |= {"signal_s": 60, "partition": "low", "setup": [], "sbatch": None}
# fails the first $FAIL times it is called
FAILING = """
n=$(grep -c "^$(basename "$0") " calls)
if [ "$n" -le "${FAIL:-0}" ]; then echo 'Unable to contact slurm controller' >&2; exit 1; fi
"""
# remembers the job by its name, as the queue shows it
SBATCH = """
name=$(sed -n 's/^#SBATCH --job-name=//p' "${@: -1}")
for task in 0 1 2; do echo "77_$task|PENDING|$name" >> queue; done
echo "Submitted batch job 77"
"""


@pytest.fixture
def cluster(here, shim, monkeypatch):
    """Shims of a cluster whose commands fail `cluster(times)`; waits between tries are short."""
    monkeypatch.setattr(slurm, "FIRST_WAIT_S", 0.01)
    monkeypatch.setenv("REQUEUE_WAIT_S", "0")
    shim("srun", "exit 0")
    shim("sbatch", FAILING + SBATCH)
    shim("squeue", FAILING + "[ ! -e queue ] || cat queue")
    shim("scontrol", FAILING)
    shim("scancel", FAILING)
    (here / "calls").write_text("")
    return lambda times: monkeypatch.setenv("FAIL", str(times))


def called(shim, name):
    return [call for call in shim.calls() if call.split()[0] == name]


@pytest.mark.parametrize("failures", [0, 4])
def test_a_submission_is_tried_until_it_goes_through_and_is_one(cluster, sweeps, shim, failures):
    cluster(failures)
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    assert [sweeps.ledger.submissions()[i].job for i in range(3)] == ["77_0", "77_1", "77_2"]
    assert sweeps.names() == ["queued"] * 3
    assert len(called(shim, "sbatch")) == failures + 1
    sweeps.submit(**LAUNCHER)
    assert len(called(shim, "sbatch")) == failures + 1


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
    shim("sbatch", SBATCH + "echo 'Socket timed out on send/recv operation' >&2; exit 1")
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    assert len(called(shim, "sbatch")) == 1
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
    assert len(called(shim, "sbatch")) == 1
    assert [sweeps.ledger.submissions()[i].job for i in range(3)] == ["77_0", "77_1", "77_2"]


def test_a_command_that_hangs_is_given_up_in_time(cluster, shim, monkeypatch):
    shim("squeue", "exec sleep 60")
    monkeypatch.setattr(slurm, "TIMEOUT_S", 0.2)
    start = time.monotonic()
    with pytest.raises(SlurmError, match="squeue failed 5 times: no answer in 0.2 s"):
        slurm.queue()
    assert time.monotonic() - start < 10


def test_the_flags_of_the_launcher_are_in_the_batch_script(cluster, sweeps):
    sweeps.make(3)
    more = {"setup": ["module load cuda"], "sbatch": {"account": "us"}, "gpus": 2}
    sweeps.submit(**LAUNCHER | more)
    script = (sweeps.folder / "slurm" / "77_submission.sh").read_text()
    for line in ("--array=0-2%3", "--partition=low", "--time=60", "--mem=1GB", "--requeue"):
        assert f"#SBATCH {line}\n" in script
    for line in ("--signal=USR2@60", "--account=us", "--gpus-per-node=2", "--cpus-per-task=1"):
        assert f"#SBATCH {line}\n" in script
    assert script.index("module load cuda") < script.index("requeue.sh") < script.index("srun")


def requeue(here, status, folder=""):
    """A batch script that ends with this status; SLURM would say what the environment says."""
    lines = f"source {CONF.parent}/slurm/requeue.sh {folder}\nexit {status}"
    environment = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "1"}
    return subprocess.run(
        ["bash", "-c", lines], env=os.environ | environment, capture_output=True, text=True,
        cwd=here, timeout=30,
    )  # fmt: skip


@pytest.mark.parametrize("failures", [0, 1, 4])
def test_a_job_that_saved_is_requeued_alone_however_often_it_must_be_tried(
    cluster, here, shim, failures
):
    cluster(failures)
    done = requeue(here, 75)
    assert done.returncode == 75
    assert called(shim, "scontrol") == ["scontrol requeue 77_1"] * (failures + 1)
    assert "in the queue again" in done.stderr


def test_a_requeue_that_fails_five_times_leaves_the_status_and_says_so(cluster, here, shim):
    cluster(99)
    done = requeue(here, 75)
    assert done.returncode == 75
    assert len(called(shim, "scontrol")) == 5
    assert "is not requeued; its checkpoint is kept" in done.stderr


def test_a_requeue_that_hangs_is_given_up_and_tried_again(cluster, here, shim, monkeypatch):
    monkeypatch.setenv("REQUEUE_TIMEOUT_S", "0.2")
    shim("scontrol", "exec sleep 60")
    start = time.monotonic()
    assert requeue(here, 75).returncode == 75
    assert len(called(shim, "scontrol")) == 5
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("status", [0, 1, 137])
def test_a_job_that_ended_is_not_requeued(cluster, here, shim, status):
    assert requeue(here, status).returncode == status
    assert called(shim, "scontrol") == []


def test_what_a_kill_left_of_submitits_files_is_removed_with_a_warning(cluster, here):
    folder = here / "logs" / "deep"
    folder.mkdir(parents=True)
    mine = [folder / f"77_1_{name}.pkl.save_tmp" for name in ("submitted", "0_result")]
    others = [folder / "77_10_submitted.pkl.save_tmp", folder / "77_1_submitted.pkl"]
    for path in [*mine, *others]:
        path.touch()
    done = requeue(here, 0, here / "logs")
    assert not any(path.exists() for path in mine)
    assert all(path.exists() for path in others)
    assert all(str(path) in done.stderr for path in mine)
    assert "warning" in done.stderr


def test_a_queue_that_cannot_be_asked_changes_no_state(cluster, sweeps):
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    cluster(10**6)
    assert sweeps.names() == ["queued"] * 3
    with pytest.raises(SlurmError, match="not known what runs"):
        sweeps.submit(**LAUNCHER)


def test_cancel_is_written_before_it_is_done(cluster, sweeps, shim, capsys):
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    shim("scancel", "grep -c cancelled runs/sweeps/t/submissions.jsonl > seen; rm queue")
    sweep.cancel([])
    assert called(shim, "scancel") == ["scancel --quiet 77_0 77_1 77_2"]
    assert (sweeps.here / "seen").read_text() == "1\n"
    assert sweeps.names() == ["cancelled"] * 3


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
