"""Any recorded name of any runs is drawn as it was recorded: nothing is smoothed or mixed."""

import sys
import time
import warnings
from itertools import combinations, pairwise

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection
from matplotlib.text import Text

from analysis import cli, load_runs, plot
from analysis.cli import ChoiceError
from analysis.figures import loss_curves
from analysis.panels import legend_below, name_lines, name_points
from analysis.report.collect import collect_run
from analysis.report.plots import curve_figure
from analysis.style import style
from lowprec import waiting
from tests.analysis.conftest import drawn, legend

CONV = "visual.conv1.weight"


@pytest.fixture
def runs(make_run, tmp_path):
    """A sweep of one's own: two learning rates with three seeds each, and a spike in one run."""
    for seed in range(3):
        for lr in (1e-3, 4e-3):
            losses = 5 - np.arange(30) / 10 + seed / 10
            losses[20] += 2 * (seed == 1)
            score = np.full(30, 0.1 * seed + 100 * lr)
            make_run(experiment=None, lr=lr, seed=seed, num_steps=30, losses=losses,
                     columns={"recall/top1": score})  # fmt: skip
    return load_runs(tmp_path / "runs")


def test_each_seed_is_a_line_and_the_one_that_ends_in_the_middle_has_the_name(runs):
    [ax] = drawn(*plot.make_figure(runs, y="loss", hue="optimizer.lr", facet="model"))
    losses = runs.metrics.pivot(index="step", columns="run", values="loss")
    assert sorted(line.get_ydata().max() for line in ax.lines) == sorted(losses.max())
    named = [line for line in ax.lines if not line.get_label().startswith("_")]
    assert [line.get_ydata()[-1] for line in named] == pytest.approx([2.2, 2.2])
    assert len({line.get_color() for line in named}) == 2
    assert ax.get_title() == "nano" and legend(ax) == ["learning rate 1e-3", "learning rate 4e-3"]


def test_a_run_of_unknown_precision_goes_by_its_name(make_run):
    run = make_run(experiment=None, autocast="unknown", num_steps=30)
    run = run.rename(run.with_name("mlp"))
    for hue, label in (("", "mlp"), ("optimizer.lr", "learning rate 1e-3")):
        row, frame = plot.make_figure(load_runs(run), hue=hue)
        assert set(frame["label"]) == {label}
        assert drawn(row, frame)[0].lines[0].get_linestyle() == "-"
    make_run(experiment=None, autocast="unknown", num_steps=30, seed=1)
    [ax] = drawn(*plot.make_figure(load_runs(run.parent)))
    assert legend(ax) == ["unknown, AdamW"]  # of two seeds


@pytest.mark.parametrize("num_steps", [60, 600])
def test_the_loss_axis_covers_the_first_steps_of_short_runs_alone(make_run, num_steps):
    losses = np.full(num_steps, 0.5)
    losses[:4] = 5.0, 4.0, 3.0, 2.0
    run = make_run(experiment=None, num_steps=num_steps, losses=losses)
    [ax] = drawn(*plot.make_figure(load_runs(run)))
    assert ax.get_xlim()[0] == 0
    assert (ax.get_ylim()[1] > 5) == (num_steps == 60)


def test_a_loss_above_the_axis_has_a_marker_at_its_edge(make_run):
    losses = np.full(100, 0.25)
    losses[0], losses[59:62] = 0.27, 240_106
    run = make_run(experiment=None, num_steps=100, losses=losses)
    row, frame = plot.make_figure(load_runs(run))
    [ax] = drawn(row, frame)
    assert "Triangles at its upper edge" in row.caption(frame)
    [marks] = [line for line in ax.lines if line.get_marker() == "^"]
    assert marks.get_xdata().tolist() == [60, 61, 62] and not marks.get_clip_on()
    assert set(marks.get_ydata()) == {ax.get_ylim()[1]} and ax.get_ylim()[1] < 0.6


@pytest.mark.parametrize(("band", "num"), [("seed", 2), ("optimizer.lr", 1)])
def test_a_band_covers_the_runs_that_differ_in_it_alone(runs, band, num):
    row, frame = plot.make_figure(runs, y="loss", band=band)
    [ax] = drawn(row, frame)
    bands = [each for each in ax.collections if not isinstance(each, LineCollection)]
    assert len(ax.lines) == len(bands) == len(legend(ax)) == num
    highest = max(path.vertices[:, 1].max() for band in bands for path in band.get_paths())
    assert highest == frame["loss"].max()
    medians = frame.groupby(["label", "step"])["loss"].median().groupby("label")
    assert {line.get_ydata().sum() for line in ax.lines} == {part.sum() for _, part in medians}


def test_last_values_are_points_with_mean_and_range(runs):
    row, frame = plot.make_figure(runs, y="recall/top1", x="optimizer.lr")
    [ax] = drawn(row, frame)
    dots, mean, *points = ax.lines
    for line in (dots, mean):
        np.testing.assert_allclose(line.get_ydata(), [0.2, 0.5])
    heights = sorted(np.concatenate([p.get_ydata() for p in points]))
    assert heights == pytest.approx(sorted(frame["recall/top1"])) and legend(ax) == ["bf16"]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0.001", "0.004"]


def test_methods_at_one_value_have_rows_in_a_block(make_run, tmp_path):
    scores = {"recall/top1": np.full(9, 0.5)}
    recipes = ("high", "switchback", "llm_int8", "fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4")
    for recipe in recipes:
        make_run(experiment=None, num_steps=9, recipe=recipe, columns=scores)
    words = {"y": "recall/top1", "x": "model", "hue": "precision"}
    for num in (2, 7):
        some = load_runs(tmp_path / "runs")
        some = some.where(some.summaries["run"].isin(_of(some, recipes[:num])))
        with style():
            [ax] = drawn(*plot.make_figure(some, **words))
        names = ax.get_yticklabels()
        assert [name.get_text() for name in names][:3] == ["nano", "bf16", "SwitchBack int8"]
        assert [name.get_fontweight() == "bold" for name in names] == [True] + num * [False]
        assert not ax.figure.legends and ax.get_xlabel() == "recall/top1 (axis not from 0)"


def _of(runs, recipes):
    return runs.runs.loc[runs.runs["precision.recipe"].isin(recipes), "run"]


def test_runs_without_a_value_of_a_key_stand_first(make_run, tmp_path):
    for decay in (0.65, None, 0.45):
        scores = {"recall/top1": np.full(20, decay or 0.2)}
        make_run(experiment=None, beta2_decay=decay, num_steps=20, columns=scores)
    runs, key = load_runs(tmp_path / "runs"), "optimizer.beta2_decay"
    [ax] = drawn(*plot.make_figure(runs, y="recall/top1", x=key))
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert names[::2] == [f"beta2 decay {value}" for value in ("null", "0.45", "0.65")]
    points = [line.get_xdata() for line in ax.lines if line.get_marker() == "o"]
    values = [x for row in points for x in row]
    assert values == pytest.approx([0.2, 0.45, 0.65])
    [ax] = drawn(*plot.make_figure(runs, y="loss", hue=key))
    assert len(ax.lines) == 3
    assert legend(ax) == [f"beta2 decay {value}" for value in ("null", "0.45", "0.65")]


def test_names_tell_a_setting_once_and_lines_of_one_color_differ(make_run, tmp_path):
    for recipe, optimizer in (("high", "adamw"), ("high", "stable_adamw"), ("switchback", "adamw")):
        make_run(experiment=None, num_steps=9, recipe=recipe, optimizer=optimizer)
    runs, bf16 = load_runs(tmp_path / "runs"), ["bf16, AdamW", "bf16, StableAdamW"]
    for words, names in (
        ({"hue": "precision"}, [*bf16, "SwitchBack int8, AdamW"]),
        ({"hue": "precision", "facet": "optimizer"}, ["bf16", "SwitchBack int8"]),
        ({"hue": "seed", "where": {"precision": "bf16"}}, [f"seed 0, {name}" for name in bf16]),
    ):
        row, frame = plot.make_figure(runs, **words)
        lines = frame.drop_duplicates("label")
        assert sorted(lines["label"]) == sorted(names)
        assert len({row.hue.look(line) for _, line in lines.iterrows()}) == len(names)


def test_a_hue_with_one_value_is_named_beside_the_points(runs):
    with style():  # whose letters are smaller than matplotlib's
        words = {"x": "optimizer.lr", "hue": "optimizer.beta2"}
        [ax] = drawn(*plot.make_figure(runs, y="recall/top1", **words))
    assert legend(ax)[0].startswith("beta2 0.99")
    assert box_of(ax.texts[-1]).x0 > ax.get_window_extent().x1


def box_of(name):
    """The place of a name, without the line that joins it to a point."""
    return Text.get_window_extent(name)


ENDS = {"low": 0.0, "same, mini_l": 1.0, "lower by a little": 0.99, "another name": 1.0}


@pytest.mark.parametrize("last", [10, 5])
def test_lines_have_their_names_beside_them_unless_one_ends_early(last):
    with style():
        figure = plt.figure(layout="constrained", figsize=(3.4, 2.5))
        ax = figure.subplots()
        ax.set(title="mini_l", xlim=(0, 10))
        for name, end in ENDS.items():
            ax.plot([0, last], [0.5, end], label=name)
        name_lines(figure, [ax])
        figure.draw_without_rendering()
    names = sorted(ax.texts, key=lambda text: box_of(text).y0)
    assert len(figure.legends) == (last == 5) and bool(names) == (last == 10)
    if names:
        boxes = [box_of(text) for text in names]
        assert all(low.y1 <= high.y0 + 2 for low, high in pairwise(boxes))
        assert all(ax.bbox.x1 < box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
        colors = [ax.lines[list(ENDS).index(name)].get_color() for name in ENDS]
        texts = {text.get_text(): text.get_color() for text in names}
        assert texts == dict(zip(["low", "same", *list(ENDS)[2:]], colors, strict=True))
        assert [text.get_text() for text in names[:2]] == ["low", "lower by a little"]
        ends = [ax.transLimits.inverted().transform(text.xy) for text in names]  # joined to these
        assert sorted(y for _, y in ends) == pytest.approx(sorted(ENDS.values()))
    plt.close(figure)


def test_lines_of_one_name_have_it_beside_each_bundle():
    with style():
        figure = plt.figure(layout="constrained", figsize=(3.4, 2.5))
        ax = figure.subplots()
        for end in (0.0, 0.01, 0.02, 1.0):
            ax.plot([0, 10], [0.5, end], label="bf16")
        name_lines(figure, [ax])
    ends = [ax.transLimits.inverted().transform(text.xy)[1] for text in ax.texts]
    assert ends == pytest.approx([0.01, 1.0])
    plt.close(figure)


@pytest.mark.parametrize("name", ["group", "a name that is longer than the panel is wide"])
def test_groups_of_points_have_their_names_beside_them_or_else_a_legend(name):
    with style():
        figure = plt.figure(layout="constrained", figsize=(2.4, 2.5))
        ax = figure.subplots()
        at = np.linspace(0, 1, 6)
        for n in range(3):
            ax.plot(at + 0.12 * n, at, "o", ms=4, label=f"{name} {n}")
        name_points(figure, ax)
        figure.draw_without_rendering()
    assert len(figure.legends) == (name != "group") and bool(ax.texts) == (name == "group")
    boxes = [box_of(text) for text in ax.texts]
    points = np.concatenate([ax.transData.transform(line.get_xydata()) for line in ax.lines])
    assert all(ax.bbox.count_contains(box.corners()) == 4 for box in boxes)
    assert not any(box.count_contains(points) for box in boxes)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    plt.close(figure)


def test_a_legend_of_several_panels_has_the_order_of_the_one_with_most_names():
    canvas, axes = plt.subplots(1, 2, layout="constrained")
    for ax, names in zip(axes, ("cd", "abcd"), strict=True):
        for name in names:
            ax.plot([0, 1], [0, 1], label=name)
    legend_below(canvas, axes)
    [shown] = canvas.legends
    assert [text.get_text() for text in shown.get_texts()] == [*"abcd"]
    plt.close(canvas)


def test_a_legend_of_long_names_is_as_wide_as_the_figure_at_most():
    with style():
        figure, ax = plt.subplots(layout="constrained", figsize=(4, 3))
        for n in range(5):
            ax.plot([0, 1], label=f"a recipe with a long name, number {n}")
        legend_below(figure, [ax])
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 and box.x1 <= figure.bbox.x1
    plt.close(figure)


def test_names_of_tensors_and_timing_are_drawn(runs):
    _, rms = plot.make_figure(runs, y=f"rms/{CONV}")
    values = rms.groupby("run")[f"rms/{CONV}"].apply(list).tolist()
    assert values == [list(map(float, range(1, 31)))] * 6
    assert len(plot.make_figure(runs, y="wall_s")[1]) == 12


def test_runs_that_did_not_record_a_name_are_counted(make_run, tmp_path):
    make_run(num_steps=20)
    make_run(num_steps=20, seed=1, columns={"mine": np.ones(20)})
    for x in ("step", "optimizer.lr"):
        with pytest.warns(UserWarning, match="^1 of 2 runs did not record mine$"):
            plot.make_figure(load_runs(tmp_path / "runs"), y="mine", x=x)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"y": "los"}, "y=los: .*nearest: loss"),
        ({"y": f"rms/{CONV[:-2]}th"}, f"STATISTIC/TENSOR; nearest: rms/{CONV}$"),
        ({"y": f"rsm/{CONV}"}, f"STATISTIC/TENSOR; nearest: rms/{CONV}$"),
        ({"hue": "optimizer.beta"}, "no key optimizer.beta; nearest: optimizer.beta2"),
        ({"hue": "precison"}, "no key precison; nearest: precision$"),
        ({"y": "waits"}, "and STATISTIC/TENSOR$"),  # wall_s is not near
        ({"where": {"seed": "7"}}, "no run has seed=7; there are "),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(runs, words, message):
    with pytest.raises(ChoiceError, match=message):
        plot.make_figure(runs, **words)


def test_the_command_writes_picture_and_plotted_numbers(runs, tmp_path, capsys):
    words = ["y=loss", "hue=optimizer.lr", "seed=1"]
    out = tmp_path / "out" / "mine"
    assert plot.main(["--runs", str(runs.root), "--out", f"{out}.png", *words]) == 0
    assert sorted(path.suffix for path in out.parent.iterdir()) == [".csv", ".pdf", ".png"]
    _, frame = plot.make_figure(runs, y="loss", hue="optimizer.lr", where={"seed": "1"})
    written = pd.read_csv(f"{out}.csv")
    expected = frame[["run", "step", "loss", "lr"]].rename(columns={"lr": "optimizer.lr"})
    pd.testing.assert_frame_equal(written, expected, check_dtype=False)
    assert plot.main(["--runs", str(runs.root), "loss"]) == 2
    assert "'loss': KEY=VALUE is expected" in capsys.readouterr().err
    assert plot.main(["--rums", str(runs.root), "y=loss"]) == 2
    assert capsys.readouterr().err.endswith(
        "no such flag; there are --help, --runs, --out; nearest: --runs\n"
    )
    assert plot.main(["--runs", str(runs.root), "--out", "/proc/x/mine"]) == 2
    assert capsys.readouterr().err == "error: /proc/x: No such file or directory\n"


def test_a_slow_command_says_what_it_is_doing(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "SILENT_S", 0.02)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    with warnings.catch_warnings(), pytest.raises(SystemExit):
        cli.run(lambda: waiting.doing("drawing") or time.sleep(0.1))
    assert "\ndrawing (0 s)\n" in f"\n{capsys.readouterr().err}"


def test_a_warning_about_runs_is_printed_as_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "warnoptions", [])
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    with warnings.catch_warnings(), pytest.raises(SystemExit):
        cli.run(lambda: warnings.warn("1 of 2 runs did not record rms/a", stacklevel=1))
    assert capsys.readouterr().err == "warning: 1 of 2 runs did not record rms/a\n"


@pytest.mark.parametrize("num", [3, 7])
def test_labels_of_values_are_turned_only_if_they_would_touch(make_run, tmp_path, num):
    for beta2 in (0.5, 0.8, 0.9, 0.98, 0.99, 0.995, 0.999)[:num]:
        for optimizer in ("adamw", "adamw_clip"):
            make_run(num_steps=20, beta2=beta2, optimizer=optimizer)
    row, frame = plot.make_figure(load_runs(tmp_path / "runs"), x="optimizer.beta2")
    with style():
        [ax] = drawn(row, frame)
        boxes = [text.get_window_extent() for text in ax.get_xticklabels()]
    assert {text.get_rotation() for text in ax.get_xticklabels()} == {45 if num == 7 else 0}
    assert num == 7 or all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_a_long_name_of_a_tensor_has_lines_within_the_figure(make_run):
    name = "vision_model.encoder.layers.23." + "projection_" * 7 + "weight"
    tables = {"tensors": {"rms": pd.DataFrame({name: np.ones(20)}, range(1, 21))}}
    run = make_run(num_steps=20, tables=tables)
    with style():
        [ax] = drawn(*plot.make_figure(load_runs(run), y=f"rms/{name}"))
        box = ax.yaxis.label.get_window_extent()
    assert ax.get_ylabel().replace("\n", "") == f"rms/{name}"
    assert box.y0 > 0 and box.y1 < ax.figure.bbox.height


def chance_lines(ax):
    lines = [c for c in ax.collections if isinstance(c, LineCollection)]
    return [line.get_segments()[0][0][1] for line in lines]


def test_every_loss_plot_has_the_line_of_chance(runs):
    [ax] = drawn(*plot.make_figure(runs))
    assert chance_lines(ax) == [np.log(128)]
    [ax] = drawn(loss_curves, loss_curves.query(runs))
    assert chance_lines(ax) == [np.log(128)]
    data = [collect_run(runs.only(runs.summaries["run"][0]), CONV, 99, 1)]
    figure, _ = curve_figure(data, ["a"], [("#000000", "solid")])
    assert np.log(128) in [shape.y0 for shape in figure.layout.shapes]
