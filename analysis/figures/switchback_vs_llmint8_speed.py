"""Time that a SwitchBack layer and an LLM.int8() layer save of nn.Linear, by dim.

Lines: `python -m experiments.benchmarks.layer`. Source: arXiv:2304.13013.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import bench, paper, style

LINES = "layer"
CASES = ("switchback", "llm_int8")


def query(lines: pd.DataFrame) -> pd.DataFrame:
    """`value`: time saved, % of nn.Linear's; the paper's SwitchBack too."""
    ours = bench.layer_times(lines, CASES).rename(columns={"saved": "value"})
    theirs = paper.rows(paper.SAVED, "switchback").assign(file="", mode="")
    frame = pd.concat([ours, theirs], ignore_index=True)
    frame.attrs["missing"] = bench.missing(lines[lines["case"].isin(CASES)])
    return frame


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel: measured in color, the paper's SwitchBack in gray."""
    bench.plot_paper(frame, ax)
    bench.plot_layer(frame, ax, "value")
    ax.axhline(0, color="black", lw=0.6)
    ax.set(ylabel="time saved (% of nn.Linear)")
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """One panel."""
    figure.set_size_inches(style.COLUMN_WIDTH, 3.6)
    bench.legend_below(figure, [plot(frame, figure.subplots())], ncols=1)


def caption(frame: pd.DataFrame) -> str:
    """Device, base, and whose the gray lines are."""
    return (
        f"Forward and backward of one linear layer on {bench.devices(frame)}, dim to 4 dim and "
        "4 dim to dim together: time saved of nn.Linear in bf16, run in the same way. Gray: the "
        "paper's own percentages for SwitchBack's operations on an A100 in fp16."
        f"{frame.attrs.get('missing', '')}"
    )
