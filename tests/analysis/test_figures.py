import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis import load_runs, make, style
from analysis.figures import loss_curves
from lowprec.config.schema import InterventionConfig

FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs"


def drawn(frame):
    figure = Figure(layout="constrained")
    loss_curves.draw(frame, figure)
    figure.draw_without_rendering()
    return figure.axes


def legend(ax):
    return [text.get_text().replace("\n", " ") for text in ax.get_legend().get_texts()]


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


@pytest.mark.parametrize(("steps", "width"), [(20000, 40), (400, 40), (200, 20), (5, 1)])
def test_smoothing_width_is_at_most_a_tenth_of_the_run(steps, width):
    assert style.smoothing_width(steps) == width


def test_every_method_has_its_own_color():
    methods = [("bf16", name) for name in style.OPTIMIZERS]
    methods += [(name, "stable_adamw") for name in style.PRECISIONS if name != "bf16"]
    assert len({style.color(*method) for method in methods}) == len(methods)
    assert style.color("unheard_of", "adamw") == style.color("custom", "adamw")


def test_the_frame_holds_every_step_and_its_smoothed_loss(make_run, tmp_path):
    make_run(optimizer="adamw", num_steps=200)
    make_run(optimizer="stable_adamw", num_steps=200)
    runs = load_runs(tmp_path / "runs")
    frame = loss_curves.query(runs)
    assert tuple(frame.columns) == loss_curves.COLUMNS
    assert frame.groupby("run")["step"].apply(list).tolist() == [list(range(1, 201))] * 2
    for _, part in frame.groupby("run"):
        raw = runs.metrics.loc[runs.metrics["run"] == part["run"].iloc[0], "loss"]
        assert part["loss"].tolist() == raw.tolist()
        expected = style.smooth(raw, 20)
        np.testing.assert_array_equal(part["loss_smoothed"].to_numpy(), expected.to_numpy())


def test_lines_are_the_numbers_of_the_frame(make_run, tmp_path):
    make_run(optimizer="adamw", num_steps=200)
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    (ax,) = drawn(frame)
    raw, smoothed = ax.get_lines()
    np.testing.assert_array_equal(raw.get_ydata(), frame["loss"])
    np.testing.assert_array_equal(smoothed.get_ydata(), frame["loss_smoothed"])
    assert smoothed.get_color() == style.color("bf16", "adamw")


def test_a_panel_a_model_from_small_to_large_with_an_inset_when_long(make_run, tmp_path):
    for model in ("vit_h14", "vit_b32"):
        make_run(model=model, num_steps=1000, scale="paper")
    axes = drawn(loss_curves.query(load_runs(tmp_path / "runs")))
    assert [ax.get_title() for ax in axes] == ["ViT-B/32 (paper scale)", "ViT-H/14 (paper scale)"]
    (inset,) = axes[0].child_axes
    assert inset.get_xlim() == (900, 1000)


def test_a_diverged_run_ends_in_a_cross_and_does_not_stretch_the_axis(make_run, tmp_path):
    make_run(optimizer="stable_adamw", num_steps=200)
    losses = np.concatenate([np.linspace(4, 1, 60), np.linspace(1, 90, 60)])
    make_run(optimizer="adamw", num_steps=200, steps=120, state="diverged", losses=losses)
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    (ax,) = drawn(frame)
    assert legend(ax) == ["bf16, StableAdamW", "bf16, AdamW (diverged at step 120)"]
    crosses = [line for line in ax.get_lines() if line.get_marker() == "X"]
    top = ax.get_ylim()[1]
    assert [(list(c.get_xdata()), list(c.get_ydata())) for c in crosses] == [([119], [top])]
    assert top < 5
    assert "Diverged (cross): nano bf16, AdamW (diverged at step 120)." in loss_curves.caption(
        frame
    )


def test_a_run_that_diverged_at_once_is_drawn(make_run):
    frame = loss_curves.query(load_runs(make_run(steps=1, state="diverged")))
    (ax,) = drawn(frame)
    assert legend(ax) == ["bf16, AdamW (diverged at step 1)"]


@pytest.mark.parametrize("state", ["running", "failed", "preempted"])
def test_an_incomplete_run_says_so_in_legend_and_caption(make_run, state):
    frame = loss_curves.query(load_runs(make_run(num_steps=2000, steps=1300, state=state)))
    (ax,) = drawn(frame)[:1]
    assert legend(ax) == ["bf16, AdamW (incomplete: 1,300 of 2,000 steps)"]
    assert "(incomplete: 1,300 of 2,000 steps)" in loss_curves.caption(frame)


def test_a_run_that_is_still_evaluating_is_incomplete(make_run):
    frame = loss_curves.query(load_runs(make_run(num_steps=60, state="running")))
    assert frame["label"].unique().tolist() == ["bf16, AdamW (incomplete: 60 of 60 steps)"]


def test_runs_without_steps_and_with_damaged_configs_are_left_out(make_run, tmp_path):
    kept = make_run(num_steps=60)
    make_run(num_steps=60, steps=0, seed=1, state="running")
    damaged = make_run(num_steps=60, seed=2)
    (damaged / "config.yaml").write_text("{")
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    assert frame["run"].unique().tolist() == [kept.name]
    assert loss_curves.query(load_runs(damaged)).empty


def test_settings_tell_runs_of_one_method_apart_and_seeds_share_a_line_of_the_legend(
    make_run, tmp_path
):
    for beta2 in (0.99, 0.9):
        for seed in (0, 1):
            make_run(num_steps=60, beta2=beta2, seed=seed)
    (ax,) = drawn(loss_curves.query(load_runs(tmp_path / "runs")))
    assert legend(ax) == ["bf16, AdamW (beta2=0.9)", "bf16, AdamW (beta2=0.99)"]
    assert len({handle.get_color() for handle in ax.get_legend().legend_handles}) == 2


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"num_steps": 80}, ("num_steps=60", "num_steps=80")),
        ({"compile": True}, ("compile=false", "compile=true")),
        ({"intervention": InterventionConfig("kq_norm")}, ("intervention=kq_norm", "=none")),
        ({"data": "cd" * 32}, ("data=ababababab", "data=cdcdcdcdcd")),
    ],
    ids=["steps", "code path", "model", "data"],
)
def test_runs_of_one_method_that_differ_in_any_way_are_told_apart(
    make_run, tmp_path, change, shown
):
    make_run(num_steps=60)
    make_run(**{"num_steps": 60, **change})
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    (ax,) = drawn(frame)
    for line, text in zip(legend(ax), shown, strict=True):
        assert text in line
    assert frame["variant"].nunique() == 2


def test_two_runs_of_one_cell_are_told_apart_by_their_digests(make_run, tmp_path):
    runs = [make_run(num_steps=60, data=data) for data in ("ab" * 32, "cd" * 32)]
    for run in runs:
        (run / "attempts.jsonl").unlink()  # they do not say what their data held
    digests = sorted(run.name[-10:] for run in runs)
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    assert legend(drawn(frame)[0]) == [f"bf16, AdamW (run {digest})" for digest in digests]


def test_a_copied_run_is_marked_as_one(make_run, tmp_path):
    run = make_run(num_steps=60)
    shutil.copytree(run, tmp_path / "runs" / "backup" / run.name)
    frame = loss_curves.query(load_runs(tmp_path / "runs"))
    digest = run.name[-10:]
    assert legend(drawn(frame)[0]) == [
        f"bf16, AdamW (run {digest})", f"bf16, AdamW (run {digest}, copy 1)"
    ]  # fmt: skip


def test_different_data_in_one_figure_is_said_in_the_caption(make_run, tmp_path):
    make_run(num_steps=60)
    make_run(num_steps=60, optimizer="stable_adamw", data="cd" * 32)
    _, about = make.draw("loss_curves", tmp_path / "runs", tmp_path / "out", "")
    assert "2 different sets of data" in about["caption"].partition(" Marked: ")[2]


@pytest.mark.parametrize("state", ["finished", "diverged"])
def test_missing_rows_are_a_gap_in_the_line_and_a_mark_in_the_legend(make_run, state):
    run = make_run(num_steps=60, state=state)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:20] + lines[23:]))
    frame = loss_curves.query(load_runs(run))
    assert frame.loc[frame["loss"].isna(), "step"].tolist()[:3] == [21, 22, 23]
    assert frame.set_index("step")["loss_smoothed"][18:26].isna().sum() >= 3
    mark = "incomplete: 57 of 60 steps" if state == "finished" else "60; 3 steps missing"
    assert mark in legend(drawn(frame)[0])[0]
    assert mark in loss_curves.caption(frame)


def test_rows_missing_at_the_end_of_a_finished_run_make_it_incomplete(make_run):
    run = make_run(num_steps=60)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:50]))
    frame = loss_curves.query(load_runs(run))
    assert legend(drawn(frame)[0]) == ["bf16, AdamW (incomplete: 50 of 60 steps)"]


def test_a_key_that_did_not_exist_yet_tells_no_runs_apart(make_run, tmp_path):
    old = make_run(num_steps=60)
    make_run(num_steps=60, seed=1)
    text = (old / "config.yaml").read_text()
    assert "  window: 16\n" in text
    (old / "config.yaml").write_text(text.replace("  window: 16\n", ""))
    assert legend(drawn(loss_curves.query(load_runs(tmp_path / "runs")))[0]) == ["bf16, AdamW"]


def test_the_caption_states_scale_data_runs_and_smoothing(make_run, tmp_path):
    make_run(num_steps=200)
    make_run(num_steps=200, optimizer="stable_adamw")
    text = loss_curves.caption(loss_curves.query(load_runs(tmp_path / "runs")))
    assert "nano on shapes: 2 runs at demo scale (200 steps, batch 128)" in text
    assert "over 20 steps, edges cut (the paper's 40 steps, at most a tenth of a run)" in text
    assert "Inset" not in text and "Diverged" not in text and "Incomplete" not in text


@pytest.mark.skipif(not FIXTURES.exists(), reason="no recorded runs")
def test_recorded_runs_draw():
    runs = load_runs(FIXTURES)
    assert (runs.runs["note"] == "").all()
    assert len(runs.tensors("visual.conv1.weight")) > 0
    frame = loss_curves.query(runs)
    assert set(frame["run"]) == set(runs.runs["run"])
    assert np.isfinite(frame["loss_smoothed"]).any()
    drawn(frame)
