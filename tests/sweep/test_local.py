"""The local launcher: nothing is lost, nothing runs twice, whoever is killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import sweep
from lowprec.runs.read import find_runs, read_rows
from lowprec.sweep import local
from lowprec.sweep.manifest import is_locked
from lowprec.sweep.plan import cells_of

LOCAL = {"name": "local", "parallel": 2, "gpus": 0}
NANO = ["model=nano", "model.vision_layers=1", "model.text_layers=1", "model.vocab_size=512"]
NANO += ["num_steps=2", "batch_size=16", "num_workers=0", "device=cpu", "evaluation=none"]
NANO += ["precision=fp32", "data=shards", "data.val=null", "name=t"]


def kill_launcher(ledger):
    """Kills the launcher of a sweep and waits until it is gone; its cells go on."""
    pid = int(local.lock_path(ledger.folder).read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_200_cells_3_fail_by_name_and_only_these_are_run_again(sweeps, here, squares, capsys):
    script = sweeps.make(0).command[1]
    real = f'[ "$2" -lt 12 ] && {{ [ "$2" != 5 ] || [ ! -s bad ]; }} && exec {sys.executable} '
    real += '-m experiments.sweep_cell "$1" "$2"\n'
    Path(script).write_text(real + Path(script).read_text())
    (here / "bad").write_text("5\n77\n150\n")
    seeds = "seed=" + ",".join(map(str, range(12)))
    sweeps.ledger.add(cells_of([*NANO, f"data.train={squares}/train-*.tar", seeds]))
    sweeps.add(188)
    sweeps.submit()
    with pytest.raises(SystemExit) as left:
        sweep.wait([])
    assert left.value.code == 1
    said = capsys.readouterr().out
    assert "197 finished, 3 failed" in said
    named = [line for line in said.splitlines() if line.startswith("cell ") and "failed:" in line]
    assert [int(line.split()[1]) for line in named] == [5, 77, 150]
    assert all("ValueError: cell" in line and "seed=" in line for line in named)
    (here / "bad").write_text("")
    sweep.resubmit(["--failed"])
    sweep.wait([])
    assert "3 of 200 cells submitted" in capsys.readouterr().out
    assert [i for i, count in enumerate(sweeps.starts()) if count != 1] == [5, 77, 150]
    runs = find_runs(here / "runs" / "t")  # those that were trained
    assert len(runs) == 12
    assert all([r["step"] for r in read_rows(run / "metrics.jsonl")] == [1, 2] for run in runs)


def test_a_killed_launcher_loses_nothing_and_the_next_submit_starts_nothing_twice(sweeps, here):
    ledger = sweeps.make(120)
    (here / "slow").write_text("50\n51\n")
    sweeps.submit()
    sweeps.until(lambda: sum(sweeps.starts()) >= 52)
    kill_launcher(ledger)
    assert not is_locked(local.lock_path(ledger.folder))  # also while its cells go on
    left = sweeps.names()
    assert left.count("lost") > 60
    sweeps.submit()
    sweeps.end()
    assert sweeps.names() == ["finished"] * 120
    assert sorted(map(int, (here / "order").read_text().split())) == list(range(120))


def test_a_second_submit_adds_cells_to_the_launcher_that_runs(sweeps, here):
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


def test_two_that_submit_at_once_submit_each_cell_once(sweeps):
    ledger = sweeps.make(10)
    code = "import sys; from experiments import sweep; from lowprec.sweep.manifest import *\n"
    code += f"folder = {str(ledger.folder)!r}\nwith locked(folder):\n"
    code += f"  sweep.hand_over(Ledger(folder), list(range(10)), ('new',), {LOCAL!r})"
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    sweeps.end()
    assert sweeps.starts() == [1] * 10
    submitted = [row["cells"] for row in ledger.events()]
    assert submitted == [list(range(10))]


def test_no_more_cells_run_at_once_than_parallel(sweeps, here):
    counting = 'mkdir -p now; touch "now/$2"; ls now | wc -l >> most; sleep 0.1; rm "now/$2"\n'
    sweeps.make(12, counting + sweeps.script)
    sweeps.submit(parallel=3)
    sweeps.end()
    assert max(map(int, (here / "most").read_text().split())) == 3


def test_cells_that_outlived_their_launcher_count_as_running(sweeps, here):
    waits = 'touch "begun-$2"; until [ -e go ]; do sleep 0.02; done\n'
    ledger = sweeps.make(2, waits + sweeps.script)
    sweeps.submit(parallel=1)
    sweeps.until((here / "begun-0").exists)
    kill_launcher(ledger)
    sweeps.submit(parallel=1)
    time.sleep(0.5)  # a launcher with room starts the other at once
    assert not (here / "begun-1").exists()
    (here / "go").touch()
    sweeps.end()
    assert sweeps.names() == ["finished"] * 2


def test_each_cell_has_gpus_of_its_own(sweeps, here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    ranks = 'echo "$CUDA_VISIBLE_DEVICES:$RANK/$WORLD_SIZE:$MASTER_PORT" >> "gpus-$2"; sleep 0.5\n'
    sweeps.make(2, ranks + sweeps.script)
    sweeps.submit(gpus=2)
    sweeps.end()
    found = [sorted((here / f"gpus-{cell}").read_text().split()) for cell in range(2)]
    assert sorted(lines[0].split(":")[0] for lines in found) == ["4,5", "6,7"]
    for lines in found:
        assert [line.split(":")[1] for line in lines] == ["0/2", "1/2"]
        assert len({line.split(":")[2] for line in lines}) == 1


def test_a_new_launcher_leaves_out_the_gpus_of_cells_that_outlived_the_last(
    sweeps, here, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    waits = 'echo "$CUDA_VISIBLE_DEVICES" > "gpu-$2"; until [ -e "go-$2" ]; do sleep 0.02; done\n'
    ledger = sweeps.make(3, waits + sweeps.script)
    sweeps.submit(gpus=1)
    sweeps.until(lambda: (here / "gpu-0").exists() and (here / "gpu-1").exists())
    kill_launcher(ledger)
    (here / "go-1").touch()
    sweeps.until(lambda: sweeps.names()[1] == "finished")
    sweeps.until(lambda: not is_locked(ledger.lock_of(1)))
    sweeps.submit(gpus=1)
    sweeps.until(lambda: (here / "gpu-2").exists() and (here / "gpu-2").read_text())
    assert [(here / f"gpu-{i}").read_text().strip() for i in range(3)] == ["4", "5", "5"]
    for i in (0, 2):
        (here / f"go-{i}").touch()
    sweeps.end()


def test_a_cell_whose_process_dies_before_it_begins_fails_and_is_not_begun_for_ever(sweeps):
    ledger = sweeps.make(2)
    ledger.lock_of(1).mkdir()  # which nobody can open to write
    sweeps.submit()
    sweeps.until(lambda: not {"queued", "running"} & set(sweeps.names()), seconds=20)
    assert sweeps.names() == ["finished", "failed"]
    assert "ended before training began (exit status 1)" in sweeps.states()[1].reason
    assert "IsADirectoryError" in local.log_path(ledger.folder).read_text()
    assert len(ledger.rows(1)) == 1


def test_cells_for_which_a_launcher_sees_too_few_gpus_fail(sweeps, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    ledger = sweeps.make(1)
    sweeps.submit(gpus=2)
    sweeps.end()
    assert sweeps.names() == ["failed"]
    assert "launcher.gpus=2: 1 GPUs are visible" in local.log_path(ledger.folder).read_text()


def test_a_cell_that_was_told_to_stop_is_begun_again(sweeps, here):
    waits = """
trap 'exit 75' USR2
if [ ! -e begun ]; then touch begun; while :; do sleep 0.05; done; fi
"""
    ledger = sweeps.make(1, waits + sweeps.script)
    sweeps.submit()
    sweeps.until((here / "begun").exists)
    os.kill(ledger.rows(0)[0]["pid"], signal.SIGUSR2)
    sweeps.end()
    state = sweeps.states()[0]
    assert (state.state, state.preempted) == ("finished", 1)
    assert sweeps.starts() == [2]


def test_cancel_stops_what_runs_and_submit_goes_on_later(sweeps, here, capsys):
    waits = "trap 'exit 75' TERM\n[ -e go ] || { touch begun; while :; do sleep 0.05; done; }\n"
    ledger = sweeps.make(3, waits + sweeps.script)
    sweeps.submit(parallel=1)
    sweeps.until((here / "begun").exists)
    sweep.cancel([])
    assert "3 cells cancelled" in capsys.readouterr().out
    sweeps.until(lambda: not is_locked(local.lock_path(ledger.folder)))
    assert sweeps.names() == ["cancelled"] * 3
    assert sweeps.starts() == [1, 0, 0]
    assert [row["again"] for row in ledger.rows(0) if row["event"] == "ended"] == [False]
    (here / "go").touch()
    sweeps.submit()
    sweeps.end()
    assert sweeps.names() == ["finished"] * 3


def test_a_cancel_whose_signal_did_not_arrive_can_be_repeated(sweeps, here, monkeypatch):
    waits = "trap 'exit 75' TERM; touch begun; while :; do sleep 0.05; done\n"
    ledger = sweeps.make(1, waits)
    sweeps.submit()
    sweeps.until((here / "begun").exists)
    with monkeypatch.context() as patch:
        patch.setattr(local.os, "kill", lambda pid, number: None)
        sweep.cancel([])
    assert is_locked(ledger.lock_of(0))
    sweep.cancel([])
    sweeps.until(lambda: not is_locked(ledger.lock_of(0)))
    assert sweeps.names() == ["cancelled"]


def test_the_process_that_has_the_number_of_an_ended_cell_is_not_signaled(sweeps, monkeypatch):
    ledger = sweeps.make(1)
    row = {"event": "started", "token": "a", "pid": os.getpid(), "host": socket.gethostname()}
    ledger.append(0, row)
    monkeypatch.setattr(local.os, "kill", lambda pid, number: pytest.fail("it was signaled"))
    local.stop(ledger, [0])
