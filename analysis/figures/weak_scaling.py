"""Images/s per GPU on 1, 2, 4, ... GPUs with a constant batch per GPU, relative to one process.

Lines: `python -m experiments.benchmarks scale`, one for each number of GPUs with DDP and FSDP2.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import bench, style
from analysis.load import NoRunsError

LINES = "scale"
KINDS = {"ddp": ("DDP", "-", "o"), "fsdp2": ("FSDP2", (0, (3, 1.2)), "s")}  # in print, line, marker
SHAPE = (
    r"(?P<model>.+)-(?P<precision>\w+)-(?P<optimizer>\w+)-s\d+, "
    r"batch (?P<batch_size>\d+) a process(?P<settings>.*)"
)
SERIES = ["panel", "precision", "optimizer"]
NUMBERS = ["gpus", "value", "rate", "communication", "memory_gib"]


def query(lines: pd.DataFrame) -> pd.DataFrame:
    """One row per model, batch, method, kind and number of GPUs; `value` is the efficiency.

    `kind` is "one" for one process, else "ddp" or "fsdp2"; `rate` is in images/s on all GPUs, and
    `communication` is a share of the step.
    Raises NoRunsError without lines of several processes and of one to compare them with.
    """
    timed = lines[lines["ratio"].notna()]
    if not (timed["processes"] > 1).any():
        raise NoRunsError(f"slug {LINES}: no line of several processes beside one of one process")
    table = bench.newest(timed, ["shape", "case"])
    table = table.join(table["shape"].str.extract(SHAPE))
    batch = ", batch " + table["batch_size"] + " per GPU"
    table["panel"] = table["model"].map(style.model) + batch + table["settings"]
    table["kind"] = table["case"].str.partition(" ")[0]
    table["order"] = table["model"].map(lambda name: style.rank(name, style.MODELS))
    table["batch_size"] = table["batch_size"].astype(int)
    table = table.sort_values(["order", "batch_size", *SERIES, "kind", "processes"])
    table = table.rename(columns={"device": "source", "ratio": "value", "processes": "gpus"})
    return table[["file", "source", *SERIES, "kind", *NUMBERS]].reset_index(drop=True)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One model and batch: a color for each precision; FSDP2 is dashed."""
    order = frame["precision"].map(lambda name: style.rank(name, style.PRECISIONS))
    for (_, precision, optimizer), part in frame.groupby([order, *SERIES[1:]]):
        for kind, (name, line, marker) in KINDS.items():
            points = part[part["kind"].isin(("one", kind))].sort_values("gpus")
            if (points["kind"] == kind).any():
                label = f"{style.method(precision, optimizer)}, {name}"
                color = style.color(precision, optimizer)
                ax.plot(points["gpus"], points["value"], color=color, ls=line, marker=marker,
                        ms=3, label=label)  # fmt: skip
    ax.set_xscale("log", base=2)
    counts = sorted(set(frame["gpus"]))
    ax.set_xticks(counts, [str(count) for count in counts])
    ax.minorticks_off()
    ax.axhline(1, color="black", lw=0.6)
    ax.set(xlabel="GPUs", title=frame["panel"].iloc[0].replace(", ", "\n"))
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each model and batch above one legend."""
    panels = list(frame["panel"].unique())
    figure.set_size_inches(style.COLUMN_WIDTH * max(1, 0.7 * len(panels)), 3.2)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for panel, ax in zip(panels, axes, strict=True):
        plot(frame[frame["panel"] == panel], ax)
    axes[0].set_ylabel("images/s per GPU (one process: 1)")
    bench.legend_below(figure, list(axes), ncols=2)


def caption(frame: pd.DataFrame) -> str:
    """Names the device and the lowest efficiency on the largest number of GPUs."""
    most = frame[frame["gpus"] == frame["gpus"].max()]
    return (
        f"Weak scaling of a training step on {bench.devices(frame)}: images/s per GPU relative to "
        f"one process with the same batch, {most['value'].min():.2f} to {most['value'].max():.2f} "
        f"on {most['gpus'].iloc[0]} GPUs."
    )
