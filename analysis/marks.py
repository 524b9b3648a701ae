"""How figures draw runs: points, means with their intervals, rows, and the line of bf16."""

import itertools
from collections.abc import Collection

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.transforms import offset_copy

from analysis import style
from analysis.spike_marks import LARGE
from lowprec.diagnostics.spikes import Protocol

LOW = 0.04  # of the height of a panel: where a run without a value has its cross
NEAR = 0.022  # of the range of values: points that are closer hide each other
UNDER, OVER = 0.12, 0.28  # of a row: points and bar from its middle
STEP, MOST = 0.16, 0.32  # of a row: by which points move aside, and all of them
SMALL = {"fontsize": 6.5, "color": style.OTHER}  # of texts in panels


def draw_runs(
    ax: Axes,
    at: pd.Series,
    values: pd.Series,
    *,
    color: tuple,
    label: str,
    means: bool = True,
    median: bool = False,
    dashes: str | tuple = "-",
    marker: str = "o",
    every: Collection[float] = (),
    spread: pd.Series | float = 0.0,
) -> None:
    """A point for each run, pale beside a line through the means; a cross without a value.

    With `median`, a bar at the median takes the place of the line. Points are moved sideways by
    `spread`. At places of `every` without a run, the line has a gap.
    """
    mean = values.groupby(at).mean().dropna()
    if median:
        middle = values.groupby(at).median()
        ax.plot(middle.index, middle, "_", color=color, ms=6, mew=2, zorder=2.1)
    elif means:
        ax.plot(mean.index, mean, "o", color=color, ms=4, mec="white", mew=0.6, zorder=2.1)
        mean = mean.reindex(sorted({*mean.index, *every}))
        ax.plot(mean.index, mean, color=color, label=label, ls=dashes)
    at = at + spread
    shade, size, order = (style.paler(color, 1), 2.5, 1.8) if means else (color, 4, 2)
    look = {"color": shade, "ms": size, "ls": "none", "marker": marker, "zorder": order}
    ax.plot(at[values.notna()], values.dropna(), label=None if means else label, **look)
    for place in at[values.isna()]:
        ax.plot(place, LOW, "X", color=color, ms=5.5, transform=ax.get_xaxis_transform())


def mark_below(ax: Axes, at: pd.Series, values: pd.Series, least: float) -> None:
    """Lets a y axis begin at `least`; values below have a triangle."""
    ax.set_ylim(bottom=least)
    below = at[values < least]
    ax.plot(below, [LOW] * len(below), "v", color=style.OTHER, ms=4, zorder=3,
            transform=ax.get_xaxis_transform())  # fmt: skip


def slots(names: Collection, width: float) -> dict:
    """By name, its place beside a value on an axis: the names share a width."""
    return {n: (i - (len(names) - 1) / 2) * width / len(names) for i, n in enumerate(names)}


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
    hollow: tuple[pd.Series, str] | None = None,
    ends: tuple[float, float] | None = None,
    note: str = "",
) -> None:
    """A pale point for each value in a row, a cross for NaN, and a bar at the middle of several.

    Points are open where `hollow` is true; what these are stands beside the largest value. A line
    joins the ends of an interval; a note stands beside the panel.
    """
    hollow, name = hollow or (pd.Series(False, values.index), "")
    step = min(STEP, MOST / max(1, spread.abs().max()))  # 1 for none
    places, pale = row + UNDER + step * spread, style.paler(color, 1)
    for part, face in ((~hollow, pale), (hollow, "white")):
        ax.plot(values[part], places[part], "o", ms=3, mfc=face, mec=pale, mew=0.7)
    if (hollow & values.notna()).any() and hollow[last := values.idxmax()]:
        ax.annotate(name, (values[last], places[last]), (4, 0), textcoords="offset points",
                    va="center", **SMALL)  # fmt: skip
    for _ in range(values.isna().sum()):
        ax.plot(0.98, row, "X", ms=5.5, color=color, transform=ax.get_yaxis_transform())
    over = OVER if len(values) > 1 else -UNDER  # a single value needs no bar
    if len(values) > 1:
        ax.plot(middle, row - over, "|", ms=6.5, mew=2, color=color)
    if ends:
        ax.plot(ends, [row - over] * 2, color=color, lw=1.8, zorder=1)
    if note:
        note_row(ax, row, note)


def note_in_row(ax: Axes, row: int, note: str) -> None:
    """Writes a note in a row, at its left end."""
    ax.text(0.02, row, note, transform=ax.get_yaxis_transform(), va="center", **SMALL)


def note_row(ax: Axes, row: int, note: str) -> None:
    """Writes a note beside a row."""
    ax.annotate(note, (1, row), (3, 0), xycoords=ax.get_yaxis_transform(), fontsize=7,
                textcoords="offset points", va="center")  # fmt: skip


def draw_reference(ax: Axes, at: float, equal: float, name: str) -> None:
    """A line at bf16 with its name, and a gray band of values that are equal to it.

    The axis of the values is `x`, where the name takes the place of the first row, or `y`.
    """
    text, look = f"within {equal:g}% of bf16" if equal else "bf16", {"lw": 0.8, "zorder": 0.5}
    if name == "y":
        ax.axhspan(at - equal, at + equal, color="0.92", lw=0, zorder=0)
        ax.axhline(at, color=style.OTHER, **look)
        ax.annotate(text, (0, at - equal), (2, 1.5), xycoords=ax.get_yaxis_transform(),
                    textcoords="offset points", zorder=4, **SMALL)  # fmt: skip
        return
    ax.axvspan(at - equal, at + equal, color="0.92", lw=0, zorder=0)
    ax.axvline(at, ymax=1 - 1 / len(ax.get_yticks()), color=style.OTHER, **look)
    place, _ = ax.transLimits.transform(ax.transScale.transform((at, 0)))
    side = "right" if place > 0.8 else "left" if place < 0.2 and len(text) > 5 else "center"
    ax.text(at, 0, text, ha=side, va="center", **SMALL)


def name_rows(ax: Axes, names: Collection[str], bold: Collection[bool] = ()) -> None:
    """Names the rows of a panel, the first at the top; bold names are of blocks of rows."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    for text, is_bold in zip(ax.get_yticklabels(), bold, strict=False):
        text.set_fontweight("bold" if is_bold else "normal")


def mark_spikes(ax: Axes, run: pd.DataFrame) -> None:
    """A triangle over the peak of each loss spike of a run: filled if it is large."""
    peaks = run["loss"][::-1].rolling(Protocol().within + 1, min_periods=1).max()[::-1]
    peaks = peaks.clip(upper=ax.get_ylim()[1])
    above = offset_copy(ax.transData, ax.figure, y=3.5, units="points")
    for index, height in run["height"].dropna().items():
        face = "black" if height > LARGE else "white"
        ax.plot(run["step"][index], peaks[index], "v", ms=3.2, mfc=face, mec="black", mew=0.5,
                transform=above, zorder=4, clip_on=False)  # fmt: skip
