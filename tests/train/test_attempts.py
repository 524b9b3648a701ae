"""What ends an attempt from outside: a sentence, a status, and the next attempt goes on."""

import json
import os
import signal
import time

import pytest
import torch

from experiments import train as entry
from lowprec.config.check import RunError
from lowprec.data.loader import Batches
from lowprec.runs.read import find_runs, read_rows, read_status
from lowprec.train import run as running
from lowprec.train import state
from lowprec.train.failures import advice_for
from lowprec.train.step import TrainStep


@pytest.fixture
def attempt(make_config, tmp_path, monkeypatch):
    """`attempt(changes)`: one attempt of a run in a folder of its own."""
    monkeypatch.setattr("lowprec.train.run.environment", lambda: {"threads": 1})

    def main(changes=None):
        entry.main(make_config({"log_every": 2, "save_every": 4, **(changes or {})}))

    main.run = lambda: find_runs(tmp_path / "runs")[0]
    main.steps = lambda: [row["step"] for row in read_rows(main.run() / "metrics.jsonl")]
    return main


# torch's handler of SIGCHLD raises wherever it interrupts torch, also between opening a temporary
# file and keeping it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_killed_data_worker_is_named_within_seconds_and_the_run_resumes(attempt, monkeypatch):
    read = Batches.__getitem__

    def die_at_7(batches, number):
        if number == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(batches, number)

    monkeypatch.setattr(Batches, "__getitem__", die_at_7)
    start = time.monotonic()
    with pytest.raises(RunError, match="a data worker was killed .*num_workers"):
        attempt({"num_workers": 1})
    assert time.monotonic() - start < 10
    assert read_status(attempt.run())["state"] == "failed"
    monkeypatch.setattr(Batches, "__getitem__", read)
    attempt()
    assert attempt.steps() == list(range(1, 13))


def test_page_locked_memory_that_is_out_is_the_hosts(make_config):
    error = torch.AcceleratorError("CUDA error: out of memory")
    assert advice_for(error, make_config()) is None
    config = make_config()
    config.optimizer.paged = True  # which a CPU refuses
    assert "paged=true needs more memory of the host" in advice_for(error, config)


def raise_on_host():
    raise MemoryError("as told")


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**50), raise_on_host])
def test_memory_that_is_out_at_a_save_is_the_hosts(attempt, monkeypatch, allocate):
    with monkeypatch.context() as patched:
        patched.setattr(state, "save", lambda tensors: allocate())
        with pytest.raises(RunError, match="the host is out of memory while saving") as raised:
            attempt()
    assert "num_workers" in str(raised.value) and "batch_size" not in str(raised.value)
    attempt()
    assert attempt.steps() == list(range(1, 13))


def test_memory_of_the_host_of_a_gpu_is_not_the_gpus(make_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    advice = advice_for(MemoryError("as told"), make_config({"device": "auto"}))
    assert advice.startswith("the host is out of memory (MemoryError: as told)")


def raise_on_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**50), raise_on_gpu], ids=["CPU", "GPU"])
def test_out_of_memory_says_what_needs_less_and_loses_no_checkpoint(attempt, monkeypatch, allocate):
    call, calls = TrainStep.__call__, iter(range(1, 100))

    def fail_at_6(step, batch):
        if next(calls) == 6:
            allocate()
        return call(step, batch)

    monkeypatch.setattr(TrainStep, "__call__", fail_at_6)
    needed = r"out of memory with model=nano, batch_size=16.*checkpointing"
    with pytest.raises(RunError, match=needed) as raised:
        attempt()
    assert ("optimizer.paged=true continues this run" in str(raised.value)) == (
        allocate is raise_on_gpu
    )
    status = read_status(attempt.run())
    assert (status["state"], status["step"], status["saved"]) == ("failed", 4, 4)
    assert "memory" in status["reason"]
    attempt()
    assert attempt.steps() == list(range(1, 13))


@pytest.fixture
def signalled(attempt, monkeypatch):
    """An attempt that is stopped before its first step."""
    original = running.build

    def stopped(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    def main():
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
            patched.setattr(running, "build", stopped)
            attempt()
        assert ended.value.code == 75

    return main


@pytest.fixture
def in_job(monkeypatch):
    """Puts this process into a job of SLURM, which `requeued` has started again."""

    def put(job, task=None, requeued=False):
        array = {"ARRAY_JOB_ID": task and job, "ARRAY_TASK_ID": task}
        for name, value in (array | {"RESTART_COUNT": "1" if requeued else None}).items():
            monkeypatch.setenv(f"SLURM_{name}", value or "")
            if not value:
                monkeypatch.delenv(f"SLURM_{name}")
        monkeypatch.setenv("SLURM_JOB_ID", "99" if task else job)

    return put


def test_requeues_without_a_new_checkpoint_end_after_three(attempt, signalled, in_job):
    for number in range(3):
        in_job("7", "1", requeued=number > 0)
        signalled()
        assert read_status(attempt.run())["state"] == "preempted"
        assert not (attempt.run() / "metrics.jsonl").exists()  # stopped before the first step
    in_job("7", "1", requeued=True)
    with pytest.raises(RunError, match=r"3 attempts without .*\(the last is of step 0\)"):
        attempt()
    status = read_status(attempt.run())
    assert status["state"] == "failed" and "stopped: 3 attempts" in status["reason"]
    rows = read_rows(attempt.run() / "attempts.jsonl")
    assert [(row["saved"], row["job"]) for row in rows] == [(0, "7_1")] * 3
    in_job("7", "2", requeued=True)  # another task
    signalled()
    in_job("7", "1")  # the same job, by hand
    attempt()
    assert read_status(attempt.run())["state"] == "finished"


def test_changes_of_the_machine_are_printed_and_recorded(attempt, monkeypatch, capsys):
    attempt({"schedule.name": "constant", "num_steps": 1})
    monkeypatch.setattr("lowprec.train.run.environment", lambda: {"threads": 2, "gpu": "H100"})
    attempt({"schedule.name": "constant", "num_steps": 2})
    lines = ["threads: 1 -> 2", "gpu: absent -> H100"]
    assert [row["changed"] for row in read_rows(attempt.run() / "attempts.jsonl")] == [[], lines]
    printed = capsys.readouterr().out
    assert all(f"since the last attempt {line}" in printed for line in lines)


@pytest.mark.parametrize("damage", ["", "{", "[1]", None])
def test_a_damaged_status_or_environment_does_not_stop_a_resume(attempt, damage):
    attempt({"schedule.name": "constant", "num_steps": 1})
    run = attempt.run()
    for name in ("status.json", "environment.json"):
        (run / name).unlink()
        if damage is not None:
            (run / name).write_text(damage)
    attempt({"schedule.name": "constant", "num_steps": 2})
    assert json.loads((run / "status.json").read_text())["step"] == 2
