"""Which ranks the watchdog holds for dead or hung, and what it says about them."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from lowprec.runs.read import RecordFileError
from lowprec.train import failures, watchdog
from lowprec.train.distributed import Ranks
from lowprec.train.watchdog import Watchdog


@pytest.fixture
def ended(monkeypatch):
    """Why the watchdog's process would have ended, and what it said; `event` is then set."""
    ended = SimpleNamespace(event=threading.Event())

    def exit_with(status):
        ended.status = status
        ended.event.set()

    monkeypatch.setattr(watchdog.os, "_exit", exit_with)
    monkeypatch.setattr(watchdog, "WAIT_S", 0.6)
    return ended


def test_a_process_that_was_stopped_continues(monkeypatch, tmp_path):
    monkeypatch.setattr(watchdog, "TICK_S", 0.1)
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


def test_slow_work_may_exceed_the_timeout_but_a_step_may_not(ended, tmp_path):
    reasons = []
    dog = Watchdog(Ranks(), 0.4, tmp_path / "stacks" / "0001", reasons.append)
    dog.heartbeat(7, "saving")
    assert not ended.event.wait(1.5)
    dog.heartbeat(8, "training")
    assert ended.event.wait(5)
    assert ended.status == 76
    assert "rank 0 (process" in reasons[0] and "step 8, training: no progress for 0.4" in reasons[0]
    assert "test_watchdog.py" in (tmp_path / "stacks/0001/rank_0.txt").read_text()


def test_the_silent_rank_and_then_the_one_behind_are_named(ended, tmp_path):
    (tmp_path / "run").mkdir()
    reasons, folder = [], tmp_path / "run" / "stacks"
    worlds = [SimpleNamespace(rank=rank, size=3) for rank in (0, 1)]
    first = Watchdog(worlds[0], 100, folder, reasons.append)
    second = Watchdog(worlds[1], 100, folder)
    first.heartbeat(4, "saving")
    first.heartbeat(4, "training")
    second.heartbeat(4, "training")
    second.close("DistBackendError: NCCL error,\nLast error:\n  as told (report 0)\n")
    assert ended.event.wait(5)
    silent, behind, other = reasons[0].split("; ")
    assert silent == "rank 2 had not reported within 0.6 s"
    assert behind.startswith("rank 1 (process")
    assert "failed: DistBackendError: NCCL error, Last error: as told" in behind
    assert "at step 4, training: another rank has ended" in other


@pytest.mark.parametrize("text", ["of another version\n", "", "\udcff"])
def test_a_file_that_is_not_understood_or_listed_hides_no_rank(ended, tmp_path, monkeypatch, text):
    (tmp_path / "rank_1.txt").write_text(f"rank 1 {text}", errors="surrogateescape")
    monkeypatch.setattr(watchdog.Path, "glob", lambda *_: [])  # NFS lists what was a minute ago
    reasons = []
    dog = Watchdog(SimpleNamespace(rank=0, size=2), 100, tmp_path, reasons.append)
    dog.heartbeat(4, "training")
    dog.end("no progress")
    first, second = reasons[0].split("; ")
    assert first.startswith("rank 1 ") and "at step 4, training: no progress" in second


def test_a_rank_that_cannot_write_its_stacks_still_says_why_it_ends(ended, tmp_path, capsys):
    reasons = []
    dog = Watchdog(SimpleNamespace(rank=0, size=2), 100, tmp_path / "gone" / "0", reasons.append)
    leave = dog._leave
    dog._leave = lambda reason: (said.append(capsys.readouterr().err), leave(reason))
    said = []
    dog.end("NCCL error:\nunhandled")
    assert ended.status == 76
    assert "starting: NCCL error: unhandled; stacks: " in said[0]  # before the disk is touched
    silent, own = reasons[0].split("; ")
    assert silent == "rank 1 had not reported within 0.6 s" and own in said[0]


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (RuntimeError("[gloo] Connection closed by peer"), True),
        (RecordFileError("/run/config.yaml cannot be read: Connection timed out"), False),
    ],
)
def test_only_torchs_errors_mean_a_lost_rank(monkeypatch, make_config, tmp_path, error, ends):
    reasons = []
    dog = SimpleNamespace(close=str, end=reasons.append)
    monkeypatch.setattr(failures.watchdog, "Watchdog", lambda *_, **__: dog)
    world, record = SimpleNamespace(size=2), SimpleNamespace(run=tmp_path, attempt=1)
    with pytest.raises(type(error)), failures.watched(make_config(), record, world):
        raise error
    assert bool(reasons) == ends
