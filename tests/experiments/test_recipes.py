"""All recipes train a small model."""

import math

import pytest

from lowprec.nn.recipe import RECIPES
from lowprec.runs.read import read_rows

FAST = ("llm_int8", "hw_fp8_switchback")  # test_int8_inference trains with two others
CHANCE, LEAST = math.log(16), math.log(4)  # 16 pairs, of which groups of four share a caption


@pytest.mark.parametrize(
    "recipe",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES],
)
def test_loss_stays_finite_and_falls(recipe, make_config, run_once, tmp_path):
    changes = {"num_steps": 60, "save_every": 60, "schedule.warmup_steps": 0}
    config = make_config({**changes, "precision": {"autocast": "bf16", "recipe": recipe}})
    ended, built = run_once(config, tmp_path / "a")
    losses = [row["loss"] for row in read_rows(tmp_path / "a" / "metrics.jsonl")]
    assert ended.state == "finished" and len(losses) == 60
    assert all(map(math.isfinite, losses))
    assert losses[0] > CHANCE and max(losses[-5:]) < LEAST + 0.2
    assert {layer.swapped for layer in built.layers} == {recipe != "high"}
