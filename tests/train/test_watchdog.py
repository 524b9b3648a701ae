"""When the watchdog ends a process, and what it says and leaves."""

import threading
from types import SimpleNamespace

import pytest

from lowprec.runs.read import RecordFileError
from lowprec.train import failures, watchdog
from lowprec.train.watchdog import Watchdog


@pytest.fixture
def ended(monkeypatch):
    """Why the watchdog's process would have ended, and what it said; `event` is then set."""
    ended = SimpleNamespace(event=threading.Event())

    def exit_with(status):
        ended.status = status
        ended.event.set()

    monkeypatch.setattr(watchdog.os, "_exit", exit_with)
    return ended


def test_slow_work_may_exceed_the_timeout_but_a_step_may_not(ended, tmp_path):
    reasons = []
    dog = Watchdog(0, 0.4, tmp_path / "stacks" / "0001", reasons.append)
    dog.heartbeat(7, "saving")
    assert not ended.event.wait(1.5)
    dog.heartbeat(8, "training")
    assert ended.event.wait(5)
    assert ended.status == 76
    assert reasons == ["rank 0 at step 8, training: no progress for 0.4 s"]
    assert "test_watchdog.py" in (tmp_path / "stacks/0001/rank_0.txt").read_text()


def test_a_suspended_process_continues(ended, monkeypatch, tmp_path):
    dog = Watchdog(0, 10, tmp_path)
    now = watchdog.time.monotonic
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now() + 3600))
    assert not ended.event.wait(1.2)
    dog.close()


def test_a_rank_that_cannot_write_its_stacks_still_says_why_it_ends(ended, tmp_path, capsys):
    reasons = []
    dog = Watchdog(1, 100, tmp_path / "gone" / "stacks" / "0000", reasons.append)
    dog.end("NCCL error:\nunhandled")
    assert ended.status == 76
    assert reasons == ["rank 1 at step 0, starting: NCCL error: unhandled"]
    assert f"{reasons[0]}; stacks: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (RuntimeError("[gloo] Connection closed by peer"), True),
        (RecordFileError("/run/config.yaml cannot be read: Connection timed out"), False),
    ],
)
def test_only_an_error_of_torch_is_taken_for_a_lost_rank(
    monkeypatch, make_config, tmp_path, error, ends
):
    reasons = []
    dog = SimpleNamespace(close=lambda: None, end=reasons.append)
    monkeypatch.setattr(failures.watchdog, "Watchdog", lambda *_, **__: dog)
    world, record = SimpleNamespace(rank=0, size=2), SimpleNamespace(run=tmp_path, attempt=1)
    with pytest.raises(type(error)), failures.watched(make_config(), record, world):
        raise error
    assert bool(reasons) == ends
