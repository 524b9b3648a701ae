"""What ends an attempt from outside: a sentence, a status, and the next attempt goes on."""

import json
import os
import shutil
import signal
import time

import pytest
import torch

from experiments import train as entry
from experiments.cli import RunError
from lowprec.data.loader import Batches
from lowprec.run import find_runs, read_rows, read_status
from lowprec.train.step import TrainStep

fork_is_fine = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def attempt(make_config, tmp_path, monkeypatch):
    """`attempt(changes)`: one attempt of a run in a folder of its own."""
    monkeypatch.setattr(entry, "environment", lambda: {"threads": 1})

    def main(changes=None):
        entry.main(make_config({"log_every": 2, "save_every": 4, **(changes or {})}))

    main.run = lambda: find_runs(tmp_path / "runs")[0]
    main.steps = lambda: [row["step"] for row in read_rows(main.run() / "metrics.jsonl")]
    return main


@fork_is_fine
def test_a_killed_data_worker_is_named_within_seconds_and_the_run_goes_on(attempt, monkeypatch):
    read = Batches.__getitem__

    def die_at_7(batches, number):
        if number == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(batches, number)

    monkeypatch.setattr(Batches, "__getitem__", die_at_7)
    start = time.monotonic()
    with pytest.raises(RunError, match="a data worker was killed .*num_workers.*same command"):
        attempt({"num_workers": 1})
    assert time.monotonic() - start < 10
    assert read_status(attempt.run())["state"] == "failed"
    monkeypatch.setattr(Batches, "__getitem__", read)
    attempt()
    assert attempt.steps() == list(range(1, 13))


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


def test_a_signal_while_the_model_is_built_stops_before_the_first_step(attempt, monkeypatch):
    from experiments import build

    original = build.build

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(build, "build", signalled)
    with pytest.raises(SystemExit) as ended:
        attempt()
    assert ended.value.code == 75
    assert read_status(attempt.run())["state"] == "preempted"
    assert not (attempt.run() / "metrics.jsonl").exists()


def test_a_later_attempt_finds_the_same_run_whatever_the_clock_says(attempt, monkeypatch, tmp_path):
    def stop_at_6(step, batch):
        if next(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return call(step, batch)

    call, calls = TrainStep.__call__, iter(range(1, 100))
    monkeypatch.setattr(TrainStep, "__call__", stop_at_6)
    with pytest.raises(SystemExit):
        attempt()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    for path in attempt.run().rglob("*"):
        os.utime(path, (1, 1))
    attempt()
    assert len(find_runs(tmp_path / "runs")) == 1
    assert attempt.steps() == list(range(1, 13))
    assert all(row["wall_s"] >= 0 for row in read_rows(attempt.run() / "timing.jsonl"))
    assert [row["attempt"] for row in read_rows(attempt.run() / "attempts.jsonl")] == [0, 1]


def test_what_has_changed_of_the_machine_is_said_and_recorded(attempt, monkeypatch, capsys):
    attempt({"schedule.name": "constant", "num_steps": 4})
    monkeypatch.setattr(entry, "environment", lambda: {"threads": 2, "gpu": "H100"})
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
