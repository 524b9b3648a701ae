"""Runs behind a URL load as those on disk do."""

import shutil

import fsspec
import numpy as np
import pandas as pd
import pytest

from analysis import NoRunsError, load_runs
from analysis.report import main

CONV = "visual.conv1.weight"


@pytest.fixture
def upload(tmp_path):
    """A function: copies `tmp_path/runs` to a store in memory and returns its URL."""
    store = fsspec.filesystem("memory")

    def upload():
        store.put(str(tmp_path / "runs"), "/bucket/runs", recursive=True)
        return "memory://bucket/runs"

    yield upload
    store.rm("/bucket", recursive=True)


def test_every_table_of_runs_behind_a_url_is_that_of_the_folder(make_run, tmp_path, upload):
    make_run(num_steps=60)
    make_run(num_steps=60, seed=1, steps=30, state="diverged")
    make_run(num_steps=60, seed=2, steps=40, state="running")  # has streams alone
    here, there = load_runs(tmp_path / "runs"), load_runs(upload())
    for table in ("metrics", "timing", "events"):
        pd.testing.assert_frame_equal(getattr(there, table), getattr(here, table))
    pd.testing.assert_frame_equal(there.runs.drop(columns="path"), here.runs.drop(columns="path"))
    pd.testing.assert_frame_equal(there.tensors("visual.*"), here.tensors("visual.*"))
    assert there.runs["path"].str.startswith("memory://").all()


def test_lines_of_benchmarks_beside_runs_load_without_the_damaged(make_run, tmp_path, upload):
    make_run(num_steps=20)
    assert load_runs(tmp_path / "runs").bench.empty
    (tmp_path / "runs" / "bench" / "ops").mkdir(parents=True)
    lines = '{"slug": "ops", "case": "output", "ms": 2.5}\nno\n{"case": "grad_input", "ms": 3.5}\n'
    (tmp_path / "runs" / "bench" / "ops" / "one.jsonl").write_text(lines)
    for root in (tmp_path / "runs", upload()):
        with pytest.warns(UserWarning, match="one.jsonl: left out: .*line 2"):
            bench = load_runs(root).bench
        assert bench[["slug", "ms"]].values.tolist() == [["ops", 2.5], ["ops", 3.5]]


def test_one_run_behind_a_url_loads(make_run, upload):
    run = make_run(num_steps=20)
    make_run(num_steps=20, seed=1)
    url = f"{upload()}/{run.parent.name}/{run.name}"
    assert load_runs(url).runs["run"].tolist() == [run.name]


def test_damage_behind_a_url_is_a_note(make_run, tmp_path, upload):
    run = make_run(num_steps=20)
    (run / "status.json").write_text("null")
    with open(run / "metrics.jsonl", "a") as file:
        file.write("garbage\n")
    (run / "tensors.parquet").write_bytes(b"PAR1 no")
    runs = load_runs(upload())
    note = runs.runs["note"][0]
    assert "status.json is damaged" in note and "metrics.jsonl: line 21" in note
    assert runs.tensors(CONV)["step"].tolist() == list(range(1, 21))  # of the streams


def test_only_the_chosen_columns_come_over_the_network(make_run, upload, monkeypatch):
    values = np.random.default_rng(0).random((2000, 100), np.float32)
    names = [CONV, *(f"layer.{i}" for i in range(99))]
    rms = pd.DataFrame(values, range(1, 2001), names)
    run = make_run(num_steps=2000, flush=1000, tables={"tensors": {"rms": rms}})
    shutil.rmtree(run / "tensors")
    size = (run / "tensors.parquet").stat().st_size
    runs, fetched = load_runs(upload()), []
    opened = fsspec.implementations.memory.MemoryFile

    def read(self, size=-1):
        fetched.append(len(part := super(opened, self).read(size)))
        return part

    monkeypatch.setattr(opened, "read", read, raising=False)
    assert len(runs.tensors(CONV)) == 2000
    assert 0 < sum(fetched) < 0.2 * size  # one of 100 columns, and the end of the file


def test_no_runs_behind_a_url_names_it():
    with pytest.raises(NoRunsError, match="memory://nothing: no runs"):
        load_runs("memory://nothing")


def test_a_report_of_runs_behind_a_url_is_written(make_run, tmp_path, upload, capsys):
    make_run(num_steps=20)
    out = tmp_path / "page.html"
    assert main(["--runs", upload(), "--out", str(out)]) == 0
    assert "1 run: 1 finished" in out.read_text()
