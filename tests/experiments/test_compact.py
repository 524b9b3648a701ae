"""A folder of runs is copied completely or not at all."""

import shutil
import zipfile
from pathlib import Path

import pandas as pd
import pytest

from analysis import load_runs, run_files
from experiments.compact import SMALLER, CompactConfig, main
from lowprec.config.check import RunError
from tests.analysis.conftest import make_run


@pytest.fixture
def folder(tmp_path):
    """Two runs of which the second, in order of their names, recorded another tensor alone."""
    for model, tensor in (("mini_b", "visual.conv1.weight"), ("mini_l", "visual.proj")):
        rms = pd.DataFrame({tensor: [1.0] * 20}, index=range(1, 21))
        make_run(tmp_path / "runs", model=model, num_steps=20, tables={"tensors": {"rms": rms}})
    return tmp_path / "runs"


def damage(folder):
    run = sorted(folder.glob("*/*"))[-1]
    (run / "tensors.parquet").write_bytes(b"PAR1 no")


@pytest.mark.parametrize(
    ("tensors", "change", "why"),
    [
        (["visual.conv1.weight"], None, "mini_l.*none of its tensors"),
        (["*"], damage, "mini_l.*damaged"),
    ],
)
def test_nothing_is_copied_if_one_run_cannot_be(folder, tmp_path, tensors, change, why):
    if change:
        change(folder)
    with pytest.raises(RunError, match=why):
        main(CompactConfig(run=str(folder), out=str(tmp_path / "out"), tensors=tensors))
    assert not (tmp_path / "out").exists()


def test_each_run_is_copied_with_the_selected_tensors(folder, tmp_path):
    main(CompactConfig(run=str(folder), out=str(tmp_path / "out"), tensors=["visual.*"]))
    assert len(list((tmp_path / "out").glob("*/*/tensors.parquet"))) == 2


def test_an_archive_loads_like_the_folder_and_so_does_a_run_in_it(folder, tmp_path):
    archive = tmp_path / "results, a #1" / "runs.zip"
    main(CompactConfig(run=str(folder), out=str(archive), tensors=["visual.*"]))
    with zipfile.ZipFile(archive) as file:
        smaller = {Path(i.filename).suffix for i in file.infolist() if i.compress_type == SMALLER}
    assert smaller == {".jsonl"}
    runs, archived = load_runs(folder), load_runs(tmp_path / "results, a #1")
    pd.testing.assert_frame_equal(archived.metrics, runs.metrics)
    pd.testing.assert_frame_equal(archived.tensors("*"), runs.tensors("*"))
    pd.testing.assert_frame_equal(
        archived.runs.drop(columns="path"), runs.runs.drop(columns="path")
    )
    [alone] = load_runs(archived.runs["path"][0]).runs["run"]
    assert alone == runs.runs["run"][0]
    beside = load_runs(archive.parent / alone)  # as if it were not archived
    assert beside.runs["path"].tolist() == archived.runs["path"].tolist()[:1]


def test_an_archive_that_is_damaged_or_too_large_is_left_out(folder, tmp_path, monkeypatch):
    shutil.copytree(next(folder.glob("*/mini_l*")), tmp_path / "results" / "whole")
    main(
        CompactConfig(run=str(folder), out=str(tmp_path / "results/runs.zip"), tensors=["visual.*"])
    )
    monkeypatch.setattr(run_files, "MAX_BYTES", 1000)
    with pytest.warns(UserWarning, match="runs.zip: left out: it unpacks to more than 1,000"):
        assert len(load_runs(tmp_path / "results")) == 1
    (tmp_path / "results/runs.zip").write_bytes(b"PK no zip")
    with pytest.warns(UserWarning, match="runs.zip: left out: File is not a zip file"):
        assert len(load_runs(tmp_path / "results")) == 1
