"""The plan of a sweep: its files survive a crash and its runs are checked."""

import pytest

from experiments import sweep
from experiments.train import main as train
from lowprec.config.check import ConfigError
from lowprec.config.compose import compose_command
from lowprec.runs.read import find_runs
from lowprec.sweep.plan import Manifest, plan_runs


@pytest.fixture
def manifest(sweeps):
    manifest = sweeps.make(2)
    row = {"event": "submitting", "token": "a", "runs": [0, 1], "launcher": {"name": "local"}}
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


def test_the_plan_is_readable_by_its_owner_only(manifest):
    assert (manifest.folder / "sweep.json").stat().st_mode & 0o777 == 0o600


def test_a_sweep_of_an_earlier_version_is_refused(manifest):
    (manifest.folder / "sweep.json").write_text('{"command": [], "cwd": "/", "cells": []}')
    with pytest.raises(ConfigError, match=r"earlier version; delete it"):
        Manifest(manifest.folder)


def test_each_data_set_is_opened_once(here, tiny):
    opened = []
    keys = [*tiny, "seed=0,1,2", "batch_size=16,32", "name=t"]
    runs = plan_runs(keys, lambda config: opened.append(config) or {"data": "0"})
    assert len(runs) == 6 and len(opened) == 2


def test_a_planned_directory_is_where_the_same_command_trains(here, tiny):
    (run,) = plan_runs([*tiny, "seed=3", "name=t"], sweep.open_sources)
    train(compose_command([*tiny, "seed=3", "name=t"])[0].config)
    assert [str(path) for path in find_runs(here / "runs")] == [str(here / run.directory)]


def test_a_dry_run_prints_the_runs_and_writes_nothing(here, tiny, capsys):
    sweep.submit([*tiny, "seed=0,1", "name=t", "dry_run=true"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("runs/t/nano-fp32-adamw-s0-") and "-s1-" in second
    assert not (here / "runs").exists()
