"""The plan of a sweep: its files survive a crash, its runs are checked, its cost is estimated."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from experiments import sweep
from lowprec.config.check import ConfigError
from lowprec.runs.read import find_runs
from lowprec.sweep import plan
from lowprec.sweep.plan import RECORDS, Manifest, plan_runs

MEASURED = "mini_l-bf16-adamw-s0-9ba1632507"


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
    with pytest.raises(ConfigError, match=r"earlier version.*delete the folder"):
        Manifest(manifest.folder)


def test_each_data_set_is_opened_once(here, tiny):
    opened = []
    keys = [*tiny, "seed=0,1,2", "batch_size=16,32", "name=t"]
    runs = plan_runs(keys, lambda config: opened.append(config) or {"data": "0"})
    assert len(runs) == 6 and len(opened) == 2


def test_a_planned_directory_is_where_the_same_command_trains(here, tiny):
    (run,) = plan_runs([*tiny, "seed=3", "name=t"], sweep.open_sources)
    command = [sys.executable, "-m", "experiments.train", *tiny, "seed=3", "name=t"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert [str(path) for path in find_runs(here / "runs")] == [str(here / run.directory)]


def test_faults_of_a_single_run_name_no_run(tiny):
    with pytest.raises(ConfigError) as error:
        plan_runs([*tiny, "seed=0", "schedule.warmup_steps=9"], sweep.open_sources)
    assert len(error.value.faults) == 1 and "[run" not in error.value.faults[0]


@pytest.fixture
def dry_run(squares, capsys):
    """`dry_run(*keys)`: what a dry run prints."""

    def call(*keys):
        data = ["evaluation=none", "data=shards", "data.val=null", "batch_size=64", "dry_run=true"]
        sweep.submit([*data, f"data.train={squares}/train-*.tar", *keys])
        return capsys.readouterr().out

    return call


def test_a_dry_run_counts_what_was_measured_and_names_what_was_not(here, dry_run):
    printed = dry_run("device=auto", "model=mini_l,mini_h")
    assert "2 runs" in printed and "GPU-hours on NVIDIA H" in printed
    assert re.search(r"unknown for 1 runs .*model=mini_h", printed)
    assert re.search(r"disk: \d+\.\d\d GB of checkpoints; .* GB free", printed)
    assert not (here / "runs").exists()


def test_a_dry_run_takes_times_from_runs_with_as_many_processes(here, dry_run, monkeypatch):
    (source,) = [run for run in find_runs(RECORDS) if run.name == MEASURED]
    for count in (1, 8):
        copy = here / "records" / str(count)
        shutil.copytree(source, copy)
        attempt = json.loads((copy / "attempts.jsonl").read_text()) | {"processes": count}
        (copy / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    monkeypatch.setattr(plan, "RECORDS", here / "records")
    keys = ["num_steps=1000000", "model=mini_l", "launcher=slurm", "distributed=ddp"]
    hours = {}
    for count in (1, 2, 8):
        printed = dry_run(*keys, f"launcher.gpus={count}")
        hours[count] = re.search(r"time: (\d+\.\d+) GPU-hours on .* from .*/records/(\d)", printed)
        assert ("unknown for 1 runs" in printed) == (count == 2)
    assert (hours[1][2], hours[2], hours[8][2]) == ("1", None, "8")
    assert float(hours[8][1]) == pytest.approx(8 * float(hours[1][1]), rel=0.01)
