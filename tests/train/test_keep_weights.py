"""What a finished run keeps of its checkpoints, and what that is enough for."""

import os
import shutil

import pytest
import yaml

from experiments import evaluate, quant_error
from experiments import train as entry
from experiments.evaluate import ChosenEvaluation, EvaluateConfig
from experiments.quant_error import QuantErrorConfig
from lowprec.runs.read import find_runs, read_rows
from lowprec.train import checkpoint as checkpoints
from lowprec.train.checkpoint import list_checkpoints, verify


@pytest.fixture(scope="module")
def source(tiny_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    entry.main(tiny_config(folder, {"model.patch_dropout": 0.5, "num_steps": 4}))
    return find_runs(folder)[0]


@pytest.fixture(scope="module")
def light_source(tiny_config, tmp_path_factory):
    """Of the same run, which keeps the weights alone, as is the default."""
    folder = tmp_path_factory.mktemp("light")
    changes = {"keep_checkpoints": None, "model.patch_dropout": 0.5, "num_steps": 4}
    entry.main(tiny_config(folder, changes))
    [checkpoint] = list_checkpoints(find_runs(folder)[0])
    assert not (checkpoint / "exp_avg.safetensors").exists()
    return checkpoint.parents[1]


@pytest.fixture
def first(source, tmp_path):
    """A copy of a whole run."""
    return shutil.copytree(source, tmp_path / "first")


def test_a_finished_run_keeps_the_weights(make_config, tmp_path, first, monkeypatch, capsys):
    changes = {"keep_checkpoints": None, "model.patch_dropout": 0.5, "num_steps": 4}
    entry.main(make_config({"name": "light", "save_every": 2, **changes}))
    [light] = find_runs(tmp_path / "runs" / "light")
    [checkpoint] = list_checkpoints(light)
    whole = list_checkpoints(first)[-1]
    moments = {"exp_avg.safetensors", "exp_avg_sq.safetensors"}
    assert {p.name for p in whole.iterdir()} - {p.name for p in checkpoint.iterdir()} == moments
    for name in ("model.safetensors", "rng.safetensors", "state.json"):
        assert (checkpoint / name).read_bytes() == (whole / name).read_bytes()
    entry.main(make_config({"name": "warm", "num_steps": 1, "model.init_from": str(light)}))
    entry.main(make_config({"name": "light", "save_every": 2, **changes}))
    assert "is finished at step 4; nothing to do" in capsys.readouterr().out

    monkeypatch.setattr(checkpoints.Path, "unlink", lambda path: os.stat("/gone"))  # or a kill
    entry.main(make_config({"name": "cut", "save_every": 2, **changes}))
    [cut] = find_runs(tmp_path / "runs" / "cut")
    assert "warning: the optimizer's state stays in" in capsys.readouterr().out
    [checkpoint] = list_checkpoints(cut)
    assert (checkpoint / "exp_avg.safetensors").exists()
    assert "exp_avg.safetensors" not in verify(checkpoint)["files"]


@pytest.mark.parametrize("text", ["", "[]", '{"sha256": ""}'])
def test_a_manifest_that_cannot_be_read_leaves_a_finished_run_whole(first, text, capsys):
    [newest] = list_checkpoints(first)
    shutil.copytree(newest, newest.with_name("step_000000002"))
    (newest / "manifest.json").write_text(text)
    checkpoints.keep_weights(first)
    assert "warning: the optimizer's state stays in" in capsys.readouterr().out
    assert [path.name for path in list_checkpoints(first)] == ["step_000000002", newest.name]
    assert (newest / "exp_avg.safetensors").exists()


def evaluated(run):
    evaluate.main(EvaluateConfig(str(run), evaluation=ChosenEvaluation("both"), device="cpu"))
    return read_rows(run / "evaluations.jsonl")


def measured(run):
    quant_error.main(QuantErrorConfig(str(run), recipes=["switchback"], device="cpu"))
    return read_rows(run / "quant_error.jsonl")


@pytest.mark.parametrize("command", [evaluated, measured])
def test_weights_alone_give_what_a_whole_run_gives(light_source, first, tmp_path, command):
    """Neither needs the cache of the training machine, nor an evaluation what was trained on."""
    light = shutil.copytree(light_source, tmp_path / "light" / first.name)
    path = light / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["data"]["cache"] = str(path / "cache")  # in a file, where no folder can be made
    if command is evaluated:
        config["data"]["train"] = "gone/*.tar"
    path.write_text(yaml.safe_dump(config))
    results = command(light)
    assert results and results == command(first)


@pytest.mark.parametrize(
    "changes", [{"schedule.name": "constant"}, {"keep_checkpoints": 3}], ids=str
)
def test_a_run_that_may_continue_or_was_told_stays_whole(make_config, tmp_path, changes):
    changes = {"keep_checkpoints": None, "num_steps": 2, "save_every": 1, **changes}
    entry.main(make_config(changes))
    [run] = find_runs(tmp_path / "runs")
    assert all((path / "exp_avg.safetensors").exists() for path in list_checkpoints(run))
    assert len(list_checkpoints(run)) == 2
