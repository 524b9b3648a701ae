"""The plan of a sweep: its files survive a crash and its runs are checked."""

import os
import shutil

import pytest

from experiments import sweep
from experiments.train import main as train
from lowprec.config.compose import compose_command
from lowprec.runs.read import find_runs, read_last_row, read_status
from lowprec.sweep.plan import LAUNCHER, Manifest, plan_runs


@pytest.fixture
def manifest(sweeps):
    manifest = sweeps.make(2)
    row = {"event": "submitting", "token": "a", "runs": [0, 1], "launcher": LAUNCHER}
    manifest.record(row)
    manifest.append(0, {"event": "started", "token": "a"})
    return manifest


def test_a_torn_row_costs_no_other_row(manifest, sweeps):
    for path in (manifest.folder / "submissions.jsonl", manifest.folder / "runs" / "0000.jsonl"):
        with open(path, "a") as file:
            file.write('{"time": 1.0, "event": "subm')
    assert sweeps.names() == ["lost", "lost"]
    manifest.record({"event": "cancelled", "runs": [0]})
    manifest.append(0, {"event": "ended", "token": "a"})
    assert [row["event"] for row in manifest.events()] == ["submitting", "cancelled"]
    assert [row["event"] for row in manifest.attempts(0)] == ["started", "ended"]
    assert sweeps.names() == ["cancelled", "lost"]


def test_a_damaged_row_of_a_submission_stops_no_verb(manifest, sweeps):
    path = manifest.folder / "submissions.jsonl"
    path.write_text(path.read_text()[9:])
    manifest.record({"event": "submitted", "token": "a", "job": "7"})
    manifest.record({"event": "cancelled", "runs": [1]})
    assert sweeps.names() == ["new", "new"]


@pytest.mark.parametrize("index", [2, -1])
def test_rows_beyond_the_plan_or_in_a_wrong_file_are_named(manifest, sweeps, capsys, index):
    row = {"event": "submitting", "token": "b", "runs": [index, 1], "launcher": LAUNCHER}
    manifest.record(row)
    manifest.record({"event": "started", "token": "a"})  # an attempt among the submissions
    submissions = {i: (one.token, one.place) for i, one in manifest.submissions().items()}
    assert submissions == {0: ("a", 0), 1: ("b", 1)}
    sweep.command(["status"])
    printed = "".join(capsys.readouterr().out.split("\n"))
    assert f"t/submissions.jsonl: a row names run {index}, which is not in the plan" in printed
    assert "t/submissions.jsonl: a row is damaged" in printed
    assert sweeps.names() == ["lost", "lost"]


PLANS = ('{"cells": []}', "[]", "text", "", '{"runs": 3}', '{"runs": [3]}', '{"runs": [{}]}')
PLANS += ('{"command": ["touch", "%s"], "cwd": "/", "runs": []}',)


@pytest.mark.parametrize("text", PLANS)
def test_a_damaged_plan_or_one_of_an_earlier_version_is_named(manifest, canary, text):
    (manifest.folder / "sweep.json").write_text(text.replace("%s", str(canary)))
    for words in (["status"], ["wait"], ["cancel"], ["resubmit", "--failed"]):
        with pytest.raises(SystemExit, match=r"/t/sweep\.json is damaged"):
            sweep.command(words)


DAMAGE = ("[]", "text", "null", "7", "\0\0", '{"loss": {}}', '{"step": "4"}')
DAMAGE += ('{"state": [], "step": "x", "event": 3}',)
DAMAGE += ('{"event": "submitting", "token": "b", "runs": [[]], "launcher": {}}',)


@pytest.mark.parametrize("text", DAMAGE)
def test_damaged_files_are_named_and_other_runs_keep_their_states(manifest, sweeps, capsys, text):
    good, bad = manifest.directory_of(0), manifest.directory_of(1)
    good.mkdir(parents=True)
    (good / "status.json").write_text('{"state": "finished", "step": 1}')
    bad.mkdir()
    manifest.append(1, {"event": "ended", "token": "a", "code": 0, "again": False})
    rows = [manifest.folder / "submissions.jsonl", manifest.folder / "runs" / "0001.jsonl"]
    for path in (bad / "status.json", bad / "metrics.jsonl", *rows):
        path.write_text((path.read_text() if path in rows else "") + text + "\n")
    shutil.copytree(manifest.folder, manifest.folder.with_name("t.bak"))
    assert sweeps.names() == ["finished", "failed"]
    sweep.status([])
    printed = capsys.readouterr().out
    is_row = "event" in text or "loss" in text or "step" in text
    for path in rows if is_row and "state" not in text else (bad / "status.json", *rows):
        assert f"{path}" in printed, printed


def test_pipes_and_folders_in_the_place_of_files_are_named(manifest, sweeps, capsys):
    for index, make in enumerate((os.mkfifo, os.mkdir)):
        directory = manifest.directory_of(index)
        directory.mkdir(parents=True)
        make(directory / "status.json")
        make(directory / "metrics.jsonl")
    make(manifest.folder / "runs" / "0001.jsonl")
    assert sweeps.names() == ["lost", "lost"]
    sweep.status([])
    printed = capsys.readouterr().out
    assert printed.count("is not a regular file") == 5


def test_each_data_set_is_opened_once(here, tiny):
    opened = []
    keys = [*tiny, "seed=0,1,2", "batch_size=16,32", "name=t"]
    runs = plan_runs(keys, lambda config: opened.append(config) or {"data": "0"})
    assert len(runs) == 6 and len(opened) == 2


def test_a_planned_directory_is_where_the_same_command_trains(here, tiny, monkeypatch):
    monkeypatch.setattr(sweep.local, "start", lambda manifest: None)
    sweep.submit([*tiny, "seed=3", "name=t"])
    sweep.train(["runs/sweeps/t", "0"])
    planned = Manifest(here / "runs/sweeps/t").directory_of(0)
    assert find_runs(here / "runs") == [planned] and read_status(planned)["state"] == "finished"
    config = compose_command([*tiny, "seed=3", "name=t"])[0].config
    shutil.rmtree(planned)
    train(config)
    assert find_runs(here / "runs") == [planned]
    assert read_last_row(planned / "metrics.jsonl")["step"] == 2


def test_a_run_is_trained_beside_its_sweep_from_any_directory(here, tiny, monkeypatch):
    monkeypatch.setattr(sweep.local, "start", lambda manifest: None)
    sweep.submit([*tiny, "name=t"])
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    sweep.train([str(here / "runs/sweeps/t"), "0"])
    assert find_runs(here / "runs") == [Manifest(here / "runs/sweeps/t").directory_of(0)]
    assert not list((here / "elsewhere").iterdir())


def test_a_dry_run_prints_the_runs_and_writes_nothing(here, tiny, capsys):
    sweep.submit([*tiny, "seed=0,1", "name=t", "dry_run=true"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("runs/t/nano-fp32-adamw-s0-") and "-s1-" in second
    assert not (here / "runs").exists()
