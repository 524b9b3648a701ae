"""A folder of experiments.export, loaded by open_clip in a fresh process and as initial weights."""

import base64
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from experiments import evaluate, export
from experiments.evaluate import ChosenEvaluation, EvaluateConfig
from experiments.export import ExportConfig
from lowprec.clip import TORCHVISION_FITS, open_clip
from lowprec.clip.export import load_weights
from lowprec.clip.model import build_model, model_config
from lowprec.config.check import ConfigError, RunError, check
from lowprec.config.schema import ModelConfig
from lowprec.runs.read import read_rows
from lowprec.train.build import build

RUNS = {  # folder: what its run changes
    "plain": {"model.init_from": None},
    "scaled": {"intervention.name": "zero_init", "precision.recipe": "switchback"},
    "normed": {"intervention.name": "kq_norm", "precision.autocast": "pure_bf16"},
}
CHECK = """
import torch
from PIL import Image
images, tokens = torch.load("batch.pt")
model.eval()
with torch.no_grad():
    features = [model.encode_image(images), model.encode_text(tokens)]
torch.save([features, preprocess.transforms[0].size, model.visual.image_mean], "{name}.pt")
"""


@pytest.fixture(scope="module")
def trained(run_once, tiny_config, tmp_path_factory):
    """A folder with the runs of `RUNS`, and their models and configs by name."""
    folder, models = tmp_path_factory.mktemp("trained"), {}
    for name, changes in RUNS.items():
        config = tiny_config(folder, {"num_steps": 2, "save_every": 2, **changes})
        _, built = run_once(config, folder / name)
        models[name] = built.task.model, config
    return folder, models


@pytest.fixture
def exported(trained, tmp_path, monkeypatch):
    """Copies the runs to `runs/` in a new working directory; their models and configs by name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained[0], "runs")
    return trained[1]


@pytest.mark.parametrize("is_fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_open_clip_loads_an_exported_folder(exported, tmp_path, capsys, is_fresh):
    images, tokens = torch.randn(2, 3, 32, 32), torch.randint(1, 500, (2, 8))
    torch.save([images, tokens], "batch.pt")
    script = ""
    for name in exported:
        export.main(ExportConfig(f"runs/{name}", name))
        count, *lines = capsys.readouterr().out.splitlines()
        assert count.startswith(f"{name}: ") and len(lines) == 2
        script += "\n".join([*lines, CHECK.format(name=name)])
    assert ("\nimport open_clip" in f"\n{script}") == TORCHVISION_FITS
    if is_fresh:  # a process takes seconds to start
        subprocess.run([sys.executable, "-c", script], check=True)
    else:
        exec(script, {})
    for name, (_, config) in exported.items():
        (image, text), size, mean = torch.load(f"{name}.pt")
        plain = build_model(config.model, config.intervention.name).eval()
        load_weights(plain, tmp_path / "runs" / name)
        with torch.no_grad():
            torch.testing.assert_close(image, plain.encode_image(images), rtol=0, atol=1e-6)
            torch.testing.assert_close(text, plain.encode_text(tokens), rtol=0, atol=1e-6)
        assert size == 32 and tuple(mean) == open_clip.OPENAI_DATASET_MEAN
        weights = tmp_path / name / "open_clip_model.safetensors"
        assert weights.stat().st_mode & 0o777 == 0o644
        with safe_open(weights, "pt") as file:
            assert file.metadata() == {"format": "pt", "run": name, "step": "2"}


def test_a_run_starts_from_an_exported_folder_with_equal_weights(exported, make_config):
    for name, (model, config) in exported.items():
        export.main(ExportConfig(f"runs/{name}/checkpoints/step_000000002", name))
        changes = {**RUNS[name], "model.init_from": name}
        state = build(make_config(changes), data=None).task.model.state_dict()
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, state[key]), key
        assert json.loads(Path(name, "open_clip_config.json").read_text())["model_cfg"] == (
            model_config(config.model, config.intervention.name)
        )


def test_a_folder_needs_a_run(exported):
    export.main(ExportConfig("runs/plain", "new/w.safetensors"))
    export.main(ExportConfig("runs/plain", "w.safetensors"))
    with pytest.raises(RunError, match="a folder needs a run"):
        export.main(ExportConfig("w.safetensors", "folder"))


def test_an_export_overwrites_nothing(exported):
    for out in ("new", "w.safetensors"):
        Path("new").mkdir(exist_ok=True)  # an empty folder may be filled
        export.main(ExportConfig("runs/plain", out))
        with pytest.raises(ConfigError, match=f"out={out} already exists"):
            export.main(ExportConfig("runs/plain", out))


def test_config_of_a_named_model_is_open_clips_but_for_its_sizes():
    sizes = dict.fromkeys(("vision_width", "vision_layers", "text_width", "text_layers", "heads"))
    sizes |= {"patch_size": None, "vocab_size": None, "embed_dim": None, "context_length": None}
    own = open_clip.get_model_config("ViT-B-32-quickgelu")
    own["vision_cfg"]["image_size"] = 64
    assert model_config(ModelConfig("ViT-B-32-quickgelu", 64, **sizes)) == own


def test_evaluation_is_the_runs_own_by_default(run_once, make_config, tmp_path, capsys):
    for name in ("retrieval", "none"):
        config = make_config({"num_steps": 2, "save_every": 2, "evaluation.name": name})
        run_once(config, tmp_path / name)
    own = EvaluateConfig(str(tmp_path / "retrieval"), device="cpu", shown=2)
    with_task = EvaluateConfig(own.run, evaluation=ChosenEvaluation("zero_shot"), device="cpu")
    for evaluated in (own, with_task):
        evaluate.main(evaluated)
    first, second = read_rows(tmp_path / "retrieval" / "evaluations.jsonl")
    assert first["step"] == 2 and "retrieval/loss" in first and "zero_shot/top1" not in first
    assert "zero_shot/top1" in second and "retrieval/loss" not in second
    assert capsys.readouterr().out.count("2 of 2") == 2
    rows = read_rows(tmp_path / "retrieval" / "retrieved.jsonl")
    assert [len(row["nearest"]) for row in rows] == [3, 3] and rows[0]["sample"] == 0
    assert {(row["step"], row["val"]) for row in rows} == {(2, first["val"])}
    assert rows[0]["caption"] == "a red square" and len({*rows[0]["nearest"]}) == 3
    with Image.open(io.BytesIO(base64.b64decode(rows[1]["jpeg"]))) as image:
        assert image.format == "JPEG" and max(image.size) <= 96
    with pytest.raises(ConfigError, match="shown=9"):
        check({"run": own.run, "shown": 9}, EvaluateConfig)
    with_task.shown = 2
    with pytest.raises(ConfigError, match="shown=2 needs evaluation=retrieval"):
        evaluate.main(with_task)
    with pytest.raises(ConfigError, match="has evaluation=none: choose"):
        evaluate.main(EvaluateConfig(str(tmp_path / "none"), device="cpu"))
