"""evaluate with precision=int8_inference, on a run of the colored squares."""

import shutil

import pytest

from experiments import evaluate
from experiments.evaluate import ChosenEvaluation, EvaluateConfig, EvaluatedPrecision
from lowprec.config.check import ConfigError
from lowprec.config.compose import compose_command
from lowprec.runs.read import read_rows

INT8 = EvaluatedPrecision("int8_inference")


@pytest.fixture(scope="module", params=["high", "switchback"])
def trained(request, run_once, tiny_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    changes = {"num_steps": 40, "save_every": 40, "optimizer.lr": 2e-3}
    run_once(tiny_config(folder, {**changes, "precision.recipe": request.param}), folder)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_trained_model_keeps_its_predictions_in_int8(run, capsys):
    for precision in (EvaluatedPrecision(), INT8):
        evaluate.main(EvaluateConfig(str(run), precision, ChosenEvaluation("both"), device="cpu"))
    trained, converted = read_rows(run / "evaluations.jsonl")
    assert (trained["precision"], converted["precision"]) == ("as_trained", "int8_inference")
    assert set(converted) - set(trained) == {"int8/memory_ratio", "int8/agreement"}
    assert trained["zero_shot/top1"] > 0.9
    assert converted["int8/agreement"] >= 0.99
    assert converted["int8/memory_ratio"] <= 0.30
    printed = capsys.readouterr().out
    assert "int8/agreement" in printed and "(chance 25.00%)" in printed  # of four classes


def test_precision_is_selected_by_name():
    [run] = compose_command(["run=a"], "evaluate", EvaluateConfig)
    assert run.config.precision == EvaluatedPrecision()
    [run] = compose_command(["run=a", "precision=int8_inference"], "evaluate", EvaluateConfig)
    assert run.config.precision.recipe == "int8_inference"
    with pytest.raises(ConfigError, match="int8_inference"):
        compose_command(["run=a", "precision=switchback"], "evaluate", EvaluateConfig)
