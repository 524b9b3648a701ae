"""Tests `python -m analysis.make`: its files and its errors."""

import hashlib
import json
import os
import re
import shutil

import fsspec
import numpy as np
import pandas as pd
import pytest

from analysis import load_runs, make, paper
from analysis.figures import loss_curves, op_profile
from lowprec.config.schema import EvaluationConfig


@pytest.fixture(name="run_make")
def run_make_fixture(tmp_path, capsys):
    def run_make(*extra, slug="loss_curves", out="out"):
        arguments = [slug, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / out), *extra]
        code = make.main(arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_make


def test_csv_is_exactly_the_plotted_numbers(make_run, no_pictures, run_make, tmp_path):
    make_run(num_steps=60)
    make_run(num_steps=60, steps=30, seed=1, state="diverged")
    run_make()
    written = pd.read_csv(tmp_path / "out" / "loss_curves_demo.csv")
    plotted = loss_curves.query(load_runs(tmp_path / "runs"))
    # pandas 2 parses a decimal to within one unit in the last place, pandas 3 exactly
    pd.testing.assert_frame_equal(written, plotted, rtol=1e-15, atol=0, check_dtype=False)


def test_runs_in_an_archive_have_the_digests_of_their_files(
    make_run, no_pictures, run_make, tmp_path
):
    run = make_run(num_steps=60)
    shutil.make_archive(str(tmp_path / "runs"), "zip", run.parent)
    metrics = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs.zip").rename(tmp_path / "runs" / "runs.zip")
    assert run_make()[0] == 0
    (row,) = json.loads((tmp_path / "out" / "loss_curves_demo.json").read_text())["runs"]
    assert row["metrics_sha256"] == hashlib.sha256(metrics).hexdigest()


def test_same_runs_give_the_same_bytes(make_run, run_make, tmp_path):
    make_run(num_steps=60)
    files = []
    for epoch in ("0", "1000000000"):
        run_make()
        folder = sorted((tmp_path / "out").iterdir())
        files.append({path.name: path.read_bytes() for path in folder})
        os.utime(tmp_path / "out" / "loss_curves_demo.csv", (int(epoch), int(epoch)))
    assert files[0] == files[1]
    assert b"CreationDate" not in files[0]["loss_curves_demo.pdf"]


def test_provenance_names_runs_states_versions_and_command(
    make_run, no_pictures, run_make, tmp_path
):
    run = make_run(num_steps=60, steps=30, state="running")
    empty = make_run(num_steps=60, steps=0, seed=1, state="failed")
    code, _, err = run_make()
    about = json.loads((tmp_path / "out" / "loss_curves_demo.json").read_text())
    (row,) = about["runs"]
    assert code == 0
    assert (row["path"], row["digest"]) == (str(run), run.name[-10:])
    assert (row["state"], row["step"], row["num_steps"]) == ("running", 30, 60)
    assert about["command"].startswith("python -m analysis.make loss_curves --runs ")
    metrics = (run / "metrics.jsonl").read_bytes()
    assert row["metrics_sha256"] == hashlib.sha256(metrics).hexdigest()
    assert about["versions"]["pandas"] == pd.__version__
    assert "(incomplete: 30 of 60 steps)" in about["caption"]
    assert about["left_out"] == {str(empty): "failed: 0 of 60 steps"}
    assert str(empty) in err


@pytest.mark.usefixtures("no_pictures")
def test_each_run_that_is_left_out_has_a_reason(make_run, run_make, tmp_path):
    keys = {"experiment": "rms_and_loss", "num_steps": 60}
    one, two = (make_run(optimizer="stable_adamw", beta2=b, **keys) for b in (0.8, 0.9))
    seed, blind = make_run(seed=1, **keys), make_run(beta2=0.95, tables={}, **keys)
    make_run(**keys)
    other = "no run with optimizer.name=stable_adamw is drawn"
    _, _, err = run_make(slug="rms_and_loss")
    about = json.loads((tmp_path / "out" / "rms_and_loss_demo.json").read_text())
    lacking = "it lacks what is drawn: RMS_t of the patch embedding and training loss"
    reasons = {one: other, two: other, seed: "no run with seed=1 is drawn", blind: lacking}
    assert about["left_out"] == {str(run): why for run, why in reasons.items()}
    shown = min(one, two)
    assert f"{shown} ({other}) and 1 more" in err and f"{seed} (no run with seed=1 is drawn)" in err
    for seed in range(2, 9):
        make_run(seed=seed, beta2=0.95, **keys)
    _, _, err = run_make(slug="rms_and_loss")
    assert err.count(";") == 3 and err.endswith("; and 7 for other reasons\n")


@pytest.mark.parametrize(
    ("keys", "lacking"),
    [
        ({"tables": {}}, "RMS_t of visual.conv1.weight"),
        ({"steps": 5, "state": "failed"}, "steps after the first 40, which are ignored"),
    ],
)
def test_spike_figures_of_any_runs_say_what_the_runs_lack(
    make_run, run_make, tmp_path, keys, lacking
):
    make_run(experiment=None, **keys)
    for slug in ("lead_histogram", "rms_and_loss", "spike_warnings"):
        code, _, err = run_make("--experiment", "any", slug=slug)
        assert code == 2 and err.startswith(f"error: {tmp_path}/runs: no run has what is drawn: ")
        assert f"{lacking} (" in err and "; to make runs: python -m experiments.train" in err


def test_unknown_slug_names_the_nearest(run_make):
    code, _, err = run_make(slug="loss_curve")
    assert code == 2
    assert "'loss_curve'" in err and "nearest: loss_curves" in err and err.count("\n") == 1


@pytest.mark.usefixtures("no_pictures")
def test_several_scales_ask_for_one(make_run, run_make, tmp_path):
    make_run(num_steps=20)
    make_run(num_steps=20, scale="mini")
    code, _, err = run_make()
    assert code == 2
    assert "--scale demo or --scale mini" in err
    assert run_make("--scale", "mini")[0] == 0
    assert set(pd.read_csv(tmp_path / "out" / "loss_curves_mini.csv")["scale"]) == {"mini"}
    make_run(num_steps=20, scale="paper", experiment="other")  # a figure takes any runs if told
    assert run_make("--scale", "paper")[0] == 2
    assert run_make("--scale", "paper", "--experiment", "any")[0] == 0
    code, _, err = run_make("--scale", "paper", "--experiment", "any", slug="loss_scaler")
    assert code == 2 and "the figure shows no such runs" in err


@pytest.mark.parametrize("slug", ["accuracy_vs_size", "recipes_by_size", "spike_heights"])
def test_runs_of_no_study_that_lack_what_a_figure_shows_end_in_one_line(make_run, run_make, slug):
    features = pd.DataFrame({paper.BLOCK.format(3): np.ones(20)}, range(1, 21))
    for seed in (0, 1):  # in bf16, without spikes and evaluation
        of_run = {"experiment": None, "state": "failed", "seed": seed, "beta2": 0.9 + 0.09 * seed}
        make_run(num_steps=20, tables={"blocks": {"feature_mean": features}}, **of_run)
    code, _, err = run_make("--experiment", "any", slug=slug)
    assert code == 2 and err.startswith("error: no run has ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("slug", "lacking"),
    [
        ("one_product", "no run has what is drawn: mean R@1"),
        ("rate_map", "no run has what is drawn: validation loss"),
        ("rounding", "no run of experiment=rounding has a score"),
    ],
)
@pytest.mark.usefixtures("no_pictures")
def test_runs_of_no_study_with_half_of_what_a_figure_shows_end_in_one_line(
    make_run, run_make, slug, lacking
):
    recall = ("retrieval/image_to_text_r1", "retrieval/text_to_image_r1")
    for seed in (0, 1):
        columns = {name: np.full(20, 0.5) for name in recall}
        make_run(num_steps=20, experiment=None, seed=seed, columns=columns)
    code, _, err = run_make("--experiment", "any", slug=slug)
    assert code == 2 and lacking in err and err.count("\n") == 1


@pytest.mark.usefixtures("no_pictures")
def test_runs_that_evaluate_read_no_other_data_set(make_run, run_make, tmp_path):
    keys = {"num_steps": 20, "evaluation": EvaluationConfig("none")}
    make_run(num_steps=20)
    make_run(seed=1, data="cd" * 32, **keys)
    run_make()
    about = tmp_path / "out" / "loss_curves_demo.json"
    assert json.loads(about.read_text())["mark"] == ""
    other = make_run(seed=2, data="ef" * 32, **keys)
    run_make()
    assert json.loads(about.read_text())["mark"] == "2 different data sets"
    shutil.rmtree(other)
    config = next((tmp_path / "runs").glob("*/*s1*/config.yaml"))
    config.write_text(re.sub("train: .*", "train: others/train-*.tar", config.read_text()))
    run_make()
    assert json.loads(about.read_text())["mark"] == "2 different data sets"


def test_pictures_of_a_folder_without_any_is_an_error(make_run, run_make):
    make_run(num_steps=20)
    code, _, err = run_make(slug="pictures")
    assert code == 2 and "there is no picture of a figure, such as accuracy_vs_size.png" in err


@pytest.mark.usefixtures("no_pictures")
def test_pictures_draws_figures_of_a_folder_anew_and_nothing_else(make_run, run_make, tmp_path):
    make_run(num_steps=20)
    for name in ("loss_curves", "photograph"):
        (tmp_path / "runs" / f"{name}.png").touch()
    assert run_make(slug="pictures")[0] == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["loss_curves.png"]
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "runs"), "/bucket/runs", recursive=True)
    code, _, err = run_make("--runs", "memory://bucket/runs", slug="pictures")
    store.rm("/bucket", recursive=True)
    assert code == 2 and "memory://bucket/runs: pictures need a folder, not a URL" in err


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("slug", ["loss_curves", "all", "claims"])
def test_file_in_the_place_of_the_folder_is_an_error(make_run, tmp_path, capsys, slug):
    make_run(num_steps=20)
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / "below"
    assert make.main([slug, "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 2
    assert "is not a folder" in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.usefixtures("no_pictures")
def test_a_full_disk_leaves_whole_files_and_names_the_next(make_run, run_make, tmp_path, fill_disk):
    make_run(num_steps=20)
    fill_disk()
    code, _, err = run_make()
    assert code == 2 and "loss_curves_demo.csv.tmp cannot be written: No space left" in err
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".png", ".pdf"}


@pytest.fixture(name="make_all")
def make_all_fixture(make_run, no_pictures, tmp_path, capsys):
    """A function: all figures of a folder with runs of two studies; status, errors, pictures."""
    make_run(num_steps=20, scale="mini")
    make_run(num_steps=20, scale="mini", experiment="rms_and_loss")

    def make_all():
        code = make.main(["all", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
        pictures = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
        return code, capsys.readouterr().err.splitlines(), pictures

    return make_all


def fail(*_, **__):
    raise IndexError("no row\n  of this")


@pytest.mark.parametrize("where", ["query", "draw", "caption"])
def test_a_figure_that_crashes_is_named_and_the_others_are_drawn(make_all, monkeypatch, where):
    monkeypatch.setattr(loss_curves, where, fail)
    code, errors, pictures = make_all()
    assert code == 1 and pictures == ["rms_and_loss_mini.png"]
    assert "failed: loss_curves: IndexError: no row of this" in errors


def test_a_damaged_file_of_lines_stops_its_figure_alone(make_all, tmp_path):
    lines = tmp_path / "runs" / "bench" / op_profile.lines / "one.jsonl"
    lines.parent.mkdir(parents=True)
    lines.write_text('{"case": "output"}\n')  # lacks what every line has
    code, errors, pictures = make_all()
    assert code == 1 and pictures == ["loss_curves_mini.png", "rms_and_loss_mini.png"]
    assert any(line.startswith("failed: op_profile: KeyError: ") for line in errors)
