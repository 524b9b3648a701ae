"""Time of each operation of a SwitchBack layer by dim, and what SwitchBack saves of the 16-bit one.

Lines: `python -m experiments.benchmarks.ops`. Source: figure 3, arXiv:2304.13013.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import bench, paper, style
from analysis.load import NoRunsError

LINES = "ops"
TOKENS = 32768  # of the left panel, if measured
COLUMNS = ["file", "panel", "source", "series", "dtype", "tokens", "dim", "value"]
OPERATIONS = {  # case: (in print, marker)
    "output": ("output", "o"),
    "grad_input": ("grad input", "s"),
    "grad_weight": ("grad weight", "^"),
    "quantize_x": ("quantize x", "v"),
    "quantize_g": ("quantize g, sum", "<"),
    "quantize_w": ("quantize w, twice", ">"),
}
METHODS = {"int8": "switchback", "fp8": "hw_fp8_switchback"}  # dtype: whose name and color
COLORS = {"bf16": style.color("bf16", "stable_adamw")}
COLORS |= {dtype: style.color(name, "") for dtype, name in METHODS.items()}


def query(lines: pd.DataFrame) -> pd.DataFrame:
    """Panel `ms`: milliseconds of an operation; panel `saved`: time saved in %, also the paper's.

    NoRunsError unless one file has every operation of SwitchBack at some dim.
    """
    totals = bench.switchback_times(lines)
    if totals.empty:
        raise NoRunsError("no dim has every operation of SwitchBack, and in 16 bit, in one file")
    counts = set(totals["tokens"])
    times = bench.operations(lines)
    times = times[times["tokens"] == (TOKENS if TOKENS in counts else max(counts))]
    times = times.rename(columns={"case": "series", "ms": "value", "device": "source"})
    saved = totals.rename(columns={"device": "source"})
    saved["value"] = bench.saved_percent(saved["ms"], saved["base_ms"])
    theirs = paper.rows(paper.SAVED, "switchback").assign(dtype="int8", file="")
    parts = [times.assign(panel="ms"), saved.assign(panel="saved", series="switchback")]
    frame = pd.concat([*parts, theirs.assign(panel="saved")], ignore_index=True)[COLUMNS]
    frame.attrs["missing"] = bench.missing(lines)
    return frame


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Milliseconds of each operation by dim: a marker an operation, a color a precision."""
    times = frame[frame["panel"] == "ms"]
    for (dtype, case), part in times.groupby(["dtype", "series"]):
        part, marker = part.sort_values("dim"), OPERATIONS[case][1]
        ax.plot(part["dim"], part["value"], color=COLORS[dtype], marker=marker, ms=3, lw=1)
    for dtype in (dtype for dtype in COLORS if dtype in set(times["dtype"])):
        ax.plot([], [], color=COLORS[dtype], lw=2, label=dtype)
    for name, marker in OPERATIONS.values():
        ax.plot([], [], color="0.3", lw=0, marker=marker, ms=4, label=name)
    bench.dim_axis(ax, times["dim"])
    ax.set_yscale("log")
    ax.set(ylabel="time (ms)", title=f"each operation, {times['tokens'].iloc[0]:,} tokens")
    return ax


def plot_saved(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Time that SwitchBack saves, by dim: measured in color, the paper's in gray."""
    saved = frame[frame["panel"] == "saved"]
    bench.plot_paper(saved, ax)
    ours = saved[saved["source"] != paper.SOURCE]
    for (dtype, tokens), part in ours.groupby(["dtype", "tokens"]):
        part = part.sort_values("dim")
        label = f"{style.PRECISIONS[METHODS[dtype]][0]}, {tokens:,} tokens"
        few = 1 if tokens == ours["tokens"].max() else 0.5  # fewer tokens: paler
        ax.plot(part["dim"], part["value"], color=COLORS[dtype], alpha=few, marker="o", ms=3,
                label=label)  # fmt: skip
    ax.axhline(0, color="black", lw=0.6)
    bench.dim_axis(ax, saved["dim"])
    ax.set(ylabel="time saved (% of 16 bit)", title="all operations of a layer")
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Operations left, percentages right."""
    figure.set_size_inches(2.1 * style.COLUMN_WIDTH, 3.6)
    left, right = figure.subplots(1, 2)
    bench.legend_below(figure, [plot(frame, left), plot_saved(frame, right)], ncols=4)


def caption(frame: pd.DataFrame) -> str:
    """Device, what is summed, and whose the gray lines are."""
    return (
        f"Operations of one linear layer on {bench.devices(frame)}, mean of dim to 4 dim and 4 dim "
        "to dim. Left: each operation. Right: time that SwitchBack's operations save of the three "
        "16-bit products (bf16); gray: the paper's own percentages on an A100 in fp16."
        f"{frame.attrs.get('missing', '')}"
    )
