"""Figures of what blocks recorded: the size of features by recipe, and attention logits."""

import numpy as np
import pandas as pd
import pytest

from analysis import paper
from analysis.curves import RECALL
from analysis.figures import attention_logits, feature_size
from lowprec.config.schema import InterventionConfig, ModelConfig
from tests.analysis.conftest import drawn

BLOCKS = [paper.BLOCK.format(k) for k in (0, ModelConfig().vision_layers - 1)]
INT8 = {"grad_weight": {"format": "int8", "g": "columnwise", "x": "columnwise"}}


@pytest.fixture(name="plant")
def plant_fixture(make_run):
    """A function: a run of 20 steps whose last block has these values at steps 2 and 20."""

    def plant(values, statistic="feature_mean", recall=50.0, **keys):
        frame = pd.DataFrame(np.outer(values, [0.5, 1]), [2, 20], BLOCKS)
        columns = dict.fromkeys(RECALL, np.full(20, recall / 100))
        keys = {"num_steps": 20, "scale": "mini", "experiment": "accuracy_vs_size"} | keys
        make_run(tables={"blocks": {statistic: frame}}, columns=columns, **keys)

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
    assert tuple(frame.columns) == feature_size.COLUMNS
    ratios = frame[frame["at"] == "last"].groupby("recipe")["ratio"].apply(sorted)
    expected = {"LLM.int8()": [8 / 5, 2], "int8 weight gradient only": [3], "bf16": [1, 1]}
    assert ratios.to_dict() == expected | {feature_size.ROUNDING: [0.75]}
    early = frame[frame["at"] == "early"].groupby("recipe")["ratio"].max()
    assert early["LLM.int8()"] == 1.5 and set(frame.loc[frame["at"] == "early", "step"]) == {2}
    (ax,) = drawn(feature_size, frame)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [feature_size.ROUNDING, "LLM.int8()", "int8 weight gradient only"]
    assert "LLM.int8(): 1.80 (1.60 to 2.00, 2 runs)" in feature_size.caption(frame)


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
    assert tuple(frame.columns) == attention_logits.COLUMNS and len(frame) == 7
    assert sorted(frame["logit_max"]) == [10, 20, 30, 50, 100, 200, 300]
    over_runs, within = attention_logits.correlations(frame)
    assert within == pytest.approx(1) and over_runs < 0
    (ax,) = drawn(attention_logits, frame)
    names = [line.get_label() for line in ax.lines]
    rest = "lr 0.001, batch 128"
    assert names[:2] == [f"nano, {rest}", f"nano, {rest}, zero-init layer-scale"]
    assert "which compares settings, and 1.00 within" in attention_logits.caption(frame)
