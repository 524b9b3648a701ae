"""bench_model: what a line says, which rows count, and its exit."""

import json

import pytest
import torch

from experiments.benchmarks import model as bench_model
from lowprec.clip import open_clip
from lowprec.config.schema import Config

RIGHT, OTHER = (5.0, torch.ones(3)), (1.0, torch.ones(3))


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Runs the benchmark on invented cases: their (ms, numbers), or an error. Returns its lines."""

    def run(cases, compile=True):
        def measure(config, case, device):
            found = cases.get(case, (1.0, RIGHT))
            if isinstance(found, Exception):
                raise found
            return *found, 2.0

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


def test_ratio_is_to_the_row_that_it_names(lines):
    found = lines({"open_clip eager": (4.0, RIGHT), "open_clip": (2.0, RIGHT)})
    told = {case: (row["ratio_to"], row["ratio"]) for case, row in found.items()}
    assert told["open_clip eager"] == ("open_clip eager", 1)
    assert told["open_clip"] == ("the faster open_clip", 1)
    assert told["switchback"] == ("the faster open_clip", 2)


def test_line_says_what_its_shape_leaves_out(lines):
    found = lines({}, compile=False)
    assert "open_clip" not in found and len(found) == 1 + len(bench_model.RECIPES)
    assert all((row["image_size"], row["patch_dropout"]) == (32, 0.5) for row in found.values())


@pytest.mark.parametrize("nan", [False, True])
def test_without_a_row_of_open_clip_none_of_ours_counts(lines, nan):
    failing = (1.0, (float("nan"), torch.ones(3))) if nan else RuntimeError("CUDA out of memory")
    with pytest.raises(SystemExit, match="no number for autograd_high, high"):
        lines({"open_clip eager": failing, "open_clip": failing})
    row = lines.lines["high"]
    assert row["ms"] is row["correct"] is None and "no row of open_clip" in row["reason"]


def test_case_of_ours_that_is_wrong_or_fails_has_no_number_and_ends_in_an_error(lines):
    cases = {"switchback": (1.0, OTHER), "llm_int8": RuntimeError("CUDA out of memory")}
    with pytest.raises(SystemExit, match="no number for switchback, llm_int8; their lines"):
        lines(cases)
    row = lines.lines["switchback"]
    assert row["ms"] is None and row["correct"] is False and "off by 0.8" in row["reason"]
    assert lines.lines["llm_int8"]["correct"] is None
    assert lines.lines["high"]["correct"] is True


def test_case_of_open_clip_that_fails_is_no_error_of_ours(lines):
    found = lines({"open_clip": RuntimeError("CUDA out of memory")})
    assert found["open_clip"]["ms"] is None and found["high"]["ratio"] == 1


def test_first_layer_is_found_in_towers_of_open_clip_and_of_timm():
    text = dict(context_length=8, vocab_size=64, width=64, layers=1, heads=2)
    ours = dict(image_size=32, patch_size=16, width=64, layers=1, head_width=32)
    timm = dict(timm_model_name="vit_tiny_patch16_224", timm_pool="avg", timm_proj="linear")
    for vision, width in ((ours, 64), (timm, 192)):
        model = open_clip.model.CLIP(32, vision, text)
        assert bench_model.first_layer(model).weight.shape == (width, 3, 16, 16)
    model.visual = torch.nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="no convolution"):
        bench_model.first_layer(model)
