"""How figures draw runs: points, means with their intervals, rows, and the line of bf16."""

import itertools
from collections.abc import Collection

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import style

LOW = 0.04  # of the height of a panel: where a run without a value has its cross
NEAR = 0.022  # of the range of values: points that are closer hide each other
UNDER, OVER = 0.12, 0.28  # of a row: points and bar from its middle
STEP, MOST = 0.16, 0.32  # of a row: by which points move aside, and all of them


def draw_runs(
    ax: Axes,
    at: pd.Series,
    values: pd.Series,
    *,
    color: tuple,
    label: str,
    means: bool = True,
    dashes: str | tuple = "-",
    marker: str = "o",
    hollow: pd.Series | None = None,
    every: Collection[float] = (),
    spread: pd.Series | float = 0.0,
) -> None:
    """A point for each run, pale beside a line through the means; a cross without a value.

    Points are open where `hollow` is true, and moved sideways by `spread`. Across places of `every`
    without a run, the line is dotted.
    """
    mean = values.groupby(at).mean().dropna()
    if means:
        ax.plot(mean.index, mean, "o:", color=color, lw=0.8, ms=3)
        mean = mean.reindex(sorted({*mean.index, *every}))
        ax.plot(mean.index, mean, color=color, label=label, ls=dashes)
    at = at + spread
    filled = values.notna() & ~(hollow if hollow is not None else False)
    shade, size, order = (style.paler(color, 1), 2.5, 1.8) if means else (color, 4, 2)
    look = {"color": shade, "ms": size, "ls": "none", "marker": marker, "zorder": order}
    ax.plot(at[filled], values[filled], label=None if means else label, **look)
    if hollow is not None and hollow.any():
        ax.plot(at[hollow], values[hollow], mfc="white", **look)
    for place in at[values.isna()]:
        ax.plot(place, LOW, "X", color=color, ms=5.5, transform=ax.get_xaxis_transform())


def spread(places: pd.Series, values: pd.Series, log: bool) -> pd.Series:
    """By how many steps, such as 0, 1 or -1, each point moves aside so that it hides no other one.

    Points of one place are near if their values, or their logarithms, differ by less than NEAR of
    the range of all.
    """
    finite = values[np.isfinite(values)].astype(float)
    at = np.log(finite) if log else finite
    near, steps = NEAR * (at.max() - at.min()), pd.Series(0, values.index)
    for _, part in at.groupby(places):
        last = {}  # step: the value of its latest point
        for index, value in part.sort_values(kind="stable").items():
            free = (k for k in itertools.count() if value - last.get(k, -np.inf) > near)
            last[k := next(free)] = value
            steps[index] = (k + 1) // 2 * (-1) ** k
    return steps


def draw_row(
    ax: Axes,
    row: int,
    values: pd.Series,
    middle: float,
    color: str | tuple,
    *,
    spread: pd.Series,
    hollow: pd.Series | None = None,
    ends: tuple[float, float] | None = None,
    note: str = "",
) -> None:
    """A pale point for each value in a row, a cross for NaN, and above them a bar at their middle.

    A line joins the ends of an interval; a note stands beside the panel.
    """
    hollow = pd.Series(False, values.index) if hollow is None else hollow
    step = min(STEP, MOST / max(1, spread.abs().max()))  # 1 for none
    places, pale = row + UNDER + step * spread, style.paler(color, 1)
    for part, face in ((~hollow, pale), (hollow, "white")):
        ax.plot(values[part], places[part], "o", ms=3, mfc=face, mec=pale, mew=0.7)
    for _ in range(values.isna().sum()):
        ax.plot(0.98, row, "X", ms=5.5, color=color, transform=ax.get_yaxis_transform())
    ax.plot(middle, row - OVER, "|", ms=6.5, mew=2, color=color)
    if ends:
        ax.plot(ends, [row - OVER] * 2, color=color, lw=1.8)
    if note:
        ax.annotate(note, (1, row), (3, 0), xycoords=ax.get_yaxis_transform(), fontsize=7,
                    textcoords="offset points", va="center")  # fmt: skip


def draw_reference(ax: Axes, at: float, equal: float, name: str) -> None:
    """A line across an axis, below the first row, with a gray band of values that are equal to it.

    The axis is `x`, beside which rows have names, or `y`.
    """
    line, span = (ax.axvline, ax.axvspan) if name == "x" else (ax.axhline, ax.axhspan)
    span(at - equal, at + equal, color="0.92", lw=0, zorder=0)
    end = {"ymax": 1 - 1 / len(ax.get_yticks())} if name == "x" else {}
    line(at, color=style.OTHER, lw=0.8, zorder=0.5, **end)


def name_reference(ax: Axes, at: float, text: str) -> None:
    """Writes what the vertical line of `draw_reference` is in the first row."""
    place, _ = ax.transLimits.transform(ax.transScale.transform((at, 0)))
    side = "right" if place > 0.8 else "left" if place < 0.2 and len(text) > 5 else "center"
    ax.text(at, 0, text, ha=side, va="center", fontsize=6.5, color=style.OTHER)


def name_rows(ax: Axes, names: Collection[str], bold: Collection[bool] = ()) -> None:
    """Names the rows of a panel, the first at the top; bold names are of blocks of rows."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    for text, is_bold in zip(ax.get_yticklabels(), bold, strict=False):
        text.set_fontweight("bold" if is_bold else "normal")
