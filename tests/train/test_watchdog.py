"""Which ranks the watchdog holds for dead or hung, and what it says about them."""

import signal
import subprocess
import sys
import threading
import time

from lowprec.train.distributed import Ranks
from lowprec.train.watchdog import Watchdog

TRAINING = """
import sys, time
from pathlib import Path
from lowprec.train import watchdog
from lowprec.train.distributed import Ranks

watchdog.SILENT_S = 1
dog = watchdog.Watchdog(Ranks(), 1.8, Path(sys.argv[1]))
for step in range(1, 4):
    dog.heartbeat(step, "training")
    print(step, flush=True)
    for _ in range(7):  # the rest of it is done after the stop
        time.sleep(0.1)
dog.close()
"""


def test_a_process_that_was_stopped_continues(tmp_path):
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "stacks")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "1\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.2)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read().split() == ["2", "3"]
    assert process.returncode == 0
    assert not (tmp_path / "stacks").exists()


def test_slow_work_may_exceed_the_timeout_but_a_step_may_not(monkeypatch, tmp_path):
    reasons, ended = [], threading.Event()

    def end(dog, reason):
        reasons.append(reason)
        dog.closing.set()
        ended.set()

    monkeypatch.setattr(Watchdog, "_end", end)
    dog = Watchdog(Ranks(), 0.4, tmp_path)
    dog.heartbeat(7, "saving")
    assert not ended.wait(1)
    dog.heartbeat(8, "training")
    assert ended.wait(5)
    assert "no progress for 0.4 s" in reasons[0] and "rank 0 (process" in reasons[0]
    assert "step 8, training" in reasons[0]
