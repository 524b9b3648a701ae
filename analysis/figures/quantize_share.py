"""Share of SwitchBack's time that goes into quantizing, by dim.

Lines: `python -m experiments.benchmarks.ops`. Source: figure 4, left, arXiv:2304.13013.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import bench, paper, style
from analysis.load import NoRunsError

LINES = "ops"
COLUMNS = ["file", "source", "series", "tokens", "dim", "value"]
METHODS = {"int8": "switchback", "fp8": "hw_fp8_switchback"}  # dtype: whose name and color


def query(lines: pd.DataFrame) -> pd.DataFrame:
    """% of the operations' time that is in quantize operations, by tokens and dim; the paper's too.

    NoRunsError unless one file has every operation of SwitchBack at some dim.
    """
    totals = bench.switchback_times(lines)
    if totals.empty:
        raise NoRunsError("no dim has every operation of SwitchBack, and in 16 bit, in one file")
    ours = totals.rename(columns={"device": "source", "dtype": "series"})
    ours["value"] = 100 * ours["quantize_ms"] / ours["ms"]
    theirs = paper.rows(paper.QUANTIZE_SHARE, "int8").assign(file="")
    frame = pd.concat([ours, theirs], ignore_index=True)[COLUMNS]
    frame.attrs["missing"] = bench.missing(lines)
    return frame


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel: measured in color, the paper's in gray."""
    bench.plot_paper(frame, ax)
    ours = frame[frame["source"] != paper.SOURCE]
    for (series, tokens), part in ours.groupby(["series", "tokens"]):
        part = part.sort_values("dim")
        variant = sorted(set(ours["tokens"]), reverse=True).index(tokens)
        color = style.color(METHODS[series], "", variant)
        label = f"{style.PRECISIONS[METHODS[series]][0]}, {tokens:,} tokens"
        ax.plot(part["dim"], part["value"], color=color, marker="o", ms=3, label=label)
    bench.dim_axis(ax, frame["dim"])
    ax.set(ylabel="time in quantize operations (%)")
    ax.set_ylim(bottom=0)
    ax.legend()
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """One panel."""
    figure.set_size_inches(style.COLUMN_WIDTH, 2.8)
    plot(frame, figure.subplots())


def caption(frame: pd.DataFrame) -> str:
    """Device, and whose the gray lines are."""
    return (
        f"Share of SwitchBack's time that goes into quantizing x, g and w, on "
        f"{bench.devices(frame)}; gray: the paper's own percentages on an A100 in fp16."
        f"{frame.attrs.get('missing', '')}"
    )
