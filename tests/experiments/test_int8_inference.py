"""evaluate and export with precision=int8_inference, on a run of the colored squares."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from experiments import evaluate, export
from experiments.evaluate import ChosenEvaluation, EvaluateConfig, EvaluatedPrecision
from experiments.export import ExportConfig
from lowprec.clip.model import build_model
from lowprec.config.check import ConfigError
from lowprec.config.compose import compose_command
from lowprec.data.open import open_data
from lowprec.nn.inference import load_int8
from lowprec.runs.read import read_config, read_rows
from lowprec.train.build import build
from lowprec.train.checkpoint import newest_checkpoint

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


def test_exported_model_equals_the_evaluated_one(run, tmp_path):
    export.main(ExportConfig(str(run), str(tmp_path / "int8.safetensors"), INT8))
    evaluate.main(EvaluateConfig(str(run), INT8, ChosenEvaluation("zero_shot"), device="cpu"))
    [row] = read_rows(run / "evaluations.jsonl")
    config = read_config(run)
    config.evaluation.name = "zero_shot"
    built = build(config, open_data(config))
    built.task.model = load_int8(build_model(config.model), tmp_path / "int8.safetensors")
    assert built.evaluation()(built.task.model)["zero_shot/top1"] == row["zero_shot/top1"]


def test_export_follows_autocast_and_needs_a_run(make_config, run_once, tmp_path):
    run, out = tmp_path / "run", tmp_path / "int8.safetensors"
    changes = {"num_steps": 1, "save_every": 1, "precision.autocast": "pure_bf16"}
    run_once(make_config(changes), run)
    for autocast, dtype in ((None, torch.bfloat16), ("bf16", torch.float32)):
        export.main(ExportConfig(str(run), str(out), EvaluatedPrecision(INT8.recipe, autocast)))
        state = load_file(out)
        assert state["visual.conv1.weight"].dtype == dtype
        assert state["transformer.resblocks.0.mlp.c_fc.weight"].dtype == torch.int8
        out.unlink()
    weights = newest_checkpoint(run)[0] / "model.safetensors"
    for source, to, error, message in (
        (weights, out, ConfigError, "not a run directory"),
        (run, out.with_suffix(".pt"), SystemExit, "written as .safetensors"),
    ):
        with pytest.raises(error, match=message):
            export.main(ExportConfig(str(source), str(to), INT8))


@pytest.mark.parametrize(
    ("entry", "schema", "required"),
    [("evaluate", EvaluateConfig, ["run=a"]), ("export", ExportConfig, ["source=a", "out=b"])],
)
def test_precision_is_selected_by_name(entry, schema, required):
    [run] = compose_command(required, entry, schema)
    assert run.config.precision == EvaluatedPrecision()
    [run] = compose_command([*required, "precision=int8_inference"], entry, schema)
    assert run.config.precision.recipe == "int8_inference"
    with pytest.raises(ConfigError, match="int8_inference"):
        compose_command([*required, "precision=switchback"], entry, schema)
