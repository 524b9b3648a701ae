"""The runs that a study asks for, and the marks of figures drawn from other or incomplete runs."""

import json
import shutil

import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import load_runs, make, study

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_missing_runs_are_named_by_the_values_that_differ(make_run, tmp_path):
    make_run(num_steps=20, scale="mini", model="mini_l", optimizer="stable_adamw")
    runs = load_runs(tmp_path / "runs").runs
    total, names = study.missing("loss_curves", "mini", runs)
    assert (total, len(names)) == (10, 9)
    assert "mini_l switchback" in names and "mini_l bf16" not in names


def test_a_plain_run_of_a_study_of_fixes_is_not_taken_for_another(make_run, tmp_path):
    make_run(experiment="fp8_fixes", num_steps=20, scale="mini", model="mini_l")  # bf16, AdamW
    _, names = study.missing("fp8_fixes", "mini", load_runs(tmp_path / "runs").runs)
    assert len(names) == 5


def mark_of(tmp_path, total=0, num_missing=0):
    return study.mark_of_runs(load_runs(tmp_path / "runs").runs, total, num_missing)


def test_whole_runs_of_one_kind_have_no_mark(make_run, tmp_path):
    make_run(num_steps=20)
    make_run(num_steps=20, seed=1, state="diverged", steps=12)
    assert mark_of(tmp_path) == ""


def test_incomplete_and_damaged_runs_are_marked(make_run, tmp_path):
    make_run(num_steps=20, steps=12, state="running")
    holed = make_run(num_steps=20, seed=1)
    rows = (holed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (holed / "metrics.jsonl").write_text("".join(rows[:5] + rows[8:]))
    torn = make_run(num_steps=20, seed=2)
    with (torn / "timing.jsonl").open("a") as file:
        file.write('{"step": \n{"step": 1}\n')
    assert mark_of(tmp_path) == "2 of 3 runs incomplete; 1 of 3 runs damaged"


def test_runs_of_several_data_sets_are_marked(make_run, tmp_path):
    make_run(num_steps=20)
    make_run(num_steps=20, seed=1, data="cd" * 32)
    assert mark_of(tmp_path) == "2 different data sets"


def the_mark(tmp_path, slug="rms_and_loss", **keys):
    return make.draw(slug, tmp_path / "runs", tmp_path / "out", "", **keys)[1]["mark"]


@pytest.mark.parametrize("slug", ["rms_and_loss", "update_clipping", "spikes_vs_batch"])
def test_a_study_as_its_file_says_has_no_mark(make_cells, tmp_path, slug):
    make_cells(slug, num_steps=40)
    assert the_mark(tmp_path, slug) == ""


@pytest.mark.parametrize(
    ("where", "changes", "mark"),
    [
        ({}, {"num_steps": 300}, "num_steps 300, the study's 2,000"),
        (
            {"optimizer.beta2": 0.9},
            {"optimizer.lr": 1e-3, "batch_size": 64},
            "batch_size 64, the study's 1,024; lr 0.001, the study's 0.002",
        ),
        (
            {},
            {"precision.recipe": "switchback"},
            "2 of the study's 2 runs are missing; recipe switchback, the study's high",
        ),
        (
            {},
            {"optimizer.name": "stable_adamw", "optimizer.clip_threshold": 1.0},
            "2 of the study's 2 runs are missing; optimizer stable_adamw, the study's adamw; "
            "clip_threshold 1, the study's null",
        ),
        ({}, {"data.name": "shards", "num_workers": 3}, ""),
    ],
    ids=["short", "mixed", "recipe", "optimizer", "data"],
)
def test_settings_that_are_not_the_studys_are_named(make_cells, tmp_path, where, changes, mark):
    make_cells("rms_and_loss", where, changes, num_steps=40)
    if where:
        make_cells("rms_and_loss", {"optimizer.beta2": 0.999}, num_steps=40)
    assert the_mark(tmp_path) == mark


def test_many_settings_are_counted(make_cells, tmp_path):
    changes = {"optimizer.lr": 1e-3, "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1}
    changes |= {"batch_size": 64, "compile": False, "schedule.warmup_steps": 5}
    make_cells("rms_and_loss", changes=changes, num_steps=40)
    assert the_mark(tmp_path).endswith("; eps 1e-08, the study's 1e-06; 2 more settings differ")


def no_rows(run):
    (run / "metrics.jsonl").unlink()
    (run / "status.json").write_text('{"state": "failed", "step": 0, "reason": "no GPU"}')


def half_the_tensors(run):
    shutil.rmtree(run / "tensors")
    path = run / "tensors.parquet"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "no rows": no_rows,
    "half the tensors": half_the_tensors,
    "no metrics": lambda run: (run / "metrics.jsonl").write_text(""),
    "binary metrics": lambda run: (run / "metrics.jsonl").write_bytes(bytes(range(256)) * 9),
    "no config": lambda run: (run / "config.yaml").write_text("{"),
}


@pytest.mark.filterwarnings("ignore:.*tensors left out")
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_run_that_cannot_be_drawn_is_marked(make_cells, tmp_path, damage):
    damage(make_cells("rms_and_loss", num_steps=40)[0])
    assert the_mark(tmp_path).startswith("1 of 2 runs not drawn")


def test_runs_that_a_figure_is_not_about_are_not_lost(make_cells, tmp_path):
    make_cells("spikes_vs_lr", num_steps=40)  # those with beta2 of 0.9 have no panel
    assert the_mark(tmp_path, "spike_lead_lr") == ""


def test_the_mark_stands_in_picture_caption_and_provenance(make_run, tmp_path, monkeypatch):
    make_run(num_steps=60, experiment="of_my_own")
    make_run(num_steps=60, steps=30, state="running", seed=1, experiment="of_my_own")
    kept, put = [], make._put_mark
    monkeypatch.setattr(
        make, "_put_mark", lambda figure, mark: (put(figure, mark), kept.append(figure))
    )
    arguments = ("loss_curves", tmp_path / "runs", tmp_path / "out", "")
    make.draw(*arguments, experiment="of_my_own")
    written = json.loads((tmp_path / "out" / "loss_curves_demo.json").read_text())
    assert written["mark"] == "1 of 2 runs incomplete"
    assert written["caption"].endswith(" Marked: 1 of 2 runs incomplete.")
    [figure] = kept
    assert figure.get_suptitle() == "Marked: 1 of 2 runs incomplete"


def test_a_long_mark_stays_within_the_picture():
    figure = Figure(figsize=(3.4, 3), layout="constrained")
    figure.subplots().plot([0, 1])
    make._put_mark(figure, "9 of the study's 10 runs are missing; " * 4)
    figure.draw_without_rendering()
    assert figure.get_tightbbox().x1 <= 3.4
    assert np.isfinite(figure.get_tightbbox().y1)


def test_another_studys_runs_are_not_counted_as_missing(make_cells, tmp_path):
    make_cells("update_clipping", {"optimizer.beta2": 0.9}, num_steps=40)
    assert the_mark(tmp_path, "loss_curves", experiment="update_clipping") == ""
