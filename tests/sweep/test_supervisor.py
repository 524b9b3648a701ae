"""A supervisor counts attempts, passes signals on and records how training ended."""

import os
import signal
import subprocess
import sys

import pytest

from lowprec.runs.attempts import STOPPED
from lowprec.sweep import supervisor
from lowprec.sweep.plan import LAUNCHER, Manifest, take_lock
from lowprec.sweep.supervisor import supervise

STOPS = """
checkpoint=runs/t/$2/checkpoints/step_$(cat step)
mkdir -p "$checkpoint" && touch "$checkpoint/manifest.json"
kill -USR2 $PPID
trap 'exit 75' USR2
while :; do sleep 0.02; done
"""
SAVES = """
[ ! -e alive ] || { echo 'two at once'; exit 9; }
[ ! -e saved ] || exit 0
trap 'sleep 0.7; rm alive; touch saved; exit 75' TERM
touch alive
while :; do sleep 0.02; done
"""


def submit_row(token):
    return {"event": "submitting", "token": token, "runs": [0], "launcher": LAUNCHER}


@pytest.fixture
def attempt(sweeps, here):
    """`attempt(script)`: one attempt at the only run of a sweep; returns its exit status."""

    def call(script, token="first"):
        if not (sweeps.folder / "sweep.json").exists():
            sweeps.make(1, script)
        (here / "run.sh").write_text(script)
        if sweeps.manifest.submissions().get(0) is None:
            sweeps.manifest.record(submit_row("first"))
        return supervise(sweeps.manifest, 0, token)

    call.rows = lambda event: [r for r in sweeps.manifest.attempts(0) if r["event"] == event]
    return call


def test_three_attempts_of_a_submission_from_the_same_checkpoint_are_the_last(
    attempt, sweeps, here
):
    for step in (10, 20, 20, 20):  # the first began at 0, three at 20
        (here / "step").write_text(str(step))
        assert attempt(STOPS) == STOPPED
    assert [row["saved"] for row in attempt.rows("started")] == [0, 10, 20, 20]
    assert [attempt(STOPS), attempt(STOPS)] == [STOPPED, 1]
    last = attempt.rows("ended")[-1]
    assert "3 attempts" in last["reason"] and "step 20" in last["reason"]
    assert not last["again"]
    sweeps.manifest.record(submit_row("second"))  # counts from zero and ends the first
    assert [attempt(STOPS, token) for token in ("first", "second")] == [1, STOPPED]
    assert len(attempt.rows("started")) == 6


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("kill -KILL $$", 137, "killed by SIGKILL, often for lack of memory"),
        ("kill -SEGV $$", 139, "killed by SIGSEGV"),
        ("echo Traceback; echo 'ValueError: no'; exit 1", 1, "ValueError: no"),
        ("echo 'runs/x failed: because'; echo 'and do this'; exit 1", 1, "because and do this"),
        ("exit 4", 4, "exit status 4"),
        ("exit 255", 255, "exit status 255"),  # 127 is no signal
        ("trap 'echo no; exit 1' USR2; kill -USR2 $PPID; while :; do sleep 0.02; done", 1, "no"),
    ],
)
def test_a_failure_is_recorded_and_not_started_again(attempt, script, code, reason):
    assert attempt(script) == code
    ended = attempt.rows("ended")[-1]
    assert (ended["code"], ended["reason"], ended["again"]) == (code, reason, False)


@pytest.mark.parametrize(("script", "codes"), [("exit 4", [4, 1]), ("exit 0", [0, 0])])
def test_a_run_that_has_ended_is_not_started_again(attempt, script, codes):
    assert [attempt(script), attempt("exit 5")] == codes
    assert len(attempt.rows("started")) == 1


def test_a_run_killed_by_a_stop_signal_before_it_can_save_is_started_again(attempt):
    assert attempt("kill -USR2 $PPID; while :; do sleep 0.02; done") == STOPPED
    assert attempt.rows("ended")[-1]["reason"] == "killed by SIGUSR2"


def test_training_that_cannot_be_started_fails_with_the_reason(attempt, sweeps, monkeypatch):
    sweeps.make(1, "exit 0")
    monkeypatch.setattr(Manifest, "log_of", lambda manifest, index: manifest.folder / "no" / "log")
    assert attempt("exit 0") == 1
    ended = attempt.rows("ended")[-1]
    assert "FileNotFoundError" in ended["reason"] and not ended["again"]


def test_a_signal_during_the_fork_of_training_reaches_it(attempt, sweeps, here, monkeypatch):
    real = subprocess.Popen

    def popen(*arguments, **options):
        process = real(*arguments, **options)
        sweeps.until((here / "ready").exists)
        os.kill(os.getpid(), signal.SIGUSR2)
        return process

    monkeypatch.setattr(supervisor.subprocess, "Popen", popen)
    waits = "trap 'exit 75' USR2; touch ready; for i in $(seq 100); do sleep 0.02; done; exit 3"
    assert attempt(waits) == STOPPED


def test_a_run_that_another_process_trains_is_left_alone(attempt, sweeps, monkeypatch):
    monkeypatch.setattr(supervisor, "GRACE_S", 0.1)
    sweeps.make(1, "exit 0")
    lock = take_lock(sweeps.manifest.lock_of(0))
    try:
        assert attempt("exit 1") == 0
        assert attempt.rows("started") == []
    finally:
        os.close(lock)


def test_other_ranks_of_a_failed_run_are_killed_after_a_grace_time(attempt, sweeps, monkeypatch):
    monkeypatch.setattr(supervisor, "GRACE_S", 0.3)
    ranks = '[ "$RANK/$WORLD_SIZE" = 1/2 ] && { echo "ValueError: one"; exit 7; }; exec sleep 60'
    sweeps.make(1, ranks)
    sweeps.manifest.record(submit_row("first") | {"launcher": LAUNCHER | {"gpus": 2}})
    assert attempt(ranks) == 7
    assert attempt.rows("ended")[-1]["reason"] == "ValueError: one"


WORKER = """
trap 'saved=1' USR2
sleep 1 & worker=$!
touch begun
wait $worker
kill -0 $worker 2>/dev/null && echo alive > worker
wait $worker; echo $? >> worker
exit 75
"""


def test_a_signal_to_the_whole_group_reaches_training_and_not_its_workers(sweeps, here):
    manifest = sweeps.make(1, WORKER)
    manifest.record(submit_row("a"))
    command = [sys.executable, "-m", "lowprec.sweep.supervisor", str(manifest.folder), "0", "a"]
    process = subprocess.Popen(command, process_group=0)
    sweeps.until((here / "begun").exists)
    os.killpg(process.pid, signal.SIGUSR2)  # as SLURM does
    assert process.wait(30) == STOPPED
    assert (here / "worker").read_text().split() == ["alive", "0"]


def test_training_of_a_killed_supervisor_saves_before_the_next_attempt(sweeps, here):
    manifest = sweeps.make(1, SAVES)
    manifest.record(submit_row("a"))
    command = [sys.executable, "-m", "lowprec.sweep.supervisor", str(manifest.folder), "0", "a"]
    process = subprocess.Popen(command)
    sweeps.until((here / "alive").exists)
    process.kill()
    process.wait()
    assert supervise(manifest, 0, "a") == 0
    assert [row["event"] for row in manifest.attempts(0)] == ["started", "started", "ended"]
    assert (here / "saved").exists()
