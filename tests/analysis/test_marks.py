"""Points of rows and lines are where they can be told apart, and lines of reference where named."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis import marks
from analysis.grammar import Axis
from analysis.points import Rows


@pytest.fixture
def ax():
    return Figure().subplots()


def test_points_that_would_hide_each_other_move_to_either_side():
    places, values = pd.Series([0] * 5 + [1]), pd.Series([1.0, 1.0, 1.01, 1.0, 2.0, 1.0])
    assert marks.spread(places, values, log=False).tolist() == [0, -1, -2, 1, 0, 0]
    wide = pd.Series([1.0, 2.0, 100.0, np.nan, np.inf])
    assert marks.spread(0 * wide, wide, log=False).tolist() == [0, -1, 0, 0, 0]
    assert marks.spread(0 * wide, wide, log=True).tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("most", [0, 1, 9])
def test_points_of_a_row_stay_in_it_below_their_bar(ax, most):
    values, spread = pd.Series([1.0, 2.0, np.nan]), pd.Series([-most, most, 0])
    marks.draw_row(ax, 3, values, 1.5, "black", spread=spread, ends=(1, 2))
    pale, _, cross, bar, interval = ax.get_lines()
    points = pale.get_ydata()[:2]
    assert bar.get_ydata()[0] < min(points) and max(points) < 3.5
    assert (points[1] - points[0] > 0.3) == (most > 0)
    assert [*bar.get_xdata(), *interval.get_xdata()] == [1.5, 1, 2]
    assert list(cross.get_ydata()) == [3]


def test_a_single_point_of_a_row_lies_on_its_interval_without_a_bar(ax):
    marks.draw_row(ax, 3, pd.Series([1.0]), 1.0, "black", spread=pd.Series([0]), ends=(0, 2))
    pale, _, interval = ax.get_lines()
    assert [*interval.get_ydata()] == [*pale.get_ydata()] * 2


def test_a_line_across_rows_leaves_room_for_its_name_in_the_first(ax):
    marks.name_rows(ax, ["", "a", "b", "c"])
    marks.draw_reference(ax, 1, 0.5, "x")
    [line] = ax.get_lines()
    low, high = (ax.transData.inverted().transform(line.get_transform().transform((1, y)))[1]
                 for y in line.get_ydata())  # fmt: skip
    assert (low, high) == (pytest.approx(3.5), pytest.approx(0.5))


def test_the_mean_in_bf16_is_a_line_across_the_rows_of_its_block(ax):
    def row(precision, *values):
        return pd.DataFrame({"precision": precision, "recall": values})

    def drawn(*rows):
        for lines in [*ax.collections]:
            lines.remove()
        Rows._mark_bf16(list(rows), ax, "recall")
        return [lines.get_segments()[0].tolist() for lines in ax.collections]

    title, int8, bf16 = pd.DataFrame({"precision": []}), row("switchback", 5.0), row("bf16", 1.0, 2)
    assert drawn(bf16) == drawn(bf16, row("bf16", 2.0), int8) == []
    of_block = [[1.5, 0.5], [1.5, 2.5]]
    other = [[3, 3.5], [3, 5.5]]
    assert drawn(title, bf16, int8, title, row("bf16", 3.0), int8) == [of_block, other]
    assert drawn(title, bf16, title, int8) == [[[1.5, 0.5], [1.5, 3.5]]]  # the only one of all


def test_axes_are_drawn_in_their_order_without_those_of_which_no_run_has_a_value():
    axes = tuple(Axis(column=name, label="") for name in ("loss", "recall", "size"))
    frame = pd.DataFrame({"loss": [1.0], "recall": [np.nan], "size": [2.0]})
    rows = Rows(studies=("formats",), table=None, values=axes)
    assert [axis.column for axis in rows._drawn(frame)] == ["loss", "size"]
    assert rows._drawn(frame[["recall"]].assign(loss=np.nan, size=np.nan)) == [axes[0]]
