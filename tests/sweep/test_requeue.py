"""requeue.sh requeues a job that has saved, even if SLURM's commands fail."""

import os
import subprocess
import time

import pytest

from lowprec.config.compose import CONF


def requeue(here, status, folder=""):
    """Runs a batch script that ends with this status, in the environment of a job."""
    lines = f"source {CONF.parent}/slurm/requeue.sh {folder}\nexit {status}"
    environment = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "1"}
    return subprocess.run(
        ["bash", "-c", lines], env=os.environ | environment, capture_output=True, text=True,
        cwd=here, timeout=30,
    )  # fmt: skip


@pytest.mark.parametrize("failures", [0, 1, 4, 99])
def test_a_job_that_saved_is_requeued_without_its_array_or_keeps_its_status(
    cluster, here, shim, failures
):
    cluster(failures)
    done = requeue(here, 75)
    assert done.returncode == 75
    assert shim.calls("scontrol") == ["scontrol requeue 77_1"] * min(failures + 1, 5)
    said = "in the queue again" if failures < 5 else "is not requeued; its checkpoint is kept"
    assert said in done.stderr


def test_a_requeue_that_hangs_is_tried_again(cluster, here, shim, monkeypatch):
    monkeypatch.setenv("REQUEUE_TIMEOUT_S", "0.2")
    shim("scontrol", "exec sleep 60")
    start = time.monotonic()
    assert requeue(here, 75).returncode == 75
    assert len(shim.calls("scontrol")) == 5
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("status", [0, 1, 137])
def test_a_job_that_ended_is_not_requeued(cluster, here, shim, status):
    assert requeue(here, status).returncode == status
    assert shim.calls("scontrol") == []


def test_submitits_torn_files_are_removed_with_a_warning(cluster, here):
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
