"""The plan of a sweep: its files survive a crash and its runs are checked."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from experiments import sweep
from experiments.train import main as train
from lowprec.config.compose import compose_command
from lowprec.runs.read import find_runs, read_last_row, read_status
from lowprec.sweep.plan import Plan, _write
from lowprec.sweep.status import State, steps
from tests.sweep.conftest import LOCAL


@pytest.fixture
def plan(sweeps):
    """The plan of two submitted runs."""
    sweeps.make(2)
    plan = sweeps.plan
    plan.hand_over([0, 1], LOCAL)
    return plan


PLANS = ("text", "{}", "[" * 10**5, '{"launchers": {}, "runs": []}')


@pytest.mark.parametrize("text", PLANS, ids=range(len(PLANS)))
def test_a_damaged_plan_or_one_of_an_earlier_version_is_named(plan, text):
    (plan.folder / "sweep.json").write_text(text)
    for words in (["status"], ["wait"], ["cancel"], ["resubmit", "--failed"]):
        with pytest.raises(SystemExit, match=r"/t/sweep\.json is damaged"):
            sweep.command(words)


def test_an_edited_plan_and_one_with_other_fields_are_named(plan):
    path = plan.folder / "sweep.json"
    path.write_text(path.read_text().replace('"seed=1"', '"seed=2"'))
    with pytest.raises(SystemExit, match=f"{path} is damaged .*its digest is another"):
        sweep.command(["status"])
    _write(plan.folder, {"launchers": {}, "runs": [{"index": 0, "cells": 3}]})
    with pytest.raises(SystemExit, match=f"{path} is damaged or from an earlier version .*cells"):
        sweep.command(["status"])


@pytest.mark.parametrize("name", [".", "sweep.json"])
@pytest.mark.parametrize("change", ["owner", "group", "others"])
def test_a_plan_that_others_can_write_is_refused(sweeps, monkeypatch, canary, name, change):
    before = os.umask(0o002)
    plan = sweeps.make(1)
    os.umask(before)
    plan.hand_over([0], LOCAL)
    path = plan.folder / name
    if change == "owner":
        stat, foreign = os.stat, os.stat_result([0o100600, 0, 0, 1, os.getuid() + 1, 0, 0, 0, 0, 0])
        monkeypatch.setattr(
            os, "stat", lambda at, **k: foreign if Path(at) == path else stat(at, **k)
        )
    else:
        path.chmod(path.stat().st_mode | {"group": 0o020, "others": 0o002}[change])
    for words in (["status"], ["resubmit", "--failed"], ["train", str(plan.folder), "0"]):
        with pytest.raises(SystemExit, match=r"/t/sweep\.json can have been written by another"):
            sweep.command(words)


def test_a_finished_run_has_no_result_once_num_steps_are_raised(plan, sweeps):
    directory = plan.directory_of(0)
    directory.mkdir(parents=True)
    (directory / "status.json").write_text('{"state": "finished", "step": 1}')
    assert sweeps.names() == ["finished", "lost"]
    plan.runs[0].config["num_steps"] = 2
    plan.write()
    assert sweeps.names() == ["lost", "lost"]
    (directory / "status.json").write_text('{"state": "diverged", "step": 1}')
    assert sweeps.names() == ["diverged", "lost"]


def test_a_run_without_a_recorded_step_is_starting(plan):
    run_states = [State(0, "running", 12), State(1, "running")]
    num_steps = plan.runs[0].config["num_steps"]
    assert steps(plan, run_states) == f"run 0 at step 12 of {num_steps}, run 1 starting"
    assert steps(plan, 5 * run_states[1:]) == "run 1 starting, " * 4 + "..."


def test_a_users_own_pipe_is_trained_in_the_background(here, tiny, squares, monkeypatch):
    keys = [key for key in tiny if not key.startswith("data")]
    keys += ["data=stream", "data.allow_remote=[pipe]", "data.val=null", "name=t"]
    sweep.submit([*keys, f"data.train='pipe:cat {squares}/train-0.tar'"])
    with contextlib.suppress(SystemExit):
        sweep.wait([])
    plan = Plan(here / "runs/sweeps/t")
    assert read_status(plan.directory_of(0))["state"] == "finished", plan.log_of(0).read_text()


DAMAGE = ("[]", "text", "null", "7", "\0\0", '{"loss": {}}', '{"step": "4"}')
DAMAGE += ('{"state": [], "step": "x", "reason": 3}',)


@pytest.mark.parametrize("text", DAMAGE)
def test_damaged_files_are_named_and_other_runs_keep_their_states(plan, sweeps, capsys, text):
    good, bad = plan.directory_of(0), plan.directory_of(1)
    good.mkdir(parents=True)
    (good / "status.json").write_text('{"state": "finished", "step": 1}')
    bad.mkdir()
    for path in (bad / "status.json", bad / "metrics.jsonl", plan.mark(1, "ended")):
        path.write_text(text + "\n")
    shutil.copytree(plan.folder, plan.folder.with_name("t.bak"))
    assert sweeps.names() == ["finished", "failed"]
    sweep.status([])
    printed = capsys.readouterr().out
    if "loss" not in text and "step" not in text:
        assert str(bad / "status.json") in printed


def test_a_planned_directory_is_where_the_same_command_trains_from_anywhere(
    here, tiny, monkeypatch, no_launcher
):
    sweep.submit([*tiny, "seed=3", "name=t"])
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    sweep.train([str(here / "runs/sweeps/t"), "0"])
    assert not list((here / "elsewhere").iterdir())
    planned = Plan(here / "runs/sweeps/t").directory_of(0)
    assert find_runs(here / "runs") == [planned] and read_status(planned)["state"] == "finished"
    monkeypatch.chdir(here)
    config = compose_command([*tiny, "seed=3", "name=t"])[0].config
    shutil.rmtree(planned)
    train(config)
    assert find_runs(here / "runs") == [planned]
    assert read_last_row(planned / "metrics.jsonl")["step"] == 2


def test_a_dry_run_prints_the_runs_and_writes_nothing(here, tiny, capsys):
    sweep.submit([*tiny, "seed=0,1", "name=t", "dry_run=true"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("runs/t/nano-fp32-adamw-s0-") and "-s1-" in second
    assert not (here / "runs").exists()
