"""Tests how panels place names, titles and ticks."""

import itertools

import pandas as pd
from matplotlib.figure import Figure

from analysis import panels


def test_titles_of_panels_that_would_touch_are_broken():
    canvas = Figure(layout="constrained")
    axes = panels.grid(canvas, 3)
    for ax in axes:
        ax.set_title("a title that is far too long for it\nsecond line")
    panels.wrap_titles(canvas)
    canvas.draw_without_rendering()
    boxes = [ax.title.get_window_extent() for ax in axes]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert axes[0].get_title().endswith("\nsecond line")


def test_names_of_lines_that_end_at_the_top_stay_beside_their_panel():
    canvas = Figure(layout="constrained")
    [ax] = panels.grid(canvas, 1)
    for i in range(5):
        ax.plot([0, 1], [0, 1 + i / 1000], label=f"a name of two lines, number {i}")
    panels.name_lines(canvas, [ax])
    canvas.draw_without_rendering()
    tops = [text.get_window_extent().y1 for text in ax.texts if text.get_gid() == "name"]
    assert len(tops) == 5 and max(tops) < ax.bbox.y1 + 0.1 * ax.bbox.height + 15  # half of a name


def test_an_axis_of_nearly_equal_values_is_not_logarithmic():
    assert not panels.is_log(pd.Series([1.0218, 1.0219]), True)
    assert panels.is_log(pd.Series([1.0, 1.2]), True)
    ax = Figure().subplots()
    ax.plot([0.99997, 1], [0, 1])
    panels.value_axis(ax, False, "x")
    ax.figure.draw_without_rendering()
    assert "0.99998" in [text.get_text() for text in ax.get_xticklabels()]
