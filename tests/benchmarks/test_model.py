"""The benchmark of whole models: what a line says, which cases count, and its exit."""

import pytest
import torch

from experiments.benchmarks import model as bench_model
from experiments.benchmarks.configs import RECIPES, ModelConfig
from experiments.benchmarks.model import Measured
from lowprec.clip import open_clip
from tests.benchmarks.conftest import by_case

pytestmark = pytest.mark.filterwarnings("ignore:.* converts none")  # of such narrow models


def result(ms=1.0, loss=5.0):
    return Measured(torch.tensor(loss), torch.ones(3), {"ms": ms})


@pytest.fixture
def lines(lines_of, monkeypatch):
    """Runs the benchmark on invented results by case, or errors; returns the lines by case."""

    def run(cases):
        def measure(config, case, device):
            measured = cases.get(case, result())
            if isinstance(measured, Exception):
                raise measured
            return measured

        monkeypatch.setattr(bench_model, "measure", measure)
        return by_case(lines_of(bench_model.main, ModelConfig(compile=True, device="cpu")))

    return run


def test_ratio_is_to_the_case_that_it_names(lines):
    cases = {"open_clip eager": result(4.0), "open_clip": result(2.0), "high": result(1.5)}
    rows = lines(cases)
    ratios = {case: (row["ratio_to"], row["ratio"]) for case, row in rows.items()}
    assert ratios["open_clip eager"] == ("open_clip eager", 1)
    assert ratios["open_clip"] == ("the faster open_clip", 1)
    assert ratios["switchback"] == ("the faster open_clip", 2)
    assert rows["switchback"]["ratio_to_high"] == 1.5 and "ratio_to_high" not in rows["open_clip"]


@pytest.mark.parametrize("nan", [False, True])
def test_without_a_number_of_open_clip_none_of_ours_counts(lines, lines_of, nan):
    failing = result(loss=float("nan")) if nan else RuntimeError("CUDA out of memory")
    with pytest.raises(SystemExit, match="autograd_high"):
        lines({"open_clip eager": failing, "open_clip": failing})
    row = by_case(lines_of.lines)["high"]
    assert row["ms"] is row["correct"] is None and "open_clip" in row["reason"]


def test_case_of_ours_that_is_wrong_or_fails_has_no_number(lines, lines_of):
    cases = {"switchback": result(loss=1.0), "llm_int8": RuntimeError("CUDA out of memory")}
    with pytest.raises(SystemExit, match="switchback .*, llm_int8"):
        lines(cases)
    rows = by_case(lines_of.lines)
    row = rows["switchback"]
    assert row["ms"] is None and row["correct"] is False and "loss differs" in row["reason"]
    assert rows["llm_int8"]["correct"] is None
    assert rows["high"]["correct"] is True


@pytest.mark.parametrize("case", ["open_clip eager", "switchback"])
def test_the_model_is_of_open_clips_own_classes(case):
    config = ModelConfig(device="cpu", compile=False)
    model = bench_model.build_task(config, case, torch.device("cpu"))[0].model
    assert type(model) is open_clip.model.CLIP
    assert type(model.visual) is open_clip.transformer.VisionTransformer


@pytest.mark.slow
def test_tiny_model_is_measured_with_each_recipe(lines_of):
    config = ModelConfig(device="cpu", batch_size=4)
    config.model.vision_width = config.model.text_width = 64
    rows = lines_of(bench_model.main, config)
    assert [row["case"] for row in rows] == ["open_clip eager", *RECIPES]
    assert all(row["correct"] and row["ms"] > 0 for row in rows)
