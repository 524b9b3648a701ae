"""Speed of SwitchBack, SwitchBackM and SwitchBackQ layers by dim.

Lines: `python -m experiments.benchmarks.layer`. Source: algorithms 1, 3 and 4, arXiv:2304.13013.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import bench, paper, style

LINES = "layer"
CASES = ("switchback", "switchback_m", "switchback_q")
TOKENS = 32768  # of the paper's lines


def query(lines: pd.DataFrame) -> pd.DataFrame:
    """`ms`, and `value`: time saved, % of nn.Linear's; the paper's SwitchBack and SwitchBackQ."""
    ours = bench.layer_times(lines, CASES).rename(columns={"saved": "value"})
    tables = {"switchback": paper.SAVED, "switchback_q": paper.SAVED_Q}
    theirs = pd.concat([paper.rows(table, series) for series, table in tables.items()])
    theirs = theirs[theirs["tokens"] == TOKENS].assign(file="", mode="")
    frame = pd.concat([ours, theirs], ignore_index=True)
    frame.attrs["missing"] = bench.missing(lines[lines["case"].isin(CASES)])
    return frame


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Milliseconds by dim, nn.Linear in black."""
    ours = frame[frame["source"] != paper.SOURCE]
    for (mode, _), part in ours.groupby(["mode", "tokens"]):
        base = part.drop_duplicates("dim").sort_values("dim")
        graph = mode != "eager"
        line, name = ((0, (3, 1.2)), ", CUDA graph") if graph else ("-", "")
        label = f"nn.Linear{name}"
        ax.plot(base["dim"], base["base_ms"], color="black", lw=1, ls=line, label=label)
    bench.plot_layer(ours, ax, "ms")
    style.log_axis(ax)
    ax.set(ylabel="forward + backward (ms)")
    return ax


def plot_saved(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Time saved by dim; the paper's in gray: SwitchBack dashed, SwitchBackQ dotted."""
    theirs = frame[frame["source"] == paper.SOURCE]
    for series, line in (("switchback", (0, (3, 1.2))), ("switchback_q", (0, (1, 1)))):
        part = theirs[theirs["series"] == series].sort_values("dim")
        name = style.PRECISIONS[series][0].removesuffix(" int8")
        ax.plot(part["dim"], part["value"], color="0.55", lw=0.9, ls=line,
                label=f"{paper.SOURCE}: {name}")  # fmt: skip
    bench.plot_layer(frame, ax, "value")
    ax.axhline(0, color="black", lw=0.6)
    ax.set(ylabel="time saved (% of nn.Linear)")
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Milliseconds left, percentages right."""
    figure.set_size_inches(2.1 * style.COLUMN_WIDTH, 3.6)
    left, right = figure.subplots(1, 2)
    bench.legend_below(figure, [plot(frame, left), plot_saved(frame, right)], ncols=3)


def caption(frame: pd.DataFrame) -> str:
    """Device, base, and whose the gray lines are."""
    return (
        f"SwitchBack, SwitchBackM (saves int8 inputs) and SwitchBackQ (weights row- and "
        f"column-wise): one linear layer on {bench.devices(frame)}, dim to 4 dim and 4 dim to dim "
        "together. Right: time saved of nn.Linear in bf16, run in the same way; gray: the paper's "
        f"own percentages for the operations on an A100 in fp16, {TOKENS:,} tokens."
        f"{frame.attrs.get('missing', '')}"
    )
