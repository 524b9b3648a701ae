"""Tests how runs on disk and behind a URL load, damaged ones too."""

import contextlib
import io
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile
from upath import UPath

from analysis import NoRunsError, load_runs, plot
from lowprec.runs.record import Record
from lowprec.runs.tables import read_parquet

CONV = "visual.conv1.weight"


def note(runs, path):
    return runs.runs.set_index("run")["note"][path.name]


def test_runs_have_a_row_each_with_status_and_dotted_config_keys(make_run, tmp_path):
    first = make_run(optimizer="stable_adamw", seed=3, num_steps=60)
    make_run(optimizer="adamw", recipe="switchback", num_steps=60)
    runs = load_runs(tmp_path / "runs")
    rows = runs.runs.set_index("run")
    row = rows.loc[first.name]
    assert (row["state"], row["step"], row["note"]) == ("finished", 60, "")
    assert (row["experiment"], row["scale"], row["seed"]) == ("loss_curves", "demo", 3)
    assert (row["optimizer.name"], row["optimizer.beta2"]) == ("stable_adamw", 0.99)
    assert row["digest"] == first.name[-10:]
    assert sorted(rows["precision.label"]) == ["bf16", "switchback"]
    assert rows.groupby("precision.where").size().tolist() == [2]  # a list can be grouped by


def test_metrics_hold_evaluations_and_non_finite_losses(make_run, tmp_path):
    whole = make_run(num_steps=60)
    broken = make_run(num_steps=60, seed=1, steps=30, state="diverged")
    metrics = load_runs(tmp_path / "runs").metrics
    assert list(metrics.columns[:3]) == ["run", "step", "loss"]
    assert metrics["loss"].dtype == float
    counts = metrics.groupby("run").size()
    assert counts[whole.name] == 60 and counts[broken.name] == 30
    accuracy = metrics.dropna(subset="zero_shot/top1")
    assert accuracy[["run", "step"]].values.tolist() == [[whole.name, 60]]
    assert np.isnan(metrics.loc[metrics["run"] == broken.name, "loss"].iloc[-1])


def test_a_single_run_directory_loads(make_run, monkeypatch):
    run = make_run(num_steps=60, steps=30, state="diverged")
    make_run(num_steps=20, seed=1)
    monkeypatch.chdir(run)
    runs = load_runs(".")
    assert runs.runs["run"].tolist() == load_runs(run).runs["run"].tolist() == [run.name]
    assert runs.events[["step", "diverged"]].values.tolist() == [[30, "the loss is nan"]]
    assert runs.timing["step"].tolist() == [20, 30]


@pytest.mark.parametrize("kept", [True, False], ids=["parquet", "streams"])
def test_tensors_are_selected_by_glob_and_statistic(make_run, tmp_path, kept):
    run = make_run(num_steps=45)
    if not kept:
        (run / "tensors.parquet").unlink()
    runs = load_runs(tmp_path / "runs")
    frame = runs.tensors("visual.*")
    assert list(frame.columns) == ["run", "step", CONV, "visual.proj"]
    assert frame["step"].tolist() == list(range(1, 46))
    assert (frame["visual.proj"] == frame["step"] + 0.25).all()
    assert (runs.tensors(CONV, stat="grad_norm")[CONV] == frame["step"] * 10).all()


def test_runs_without_a_tensor_are_left_out_with_a_warning(make_run, tmp_path):
    run, other = make_run(num_steps=20), make_run(num_steps=20, seed=1)
    table = pd.read_parquet(run / "tensors.parquet")
    table[["step", f"rms/{CONV}"]].to_parquet(run / "tensors.parquet")
    runs = load_runs(tmp_path / "runs")
    with pytest.warns(UserWarning, match="1 of 2 runs did not record rms/visual.proj"):
        assert set(runs.tensors("visual.proj")["run"]) == {other.name}
    assert len(plot.make_figure(runs, y="rms/visual.proj", where={"seed": "1"})[1]) == 20
    assert len(runs.tensors(CONV)) == 40


def test_continued_run_ignores_the_parquet_of_its_first_end(make_run):
    run = make_run(num_steps=40, steps=20)
    (run / "status.json").write_text('{"state": "running", "step": 40, "attempt": 1, "reason": ""}')
    shutil.rmtree(run / "tensors")
    other = make_run(num_steps=40, seed=1, state="running")
    shutil.copytree(other / "tensors", run / "tensors")
    assert len(load_runs(run).tensors("*")) == 40


def test_statistics_that_only_some_attempts_recorded_are_nan_elsewhere(make_run):
    run = make_run(num_steps=20, state="running")
    with contextlib.closing(Record(run)) as record:
        record.append_tensors(np.arange(21, 23), {"kurtosis": np.ones((2, 1))}, [CONV])
    runs = load_runs(run)
    later = runs.tensors(CONV, stat="kurtosis").set_index("step")[CONV]
    assert later.loc[21:].tolist() == [1, 1] and later.loc[:20].isna().all()
    earlier = runs.tensors(CONV).set_index("step")[CONV]
    assert earlier.loc[21:].isna().all() and earlier.loc[:20].notna().all()


def test_unknown_tensor_error_names_what_was_recorded(make_run):
    runs = load_runs(make_run(num_steps=20))
    with pytest.raises(LookupError, match="grad_norm, rms; 3 tensors, such as: .*visual.proj"):
        runs.tensors("visual.conv2.*")


@pytest.mark.parametrize("steps", [0, 40])
def test_a_running_run_loads_without_steps_or_with_a_torn_last_line(make_run, steps):
    run = make_run(num_steps=60, steps=steps, state="running")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "lo')
    runs = load_runs(run)
    assert len(runs.metrics) == steps and list(runs.metrics.columns)[:3] == ["run", "step", "loss"]
    assert note(runs, run) == f"running: {steps} of 60 steps"


def test_missing_runs_error_names_the_folder_and_the_command(tmp_path):
    (tmp_path / "results").mkdir()
    absent, none = f"no such folder; nearest: {tmp_path}/results", "no runs at or below this folder"
    roots = {f"{tmp_path}/results": none, "memory://nothing": none, f"{tmp_path}/resluts": absent}
    for root, why in roots.items():
        way_out = "to make some: .*experiment=loss_curves_demo"
        with pytest.raises(NoRunsError, match=f"^{root}: {why}; {way_out}"):
            load_runs(root, experiment="loss_curves")
    with pytest.raises(NoRunsError, match=f"no such folder; nearest: {tmp_path}/results$"):
        load_runs(tmp_path / "resluts")  # perhaps one run, which no study makes


@pytest.mark.parametrize("name", ["config.yaml", "status.json"])
def test_a_run_that_lost_its_config_or_status_is_named(make_run, tmp_path, name):
    run = make_run(num_steps=20)
    shutil.copytree(run, f"{run}.bak")
    make_run(num_steps=20, seed=1)
    for path in (run, f"{run}.bak"):
        (Path(path) / name).unlink()
    lacking = "it has no config.yaml or no status.json"
    with pytest.warns(UserWarning, match=f"{run}: left out: {lacking}$") as warned:
        assert len(load_runs(tmp_path / "runs")) == 1
    assert len(warned) == 1


def test_a_misspelled_run_names_the_nearest_in_an_archive(make_run, tmp_path):
    for seed in (0, 1):
        run = make_run(num_steps=20, seed=seed)
    shutil.make_archive(str(tmp_path / "runs"), "zip", run.parent.parent)
    (tmp_path / "study").mkdir()
    archive = (tmp_path / "runs.zip").rename(tmp_path / "study" / "runs.zip")
    (tmp_path / "study" / run.name.replace("s1", "s3").replace(run.name[-3:], "")).mkdir()
    inside = f"{archive}/{run.parent.name}/{run.name}"
    for wrong in (inside[:-1], str(tmp_path / "study" / run.name[:-1])):
        with pytest.raises(NoRunsError, match=f"no such folder; nearest: {inside}$"):
            load_runs(wrong)
    with pytest.raises(NoRunsError, match="study has no similar name"):
        load_runs(tmp_path / "study" / "qqqq")


def test_unmatched_runs_error_names_what_exists(make_run, tmp_path):
    make_run(num_steps=20)
    make_run(num_steps=20, scale="mini")
    assert len(load_runs(tmp_path / "runs", scale="mini")) == 1
    with pytest.raises(NoRunsError, match=r"the runs are of loss_curves \(demo, mini\)"):
        load_runs(tmp_path / "runs", experiment="fp8_fixes")


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


def test_of_a_table_behind_a_url_only_the_selected_columns_are_fetched(
    tmp_path, monkeypatch, upload
):
    columns = {f"rms/{i}": np.random.default_rng(i).random(2**16) for i in range(40)}
    table = pa.table({"step": np.arange(2**16), **columns})
    (tmp_path / "runs").mkdir()
    pq.write_table(table, tmp_path / "runs" / "tensors.parquet")
    path, fetched = UPath(upload()) / "tensors.parquet", []

    def readinto(self, buffer):
        fetched.append(io.BytesIO.readinto(self, buffer))
        return fetched[-1]

    monkeypatch.setattr(MemoryFile, "readinto", readinto, raising=False)
    selected, names = read_parquet(path, "rms/7".__eq__)
    assert selected == table.select(["step", "rms/7"]) and names == list(columns)
    assert 2**19 < sum(fetched) < path.stat().st_size / 4
