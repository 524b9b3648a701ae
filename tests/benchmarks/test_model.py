"""The benchmark of whole models: what a line says, which cases count, and its exit."""

import json

import pytest
import torch

from experiments.benchmarks import model as bench_model
from experiments.benchmarks.model import Measured
from lowprec.clip import open_clip
from lowprec.config.schema import Config


def result(ms=1.0, loss=5.0):
    return Measured(ms, torch.tensor(loss), torch.ones(3), memory_gib=2.0)


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Runs the benchmark on invented results by case, or errors; returns the lines by case."""

    def run(cases, compile=True):
        def measure(config, case, device):
            measured = cases.get(case, result())
            if isinstance(measured, Exception):
                raise measured
            return measured

        monkeypatch.setattr(bench_model, "measure", measure)
        config = Config(compile=compile, device="cpu", run_dir=str(tmp_path))
        config.model.patch_dropout = 0.5
        try:
            bench_model.main(config)
        finally:
            (file,) = (tmp_path / "bench" / "model").glob("*.jsonl")
            run.lines = {row["case"]: row for row in map(json.loads, file.read_text().splitlines())}
        return run.lines

    return run


def test_ratio_is_to_the_case_that_it_names(lines):
    rows = lines({"open_clip eager": result(4.0), "open_clip": result(2.0)})
    ratios = {case: (row["ratio_to"], row["ratio"]) for case, row in rows.items()}
    assert ratios["open_clip eager"] == ("open_clip eager", 1)
    assert ratios["open_clip"] == ("the faster open_clip", 1)
    assert ratios["switchback"] == ("the faster open_clip", 2)


def test_line_says_what_its_shape_leaves_out(lines):
    rows = lines({}, compile=False)
    assert "open_clip" not in rows and len(rows) == 1 + len(bench_model.OURS)
    assert all((row["image_size"], row["patch_dropout"]) == (32, 0.5) for row in rows.values())


@pytest.mark.parametrize("nan", [False, True])
def test_without_a_number_of_open_clip_none_of_ours_counts(lines, nan):
    failing = result(loss=float("nan")) if nan else RuntimeError("CUDA out of memory")
    with pytest.raises(SystemExit, match="autograd_high"):
        lines({"open_clip eager": failing, "open_clip": failing})
    row = lines.lines["high"]
    assert row["ms"] is row["correct"] is None and "open_clip" in row["reason"]


def test_case_of_ours_that_is_wrong_or_fails_has_no_number(lines):
    cases = {"switchback": result(loss=1.0), "llm_int8": RuntimeError("CUDA out of memory")}
    with pytest.raises(SystemExit, match="switchback .*, llm_int8"):
        lines(cases)
    row = lines.lines["switchback"]
    assert row["ms"] is None and row["correct"] is False and "loss differs" in row["reason"]
    assert lines.lines["llm_int8"]["correct"] is None
    assert lines.lines["high"]["correct"] is True


def test_patch_embedding_is_the_first_convolution_of_open_clip_and_timm_towers():
    text = dict(context_length=8, vocab_size=64, width=64, layers=1, heads=2)
    ours = dict(image_size=32, patch_size=16, width=64, layers=1, head_width=32)
    timm = dict(timm_model_name="vit_tiny_patch16_224", timm_pool="avg", timm_proj="linear")
    for vision, width in ((ours, 64), (timm, 192)):
        model = open_clip.model.CLIP(32, vision, text)
        assert bench_model.first_convolution(model).weight.shape == (width, 3, 16, 16)


@pytest.mark.slow
def test_tiny_model_is_measured_with_each_recipe(tmp_path):
    config = Config(device="cpu", batch_size=4, run_dir=str(tmp_path))
    config.model.vision_width = config.model.text_width = 64
    bench_model.main(config)
    [file] = (tmp_path / "bench" / "model").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["case"] for row in rows] == ["open_clip eager", *bench_model.OURS]
    assert all(row["correct"] and row["ms"] > 0 for row in rows)
