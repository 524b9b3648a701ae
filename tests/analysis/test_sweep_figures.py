"""Figures of loss curves over sweeps: spikes_vs_*, beta2_schedule, update_clipping."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import load_runs, make, style
from analysis.figures import (
    beta2_schedule,
    spikes_vs_batch,
    spikes_vs_lr,
    spikes_vs_size,
    update_clipping,
)

SWEEPS = {  # figure: key of make_run, its values in the order of the panels, titles
    spikes_vs_size: ("model", ("vit_b32", "vit_l14"), ("ViT-B/32", "ViT-L/14")),
    spikes_vs_batch: ("batch_size", (512, 4096), ("batch 512", "batch 4,096")),
    spikes_vs_lr: ("lr", (5e-4, 2e-3), ("lr 0.0005", "lr 0.002")),
}


def drawn(module, frame):
    figure = Figure(layout="constrained")
    module.draw(frame, figure)
    figure.draw_without_rendering()
    return figure.axes


def legend(ax):
    return [text.get_text().replace("\n", " ") for text in ax.get_legend().get_texts()]


def hues(ax):
    return [handle.get_color() for handle in ax.get_legend().legend_handles]


@pytest.fixture(name="query")
def query_fixture(tmp_path):
    return lambda module: module.query(load_runs(tmp_path / "runs"))


@pytest.mark.parametrize("figure", SWEEPS, ids=lambda figure: figure.key)
def test_a_panel_a_value_and_a_line_a_beta2_in_order(make_run, query, figure):
    key, values, titles = SWEEPS[figure]
    for value in reversed(values):
        for beta2 in (0.99, 0.9):
            make_run(num_steps=60, beta2=beta2, **{key: value})
    axes = drawn(figure, query(figure))
    assert [ax.get_title() for ax in axes] == list(titles)
    for ax in axes:
        assert legend(ax) == ["beta2 = 0.9", "beta2 = 0.99"]
        assert hues(ax) == [style.beta2_color(0.9), style.beta2_color(0.99)]


@pytest.mark.parametrize("figure", SWEEPS, ids=lambda figure: figure.key)
def test_a_value_without_the_smallest_beta2_keeps_the_place_of_its_panel(make_run, query, figure):
    key, values, titles = SWEEPS[figure]
    make_run(num_steps=60, beta2=0.9, **{key: values[1]})
    make_run(num_steps=60, beta2=0.99, **{key: values[0]})
    assert [ax.get_title() for ax in drawn(figure, query(figure))] == list(titles)


def test_lines_of_a_sweep_are_the_numbers_of_the_frame(make_run, query):
    make_run(num_steps=200, lr=1e-3, beta2=0.9)
    make_run(num_steps=200, lr=2e-3, beta2=0.9)
    frame = query(spikes_vs_lr)
    assert frame["value"].unique().tolist() == [1e-3, 2e-3]
    for ax, (_, part) in zip(drawn(spikes_vs_lr, frame), frame.groupby("value"), strict=True):
        raw, smoothed = ax.get_lines()
        np.testing.assert_array_equal(raw.get_ydata(), part["loss"])
        np.testing.assert_array_equal(smoothed.get_ydata(), part["loss_smoothed"])
        assert smoothed.get_linestyle() == "-"


def test_runs_of_one_cell_of_a_sweep_that_differ_are_told_apart(make_run, query):
    make_run(num_steps=60)
    make_run(num_steps=60, optimizer="stable_adamw")
    make_run(num_steps=60, compile=True)
    assert legend(drawn(spikes_vs_size, query(spikes_vs_size))[0]) == [
        "beta2 = 0.99, bf16, StableAdamW",
        "beta2 = 0.99, bf16, AdamW (compile=false)",
        "beta2 = 0.99, bf16, AdamW (compile=true)",
    ]


def test_models_that_share_a_panel_are_named(make_run, query):
    for model in ("mini_b", "mini_l"):
        make_run(num_steps=60, model=model)
    (ax,) = drawn(spikes_vs_lr, query(spikes_vs_lr))
    assert legend(ax) == ["mini B, beta2 = 0.99", "mini L, beta2 = 0.99"]


def test_a_sweep_marks_runs_that_did_not_end_and_says_so_in_its_caption(make_run, query):
    make_run(num_steps=100, steps=70, state="diverged", lr=5e-3)
    make_run(num_steps=100, steps=40, state="running", lr=1e-3)
    text = spikes_vs_lr.caption(query(spikes_vs_lr))
    assert "Diverged (cross): nano lr 0.005, beta2 = 0.99 (diverged at step 70)." in text
    assert "Incomplete: nano lr 0.001, beta2 = 0.99 (incomplete: 40 of 100 steps)." in text
    assert "After figure 8" in text and "All runs: bf16, AdamW." in text


@pytest.mark.parametrize("figure", [*SWEEPS, beta2_schedule, update_clipping])
def test_a_damaged_config_is_left_out_and_no_run_is_an_empty_frame(make_run, query, figure):
    damaged = make_run(num_steps=60)
    (damaged / "config.yaml").write_text("{")
    assert query(figure).empty
    kept = make_run(num_steps=60, seed=1)
    assert query(figure)["run"].unique().tolist() == [kept.name]


def test_color_of_a_beta2_depends_on_it_alone_and_grows_brighter():
    sweep = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
    colors = [style.beta2_color(beta2) for beta2 in sweep]
    assert len(set(colors)) == len(sweep)
    assert all(sum(a) < sum(b) for a, b in zip(colors, colors[1:], strict=False))


def test_a_schedule_of_beta2_is_dashed_and_named_with_its_last_value(make_run, query):
    for decay in (0.65, None, 0.5):
        make_run(num_steps=100, optimizer="stable_adamw", beta2=0.98, beta2_decay=decay)
    frame = query(beta2_schedule)
    (ax,) = drawn(beta2_schedule, frame)
    assert legend(ax) == ["beta2 = 0.98", "1 - t^-0.5 (to 0.900)", "1 - t^-0.65 (to 0.950)"]
    constant, *schedules = ax.get_legend().legend_handles
    assert constant.get_linestyle() == "-"
    assert {line.get_linestyle() for line in schedules} == {"--"}
    assert "All runs: bf16, StableAdamW." in beta2_schedule.caption(frame)


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
    caption = update_clipping.caption(frame)
    assert "beta2 = 0.995, bf16, AdamW (diverged at step 30)" in caption
    assert "Diamonds" not in caption


def test_numbers_of_the_paper_stand_beside_its_own_model_only_and_are_marked(clipping, query):
    clipping("paper", "vit_h14")
    frame = query(update_clipping)
    (*_, accuracy) = drawn(update_clipping, frame)
    assert "the paper's, +-0.2" in legend(accuracy)
    assert "Diamonds: the paper's ViT-H/14" in update_clipping.caption(frame)


def test_an_accuracy_of_seeds_is_their_mean_with_every_seed_a_point(make_run, query):
    for seed, score in ((0, 0.2), (1, 0.4)):
        make_run(num_steps=60, seed=seed, columns={"zero_shot/top1": np.full(60, score)})
    _, accuracy = drawn(update_clipping, query(update_clipping))
    mean, points = accuracy.get_lines()
    assert mean.get_ydata() == pytest.approx([30])
    assert sorted(points.get_ydata()) == pytest.approx([20, 40])


def test_make_writes_each_of_them(make_run, clipping, tmp_path):
    clipping()
    slugs = ("spikes_vs_size", "spikes_vs_batch", "spikes_vs_lr", "beta2_schedule")
    for slug in slugs:
        make_run(num_steps=60, experiment=slug, scale="mini")
    for slug in (*slugs, "update_clipping"):
        arguments = [slug, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
        assert make.main(arguments) == 0
        assert (tmp_path / "out" / f"{slug}_mini.png").stat().st_size > 10_000
