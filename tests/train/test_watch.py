"""A process that was stopped and goes on is not taken for one that stands still."""

import signal
import subprocess
import sys
import time

TRAINS = """
import sys, time
from pathlib import Path
from lowprec.train.watch import Watch

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
