"""Which ranks the watchdog holds for dead or hung, and what it says about them."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from lowprec.runs.read import RecordFileError
from lowprec.train import attempt, watchdog
from lowprec.train.distributed import Ranks
from lowprec.train.watchdog import Heartbeat, Watchdog


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_was_stopped_continues(monkeypatch, tmp_path):
    monkeypatch.setattr(watchdog, "SILENT_S", 1.4)
    process = os.fork()
    if not process:
        dog = Watchdog(Ranks(), 1.2, tmp_path / "stacks")
        for step in range(1, 3):
            dog.heartbeat(step, "training")
            (tmp_path / str(step)).touch()
            for _ in range(6):  # the rest of it is done after the stop
                time.sleep(0.1)
        dog.close()
        os._exit(0)
    while not (tmp_path / "1").exists():
        time.sleep(0.01)
    os.kill(process, signal.SIGSTOP)
    time.sleep(1.8)
    os.kill(process, signal.SIGCONT)
    assert os.waitpid(process, 0)[1] == 0
    assert (tmp_path / "2").exists() and not (tmp_path / "stacks").exists()


def test_slow_work_may_exceed_the_timeout_but_a_step_may_not(monkeypatch, tmp_path):
    reasons, ended = [], threading.Event()

    def end(dog, reason):
        reasons.append(reason)
        dog.closing.set()
        ended.set()

    monkeypatch.setattr(Watchdog, "_end", end)
    dog = Watchdog(Ranks(), 0.4, tmp_path)
    dog.heartbeat(7, "saving")
    assert not ended.wait(1.5)
    dog.heartbeat(8, "training")
    assert ended.wait(5)
    assert "no progress for 0.4 s" in reasons[0] and "rank 0 (process" in reasons[0]
    assert "step 8, training" in reasons[0]


@pytest.fixture
def fault(tmp_path):
    """What the watchdog of rank 0 says 101 s after the reports (beats, step, doing) of two ranks.

    `silent_s`: how long ago rank 1's last heartbeat was; `first_silent_s`: rank 0's.
    """

    def fault(first, second, silent_s=0.0, first_silent_s=0.0):
        dog = Watchdog(Ranks(), 100, tmp_path)
        dog.close()
        dog.own.beats, dog.own.step, dog.own.doing = first
        now = time.monotonic() + 101
        peer = Heartbeat("rank 1", *second, heard=now - silent_s)
        dog.own.heard = now - first_silent_s
        dog.ranks.append(peer)
        return dog._fault(now)

    return fault


def test_the_rank_that_is_furthest_behind_is_named_first(fault):
    assert "no progress for 100 s: rank 1 at step 4, training; rank 0 (process" in fault(
        (9, 4, "saving"), (8, 4, "training")
    )


def test_ranks_that_save_are_not_hung(fault):
    assert fault((9, 4, "saving"), (9, 4, "saving")) is None


def test_a_rank_without_heartbeats_is_named(fault):
    assert "no heartbeats" in fault((9, 4, "training"), (9, 4, "training"), silent_s=13)
    assert "rank 1 at step 4" in fault((9, 4, "training"), (9, 4, "training"), silent_s=13)


def test_ranks_heard_until_rank_0_fell_silent_are_not_named(fault):
    saving = (9, 4, "saving")
    assert fault(saving, saving, silent_s=12.4, first_silent_s=11.9) is None
    reason = fault(saving, saving, silent_s=12.9, first_silent_s=12.4)
    assert "no heartbeats for 12 s from rank 0 (process" in reason and "rank 1" not in reason


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (RuntimeError("[gloo] Connection closed by peer"), True),
        (RecordFileError("/run/config.yaml cannot be read: Connection timed out"), False),
    ],
)
def test_only_an_error_of_torch_waits_for_the_watchdog_to_name_a_rank(
    monkeypatch, make_config, tmp_path, error, waits
):
    sleeps = []
    monkeypatch.setattr(attempt.watchdog, "Watchdog", lambda *_, **__: SimpleNamespace(close=str))
    monkeypatch.setattr(attempt.time, "sleep", sleeps.append)
    world, record = SimpleNamespace(size=2), SimpleNamespace(run=tmp_path)
    with pytest.raises(type(error)), attempt.watched(make_config(), record, world):
        raise error
    assert bool(sleeps) == waits
