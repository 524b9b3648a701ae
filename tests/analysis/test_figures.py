"""Tests the figures of runs: what their frames hold and what is drawn and named."""

import shutil

import numpy as np
import pandas as pd
import pytest

from analysis import load_runs, make, paper
from analysis.figures import (
    FIGURES,
    accuracy_vs_size,
    feature_magnitude,
    formats,
    gradient_magnitude,
    loss_curves,
    one_product,
    update_clipping,
)
from analysis.measures import RECALL, VALIDATION_LOSS
from lowprec.config.schema import InterventionConfig, PrecisionChangeConfig
from tests.analysis.conftest import drawn, legend


def test_a_diverged_run_ends_in_a_cross_and_does_not_stretch_the_axis(make_run, tmp_path):
    make_run(optimizer="stable_adamw", num_steps=200)
    losses = np.concatenate([np.linspace(4, 1, 60), np.linspace(1, 90, 60)])
    make_run(optimizer="adamw", num_steps=200, steps=120, state="diverged", losses=losses)
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    _, ax = drawn(loss_curves, frame)
    assert legend(ax) == ["bf16, StableAdamW", "bf16, AdamW (diverged at step 120)"]
    crosses = [line for line in ax.get_lines() if line.get_marker() == "X"]
    top = ax.get_ylim()[1]
    assert [(list(c.get_xdata()), list(c.get_ydata())) for c in crosses] == [([119], [top])]
    assert top < 5
    assert "diverged at step 120" in loss_curves.caption(frame)


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
    assert frame.set_index("step")["loss_median"][18:26].isna().sum() >= 3
    assert mark in legend(drawn(loss_curves, frame)[0])[0]
    assert mark in loss_curves.caption(frame)


def test_a_key_that_did_not_exist_yet_tells_no_runs_apart(make_run, tmp_path):
    old = make_run(num_steps=60)
    make_run(num_steps=60, seed=1)
    text = (old / "config.yaml").read_text()
    assert "  window: 16\n" in text
    (old / "config.yaml").write_text(text.replace("  window: 16\n", ""))
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    assert legend(drawn(loss_curves, frame)[0]) == ["bf16, AdamW"]


def test_accuracy_is_that_of_the_last_step_in_percent_and_a_cross_where_there_is_none(
    make_run, query
):
    for name, scores in {"adamw": (0.1, 0.2), "stable_adamw": (0.3, 0.5)}.items():
        for beta2, score in zip((0.9, 0.99), scores, strict=True):
            make_run(num_steps=60, optimizer=name, beta2=beta2, experiment="update_clipping",
                     columns={"zero_shot/top1": np.full(60, score)})  # fmt: skip
    make_run(num_steps=60, optimizer="adamw", beta2=0.995, steps=30, state="diverged",
             experiment="update_clipping")  # fmt: skip
    make_run(num_steps=60, optimizer="adamw", beta2=0.9, lr=5e-4, experiment="update_clipping",
             columns={"zero_shot/top1": np.full(60, 0.9)})  # fmt: skip
    frame = query(update_clipping)
    ends = frame.set_index(["optimizer", "beta2"])["accuracy"]
    assert ends["adamw", 0.9] == 10 and ends["stable_adamw", 0.99] == 50
    assert np.isnan(ends["adamw", 0.995])
    [accuracy] = drawn(update_clipping, frame)
    crosses = [line for line in accuracy.get_lines() if line.get_marker() == "X"]
    assert [list(line.get_xdata()) for line in crosses] == [[2]]
    ticks = [tick.get_text() for tick in accuracy.get_xticklabels()]
    assert ticks == ["0.9", "0.99", "0.995"]


BLOCKS = [paper.BLOCK.format(k) for k in range(4)]
WEIGHTS = [f"{block}.mlp.c_proj.weight" for block in BLOCKS]
NUM_STEPS = 200


@pytest.fixture(name="record")
def record_fixture(make_run):
    """A function that makes a run with block k's features (k + 1) * step, and its gradients."""

    def record(intervention="none", seed=0):
        steps = np.arange(1, NUM_STEPS + 1)
        norms = pd.DataFrame(np.outer(1.0 / steps, np.arange(1, 5)), steps, WEIGHTS)
        norms.loc[20, WEIGHTS[0]] = np.inf
        at = np.arange(50, NUM_STEPS + 1, 50)
        features = pd.DataFrame(np.outer(at, np.arange(1.0, 5)), at, BLOCKS)
        text = features.rename(columns=lambda name: name.removeprefix("visual."))
        blocks = pd.concat([features, text * 1e6], axis=1)
        tables = {"tensors": {"rms": norms, "grad_norm": norms}}
        tables |= {"blocks": {"feature_mean": blocks, "feature_max": blocks * 9}}
        make_run(intervention=InterventionConfig(intervention), tables=tables, seed=seed,
                 num_steps=NUM_STEPS, experiment="gradient_magnitude")  # fmt: skip

    return record


def test_features_are_those_of_the_vision_tower_at_the_first_and_last_record(
    record, make_run, query
):
    make_run(num_steps=60, seed=1)  # without a record of blocks: left out
    record()
    record("zero_init")
    frame = query(feature_magnitude)
    assert frame["run"].nunique() == 2
    assert frame["intervention"].unique().tolist() == ["none", "zero_init"]
    means = frame[frame["intervention"] == "none"].set_index(["at", "block"])["feature_mean"]
    assert means["first"].to_dict() == {0: 50, 1: 100, 2: 150, 3: 200}
    assert means["last"].to_dict() == {0: 200, 1: 400, 2: 600, 3: 800}


def test_one_tiny_gradient_does_not_stretch_the_axes(record, query):
    for seed in range(2):
        record(seed=seed)
    frame = query(gradient_magnitude)
    frame["gradient"] = frame["gradient"].mask(frame.index == 0, 1e-9)  # one of 1,600
    assert drawn(gradient_magnitude, frame)[0].get_ylim()[0] > 1e-3


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

    def make(recipe, **keys):
        columns = dict.fromkeys((*RECALL, VALIDATION_LOSS), np.full(20, 0.5))
        keys = {"experiment": "accuracy_vs_size", "model": "mini_l", "scale": "mini"} | keys
        return make_run(recipe=recipe, num_steps=20, tables={}, columns=columns, **keys).name

    return make


def test_formats_have_rows_by_bits_and_a_cross_without_a_value(evaluated, query):
    for recipe in ("high", "llm_int8", "switchback", "fp8_tensorwise"):
        evaluated(recipe)
    evaluated("mxfp4", experiment="formats", seed=1)
    frame = query(FIGURES["formats"])
    frame.loc[frame["seed"] == 1, "validation_loss"] = np.nan
    left, right = drawn(FIGURES["formats"], frame)
    names = [tick.get_text() for tick in left.get_yticklabels()]
    assert names[:2] == ["bf16, 16 bits", "SwitchBack int8, 10.67 bits"]
    assert names[-1] == "MXFP4, 4.25 bits" and len(names) == 5
    classes = ["16 bits", "some products or steps in 16 bits", "8 bits", "4 bits"]
    assert legend(left) == classes
    crosses = [line.get_ydata() for line in right.lines if line.get_marker() == "X"]
    assert crosses == [[4]]


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


def test_one_product_is_drawn_by_product_and_format_beside_16_bits(evaluated, query):
    operands = {"output": {"x": "rowwise", "w": "rowwise"}, "grad_input": {"g": "rowwise"}}
    operands |= {"grad_weight": {"g": "columnwise", "x": "columnwise"}}
    operands["grad_input"]["w"] = "columnwise"
    alone = [(name, form) for name in operands for form in ("int8", "e2m1")]
    for name, form in alone:
        products = {name: {"format": form, **operands[name]}}
        evaluated("custom", products=products, experiment="one_product")
    e2m1 = {"recipe": "custom", "products": products, "experiment": "one_product", "seed": 1}
    evaluated(**e2m1, state="diverged", steps=12)
    both = {name: {"format": "int8", **operands[name]} for name in ("output", "grad_weight")}
    evaluated("custom", products=both, experiment="one_product")
    evaluated("high")
    evaluated("switchback")
    evaluated("high", lr=5e-3)
    frame = query(one_product)
    assert {(row.product, row.format) for row in frame.itertuples()} == {*alone, ("", "bf16")}
    for ax in drawn(one_product, frame):
        points = [x for line in ax.lines if line.get_marker() == "o" for x in line.get_xdata()]
        assert len(points) == 8 and len(set(points)) == 7  # two of the format that diverged
        names = [label.get_text().replace("\n", " ") for label in ax.get_xticklabels()]
        assert names == ["none", "output", "input gradient", "weight gradient"]
    caption = one_product.caption(frame)
    assert caption.endswith("mini L grad_weight e2m1 (diverged at step 12).")
    assert "(1 and 2 seeds of each setting)" in caption
    assert "(1 seed of each setting)" in one_product.caption(frame[frame["seed"] == 0])
    assert legend(ax) == ["int8", "e2m1", "bf16"]
    for losses, scales in ((np.nan, ["linear"]), (2.0 ** np.arange(8), ["linear", "log"])):
        axes = drawn(one_product, frame.assign(validation_loss=losses))
        assert [ax.get_yscale() for ax in axes] == scales


def test_an_accuracy_axis_that_does_not_start_at_0_says_so(make_run, query):
    keys = {"experiment": "accuracy_vs_size", "model": "mini_l", "scale": "mini", "num_steps": 20}
    for seed, recall, is_said in ((0, 0.5, True), (1, 0.6, True), (2, 0.01, False)):
        make_run(seed=seed, columns=dict.fromkeys(RECALL, np.full(20, recall)), **keys)
        (ax,) = drawn(accuracy_vs_size, query(accuracy_vs_size))
        assert (ax.get_ylim()[0] > 0) == is_said
        assert ax.get_ylabel() == f"mean R@1 (%{', axis not from 0' * is_said})"
