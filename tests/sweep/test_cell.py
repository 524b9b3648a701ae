"""The process that watches over a cell: attempts are counted, signals passed on, ends named."""

import os
import signal
import subprocess
import sys

import pytest

from lowprec.sweep import cell as watcher
from lowprec.sweep.cell import STOPPED, run_cell
from lowprec.sweep.manifest import Ledger, take_lock

STOPS = """
checkpoint=runs/t/$2/checkpoints/step_$(cat step)
mkdir -p "$checkpoint" && touch "$checkpoint/manifest.json"
kill -USR2 $PPID
trap 'exit 75' USR2
while :; do sleep 0.02; done
"""


@pytest.fixture
def cell(sweeps, here):
    """`cell(script)`: one attempt of the one cell of a sweep, in this process; its exit status."""

    def attempt(script, token="first"):
        if not (sweeps.folder / "sweep.json").exists():
            sweeps.make(1, script)
        (here / "cell.sh").write_text(script)
        if sweeps.ledger.submissions().get(0) is None:
            row = {"event": "submitting", "token": "first", "cells": [0], "launcher": {}}
            sweeps.ledger.record(row)
        return run_cell(sweeps.ledger, 0, token, "7")

    attempt.rows = lambda event: [r for r in sweeps.ledger.rows(0) if r["event"] == event]
    return attempt


def test_three_attempts_from_the_same_checkpoint_are_the_last_and_say_why(cell, here):
    (here / "step").write_text("20")
    assert [cell(STOPS) for _ in range(4)] == [STOPPED] * 4  # the first began at 0, three at 20
    assert [row["saved"] for row in cell.rows("started")] == [0, 20, 20, 20]
    assert cell(STOPS) == 1
    assert len(cell.rows("started")) == 4
    last = cell.rows("ended")[-1]
    assert "3 attempts without a new checkpoint (the last is of step 20)" in last["reason"]
    assert not last["again"]


def test_attempts_that_get_on_are_not_counted(cell, here):
    for step in range(10, 70, 10):
        (here / "step").write_text(str(step))
        assert cell(STOPS) == STOPPED
    assert len(cell.rows("started")) == 6


def test_a_new_submission_counts_from_the_start_and_the_old_one_does_nothing_more(
    cell, sweeps, here
):
    (here / "step").write_text("20")
    for _ in range(5):
        cell(STOPS)
    row = {"event": "submitting", "token": "second", "cells": [0], "launcher": {}}
    sweeps.ledger.record(row)
    assert cell(STOPS, token="first") == 1
    assert len(cell.rows("started")) == 4
    assert cell(STOPS, token="second") == STOPPED


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("kill -KILL $$", 137, "killed by SIGKILL, often for want of memory"),
        ("kill -SEGV $$", 139, "killed by SIGSEGV"),
        ("echo Traceback; echo 'ValueError: no'; exit 1", 1, "ValueError: no"),
        ("echo 'runs/x failed: because'; echo 'and do this'; exit 1", 1, "because and do this"),
        ("exit 4", 4, "exit status 4"),
        ("exit 75", 75, "exit status 75"),  # nobody asked it to stop
        ("exit 255", 255, "exit status 255"),  # 127 is no signal
    ],
)
def test_a_failure_is_named_and_is_the_status(cell, script, code, reason):
    assert cell(script) == (1 if code == STOPPED else code)  # at 75 a job is queued again
    ended = cell.rows("ended")[-1]
    assert (ended["code"], ended["reason"], ended["again"]) == (code, reason, False)


def test_a_signal_of_the_whole_group_reaches_only_the_process_that_trains(sweeps, here):
    workers = """
trap 'saved=1' USR2
sleep 1 & worker=$!
touch begun
wait $worker
kill -0 $worker 2>/dev/null && echo alive > worker
wait $worker; echo $? >> worker
exit 75
"""
    ledger = sweeps.make(1, workers)
    ledger.record({"event": "submitting", "token": "a", "cells": [0], "launcher": {}})
    code = "from lowprec.sweep.cell import run_cell; from lowprec.sweep.manifest import Ledger\n"
    code += f"import sys; sys.exit(run_cell(Ledger({str(ledger.folder)!r}), 0, 'a', '7'))"
    process = subprocess.Popen([sys.executable, "-c", code], process_group=0)
    sweeps.until((here / "begun").exists)
    os.killpg(process.pid, signal.SIGUSR2)  # as SLURM does
    assert process.wait(30) == STOPPED
    assert (here / "worker").read_text().split() == ["alive", "0"]


SAVES = """
[ ! -e alive ] || { echo 'two at once'; exit 9; }
[ ! -e saved ] || exit 0
trap 'sleep 0.7; rm alive; touch saved; exit 75' TERM
touch alive
while :; do sleep 0.02; done
"""


def test_a_killed_watcher_takes_its_training_along_which_saves(sweeps, here):
    ledger = sweeps.make(1, SAVES)
    sweeps.submit()
    sweeps.until((here / "alive").exists)
    os.kill(ledger.rows(0)[0]["pid"], signal.SIGKILL)
    sweeps.until(lambda: sweeps.names() == ["lost"])
    assert (here / "saved").exists()  # until then it counts as running
    assert sweeps.states()[0].reason == "its process is gone"


def test_a_second_watcher_waits_until_the_training_of_a_killed_one_has_saved(sweeps, here):
    ledger = sweeps.make(1, SAVES)
    sweeps.submit()
    sweeps.until((here / "alive").exists)
    token = ledger.submissions()[0].token
    os.kill(ledger.rows(0)[0]["pid"], signal.SIGKILL)
    assert run_cell(ledger, 0, token, "7") == 0
    assert [row["event"] for row in ledger.rows(0)] == ["started", "started", "ended"]
    assert (here / "saved").exists()


@pytest.mark.parametrize(("script", "codes"), [("exit 4", [4, 1]), ("exit 0", [0, 0])])
def test_a_cell_that_ended_while_a_second_process_waited_is_not_begun_again(cell, script, codes):
    assert [cell(script), cell("exit 5")] == codes
    assert len(cell.rows("started")) == 1


def test_a_failure_while_it_is_stopped_is_a_failure(cell):
    fails = "trap 'echo ValueError: no; exit 1' USR2; kill -USR2 $PPID\n"
    assert cell(fails + "while :; do sleep 0.02; done") == 1
    ended = cell.rows("ended")[-1]
    assert (ended["reason"], ended["again"]) == ("ValueError: no", False)


def test_a_cell_killed_before_it_can_save_is_begun_again(cell):
    assert cell("kill -USR2 $PPID; while :; do sleep 0.02; done") == STOPPED
    assert cell.rows("ended")[-1]["reason"] == "killed by SIGUSR2"


def test_a_cell_that_is_cancelled_while_it_starts_trains_nothing(cell, sweeps, here, monkeypatch):
    append = Ledger.append

    def cancelled_just_before(ledger, index, row):
        if row["event"] == "started":
            ledger.record({"event": "cancelled", "cells": [index]})
        append(ledger, index, row)

    monkeypatch.setattr(Ledger, "append", cancelled_just_before)
    assert cell("touch trained") == 1
    assert not (here / "trained").exists()
    assert [row["event"] for row in sweeps.ledger.rows(0)] == ["started", "ended"]


def test_training_that_cannot_be_started_fails_with_the_reason(cell, sweeps, monkeypatch):
    sweeps.make(1, "exit 0")
    monkeypatch.setattr(Ledger, "log_of", lambda ledger, index: ledger.folder / "none" / "log")
    assert cell("exit 0") == 1
    ended = cell.rows("ended")[-1]
    assert "FileNotFoundError" in ended["reason"] and not ended["again"]


def test_a_signal_that_comes_while_training_is_forked_reaches_it(cell, sweeps, here, monkeypatch):
    real = subprocess.Popen

    def popen(*arguments, **options):
        process = real(*arguments, **options)
        sweeps.until((here / "ready").exists)
        os.kill(os.getpid(), signal.SIGUSR2)
        return process

    monkeypatch.setattr(watcher.subprocess, "Popen", popen)
    waits = "trap 'exit 75' USR2; touch ready; for i in $(seq 100); do sleep 0.02; done; exit 3"
    assert cell(waits) == STOPPED


def test_a_cell_that_another_process_runs_is_left_alone(cell, sweeps, monkeypatch):
    monkeypatch.setattr(watcher, "GRACE_S", 0.1)
    sweeps.make(1, "exit 0")
    lock = take_lock(sweeps.ledger.lock_of(0))
    try:
        assert cell("exit 1") == 0
        assert cell.rows("started") == []
    finally:
        os.close(lock)
