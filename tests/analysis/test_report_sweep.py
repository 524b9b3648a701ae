"""The report of a sweep shows the cells that have no run directory, and why."""

import json
import re

import pandas as pd
import pytest

from analysis import NoRunsError, load_runs, report
from analysis.report_sweep import absent_cells
from lowprec.sweep.manifest import Cell, Ledger

HOSTILE = "<img src=x onerror=alert(1)>\"'&amp;<b>"
LOCAL = {"name": "local", "parallel": 1, "gpus": 0}


@pytest.fixture(name="sweep")
def sweep_fixture(make_run, tmp_path):
    """A sweep of five cells: one finished; one failed at its start, one cancelled, one lost."""
    runs = [make_run(num_steps=20, seed=0)]
    runs += [runs[0].with_name(f"nano-bf16-adamw-s{seed}-{seed:010d}") for seed in range(1, 5)]
    folder = tmp_path / "runs" / "sweeps" / runs[0].parent.name
    ledger = Ledger.open(folder, ["sh"], tmp_path)
    config = {"num_steps": 20, "experiment": "loss_curves"}
    ledger.add([
        Cell(-1, "nano", run.name[-10:], str(run.relative_to(tmp_path)), [f"seed={i}"], config)
        for i, run in enumerate(runs)
    ])  # fmt: skip
    ledger.record({"event": "submitting", "token": "t", "launcher": LOCAL, "cells": [0, 1, 2, 3]})
    ledger.append(1, {"event": "started", "token": "t"})
    ended = {"event": "ended", "token": "t", "again": False}
    ledger.append(1, {**ended, "reason": f"exit status 1: {HOSTILE}"})
    ledger.record({"event": "cancelled", "cells": [2]})
    return ledger


def page_of(sweep, tmp_path):
    out = tmp_path / "page.html"
    runs = tmp_path / sweep.cells[0].run
    assert report.main(["--runs", str(runs.parent), "--out", str(out)]) == 0
    return out.read_text()


def test_cells_without_a_run_are_listed_with_state_and_reason(sweep, tmp_path):
    page = page_of(sweep, tmp_path)
    failures = page[page.index('id="failures"') : page.index('id="settings"')]
    text = re.sub(r"<[^>]+>", " ", failures)
    assert "seed=0" not in text  # it finished
    assert "seed=1" in text and "failed, no run" in text and "exit status 1" in text
    assert re.search(r"seed=2\s+cancelled, no run", text)
    assert re.search(r"seed=3\s+lost, no run.*its process is gone", text, re.DOTALL)
    assert re.search(r"seed=4\s+new, no run.*never submitted", text, re.DOTALL)
    assert "4 of the sweep without a run" in page
    assert re.search(r"need attention</span><b>4</b>", page)


def test_the_words_of_a_sweep_are_escaped(sweep, tmp_path):
    page = page_of(sweep, tmp_path)
    assert HOSTILE not in page and "&lt;img src=x onerror=alert(1)&gt;" in page


def test_a_cell_is_looked_for_by_the_folder_of_all_runs_and_by_its_experiment(sweep, tmp_path):
    root = tmp_path / "runs"
    names = set(load_runs(root).summaries["run"])
    assert len(absent_cells(root, names, None)) == 4
    assert len(absent_cells(root, names, "loss_curves")) == 4
    assert absent_cells(root, names, "fp8_fixes") == []
    assert absent_cells(root / "elsewhere", names, None) == []
    assert absent_cells("memory://runs", names, None) == []


def test_reading_a_sweep_writes_nothing(sweep, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in sweep.folder.rglob("*")}
    absent_cells(tmp_path / "runs", set(), None)
    assert {path: path.stat().st_mtime_ns for path in sweep.folder.rglob("*")} == before


def test_a_damaged_ledger_is_a_row_and_the_report_is_written(sweep, tmp_path):
    (sweep.folder / "sweep.json").write_text('{"cells": ')
    page = page_of(sweep, tmp_path)
    assert f"sweep {sweep.folder.name}" in page and "its ledger cannot be read" in page


def test_a_sweep_without_any_run_says_why(sweep, tmp_path, capsys):
    (tmp_path / sweep.cells[0].run / "status.json").unlink()
    out = tmp_path / "page.html"
    assert report.main(["--runs", str(tmp_path / "runs"), "--out", str(out)]) == 2
    errors = capsys.readouterr().err
    assert "no runs at or below" in errors and "seed=1: failed: exit status 1" in errors
    with pytest.raises(NoRunsError):
        load_runs(tmp_path / "runs")


def test_names_of_tensors_are_escaped_in_heat_maps(make_run, tmp_path):
    rms = pd.DataFrame(1.0, range(1, 21), ["visual.conv1.weight", "<b onclick=x>"])
    run = make_run(num_steps=20, tables={"tensors": {"rms": rms}})
    page = report.make_page(load_runs(run))
    [names, _] = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["lists"]
    assert sorted(names) == ["&lt;b onclick=x&gt;", "visual.conv1.weight"]
