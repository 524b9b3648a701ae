"""Who is taken for one that stands still, and what is said of it."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from lowprec.train.watchdog import Seen, Watch

TRAINS = """
import sys, time
from pathlib import Path
from lowprec.train.watchdog import Watch

watch = Watch(0, 1, 2.5, Path(sys.argv[1]), meet=lambda address: address)
for step in range(1, 6):
    watch.beat(step, "training")
    print(step, flush=True)
    for _ in range(12):  # what is left of it is done after the stop
        time.sleep(0.1)
watch.close()
"""


def test_a_process_that_was_stopped_goes_on(tmp_path):
    command = [sys.executable, "-c", TRAINS, str(tmp_path / "stacks")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "1\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read().split() == ["2", "3", "4", "5"]
    assert process.returncode == 0
    assert not (tmp_path / "stacks").exists()


@pytest.fixture
def ended(monkeypatch):
    """The reasons for which a watch in this process would have ended it."""
    reasons, told = [], threading.Event()

    def end(watch, reason):
        reasons.append(reason)
        watch.closing.set()
        told.set()

    monkeypatch.setattr(Watch, "_end", end)
    return reasons, told.wait


@pytest.mark.parametrize("work", ["starting", "saving", "ending"])
def test_long_work_of_the_host_is_no_standstill_but_a_step_is(ended, tmp_path, work):
    reasons, wait = ended
    watch = Watch(0, 1, 0.4, tmp_path, meet=lambda address: address)
    watch.beat(7, work)
    assert not wait(1.2)
    watch.beat(8, "training")
    assert wait(5)
    watch.closing.clear()  # so that it closes what it holds
    watch.close()
    assert reasons[0].startswith("nothing has moved for 0.4 s; furthest behind: rank 0 (process")
    assert reasons[0].endswith("at step 8, training")


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ((9, 4, "training"), (8, 4, "training"), "all stand at step 4, training (in a collective"),
        ((9, 4, "training"), (7, 3, "training"), "furthest behind: rank 1 at step 3, training"),
        ((9, 4, "training"), (8, 4, "waiting for data"), "furthest behind: rank 1 at step 4, wait"),
        ((9, 4, "saving"), (8, 4, "training"), "furthest behind: rank 1 at step 4, training"),
        ((9, 4, "saving"), (9, 4, "saving"), None),
    ],
)
def test_a_rank_is_named_only_where_it_is_behind(ended, tmp_path, first, second, said):
    reasons, _ = ended
    watch = Watch(0, 1, 100, tmp_path, meet=lambda address: address)
    watch.close()
    watch.own.note(*first)
    peer = Seen("rank 1")
    peer.note(*second)
    watch.seen = {None: peer}
    now = time.monotonic() + 101
    peer.heard = now
    watch._find_still(now)
    assert len(reasons) == (said is not None)
    assert all(reason.startswith(f"nothing has moved for 100 s; {said}") for reason in reasons)
