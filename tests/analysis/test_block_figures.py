"""Figures of what blocks recorded: the size of features by recipe, and attention logits."""

import numpy as np
import pandas as pd
import pytest

from analysis import paper
from analysis.figures import (
    attention_logits,
    feature_size,
    features,
    rate_map,
    recipes_by_size,
    scores,
)
from analysis.measures import RECALL, VALIDATION_LOSS
from lowprec.config.schema import InterventionConfig, ModelConfig
from tests.analysis.conftest import drawn, legend

BLOCKS = [paper.BLOCK.format(k) for k in (0, ModelConfig().vision_layers - 1)]
INT8 = {"grad_weight": {"format": "int8", "g": "columnwise", "x": "columnwise"}}


@pytest.fixture(name="plant")
def plant_fixture(make_run):
    """A function: a run of 20 steps whose last block has these values at step 2 and the end."""

    def plant(values, statistic="feature_mean", recall=50.0, loss=0.2, end=20, **keys):
        frame = pd.DataFrame(np.outer(values, [0.5, 1]), [2, end], BLOCKS)
        columns = dict.fromkeys(RECALL, np.full(20, recall / 100))
        columns[VALIDATION_LOSS] = np.full(20, loss)
        keys = {"num_steps": 20, "scale": "mini", "experiment": "accuracy_vs_size"} | keys
        return make_run(tables={"blocks": {statistic: frame}}, columns=columns, **keys)

    return plant


def test_features_are_relative_to_the_bf16_run_of_the_same_seed(plant, query):
    for seed in (0, 1):
        plant((2, 4 + seed), seed=seed)
        plant((3, 8), seed=seed, recipe="llm_int8")
        plant((9, 9), seed=seed, experiment="weight_gradient")  # the same run again
    plant((2, 12), recipe="custom", products=INT8, experiment="one_product")
    plant((2, 3), lr=1e-3 * (1 + 2e-7), experiment="rounding")
    plant((9, 9), recipe="llm_int8", lr=2e-3)  # without a bf16 run
    plant((9, 9), recipe="llm_int8", seed=2)
    frame = query(feature_size)
    ratios = frame[frame["at"] == "last"].groupby("recipe")["ratio"].apply(sorted)
    expected = {"LLM.int8()": [8 / 5, 2], "int8 weight gradient only": [3], "bf16": [1, 1]}
    assert ratios.to_dict() == expected | {features.ROUNDING: [0.75]}
    early = frame[frame["at"] == "early"].groupby("recipe")["ratio"].max()
    assert early["LLM.int8()"] == 1.5 and set(frame.loc[frame["at"] == "early", "step"]) == {2}
    (ax,) = drawn(feature_size, frame)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [features.ROUNDING, "LLM.int8()", "int8 weight gradient only"]


def test_logits_are_the_largest_of_any_block_at_the_end_and_settings_are_told_apart(plant, query):
    keys = {"statistic": "logit_max", "experiment": "spikes_vs_size"}
    for seed, (logit, recall) in enumerate(((10, 60), (20, 70), (30, 80))):
        plant((99, logit), recall=recall, seed=seed, **keys)
        plant((99, 10 * logit), recall=recall - 50, seed=seed, lr=2e-3, **keys)
    plant((99, 30), recall=80, seed=2, **keys | {"experiment": "optimizers"})  # the same run
    plant((99, 1), optimizer="muon", **keys | {"experiment": "optimizers"})
    plant((99, 1), recipe="switchback", **keys)
    plant((1, 50), intervention=InterventionConfig("zero_init"), **keys)
    frame = query(attention_logits)
    assert len(frame) == 7
    assert sorted(frame["logit_max"]) == [10, 20, 30, 50, 100, 200, 300]
    over_runs, within = scores.correlations(frame)
    assert within == pytest.approx(1) and over_runs < 0
    (ax,) = drawn(attention_logits, frame)
    names = legend(ax)
    rest = "lr 0.001, batch 128"
    assert {f"nano, {rest}", f"nano, {rest}, zero-init layer-scale"} < set(names)
    assert "which compares settings, and 1.00 within" in attention_logits.caption(frame)


def test_losses_and_features_by_size_are_relative_to_bf16_of_the_same_seed(plant, query):
    keys = {"experiment": "weight_gradient", "scale": "true_size"}
    for model, factor in (("vit_l14", 1.1), ("vit_b14", 1.2)):
        for seed, base in ((1, 0.2), (2, 0.4)):
            of_run = keys | {"model": model, "seed": seed}
            plant((seed, 99), loss=base, **of_run)
            plant((seed * 2, 1), loss=base * factor, recipe="llm_int8", **of_run)
            plant((seed * 3, 1), loss=base, recipe="custom", products=INT8, **of_run)
    plant((9, 9), loss=9, recipe="llm_int8", model="vit_b14", seed=3, **keys)  # without bf16
    plant((9, 9), loss=9, recipe="llm_int8", model="vit_b14", seed=1, lr=2e-3, **keys)
    frame = query(recipes_by_size)
    assert len(frame) == 12
    assert set(frame["step"]) == {2}  # the last record of the first fifth
    means = frame.groupby(["model", "recipe"])[["loss_change", "feature_ratio"]].agg(list)
    for model, percent in (("vit_l14", 10), ("vit_b14", 20)):
        of_loss, of_size = means.loc[model, "llm_int8"]
        assert of_loss == pytest.approx([percent] * 2) and of_size == [2, 2]
        of_loss, of_size = means.loc[model, "bf16"]  # relative to the geometric mean
        assert of_loss == pytest.approx([-29.289, 41.421], abs=1e-3) and of_size == [1, 1]


def test_losses_by_rate_join_the_runs_of_other_studies_at_their_rate(plant, query):
    keys = {"scale": "true_size", "experiment": "lr_map", "gpu": "H100"}
    other = keys | {"experiment": "weight_gradient", "gpu": "H200"}
    for model in ("vit_h14", "vit_b14"):
        plant((1, 1), loss=0.3, model=model, lr=5e-4, **other)
    plant((1, 1), loss=0.4, lr=5e-4, recipe="custom", products=INT8, model="vit_h14", **other)
    plant((1, 1), loss=0.5, lr=5e-4, model="vit_h14", **other | {"experiment": "interventions"},
          intervention=InterventionConfig("zero_init"))  # fmt: skip
    for lr, loss in ((2.5e-4, 0.2), (1e-3, 0.6)):
        plant((1, 1), loss=loss, lr=lr, model="vit_h14", **keys)
    plant((1, 1), loss=9, lr=2e-3, model="vit_h14", state="diverged", steps=12, **keys)
    plant((1, 1), loss=8, lr=4e-3, model="vit_h14", state="running", steps=12, **keys)
    frame = query(rate_map)
    assert set(frame["model"]) == {"vit_h14"} and frame["lr"].max() == 2e-3
    by_rate = frame[frame["recipe"] == "bf16"].set_index("lr")["validation_loss"]
    assert by_rate[:3].to_dict() == {2.5e-4: 0.2, 5e-4: 0.3, 1e-3: 0.6}


def noises():
    """Rows as quant_error writes them: two recipes with an int8 weight gradient, one in bf16."""
    for step, recipe, layer in np.ndindex(3, 3, 3):
        for product, operand in (("output", "x"), ("grad_weight", "g"), ("grad_weight", "x")):
            for tokens in (256, 1024):
                is_bf16 = recipe == 2
                db = 40.0 - 10 * recipe - 2 * step - layer - (tokens == 256) * 20
                names = ("llm_int8", "fp8_tensorwise", "switchback")
                layers = ("visual.0", "text.0", "visual.1")
                yield {"step": 10 * step, "recipe": names[recipe], "layer": layers[layer],
                       "product": product, "inner_dim": tokens, "operand": operand,
                       "format": "bf16" if is_bf16 else "int8", "sqnr_db": 99.0,
                       "product_sqnr_db": np.inf if is_bf16 else db,
                       "underflowed": 0.1 * step + (operand != "g") * 0.5}  # fmt: skip
