"""Runs behind a URL load as those on disk do."""

import json
import shutil

import fsspec
import numpy as np
import pandas as pd
import pytest

from analysis import NoRunsError, load_runs, make, spikes
from analysis.report.__main__ import main

CONV = "visual.conv1.weight"


@pytest.fixture
def upload(tmp_path):
    """A function that copies `tmp_path/runs` to a store in memory and returns its URL."""
    store = fsspec.filesystem("memory")

    def upload():
        store.put(str(tmp_path / "runs"), "/bucket/runs", recursive=True)
        return "memory://bucket/runs"

    yield upload
    store.rm("/bucket", recursive=True)


def test_tables_from_a_url_equal_those_from_the_folder(make_run, tmp_path, upload):
    make_run(num_steps=60)
    make_run(num_steps=60, seed=1, steps=30, state="diverged")
    make_run(num_steps=60, seed=2, steps=40, state="running")  # has streams alone
    here, there = load_runs(tmp_path / "runs"), load_runs(upload())
    for table in ("metrics", "timing", "events"):
        pd.testing.assert_frame_equal(getattr(there, table), getattr(here, table))
    pd.testing.assert_frame_equal(there.runs.drop(columns="path"), here.runs.drop(columns="path"))
    pd.testing.assert_frame_equal(there.tensors("visual.*"), here.tensors("visual.*"))
    assert there.runs["path"].str.startswith("memory://").all()


def test_benchmark_lines_load_without_the_damaged_ones(make_run, tmp_path, upload):
    make_run(num_steps=20)
    assert load_runs(tmp_path / "runs").bench.empty
    (tmp_path / "runs" / "bench" / "ops").mkdir(parents=True)
    lines = '{"slug": "ops", "case": "output", "ms": 2.5}\nno\n{"case": "grad_input", "ms": 3.5}\n'
    (tmp_path / "runs" / "bench" / "ops" / "one.jsonl").write_text(lines)
    for root in (tmp_path / "runs", upload()):
        with pytest.warns(UserWarning, match="one.jsonl: left out: .*line 2"):
            bench = load_runs(root).bench
        assert bench[["slug", "ms"]].values.tolist() == [["ops", 2.5], ["ops", 3.5]]


def test_a_single_run_loads_from_a_url(make_run, upload):
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


def test_only_matching_columns_are_downloaded(make_run, upload, monkeypatch):
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


def test_missing_runs_error_names_the_url():
    with pytest.raises(NoRunsError, match="memory://nothing: no runs"):
        load_runs("memory://nothing")


def test_figures_from_a_url_equal_those_from_the_folder(make_run, tmp_path, upload):
    make_run(num_steps=60)
    make_run(num_steps=60, seed=1, steps=30, state="running")
    lines = tmp_path / "runs" / "bench" / "quantization_variance" / "one.jsonl"
    lines.parent.mkdir(parents=True)
    row = {"case": "int8", "device": "d", "ms": None, "ratio": 1.0}
    rows = [row | {"inner_dim": n, "measured": n, "predicted": n} for n in (64, 1024)]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    url, slugs = upload(), ("loss_curves", "quantization_variance")
    for name, root in (("here", str(tmp_path / "runs")), ("there", url)):
        assert make.main(["all", "--runs", root, "--out", str(tmp_path / name)]) == 0
    for slug, root in zip(slugs, (url, f"file://{tmp_path}/runs"), strict=True):
        assert make.main([slug, "--runs", root, "--out", str(tmp_path / "one")]) == 0
    for name in ("loss_curves_demo.png", "quantization_variance.png"):
        pictures = {(tmp_path / out / name).read_bytes() for out in ("here", "there", "one")}
        assert len(pictures) == 1
    about = json.loads((tmp_path / "there" / "loss_curves_demo.json").read_text())
    assert all(run["path"].startswith("memory://") for run in about["runs"])


def test_claims_and_spikes_accept_a_url(make_run, tmp_path, upload):
    make_run(num_steps=20)
    root = upload()
    assert make.main(["claims", "--runs", root, "--out", str(tmp_path)]) == 0
    assert "From 1 runs" in (tmp_path / "claims.md").read_text()
    assert spikes.main(["--run", root]) == 0


def test_report_accepts_a_url(make_run, tmp_path, upload, capsys):
    make_run(num_steps=20)
    out = tmp_path / "page.html"
    assert main(["--runs", upload(), "--out", str(out)]) == 0
    assert "1 run: 1 finished" in out.read_text()
