import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from lowprec import waiting
from lowprec.data.jobs import run_jobs


def numbered(job):
    if job is None:
        raise ValueError("job None")
    time.sleep(job if isinstance(job, float) else 0)
    return job, os.getpid()


def end_process(job):
    if job == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("processes", [1, 2])
def test_results_are_in_the_order_of_the_jobs(processes):
    results = run_jobs(numbered, range(9), processes, "counting")
    assert [job for job, _ in results] == list(range(9))
    assert (os.getpid() in {process for _, process in results}) == (processes == 1)


@pytest.mark.parametrize("processes", [1, 2])
def test_error_of_a_job_is_raised_and_those_that_wait_end_quietly(processes, capfd):
    for _ in range(12):  # a race
        with pytest.raises(ValueError, match="job None"):
            run_jobs(numbered, [None, *[1.0] * 30], processes, "counting")
    assert capfd.readouterr().err == ""  # no traceback of the pool's own thread


def test_killed_process_is_an_error_that_names_the_work():
    with pytest.raises(ChildProcessError, match="counting: a process was killed"):
        run_jobs(end_process, range(4), 2, "counting")


WAITING = r"""
import os, signal, time
from lowprec.data.jobs import run_jobs
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's `&` takes away
def wait(job):
    os.write(1, b"%d\n" % os.getpid())
    time.sleep(60)
run_jobs(wait, range(9), 2, "waiting")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_jobs_end_with_their_command(number):
    command = [sys.executable, "-c", WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        children = [int(parent.stdout.readline()) for _ in range(2)]
        deadline = time.monotonic() + 20
        while parent.poll() is None:  # Python drops a Ctrl-C that comes within the hooks of a fork
            assert time.monotonic() < deadline
            parent.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                parent.wait(2)
        assert parent.returncode != 0
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{child}") for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("processes", [1, 2])
def test_log_file_gets_a_line_every_few_seconds(monkeypatch, capsys, processes):
    monkeypatch.setattr(waiting, "SILENT_S", 0.1)
    run_jobs(numbered, [0.0, 0.5, 0.0], processes, "counting")
    assert "counting: 1 of 3 shards (0 s)\n" in capsys.readouterr().err
    monkeypatch.setattr(waiting, "SILENT_S", 5)
    run_jobs(numbered, range(3), processes, "counting")
    assert capsys.readouterr().err == ""
