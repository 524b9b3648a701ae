"""What ends an attempt from outside: a sentence, a status, and the next attempt goes on."""

import json
import os
import shutil
import signal
import time

import pytest
import torch

from experiments import train as entry
from lowprec.config.check import RunError
from lowprec.data.loader import Batches
from lowprec.runs.read import find_runs, read_rows, read_status
from lowprec.runs.record import Record
from lowprec.train import run as running
from lowprec.train import watchdog
from lowprec.train.checkpoint import Saver
from lowprec.train.distributed import Ranks
from lowprec.train.loggers import Logger
from lowprec.train.remote import NoCopy
from lowprec.train.step import TrainStep
from lowprec.train.watchdog import Watchdog

fork_is_fine = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def attempt(make_config, tmp_path, monkeypatch):
    """`attempt(changes)`: one attempt of a run in a folder of its own."""
    monkeypatch.setattr("lowprec.train.run.environment", lambda: {"threads": 1})

    def main(changes=None):
        entry.main(make_config({"log_every": 2, "save_every": 4, **(changes or {})}))

    main.run = lambda: find_runs(tmp_path / "runs")[0]
    main.steps = lambda: [row["step"] for row in read_rows(main.run() / "metrics.jsonl")]
    return main


@fork_is_fine
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


def test_sigchld_of_a_killed_worker_does_not_interrupt_recording_the_failure(attempt, monkeypatch):
    def lose(step, batch):
        raise ConnectionResetError("the pipe of a worker")

    def as_torch_does(number, frame):
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    status = Record.status

    def late(record, state, *arguments, **options):
        if state == "failed":
            os.kill(os.getpid(), signal.SIGCHLD)
        status(record, state, *arguments, **options)

    monkeypatch.setattr(TrainStep, "__call__", lose)
    monkeypatch.setattr(Record, "status", late)
    before = signal.signal(signal.SIGCHLD, as_torch_does)
    try:
        with pytest.raises(RunError, match="a data worker was killed"):
            attempt()
        assert signal.getsignal(signal.SIGCHLD) is as_torch_does
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert read_status(attempt.run())["state"] == "failed"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_says_what_needs_less_and_loses_no_checkpoint(attempt, monkeypatch, error):
    call, calls = TrainStep.__call__, iter(range(1, 100))

    def fail_at_6(step, batch):
        if next(calls) == 6:
            raise error
        return call(step, batch)

    monkeypatch.setattr(TrainStep, "__call__", fail_at_6)
    with pytest.raises(
        RunError, match=r"out of memory with model=nano, batch_size=16.*checkpointing"
    ):
        attempt()
    status = read_status(attempt.run())
    assert (status["state"], status["step"], status["saved"]) == ("failed", 4, 4)
    assert "OutOfMemory" in status["reason"] or "MemoryError" in status["reason"]
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


def test_a_signal_while_the_model_is_built_stops_before_the_first_step(attempt, signalled):
    signalled()
    assert read_status(attempt.run())["state"] == "preempted"
    assert not (attempt.run() / "metrics.jsonl").exists()


@pytest.fixture
def in_job(monkeypatch):
    """Puts this process into a job of SLURM, which `requeued` has started again."""

    def put(job, task=None, requeued=False):
        monkeypatch.setenv("SLURM_JOB_ID", "99" if task else job)
        for name, value in (("ARRAY_JOB_ID", task and job), ("ARRAY_TASK_ID", task)):
            if value:
                monkeypatch.setenv(f"SLURM_{name}", value)
            else:
                monkeypatch.delenv(f"SLURM_{name}", raising=False)
        if requeued:
            monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        else:
            monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)

    return put


def test_a_job_that_is_requeued_without_a_new_checkpoint_ends_after_three_attempts(
    attempt, signalled, in_job
):
    for number in range(3):
        in_job("7", "1", requeued=number > 0)
        signalled()
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


def test_only_the_last_three_attempts_of_a_job_count(attempt, signalled, in_job, monkeypatch):
    in_job("7")
    signalled()
    in_job("7", requeued=True)
    signalled()
    call, calls = TrainStep.__call__, iter(range(1, 100))

    def stop_every_second_step(step, batch):
        if next(calls) % 2 == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return call(step, batch)

    monkeypatch.setattr(TrainStep, "__call__", stop_every_second_step)
    for _ in range(2):
        with pytest.raises(SystemExit):
            attempt({"save_every": 100})
    for _ in range(3):
        signalled()
    with pytest.raises(RunError, match="the last is of step 4"):
        attempt()
    rows = read_rows(attempt.run() / "attempts.jsonl")
    assert [row["saved"] for row in rows] == [0, 0, 0, 2, 4, 4, 4]
    assert {row["job"] for row in rows} == {"7"}


def test_the_watchdog_closes_before_the_logger_and_the_remote_copy(attempt, monkeypatch):
    watches, seen = [], []

    class Kept(Watchdog):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            watches.append(self)

    def see(kind, name):
        original = getattr(kind, name)

        def seeing(*arguments, **options):
            watched = None if watches[0].closing.is_set() else watches[0].own.doing
            seen.append((name, kind.__name__, watched, read_status(attempt.run())["state"]))
            return original(*arguments, **options)

        monkeypatch.setattr(kind, name, seeing)

    monkeypatch.setattr(watchdog, "Watchdog", Kept)
    for kind, name in ((Saver, "save"), (Record, "write_parquet"), (Logger, "close")):
        see(kind, name)
    see(NoCopy, "close")
    attempt({"save_every": 12})
    assert seen == [
        ("save", "Saver", "saving", "running"),
        ("write_parquet", "Record", "ending", "running"),
        ("close", "Logger", None, "finished"),
        ("close", "NoCopy", None, "finished"),
    ]


def test_a_failure_after_the_end_leaves_the_run_finished(attempt, monkeypatch):
    def gone(world):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(Ranks, "close", gone)
    short = {"schedule.name": "constant", "num_steps": 4}
    with pytest.raises(RuntimeError, match="by peer"):
        attempt(short)
    assert read_status(attempt.run())["state"] == "finished"
    monkeypatch.setattr("lowprec.train.run.first_step", gone)
    with pytest.raises(RuntimeError, match="by peer"):  # a later attempt, before its first step
        attempt({**short, "num_steps": 8})
    assert read_status(attempt.run())["state"] == "failed"


def test_changes_of_the_machine_are_printed_and_recorded(attempt, monkeypatch, capsys):
    attempt({"schedule.name": "constant", "num_steps": 4})
    monkeypatch.setattr("lowprec.train.run.environment", lambda: {"threads": 2, "gpu": "H100"})
    attempt({"schedule.name": "constant", "num_steps": 8})
    lines = ["threads: 1 -> 2", "gpu: absent -> H100"]
    assert [row["changed"] for row in read_rows(attempt.run() / "attempts.jsonl")] == [[], lines]
    said = capsys.readouterr().out
    assert all(f"since the last attempt {line}" in said for line in lines)


@pytest.mark.parametrize("damage", ["", "{", "[1]", None])
def test_a_damaged_status_or_environment_does_not_stop_a_resume(attempt, damage):
    attempt({"schedule.name": "constant", "num_steps": 4})
    run = attempt.run()
    for name in ("status.json", "environment.json"):
        (run / name).unlink()
        if damage is not None:
            (run / name).write_text(damage)
    attempt({"schedule.name": "constant", "num_steps": 8})
    assert json.loads((run / "status.json").read_text())["step"] == 8


def test_a_data_set_that_shrinks_under_a_run_is_named(attempt, squares, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(squares, copy)
    call, calls = TrainStep.__call__, iter(range(1, 100))

    def cut_at_5(step, batch):
        if next(calls) == 5:
            for shard in copy.glob("train-*.tar"):
                os.truncate(shard, 2000)
        return call(step, batch)

    monkeypatch.setattr(TrainStep, "__call__", cut_at_5)
    with pytest.raises(RunError, match=r"train-\d\.tar has become shorter"):
        attempt({"data.train": str(copy / "train-*.tar"), "data.val": None})
