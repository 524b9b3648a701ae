"""`resume.from` starts a new run from the weights and moments of another."""

import json
import os
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file

from experiments import evaluate, quant_error
from experiments import train as entry
from experiments.evaluate import ChosenEvaluation, EvaluateConfig
from experiments.quant_error import QuantErrorConfig
from lowprec.config.check import ConfigError, RunError
from lowprec.runs.read import find_runs, read_rows
from lowprec.train import checkpoint as checkpoints
from lowprec.train import run as running
from lowprec.train.checkpoint import list_checkpoints
from lowprec.train.preflight import preflight


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
    """A copy of the run that the others start from."""
    return shutil.copytree(source, tmp_path / "first")


def second(make_config, tmp_path, source, **changes):
    entry.main(make_config({"name": "second", "resume.from": str(source), **changes}))
    return find_runs(tmp_path / "runs" / "second")


def steps_of(checkpoint):
    """Number of updates of each of the optimizer's tensors."""
    return set(json.loads((checkpoint / "state.json").read_text())["steps"])


def test_a_run_starts_at_step_1_with_the_state_of_its_source(make_config, tmp_path, first):
    still = {"optimizer.lr": 1e-30, "num_steps": 1, "optimizer.weight_decay": 0.0}
    [run] = second(make_config, tmp_path, first, **still)
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1]
    before, after = (list_checkpoints(path)[-1] for path in (first, run))
    weights = [load_file(path / "model.safetensors") for path in (before, after)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    moments = [load_file(path / "exp_avg_sq.safetensors") for path in (before, after)]
    for name, old in moments[0].items():  # a step on moments of zero would leave the gradient's
        assert (moments[1][name] >= 0.7 * old).all()
    assert steps_of(after) == {5}


def test_the_source_is_part_of_the_identity(make_config, tmp_path, first):
    source = list_checkpoints(first)[-1]
    runs = second(make_config, tmp_path, first, num_steps=2)
    assert second(make_config, tmp_path, source, num_steps=2) == runs  # the same bytes
    entry.main(make_config({"name": "second", "num_steps": 2}))
    assert len(find_runs(tmp_path / "runs" / "second")) == 2


def test_a_resumed_run_does_not_start_from_its_source_again(make_config, tmp_path, first):
    changes = {"schedule.name": "constant", "num_steps": 2}
    [run] = second(make_config, tmp_path, first, **changes)
    assert second(make_config, tmp_path, first, **{**changes, "num_steps": 4}) == [run]
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert steps_of(list_checkpoints(run)[-1]) == {8}


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
    with pytest.raises(ConfigError, match="no moments, .* keep_checkpoints=2; model.init_from"):
        second(make_config, tmp_path, light)
    entry.main(make_config({"name": "light", "save_every": 2, **changes}))
    assert "is finished at step 4; nothing to do" in capsys.readouterr().out

    monkeypatch.setattr(checkpoints.Path, "unlink", lambda path: os.stat("/gone"))  # or a kill
    entry.main(make_config({"name": "cut", "save_every": 2, **changes}))
    [cut] = find_runs(tmp_path / "runs" / "cut")
    assert "warning: the optimizer's state stays in" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no moments"):
        second(make_config, tmp_path, cut)


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


def test_a_missing_or_damaged_source_is_refused(make_config, tmp_path, first):
    with pytest.raises(ConfigError, match="no such run or checkpoint"):
        preflight(make_config({"resume.from": str(tmp_path / "nowhere")}))
    for path in list_checkpoints(first):
        (path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="no intact checkpoint"):
        second(make_config, tmp_path, first)


def test_a_source_that_trained_on_is_refused(make_config, tmp_path, first, monkeypatch):
    named = running.sources_of
    stale = lambda config, data: named(config, data) | {"resume_from": "0" * 64}  # noqa: E731
    monkeypatch.setattr(running, "sources_of", stale)
    with pytest.raises(RunError, match="still being trained, and step_0+4 is newer"):
        second(make_config, tmp_path, first)
