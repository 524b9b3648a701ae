"""The local launcher counts starts, passes signals on and says how training ended."""

import os
import signal

import pytest

from experiments import sweep
from lowprec.sweep import local, training
from lowprec.sweep.plan import DECLINED

STOPS = """
checkpoint=runs/t/$2/checkpoints/step_$(head -n1 steps)
sed -i 1d steps
mkdir -p "$checkpoint" && touch "$checkpoint/manifest.json"
exit 75
"""


@pytest.fixture
def trained(sweeps, monkeypatch):
    """`trained(script, **launcher)`: trains the only run of a sweep; its state and reason."""

    def call(script, **launcher):
        if not (sweeps.folder / "sweep.json").exists():
            sweeps.make(1)
        (sweeps.here / "run.sh").write_text(script)
        sweeps.train(monkeypatch, **launcher)
        return sweeps.names()[0], sweeps.states()[0].reason

    return call


def test_three_starts_from_the_same_checkpoint_are_the_last(trained, sweeps, here, monkeypatch):
    (here / "steps").write_text("10\n" + "20\n" * 9)  # the first began at 0, three at 20
    state, reason = trained(STOPS)
    assert state == "failed" and "3 attempts" in reason and "step 20" in reason
    assert sweeps.starts() == [5]
    sweep.resubmit(["--failed"])  # counts from zero
    local.launch(sweeps.folder)
    assert sweeps.starts() == [8]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -KILL $$", "killed by SIGKILL, often for lack of memory"),
        ("kill -USR2 $$", "killed by SIGUSR2"),  # nobody had asked it to stop
        ("echo Traceback; echo 'ValueError: no'; exit 1", "ValueError: no"),
        ("echo 'runs/x failed: because'; echo 'and do this'; exit 1", "because and do this"),
        ("echo 'runs/x failed: one'; echo 'error: two'; exit 1", "error: two"),
        ("exit 255", "exit status 255"),  # 127 is no signal
        ("exit 0", "ended without a result"),
    ],
)
def test_a_failure_is_named_and_not_started_again(trained, sweeps, script, reason):
    assert trained(script) == ("failed", reason)
    assert trained("exit 5") == ("failed", reason)
    assert sweeps.starts() == [1]


def test_training_that_cannot_be_started_fails_with_the_reason(trained, monkeypatch):
    monkeypatch.setattr(training, "TRAIN", ["/no/such/python"])
    state, reason = trained("exit 0")
    assert state == "failed" and "FileNotFoundError" in reason


def test_other_ranks_of_a_failed_run_are_killed_after_a_grace_time(trained, monkeypatch):
    monkeypatch.setattr(training, "GRACE_S", 0.3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    ranks = '[ "$RANK/$WORLD_SIZE" = 1/2 ] && { echo "ValueError: one"; exit 7; }; exec sleep 60'
    assert trained(ranks, gpus=2) == ("failed", "ValueError: one")


def test_a_run_that_another_process_trains_has_not_failed(trained, sweeps, monkeypatch):
    monkeypatch.setattr(training.Plan, "is_training", lambda plan, index: True)
    plan = sweeps.make(1)
    for code, ended in ((0, False), (DECLINED, False), (1, True)):
        training.Training(plan, 0)._end(code, "no")
        assert (plan.why_ended(0) == "no") == ended


WORKER = """
[ ! -e worker ] || exit 3
trap 'saved=1' TERM
sleep 1 & worker=$!
touch begun
wait $worker
kill -0 $worker 2>/dev/null && echo alive > worker
wait $worker; echo $? >> worker
exit 75
"""


def test_a_signal_to_the_whole_group_reaches_training_and_not_its_workers(sweeps, here):
    plan = sweeps.make(1, WORKER)
    sweeps.submit()
    sweeps.until((here / "begun").exists)
    os.killpg(int(local.lock_path(plan.folder).read_text()), signal.SIGTERM)
    sweeps.until(lambda: sweeps.names() == ["lost"])
    assert (here / "worker").read_text().split() == ["alive", "0"]
