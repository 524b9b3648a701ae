"""Tests the figures of runs: what their frames hold and what is drawn and named."""

import shutil

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis import load_runs, paper, style
from analysis.figures import (
    beta2_schedule,
    feature_magnitude,
    gradient_magnitude,
    loss_curves,
    spikes_vs_batch,
    spikes_vs_lr,
    spikes_vs_size,
    update_clipping,
)
from lowprec.config.schema import InterventionConfig


def drawn(module, frame):
    """The axes of a figure drawn from a frame."""
    figure = Figure(layout="constrained")
    module.draw(frame, figure)
    figure.draw_without_rendering()
    return figure.axes


def legend(ax):
    return [text.get_text().replace("\n", " ") for text in ax.get_legend().get_texts()]


@pytest.fixture(name="query")
def query_fixture(tmp_path):
    return lambda module: module.query(load_runs(tmp_path / "runs"))


def test_smooth_is_a_centered_box_with_its_edges_cut():
    series = pd.Series(np.arange(100.0) ** 2)
    smoothed = style.smooth(series, 5)
    assert smoothed.isna().sum() == 4 and smoothed.iloc[[0, 1, -2, -1]].isna().all()
    expected = [series[i - 2 : i + 2 + 1].mean() for i in range(2, 98)]
    # a running sum over squares up to 1e4 rounds in the last of 16 digits
    np.testing.assert_allclose(smoothed.dropna(), expected, rtol=1e-10)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_smooth_leaves_a_gap_around_a_non_finite_loss_and_goes_on(bad):
    series = pd.Series(np.ones(30))
    series[10] = bad
    smoothed = style.smooth(series, 5)
    assert smoothed[8:12].isna().all() and (smoothed[13:28] == 1).all()


def test_lines_are_every_step_and_the_median_of_seeds(make_run, tmp_path):
    for seed in range(2):
        losses = np.linspace(5, 1, 200) + np.where(np.arange(200) == 150, seed, 0.1 * seed)
        make_run(optimizer="adamw", num_steps=200, seed=seed, losses=losses)
    make_run(optimizer="stable_adamw", num_steps=200)
    runs = load_runs(tmp_path / "runs")
    frame = loss_curves.query(runs)
    assert tuple(frame.columns) == loss_curves.COLUMNS
    (ax,) = drawn(loss_curves, frame)
    recorded = runs.metrics.pivot(index="step", columns="run", values="loss")
    lines = {tuple(line.get_ydata()): line for line in ax.get_lines()}
    assert len(lines) == 4 and all(len(values) == 200 for values in lines)
    for run, part in frame.groupby("run"):
        line = lines[tuple(recorded[run])]  # as high as its spike
        assert line.get_color() == style.color("bf16", part["optimizer"].iloc[0])
    seeds = frame.loc[frame["optimizer"] == "adamw", "run"].unique()
    assert lines[tuple(recorded[seeds].median(axis=1))].get_linewidth() > line.get_linewidth()


def test_a_diverged_run_ends_in_a_cross_and_does_not_stretch_the_axis(make_run, tmp_path):
    make_run(optimizer="stable_adamw", num_steps=200)
    losses = np.concatenate([np.linspace(4, 1, 60), np.linspace(1, 90, 60)])
    make_run(optimizer="adamw", num_steps=200, steps=120, state="diverged", losses=losses)
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    (ax,) = drawn(loss_curves, frame)
    assert legend(ax) == ["bf16, StableAdamW", "bf16, AdamW (diverged at step 120)"]
    crosses = [line for line in ax.get_lines() if line.get_marker() == "X"]
    top = ax.get_ylim()[1]
    assert [(list(c.get_xdata()), list(c.get_ydata())) for c in crosses] == [([119], [top])]
    assert top < 5
    assert "diverged at step 120" in loss_curves.caption(frame)


def test_an_incomplete_run_says_so_in_legend_and_caption(make_run):
    frame = loss_curves.query(load_runs(make_run(num_steps=2000, steps=1300, state="failed")))
    (ax,) = drawn(loss_curves, frame)[:1]
    assert legend(ax) == ["bf16, AdamW (incomplete: 1,300 of 2,000 steps)"]
    assert "(incomplete: 1,300 of 2,000 steps)" in loss_curves.caption(frame)


def test_runs_without_steps_and_with_damaged_configs_are_left_out(make_run, tmp_path):
    kept = make_run(num_steps=60)
    make_run(num_steps=60, steps=0, seed=1, state="running")
    damaged = make_run(num_steps=60, seed=2)
    (damaged / "config.yaml").write_text("{")
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    assert frame["run"].unique().tolist() == [kept.name]
    assert loss_curves.query(load_runs(damaged)).empty


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


def test_two_runs_of_one_cell_are_told_apart_by_their_digests(make_run, tmp_path):
    runs = [make_run(num_steps=60, data=data) for data in ("ab" * 32, "cd" * 32)]
    for run in runs:
        (run / "attempts.jsonl").unlink()  # they do not say what their data held
    digests = sorted(run.name[-10:] for run in runs)
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    assert legend(drawn(loss_curves, frame)[0]) == [
        f"bf16, AdamW (run {digest})" for digest in digests
    ]


def test_a_copied_run_is_marked_as_one(make_run, tmp_path):
    run = make_run(num_steps=60)
    shutil.copytree(run, tmp_path / "runs" / "backup" / run.name)
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    digest = run.name[-10:]
    assert legend(drawn(loss_curves, frame)[0]) == [
        f"bf16, AdamW (run {digest})", f"bf16, AdamW (run {digest}, copy 1)"
    ]  # fmt: skip


@pytest.mark.parametrize("state", ["finished", "diverged"])
def test_missing_rows_are_a_gap_in_the_line_and_a_mark_in_the_legend(make_run, state):
    run = make_run(num_steps=60, state=state)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:20] + lines[23:]))
    frame = loss_curves.query(load_runs(run))
    assert frame.loc[frame["loss"].isna(), "step"].tolist()[:3] == [21, 22, 23]
    assert frame.set_index("step")["loss_median"][18:26].isna().sum() >= 3
    mark = "incomplete: 57 of 60 steps" if state == "finished" else "60; 3 steps missing"
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


@pytest.mark.parametrize(
    ("figure", "key", "values", "titles"),
    [
        (spikes_vs_size, "model", ("vit_b32", "vit_l14"), ["ViT-B/32", "ViT-L/14"]),
        (spikes_vs_batch, "batch_size", (512, 4096), ["batch 512", "batch 4,096"]),
        (spikes_vs_lr, "lr", (5e-4, 2e-3), ["lr 0.0005", "lr 0.002"]),
    ],
    ids=["size", "batch", "lr"],
)
def test_sweep_has_a_panel_per_value_and_a_line_per_beta2_in_order(
    make_run, query, figure, key, values, titles
):
    for value in reversed(values):
        for beta2 in (0.99, 0.9):
            make_run(num_steps=60, beta2=beta2, **{key: value})
    axes = drawn(figure, query(figure))
    assert [ax.get_title() for ax in axes] == titles
    for ax in axes:
        assert legend(ax) == ["beta2 = 0.9", "beta2 = 0.99"]
        colors = [line.get_color() for line in ax.get_legend().legend_handles]
        assert colors == [style.beta2_color(0.9), style.beta2_color(0.99)]


def test_a_schedule_of_beta2_is_dashed_and_named_with_its_last_value(make_run, query):
    for decay in (0.65, None, 0.5):
        make_run(num_steps=100, optimizer="stable_adamw", beta2=0.98, beta2_decay=decay)
    frame = query(beta2_schedule)
    (ax,) = drawn(beta2_schedule, frame)
    assert legend(ax) == ["beta2 = 0.98", "1 - t^-0.5 (to 0.900)", "1 - t^-0.65 (to 0.950)"]
    constant, *schedules = ax.get_legend().legend_handles
    assert constant.get_linestyle() == "-"
    assert {line.get_linestyle() for line in schedules} == {"--"}


@pytest.fixture(name="clipping")
def clipping_fixture(make_run):
    def make(scale="mini", model="mini_l"):
        for name, scores in {"adamw": (0.1, 0.2), "stable_adamw": (0.3, 0.5)}.items():
            for beta2, score in zip((0.9, 0.99), scores, strict=True):
                column = {"zero_shot/top1": np.full(60, score)}
                make_run(num_steps=60, optimizer=name, beta2=beta2, columns=column, scale=scale,
                         model=model, experiment="update_clipping")  # fmt: skip
        make_run(num_steps=60, optimizer="adamw", beta2=0.995, steps=30, state="diverged",
                 scale=scale, model=model, experiment="update_clipping")  # fmt: skip

    return make


def test_losses_are_of_the_largest_beta2_of_all_methods(clipping, query):
    clipping()
    frame = query(update_clipping)
    assert tuple(frame.columns) == update_clipping.COLUMNS
    loss = frame[frame["part"] == "loss"]
    assert loss["beta2"].unique().tolist() == [0.99]
    assert loss.groupby("optimizer")["step"].max().to_dict() == {"adamw": 60, "stable_adamw": 60}


def test_accuracy_is_that_of_the_last_step_in_percent_and_a_cross_where_there_is_none(
    clipping, query
):
    clipping()
    frame = query(update_clipping)
    ends = frame[frame["part"] == "accuracy"].set_index(["optimizer", "beta2"])["accuracy"]
    assert ends["adamw", 0.9] == 10 and ends["stable_adamw", 0.99] == 50
    assert np.isnan(ends["adamw", 0.995])
    loss, accuracy = drawn(update_clipping, frame)
    assert legend(loss) == ["bf16, StableAdamW", "bf16, AdamW"]
    crosses = [line for line in accuracy.get_lines() if line.get_marker() == "X"]
    assert [list(line.get_xdata()) for line in crosses] == [[pytest.approx(0.005)]]
    ticks = [text.get_text() for text in accuracy.get_xticklabels()]
    assert ticks == ["0.9", "0.99", "0.995"]
    assert accuracy.get_xlim()[0] > accuracy.get_xlim()[1]  # larger beta2 to the right


def test_an_accuracy_of_seeds_is_their_mean_with_every_seed_a_point(make_run, query):
    for seed, score in ((0, 0.2), (1, 0.4)):
        make_run(num_steps=60, seed=seed, columns={"zero_shot/top1": np.full(60, score)})
    _, accuracy = drawn(update_clipping, query(update_clipping))
    mean, points = accuracy.get_lines()
    assert mean.get_ydata() == pytest.approx([30])
    assert sorted(points.get_ydata()) == pytest.approx([20, 40])


BLOCKS = [paper.BLOCK.format(k) for k in range(4)]
WEIGHTS = [f"{block}.mlp.c_proj.weight" for block in BLOCKS]
NUM_STEPS = 200


@pytest.fixture(name="record")
def record_fixture(make_run):
    """A function that makes a run with block k's features (k + 1) * step, and its gradients."""

    def record(intervention="none", details=True, last=NUM_STEPS, **keys):
        every = np.arange(1, NUM_STEPS + 1)
        norms = pd.DataFrame(np.outer(1.0 / every, np.arange(1, 5)), every, WEIGHTS)
        norms.loc[20, WEIGHTS[0]] = np.inf
        at = np.arange(50, last + 1, 50)
        features = pd.DataFrame(np.outer(at, np.arange(1.0, 5)), at, BLOCKS)
        text = features.rename(columns=lambda name: name.removeprefix("visual."))
        blocks = pd.concat([features, text * 1e6], axis=1)
        tables = {"tensors": {"rms": norms, "grad_norm": norms}}
        tables |= {"details": {"grad_abs_max": norms.loc[100::100] / 10}} if details else {}
        tables |= {"blocks": {"feature_mean": blocks, "feature_max": blocks * 9}}
        keys = {"num_steps": NUM_STEPS, "experiment": "gradient_magnitude"} | keys
        return make_run(intervention=InterventionConfig(intervention), tables=tables, **keys)

    return record


def test_features_are_those_of_the_vision_tower_at_the_first_and_last_record(record, tmp_path):
    record()
    record("zero_init")
    frame = feature_magnitude.query(load_runs(tmp_path / "runs"))
    assert tuple(frame.columns) == feature_magnitude.COLUMNS
    assert frame["intervention"].unique().tolist() == ["none", "zero_init"]
    shown = frame[frame["intervention"] == "none"].set_index(["at", "block"])["feature_mean"]
    assert shown["first"].to_dict() == {0: 50, 1: 100, 2: 150, 3: 200}
    assert shown["last"].to_dict() == {0: 200, 1: 400, 2: 600, 3: 800}


def test_gradients_are_of_the_last_product_of_the_shown_blocks(record, tmp_path):
    record()
    frame = gradient_magnitude.query(load_runs(tmp_path / "runs"))
    norms = frame[frame["statistic"] == "grad_norm"].pivot(
        index="step", columns="block", values="gradient"
    )
    assert norms.columns.tolist() == [0, 1, 2, 3] and len(norms) == NUM_STEPS
    assert norms.loc[10].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert np.isnan(norms.loc[20, 0])  # infinite: a gap
    largest = frame[frame["statistic"] == "grad_abs_max"]
    assert sorted(largest["step"].unique()) == [100, 200]


def test_runs_without_a_record_of_blocks_are_left_out(make_run, query):
    make_run(num_steps=60)
    assert query(feature_magnitude).empty and query(gradient_magnitude).empty
