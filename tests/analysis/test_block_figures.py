"""Figures of what blocks recorded: the size of features by recipe, and attention logits."""

import numpy as np
import pandas as pd
import pytest

from analysis import make, paper
from analysis.figures import FIGURES, rate_map, recipes_by_size, spikes_vs_lr
from analysis.load import NoRunsError, load_runs
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
    for lr, loss in ((2.5e-4, 0.2), (3e-4, 0.25), (1e-3, 0.6)):
        plant((1, 1), loss=loss, lr=lr, model="vit_h14", **keys)
    int8 = {"recipe": "llm_int8", "model": "vit_h14"}
    plant((1, 1), loss=0.315, lr=5e-4, **int8, **other)
    plant((1, 1), loss=0.66, lr=1e-3, **int8, **keys)
    for seed in (0, 7):
        plant((1, 1), loss=0.21, lr=2.5e-4, seed=seed, **int8, **keys)
    plant((1, 1), loss=9, lr=2e-3, model="vit_h14", state="diverged", steps=12, **keys)
    plant((1, 1), loss=8, lr=4e-3, model="vit_h14", state="running", steps=12, **keys)
    frame = query(rate_map)
    assert set(frame["model"]) == {"vit_h14"} and frame["lr"].max() == 2e-3
    by_rate = frame[frame["recipe"] == "bf16"].set_index("lr")["validation_loss"]
    assert by_rate[:4].to_dict() == {2.5e-4: 0.2, 3e-4: 0.25, 5e-4: 0.3, 1e-3: 0.6}
    changes = frame[frame["recipe"] == "llm_int8"].set_index(["lr", "seed"])["loss_change"]
    expected = [pytest.approx(5), pytest.approx(10)]
    assert [changes[2.5e-4, 0], changes[1e-3, 0]] == expected and np.isnan(changes[2.5e-4, 7])
    [left, right] = drawn(rate_map, frame[frame["lr"] < 2e-3])
    assert legend(left) == ["bf16", "bf16", "LLM.int8()"]
    assert [text.get_text() for text in left.get_xticklabels()] == [
        "2.5e-4",
        "3e-4",
        "5e-4",
        "1e-3",
    ]
    [of_bf16] = [line for line in left.lines if line.get_label() == "bf16"]
    assert of_bf16.get_ydata().tolist() == [0.2, 0.25, 0.3, 0.6]
    [shade] = left.patches  # from the rate on at which no run is within 0.1 nats of the best
    assert (
        shade.get_x() == 2.5 and left.texts[0].get_text() == "no run within\n0.1 nats of the best"
    )
    assert right.get_xlim()[1] < 2.5 and len(right.patches) == 1  # those rates are left only
    assert rate_map.title(frame) == (
        "bf16 ends lowest at 2.5e-4; from 1e-3 on, no recipe ends within 0.1 nats of that"
    )
    [llm_int8] = [line for line in right.lines if line.get_label() == "LLM.int8()"]
    np.testing.assert_allclose(llm_int8.get_ydata(), [5, np.nan, 5, np.nan])  # gaps


@pytest.mark.usefixtures("no_pictures")
def test_the_headline_counts_the_best_rate_of_the_most_recipes(plant, tmp_path):
    keys = {"scale": "true_size", "model": "vit_h14", "experiment": "lr_map"}
    for experiment, lr, seed, loss in (
        ("lr_map", 2.5e-4, 1, 0.1),  # in bf16 alone
        ("lr_map", 5e-4, 1, 0.2),
        ("lr_map", 1e-3, 1, 0.8),
        ("equality", 5e-4, 2, 0.2),
        ("equality", 5e-4, 3, 0.2),
    ):
        of_run = keys | {"experiment": experiment, "lr": lr, "seed": seed}
        plant((2, 9), recall=60, loss=loss, **of_run)
        if lr == 2.5e-4:
            with pytest.raises(NoRunsError, match="no run of a recipe besides bf16"):
                FIGURES["headline"].query(load_runs(tmp_path / "runs"))
            continue
        plant((2, 9), recall=59 + seed / 2, loss=loss, recipe="switchback", **of_run)
        if seed < 3:
            plant((6, 9), recall=57, loss=1.1 * loss, recipe="llm_int8", **of_run)
    for recipe, recall in (("high", 50), ("hw_fp8_tensorwise", 48)):
        plant((1, 1), recall=recall, recipe=recipe, **keys | {"model": "vit_l14"})
    assert make.main(["headline", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    frame = pd.read_csv(tmp_path / "headline_true_size.csv")
    assert len(frame) == 14
    own = frame[frame["counts"]].set_index(["model", "recipe"]).sort_index()
    assert own.loc[("vit_l14", "hw_fp8_tensorwise"), "recall_change"] == -2
    of_h = own.loc["vit_h14"].sort_values("seed")
    assert set(of_h["lr"]) == {5e-4} and of_h.loc["switchback", "seed"].tolist() == [2, 3]
    assert of_h.loc["switchback", "recall_change"].tolist() == [0, 0.5]
    assert of_h.loc["llm_int8", "seed"].tolist() == [1, 2]  # as many in both studies
    figure = FIGURES["headline"]
    assert figure.title(frame) == (
        "In bf16, ViT-H/14's loss is 4 times as high at 1e-3 as at 5e-4, where LLM.int8(), the "
        "costliest recipe, ends 10.0% above bf16"
    )
    rates, losses, recalls = drawn(figure, frame)
    assert rates.get_title() == "ViT-H/14" and legend(rates) == [
        "bf16",
        "SwitchBack int8",
        "LLM.int8()",
    ]
    names = ["ViT-L/14 at 1e-3", "fp8 tensor-wise", "ViT-H/14 at 5e-4", "SwitchBack int8"]
    assert [text.get_text() for text in losses.get_yticklabels()] == [*names, "LLM.int8()"]
    in_paper = [line.get_xydata()[0] for line in recalls.lines if line.get_marker() == "s"]
    np.testing.assert_allclose(in_paper, [(-0.6, 3), (-6.1, 4)])
    assert [text.get_text() for text in recalls.texts] == [
        "bf16",
        "gray: the paper,\non ImageNet",
        "paper: diverges",
    ]


def test_a_sweep_of_rates_leaves_out_what_is_near_one_of_them_in_another_study(plant, query):
    keys = {"optimizer": "adamw", "beta2": 0.99, "experiment": "spikes_vs_lr"}
    for lr in (1e-3, 1.01e-3, 4e-3):
        plant((1, 1), lr=lr, **keys)
    for lr in (2e-3, 1.952e-3):
        plant((1, 1), lr=lr, **keys | {"experiment": "stability"})
    assert sorted(set(query(spikes_vs_lr)["lr"])) == [1e-3, 1.01e-3, 2e-3, 4e-3]


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
