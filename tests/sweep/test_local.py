"""The local launcher: nothing is lost and nothing runs twice, whatever is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments import sweep
from lowprec.sweep import local, status
from lowprec.sweep.plan import Plan, take_lock
from tests.sweep.conftest import LOCAL, processes_in

SAVES = """
[ ! -e alive ] || { echo 'two at once'; exit 9; }
trap 'touch stopping; sleep 0.7; rm alive; touch saved; exit 75' TERM
[ -e saved ] || { touch alive; while :; do sleep 0.02; done; }
"""


def launcher_of(plan):
    return int(local.lock_path(plan.folder).read_text())


def kill_launcher(plan):
    """Kills the launcher of a sweep and waits until it is gone."""
    pid = launcher_of(plan)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_failed_runs_alone_are_run_again(sweeps, here, capsys, monkeypatch):
    sweeps.make(8)
    (here / "bad").write_text("5\n7\n")
    sweeps.train(monkeypatch)
    with pytest.raises(SystemExit, match="1"):
        sweep.wait([])
    printed = capsys.readouterr().out
    assert "6 finished, 2 failed" in printed
    way_out = "lost runs again: python -m experiments.sweep resubmit --failed name=t\n"
    assert way_out in printed
    lines = [line for line in printed.splitlines() if "failed:" in line]
    assert [int(line.split()[1]) for line in lines] == [5, 7]
    assert all("ValueError: run" in line and "seed=" in line for line in lines)
    (here / "bad").write_text("")
    sweeps.submit()
    assert way_out in capsys.readouterr().out
    sweep.resubmit(["--failed"])
    printed = capsys.readouterr().out
    assert "2 of 8 runs submitted" in printed and way_out not in printed
    local.launch(sweeps.folder)
    assert sweeps.names() == ["finished"] * 8
    assert [i for i, count in enumerate(sweeps.starts()) if count != 1] == [5, 7]


def test_an_interrupted_submit_leaves_no_launcher_that_begins_later(sweeps, here, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    plan = sweeps.make(2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(local.time, "sleep", interrupted)
        sweeps.submit()
    assert not processes_in(here) and not local.lock_path(plan.folder).exists()


def test_a_killed_launcher_loses_no_run_and_none_that_ended_is_run_again(sweeps, here):
    plan = sweeps.make(24)
    (here / "slow").write_text("8\n9\n")
    sweeps.submit()
    sweeps.until(lambda: sum(sweeps.starts()) >= 10)
    kill_launcher(plan)
    sweeps.until(lambda: "running" not in sweeps.names())
    assert sweeps.names().count("lost") > 10
    finished = {i for i, name in enumerate(sweeps.names()) if name == "finished"}
    first = (here / "order").read_text().split()
    sweeps.submit()
    sweeps.end()
    assert sweeps.names() == ["finished"] * 24
    order = list(map(int, (here / "order").read_text().split()))
    assert set(order) == set(range(24)) and len(order) <= 26  # two were interrupted
    assert not finished & set(order[len(first) :])


@pytest.mark.parametrize(
    ("number", "waits"), [(signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGKILL, False)]
)
def test_the_next_launcher_waits_for_what_still_saves(sweeps, here, number, waits):
    plan = sweeps.make(1, SAVES + sweeps.script)
    sweeps.submit(parallel=1)
    sweeps.until((here / "alive").exists)
    os.kill(launcher_of(plan), number)
    if waits:
        sweeps.until(lambda: sweeps.names() == ["lost"])
        assert (here / "saved").exists()  # until then it counts as running
    sweeps.submit(parallel=1)
    sweeps.until(lambda: sweeps.names() == ["finished"])
    sweeps.end()
    assert sweeps.starts() == [2]


@pytest.mark.parametrize(
    ("owner", "name"), [(Plan, "waiting"), (status, "read_status")], ids=["launcher", "submit"]
)
def test_a_run_that_ends_meanwhile_is_not_started_again(sweeps, monkeypatch, owner, name):
    plan = sweeps.make(1)
    plan.hand_over([0], LOCAL)  # and its launcher died
    plan.directory_of(0).mkdir(parents=True)
    locks = [take_lock(plan.directory_of(0) / ".lock")]
    read = getattr(owner, name)

    def slow(where):
        before = read(where)
        if locks:
            (plan.directory_of(0) / "status.json").write_text('{"state": "finished", "step": 1}')
            os.close(locks.pop())
        return before

    (plan.directory_of(0) / "status.json").write_text('{"state": "running", "step": 0}')
    monkeypatch.setattr(owner, name, slow)
    if owner is Plan:
        sweeps.train(monkeypatch)
    else:
        assert sweeps.names() == ["running"]
    assert sweeps.names() == ["finished"] and sweeps.starts() == [0]


@pytest.mark.parametrize("which", ["others", "cancelled"])
def test_lost_runs_that_nobody_asks_for_stay_lost(sweeps, which):
    plan = sweeps.make(4)
    plan.hand_over([0, 1, 2], LOCAL)  # and its launcher died
    plan.mark(2, "cancelled").touch()
    assert sweeps.names() == ["lost", "lost", "cancelled", "new"]
    if which == "others":
        sweeps.submit([1, 3])
        expected = ["lost", "finished", "cancelled", "finished"]
    else:
        sweep.resubmit(["--cancelled"])
        expected = ["lost", "lost", "finished", "new"]
    assert sweeps.names()[0] == "lost"  # the launcher lives, but has not got it
    sweeps.end()
    assert sweeps.names() == expected
    sweeps.submit()
    sweeps.end()
    assert sweeps.names() == ["finished"] * 4 and sweeps.starts() == [1] * 4


def test_lost_runs_are_cancelled_too_and_stay_so(sweeps, capsys):
    plan = sweeps.make(3)
    plan.hand_over([0, 1], LOCAL)  # and its launcher died, or has not begun
    sweep.cancel([])
    assert "2 runs cancelled" in capsys.readouterr().out and plan.waiting() == []
    sweeps.submit([2])
    sweeps.end()
    assert sweeps.names() == ["cancelled", "cancelled", "finished"]


def test_what_is_submitted_while_a_stopped_launcher_saves_is_trained(sweeps, here, monkeypatch):
    slow = SAVES.replace("sleep 0.7", "until [ -e go ]; do sleep 0.05; done")
    plan = sweeps.make(3, slow + sweeps.script)
    sweeps.submit([0, 1], parallel=1)
    sweeps.until((here / "alive").exists)
    os.kill(launcher_of(plan), signal.SIGTERM)
    sweeps.until((here / "stopping").exists)
    assert sweeps.names() == ["running", "lost", "new"]
    sweeps.submit(parallel=3)
    time.sleep(6)  # longer than a launcher waits for another one to exit
    assert sweeps.names() == ["running", "queued", "queued"] and sweeps.starts() == [1, 0, 0]
    (here / "go").touch()
    sweeps.end()
    assert sweeps.names() == ["finished"] * 3 and sweeps.starts() == [2, 1, 1]


def test_a_second_submit_adds_runs_to_the_launcher_that_is_there(sweeps, here):
    sweeps.make(4)
    (here / "slow").write_text("0\n1\n")
    sweeps.submit()
    sweeps.until(lambda: sum(sweeps.starts()) == 2)
    sweeps.add(3)
    sweeps.submit()
    sweeps.submit()
    sweeps.end()
    assert sweeps.names() == ["finished"] * 7
    assert sweeps.starts() == [1] * 7


def test_two_submits_at_once_submit_each_run_once(sweeps):
    plan = sweeps.make(10)
    code = "from experiments import sweep; from lowprec.sweep.plan import *\n"
    code += f"folder = Path({str(plan.folder)!r})\nwith durable.locked(folder / '.lock'):\n"
    code += f"  sweep.hand_over(Plan(folder), list(range(10)), ('new',), {LOCAL!r})"
    both = [subprocess.Popen([sys.executable, "-P", "-c", code]) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    sweeps.end()
    assert sweeps.starts() == [1] * 10


def test_no_more_runs_train_at_once_than_parallel(sweeps, here, monkeypatch):
    counting = (
        'mkdir -p now; touch "now/$2"; for i in $(seq 100); do ls now | wc -l >> most; '
        'grep -q 3 most && break; sleep 0.1; done; sleep 0.2; ls now | wc -l >> most; rm "now/$2"\n'
    )
    sweeps.make(5, counting + sweeps.script)
    sweeps.train(monkeypatch, parallel=3)
    assert sweeps.names() == ["finished"] * 5
    assert max(map(int, (here / "most").read_text().split())) == 3


def test_each_run_has_gpus_of_its_own(sweeps, here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    ranks = 'echo "$CUDA_VISIBLE_DEVICES:$RANK/$WORLD_SIZE:$MASTER_PORT" >> "gpus-$2"; sleep 0.5\n'
    sweeps.make(2, ranks + sweeps.script)
    sweeps.train(monkeypatch, gpus=2)
    printed = [sorted((here / f"gpus-{run}").read_text().split()) for run in range(2)]
    assert sorted(lines[0].split(":")[0] for lines in printed) == ["4,5", "6,7"]
    for lines in printed:
        assert [line.split(":")[1] for line in lines] == ["0/2", "1/2"]
        assert len({line.split(":")[2] for line in lines}) == 1


@pytest.mark.parametrize("share", [1, 2])
def test_gpus_are_shared_evenly_and_given_on(sweeps, here, monkeypatch, share):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    waits = 'echo "$CUDA_VISIBLE_DEVICES" > "gpu-$2"; until [ -e "go-$2" ]; do sleep 0.02; done\n'
    last = 2 * share
    sweeps.make(last + 1, waits + sweeps.script)
    sweeps.submit(gpus=1, parallel=5, runs_per_gpu=share)
    sweeps.until(lambda: all((here / f"gpu-{i}").exists() for i in range(last)))
    time.sleep(0.5)  # a launcher with room on a GPU starts the last one at once
    assert not (here / f"gpu-{last}").exists()
    for run in (1, last, *range(last)):
        (here / f"go-{run}").touch()
        sweeps.until((here / f"gpu-{last}").exists)
    sweeps.end()
    gpus = [(here / f"gpu-{i}").read_text().strip() for i in range(last + 1)]
    assert gpus == [*["4", "5"] * share, "5"]


@pytest.mark.parametrize(("parallel", "threads"), [(1, ""), (3, "1")])
def test_runs_that_share_the_cores_share_the_threads(sweeps, here, monkeypatch, parallel, threads):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(5))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    sweeps.make(1, 'echo "$OMP_NUM_THREADS" > threads\n' + sweeps.script)
    sweeps.train(monkeypatch, parallel=parallel)
    assert (here / "threads").read_text().strip() == threads


def test_runs_without_gpus_fail_with_the_reason(sweeps, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    sweeps.make(1)
    sweeps.train(monkeypatch, gpus=2)
    assert sweeps.names() == ["failed"]
    assert "launcher.gpus=2, but 1 GPUs are visible" in sweeps.states()[0].reason


def test_training_that_was_asked_to_stop_and_saved_is_started_again(sweeps, here):
    waits = "trap 'exit 75' USR2\n[ -e go ] || { echo $$ > pid; while :; do sleep 0.05; done; }\n"
    sweeps.make(1, waits + sweeps.script)
    sweeps.submit()
    sweeps.until(lambda: (here / "pid").exists() and (here / "pid").read_text())
    (here / "go").touch()
    os.kill(int((here / "pid").read_text()), signal.SIGUSR2)
    sweeps.end()
    assert sweeps.names() == ["finished"]
    assert sweeps.starts() == [2]


def test_cancel_stops_what_trains_and_resubmit_continues_it(sweeps, here, capsys):
    waits = "[ -e go ] || { touch begun; while :; do sleep 0.05; done; }\n"
    waits = "trap 'sleep 0.5; exit 75' TERM\n" + waits
    sweeps.make(3, waits + sweeps.script)
    sweeps.submit(parallel=1)
    sweeps.until((here / "begun").exists)
    sweep.cancel([])
    assert "3 runs cancelled; to continue them: python -m " in capsys.readouterr().out
    sweep.cancel([])  # nothing is left
    assert sweeps.names() == ["cancelling", "cancelled", "cancelled"]
    with pytest.raises(SystemExit):
        sweep.wait([])
    assert sweeps.names() == ["cancelled"] * 3
    assert sweeps.starts() == [1, 0, 0]
    (here / "go").touch()
    sweep.resubmit(["--cancelled"])
    sweeps.end()
    assert sweeps.names() == ["finished"] * 3


def test_a_run_submitted_again_while_it_is_being_cancelled_is_trained_once(sweeps, here):
    sweeps.make(1, SAVES + sweeps.script)
    sweeps.submit()
    sweeps.until((here / "alive").exists)
    sweep.cancel([])
    sweeps.until((here / "stopping").exists)
    sweeps.submit()
    sweeps.end()
    assert sweeps.names() == ["finished"]
    assert sweeps.starts() == [2]


def test_a_later_submission_changes_no_gpus_of_runs_that_wait(sweeps, here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    waits = 'echo "$CUDA_VISIBLE_DEVICES" > "gpu-$2"; until [ -e go ]; do sleep 0.02; done\n'
    sweeps.make(5, waits + sweeps.script)
    sweeps.submit([0, 1], gpus=2, parallel=4)
    sweeps.until((here / "gpu-0").exists)
    sweeps.submit([2, 3, 4], gpus=1, parallel=4, runs_per_gpu=2)
    time.sleep(1.5)  # longer than between two looks at the plan
    assert not list(here.glob("gpu-[1-4]"))  # run 0 shares its GPUs with none
    (here / "go").touch()
    sweeps.end()
    alone = [(here / f"gpu-{i}").read_text().strip() for i in range(5)]
    assert alone[:2] == ["4,5", "4,5"] and all(gpus in ("4", "5") for gpus in alone[2:])
