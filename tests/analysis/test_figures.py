"""Tests the figures of runs: what their frames hold and what is drawn and named."""

import itertools
import shutil

import numpy as np
import pandas as pd
import pytest

from analysis import load_runs, make, measures, paper
from analysis.figures import FIGURES, formats, loss_curves, losses
from analysis.figures.scores import largest_features
from analysis.measures import RECALL, VALIDATION_LOSS
from lowprec.config.schema import InterventionConfig, PrecisionChangeConfig
from tests.analysis.conftest import drawn, legend


def test_a_diverged_run_ends_in_a_cross_and_does_not_stretch_the_axis(make_run, tmp_path):
    make_run(optimizer="stable_adamw", num_steps=200)
    losses = np.concatenate([np.linspace(4, 1, 60), np.linspace(1, 90, 60)])
    make_run(optimizer="adamw", num_steps=200, steps=120, state="diverged", losses=losses)
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    _, ax = drawn(loss_curves, frame)
    assert legend(ax) == ["bf16", "bf16, AdamW (diverged at step 120)"]  # the panel says the rest
    crosses = [line for line in ax.get_lines() if line.get_marker() == "X"]
    top = ax.get_ylim()[1]
    assert [(list(c.get_xdata()), list(c.get_ydata())) for c in crosses] == [([119], [top])]
    assert top == pytest.approx(1.05 * frame.loc[frame["state"] == "finished", "loss"].max())
    caption = loss_curves.caption(frame)
    assert "diverged at step 120" in caption and "Triangles" not in caption


@pytest.mark.parametrize("key", ["seed", "lr"])
def test_losses_overlap_across_seeds_and_not_across_other_settings(make_run, query, key):
    for recipe, value in itertools.product(["high", "switchback"], [1, 2]):
        make_run(recipe=recipe, num_steps=40, **{key: value})
    title = losses.compare_ends(query(loss_curves))
    assert title == (
        "The losses of bf16 and SwitchBack int8 overlap across seeds" * (key == "seed")
    )


@pytest.mark.parametrize(
    ("change", "labels"),
    [
        ({"num_steps": 80}, ("num_steps=60", "num_steps=80")),
        ({"compile": True}, ("compile=false", "compile=true")),
        ({"intervention": InterventionConfig("kq_norm")}, ("intervention=kq_norm", "=none")),
        ({"data": "cd" * 32}, ("data=ababababab", "data=cdcdcdcdcd")),
    ],
    ids=["steps", "code path", "model", "data"],
)
def test_runs_of_one_method_that_differ_in_any_way_are_told_apart(
    make_run, tmp_path, change, labels
):
    make_run(num_steps=60)
    make_run(**{"num_steps": 60, **change})
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    (ax,) = drawn(loss_curves, frame)
    for line, text in zip(legend(ax), labels, strict=True):
        assert text in line
    assert frame["variant"].nunique() == 2


def test_runs_without_data_digests_and_copies_are_told_apart(make_run, tmp_path):
    for data in ("ab" * 32, "cd" * 32):
        run = make_run(num_steps=60, data=data)
        (run / "attempts.jsonl").unlink()  # they do not say what their data held
    shutil.copytree(run, tmp_path / "runs" / "backup" / run.name)
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    labels = legend(drawn(loss_curves, frame)[0])
    copied = run.name[-10:]
    assert len(set(labels)) == 3 and f"bf16, AdamW (run {copied}, copy 1)" in labels
    assert sum(copied in label for label in labels) == 2


@pytest.mark.parametrize(
    ("state", "mark"),
    [
        ("finished", "incomplete: 57 of 60 steps"),
        ("diverged", "60; 3 steps missing"),
        ("failed", "incomplete: 57 of 90 steps"),
    ],
)
def test_missing_rows_are_a_gap_in_the_line_and_a_mark_in_the_legend(make_run, state, mark):
    run = make_run(num_steps=90 if state == "failed" else 60, steps=60, state=state)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:20] + lines[23:]))
    frame = loss_curves.query(load_runs(run))
    assert frame.loc[frame["loss"].isna(), "step"].tolist()[:3] == [21, 22, 23]
    [ax] = drawn(loss_curves, frame)
    assert np.isnan(ax.lines[0].get_ydata()[18:26]).sum() >= 3
    assert mark in legend(ax)[0]
    assert mark in loss_curves.caption(frame)


def test_a_caption_gives_a_scale_only_if_all_runs_are_of_studies(make_run, query):
    make_run(num_steps=20)
    assert "1 run at demo scale, bf16, AdamW." in loss_curves.caption(query(loss_curves))
    make_run(num_steps=20, seed=1, experiment=None, scale="mini")  # the default scale
    assert "2 runs, bf16, AdamW." in loss_curves.caption(query(loss_curves))


@pytest.mark.parametrize(
    ("recipe", "bits"),
    [
        ("high", 16),
        ("switchback", (4 * 8 + 2 * 16) / 6),  # the weight gradient is in 16 bits
        ("llm_int8", 8),
        ("fp8_blockwise", 8 + (4 * 32 / 128 + 2 * 32 / 128**2) / 6),  # weights have square tiles
        ("mxfp8", 8.25),
        ("mxfp4", 4.25),
        ("nvfp4", 4.5),
        ("nvfp4_rht_sr", 4 + (4 * 8 / 16 + 2 * 8 / 256) / 6),
    ],
)
def test_bits_per_operand_count_the_scales_of_tiles(recipe, bits):
    assert formats.bits(recipe, "bf16") == pytest.approx(bits)


@pytest.fixture
def evaluated(make_run):
    """A function: the name of a run of mini_l with the results of an evaluation."""

    def make(recipe, score=0.5, **keys):
        columns = dict.fromkeys((*RECALL, VALIDATION_LOSS), np.full(20, score))
        keys = {"experiment": "accuracy_vs_size", "model": "mini_l", "scale": "mini"} | keys
        return make_run(recipe=recipe, num_steps=20, tables={}, columns=columns, **keys).name

    return make


def test_a_run_that_changes_its_format_is_a_method_of_its_own_between_both(evaluated, query):
    change = PrecisionChangeConfig(step=6, recipe="high")
    evaluated("nvfp4", experiment="formats")
    evaluated("nvfp4", experiment="formats", precision_change=change)
    for recipe in ("fp8_switchback", "hw_fp8_switchback"):
        evaluated(recipe, experiment="formats")
    frame = query(FIGURES["formats"]).set_index("method")
    bits = {"NVFP4, then bf16 from step 6, AdamW": 4.5 / 4 + 16 * 3 / 4, "NVFP4, AdamW": 4.5}
    assert frame["bits"][list(bits)].to_dict() == pytest.approx(bits)


def test_formats_are_drawn_beside_runs_that_differ_in_the_recipe_alone(evaluated, tmp_path, capsys):
    same, format = evaluated("high", seed=3), evaluated("mxfp4", experiment="formats")
    evaluated("high", lr=5e-3)
    evaluated("high", model="mini_b")
    evaluated("high", experiment="loss_curves")
    out = tmp_path / "out"
    assert make.main(["formats", "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert set(pd.read_csv(out / "formats_mini.csv")["run"]) == {same, format}
    assert capsys.readouterr().err.count("left out") == 1


def test_one_product_leaves_out_runs_with_several_narrow_products(evaluated, query):
    operands = {"output": {"x": "rowwise", "w": "rowwise"}}
    operands |= {"grad_weight": {"g": "columnwise", "x": "columnwise"}}
    narrow = {name: {"format": "int8", **sides} for name, sides in operands.items()}
    for products in ({"output": narrow["output"]}, narrow):
        evaluated("custom", products=products, experiment="one_product")
    evaluated("high")
    frame = query(FIGURES["one_product"])
    assert set(zip(frame["product"], frame["format"], strict=True)) == {
        ("", "bf16"), ("output", "int8")
    }  # fmt: skip


def test_the_scatter_of_rounding_is_told_beside_that_of_seeds_within_recipes(evaluated, tmp_path):
    for k, score in enumerate((0.50, 0.51, 0.52)):
        evaluated("high", experiment="rounding", lr=1e-3 + k * 1e-10, score=score)
        evaluated("high", seed=k + 1, score=0.5 + score / 10)
        for recipe in ("high", "switchback"):  # the second is left out
            evaluated(recipe, seed=k, experiment="equality", score=score, gpu="H200")
        for recipe, mean in (("switchback", 0.0), ("llm_int8", 0.4)):
            evaluated(recipe, seed=k, score=mean + score)
    rounding, runs = FIGURES["rounding"], load_runs(tmp_path / "runs")
    frame = rounding.query(runs)
    assert frame["arm"].value_counts(sort=False).to_dict() == {
        "bf16, one seed, 3 roundings": 3,
        "bf16, 3 seeds": 3,
        "bf16, 3 later seeds": 3,
        "8-bit recipes, centered, 6 runs": 6,
    }
    narrow = frame.groupby("precision")["recall"].mean()
    assert narrow["switchback"] == pytest.approx(narrow["llm_int8"]) == pytest.approx(55.1)
    ax, _ = drawn(rounding, frame)
    note = "1.00 (0.52 to 6.28)"  # by chi-squared with two degrees of freedom, below with four
    notes = [r"$\sigma$ (points, 95%)", note, "0.10 (0.05 to 0.63)", note, "1.00 (0.60 to 2.87)"]
    texts = [text.get_text() for text in ax.texts if text.get_text() != "eager"]
    assert sorted(texts) == sorted(notes)
    title = (
        "Rounding alone scatters mean R@1 (1.0 points) about as much as 8-bit recipes' seeds (1.0)"
    )
    assert rounding.title(frame) == title
    frame.loc[frame["precision"] != "bf16", "recall"] *= 10
    assert rounding.title(frame) == ""


COST = "LLM.int8() ends lowest: mean R@1 is 3.0 points below bf16's"
LOWEST = "At beta2 0.99, AdamW has the highest loss spikes and the lowest R@1: 3%, Muon 30%"
ALIKE = "With beta2 constant or scheduled, the loss ends at"
SPIKES = "oss spikes over 1 nat"
LARGE = f"{SPIKES} at higher learning rates: "
IN_EACH = f"L{SPIKES} in bf16, LLM.int8() and SwitchBack int8"


@pytest.mark.parametrize(
    ("slug", "values", "finding"),
    [
        ("accuracy_vs_size", (74, 71, 73.5), COST),
        ("accuracy_vs_size", (71, 74, 73.5), ""),
        ("accuracy_vs_size", (np.nan, 71, 73.5), ""),
        ("spikes_vs_lr", (0.5, 1.5, 0), f"L{LARGE}0, 1 and 0"),
        ("spikes_vs_lr", (0.5, np.nan, 3), f"L{LARGE}0, 0 and 1"),
        ("spikes_vs_precision", (0.5, 1.5, 2), f"{IN_EACH}: 0, 1 and 1"),
        ("beta2_schedule", (3, 0.5, 2), f"{ALIKE} 0.5 to 3.0, after 1, 1 and 1 spikes"),
        ("spike_heights", (3, 0.5, 2), LOWEST),
        ("spike_heights", (0.5, 3, 2), ""),
    ],
)
def test_a_title_states_a_finding_only_if_the_runs_have_it(slug, values, finding):
    frame = pd.DataFrame({"model": "mini_l", "precision": ["bf16", "llm_int8", "switchback"]})
    frame = frame.assign(accuracy=values, metric="mean R@1", height=values, lr=[1e-3, 2e-3, 4e-3])
    frame = frame.assign(label=frame["precision"], run=frame["precision"], loss=values)
    frame["beta2_decay"] = [np.nan, 0.5, 0.65]
    if slug == "spike_heights":
        frame = frame.assign(optimizer=["adamw", "muon", "adamw"], beta2=[0.99, 0.99, 0.9])
        frame["recall"] = [3, 30, 60]
    assert FIGURES[slug].title(frame) == finding


def test_titles_compare_means_of_formats_heights_with_kq_norm_and_widths():
    frame = pd.DataFrame({"precision": ["bf16", "llm_int8", "mxfp4"], "bits": [16, 8, 4.25]})
    title = FIGURES["formats"].title
    lowest = "LLM.int8() has the lowest mean R@1"
    assert title(frame.assign(recall=[74, 71, 72])) == f"{lowest}, below 1 recipe with fewer bits"
    assert title(frame.assign(recall=[74, 72, 71])) == lowest.replace("LLM.int8()", "MXFP4")
    title, lower = FIGURES["kq_norm"].title, "With KQ layer norm, the highest loss spike is lower"
    names = {"beta2": [0.9, 0.99], "seed": [0, 1], "intervention": ["none", "kq_norm"]}
    frame = pd.MultiIndex.from_product(names.values(), names=names).to_frame(index=False)
    changes = {  # by seed at 0.9, then at 0.99
        (-1, -1.1, 1, 1.1): f"{lower} at beta2 0.9, higher at 0.99",
        (-1, -1.1, -1, -1.1): f"{lower} at beta2 0.9 and 0.99",
        (-1, 0.5, -1, 0.9): "KQ layer norm is not shown to change the highest loss spike",
    }
    for change, words in changes.items():
        heights = np.ravel([(5, 5 + value) for value in change])
        assert title(frame.assign(highest=heights)) == words
    frame = pd.DataFrame({"source": ["H100", "H100", paper.SOURCE], "dim": [4096, 768, 512]})
    assert FIGURES["quantize_share"].title(frame.assign(value=[8.2, 28.7, 40])) == (
        "Quantizing takes 29% of SwitchBack's time at width 768, 8% at 4,096"
    )
    frame = pd.DataFrame({"logit_max": [1, 9, 5], "recall": [70, 60, 50]})
    title = FIGURES["attention_logits"].title(frame)
    assert title.endswith(
        "lower where attention logits are larger (Spearman's correlation \N{MINUS SIGN}0.50)"
    )
    assert FIGURES["attention_logits"].title(frame.assign(recall=[50, 60, 70])) == ""


def test_features_of_int8_weight_gradients_are_told_only_if_they_are_the_largest():
    means, is_int8 = pd.Series([2.4, 2.8, 1.3]), np.array([True, True, False])
    assert largest_features(means, is_int8) == (
        "With an int8 weight gradient, features are on average 2.4 to 2.8 times as large as in "
        "bf16, otherwise at most 1.3 times"
    )
    assert largest_features(means, ~is_int8) == ""
    assert largest_features(means[:2], is_int8[:2]) == ""


def test_a_setting_that_differs_at_one_value_is_named_at_all(make_run, tmp_path):
    for beta2, lr in ((0.9, 1e-3), (0.99, 5e-4), (0.99, 1e-3)):
        make_run(beta2=beta2, lr=lr)
    heads = measures.named_heads(load_runs(tmp_path / "runs"), ("optimizer.beta2",))
    names = heads.sort_values(["lr", "beta2"])[["method", "variant"]].to_numpy().tolist()
    usual = ["bf16, AdamW (lr=0.001)", 0]
    assert names == [["bf16, AdamW (lr=0.0005)", 1], usual, usual]
