"""What a study asks for, read without Hydra, is what Hydra makes of it; marks of what is not so."""

import json

import numpy as np
import pandas as pd
import pytest
from hydra.core.config_store import ConfigStore
from matplotlib.figure import Figure

from analysis import load_runs, make, marks, study
from analysis.read import flatten
from experiments import cli
from lowprec.config import Config
from lowprec.run import to_dict

SHARDS = ["data.train=train.tar", "data.val=val.tar"]
FILES = sorted(path for path in (cli.CONF / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_cells_of_a_study_are_those_that_hydra_runs(path):
    ConfigStore.instance().store(name="schema", node=cli.defaults(Config))
    scale = next((s for s in ("mini", "demo") if path.stem.endswith(f"_{s}")), "paper")
    for command, cells in study.commands(path.stem.removesuffix(f"_{scale}"), scale):
        overrides = command.partition(" -m experiment=")[2].split()
        overrides = [f"experiment={overrides[0]}", *overrides[1:]]
        shards = SHARDS if "/data: shards" in path.read_text() else []
        configs = cli.check_command([*overrides, *shards], "train", multirun=True)
        heads = pd.DataFrame([flatten(to_dict(config)) for config in configs])
        is_high = heads["precision.recipe"] == "high"
        label = heads["precision.recipe"].mask(is_high, heads["precision.autocast"])
        heads["precision.label"] = label
        assert len(cells) == len(configs)
        assert all(study._is_there(cell, heads) for cell in cells)
        assert len({tuple(cell.values()) for cell in cells}) == len(cells)


def test_missing_cells_are_named_by_what_they_differ_in(make_run, tmp_path):
    make_run(num_steps=20, scale="mini", model="mini_l", optimizer="stable_adamw")
    runs = load_runs(tmp_path / "runs").runs
    total, absent = study.missing("loss_curves", "mini", runs)
    [(command, names)] = absent.items()
    assert (total, len(names)) == (10, 9)
    assert "mini_l switchback" in names and "mini_l bf16" not in names
    assert command == "python -m experiments.train -m experiment=loss_curves_mini"


def test_a_plain_run_of_a_study_of_fixes_is_not_taken_for_another(make_run, tmp_path):
    make_run(experiment="fp8_fixes", num_steps=20, scale="mini", model="mini_l")  # bf16, AdamW
    _, absent = study.missing("fp8_fixes", "mini", load_runs(tmp_path / "runs").runs)
    assert sum(map(len, absent.values())) == 5


def mark_of(tmp_path, total=0, absent=None):
    return marks.of_runs(load_runs(tmp_path / "runs").runs, total, absent)


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


@pytest.mark.parametrize(
    ("change", "mark"),
    [
        ({"data": "cd" * 32}, "2 different sets of data"),
        ({"num_steps": 1200, "steps": 1200}, "runs of 20 and 1,200 steps"),
    ],
)
def test_mixed_runs_are_marked(make_run, tmp_path, change, mark):
    make_run(num_steps=20)
    make_run(**{"num_steps": 20, "seed": 1, **change})
    assert mark_of(tmp_path) == mark


def test_a_study_with_some_of_its_runs_is_marked_and_one_with_none_is_another(make_run, tmp_path):
    make_run(num_steps=20)
    assert mark_of(tmp_path, 3, {"c": ["a"]}) == "1 of the study's 3 runs are not there"
    assert mark_of(tmp_path, 3, {"c": ["a", "b", "d"]}) == ""


def test_lines_of_several_commits_or_versions_are_marked():
    lines = pd.DataFrame({"commit": ["a", "a"], "versions": [{"torch": "2.11"}] * 2})
    assert marks.of_lines(lines) == ""
    assert marks.of_lines(lines.assign(commit=["a", "b"])) == "measured at 2 commits"
    lines["versions"] = [{"torch": "2.11"}, {"torch": "2.12"}]
    assert marks.of_lines(lines) == "with 2 sets of versions"


def test_the_mark_stands_in_picture_caption_and_provenance(make_run, tmp_path, monkeypatch):
    make_run(num_steps=60)
    make_run(num_steps=60, steps=30, state="running", seed=1)
    kept, put = [], marks.put
    monkeypatch.setattr(marks, "put", lambda figure, mark: (put(figure, mark), kept.append(figure)))
    _, about = make.draw("loss_curves", tmp_path / "runs", tmp_path / "out", "")
    written = json.loads((tmp_path / "out" / "loss_curves_demo.json").read_text())
    assert written["mark"] == "1 of 2 runs incomplete"
    assert written["caption"].endswith(" Marked: 1 of 2 runs incomplete.")
    [figure] = kept
    assert figure.get_suptitle() == "Marked: 1 of 2 runs incomplete"


def test_a_long_mark_stays_within_the_picture():
    figure = Figure(figsize=(3.4, 3), layout="constrained")
    figure.subplots().plot([0, 1])
    marks.put(figure, "9 of the study's 10 runs are not there; " * 4)
    figure.draw_without_rendering()
    assert figure.get_tightbbox().x1 <= 3.4
    assert np.isfinite(figure.get_tightbbox().y1)


def test_another_studys_runs_are_not_counted_as_missing(make_run, tmp_path):
    make_run(num_steps=20, experiment="update_clipping", scale="mini", model="mini_l")
    arguments = ("loss_curves", tmp_path / "runs", tmp_path / "out", "")
    assert make.draw(*arguments, experiment="update_clipping")[1]["mark"] == ""
