"""Time of linear layers and of their operations by dim: four figures of benchmark lines.

`op_profile` (figure 3, arXiv:2304.13013) and `quantize_share` (figure 4, left) show the lines of
`python -m experiments.benchmarks ops`; `switchback_variants_speed` and
`switchback_vs_llmint8_speed` show those of `python -m experiments.benchmarks layer`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import bench, paper, style
from analysis.load import NoRunsError

TOKENS = 32768  # of the panels that show one number of tokens, if it is measured
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
DASHED = (0, (3, 1.2))
PAPERS = "the paper's own percentages"


@dataclass(eq=False)
class SpeedByDim:
    """One of the figures; `panels` and the caption `text` are what it shows."""

    LINES: str
    query: Callable[[pd.DataFrame], pd.DataFrame]
    panels: tuple[Callable[[pd.DataFrame, Axes], Axes], ...]
    text: str  # with a field for the device
    columns: int = 1  # of the legend

    def plot(self, frame: pd.DataFrame, ax: Axes) -> Axes:
        """The first panel."""
        return self.panels[0](frame, ax)

    def draw(self, frame: pd.DataFrame, figure: Figure) -> None:
        """All panels in a row above one legend."""
        num = len(self.panels)
        figure.set_size_inches((1 if num == 1 else 2.1) * style.COLUMN_WIDTH, 3.6)
        axes = figure.subplots(1, num, squeeze=False)[0]
        axes = [panel(frame, ax) for panel, ax in zip(self.panels, axes, strict=True)]
        bench.legend_below(figure, axes, ncols=self.columns)

    def caption(self, frame: pd.DataFrame) -> str:
        """Describes the panels and names the device."""
        return self.text.format(device=bench.devices(frame))


def _totals(lines: pd.DataFrame) -> pd.DataFrame:
    """SwitchBack's total times; NoRunsError unless one file has all operations at some dim."""
    totals = bench.switchback_times(lines)
    if totals.empty:
        raise NoRunsError("no file has all operations of SwitchBack and of 16 bits for any dim")
    return totals.rename(columns={"device": "source"})


def query_profile(lines: pd.DataFrame) -> pd.DataFrame:
    """Panel `ms`: milliseconds of each operation; panel `saved`: time saved in %."""
    saved = _totals(lines).assign(panel="saved", series="switchback")
    saved["value"] = bench.saved_percent(saved["ms"], saved["base_ms"])
    counts = set(saved["tokens"])
    times = bench.operations(lines)
    times = times[times["tokens"] == (TOKENS if TOKENS in counts else max(counts))]
    times = times.rename(columns={"case": "series", "ms": "value", "device": "source"})
    ours = pd.concat([times.assign(panel="ms"), saved], ignore_index=True)
    theirs = paper.rows(paper.SAVED, "switchback").assign(dtype="int8", file="", panel="saved")
    columns = ["file", "panel", "source", "series", "dtype", "tokens", "dim", "value"]
    return pd.concat([ours, theirs], ignore_index=True)[columns]


def query_share(lines: pd.DataFrame) -> pd.DataFrame:
    """`value`: % of the operations' time spent in quantize operations."""
    ours = _totals(lines).rename(columns={"dtype": "series"})
    ours["value"] = 100 * ours["quantize_ms"] / ours["ms"]
    theirs = paper.rows(paper.QUANTIZE_SHARE, "int8").assign(file="")
    columns = ["file", "source", "series", "tokens", "dim", "value"]
    return pd.concat([ours, theirs], ignore_index=True)[columns]


def query_layers(lines: pd.DataFrame, cases: tuple[str, ...]) -> pd.DataFrame:
    """`ms`, and `value`: time saved in % of nn.Linear's."""
    ours = bench.layer_times(lines, cases).rename(columns={"saved": "value"})
    theirs = paper.rows(paper.SAVED, "switchback").assign(file="", mode="")
    return pd.concat([ours, theirs], ignore_index=True)[list(ours)]


def plot_operations(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Milliseconds of each operation: a marker for each operation, a color for each precision."""
    times = frame[frame["panel"] == "ms"]
    for (dtype, case), part in times.groupby(["dtype", "series"]):
        part, marker = part.sort_values("dim"), OPERATIONS[case][1]
        ax.plot(part["dim"], part["value"], color=COLORS[dtype], marker=marker, ms=3, lw=1)
    for dtype in (dtype for dtype in COLORS if dtype in set(times["dtype"])):
        ax.plot([], [], color=COLORS[dtype], lw=2, label=dtype)
    for name, marker in OPERATIONS.values():
        ax.plot([], [], color="0.3", lw=0, marker=marker, ms=4, label=name)
    bench.dim_axis(ax, times["dim"])
    style.log_axis(ax)
    ax.set(ylabel="time (ms)", title=f"each operation, {times['tokens'].iloc[0]:,} tokens")
    return ax


def plot_totals(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Percentages of SwitchBack's summed operations; fewer tokens are paler."""
    bench.plot_paper(frame, ax)
    ours = frame[frame["source"] != paper.SOURCE]
    counts = sorted(set(ours["tokens"]), reverse=True)
    for (dtype, tokens), part in ours.groupby(["dtype" if "dtype" in ours else "series", "tokens"]):
        part = part.sort_values("dim")
        label = f"{style.PRECISIONS[METHODS[dtype]][0]}, {tokens:,} tokens"
        color = style.paler(COLORS[dtype], counts.index(tokens))
        ax.plot(part["dim"], part["value"], color=color, marker="o", ms=3, label=label)
    bench.dim_axis(ax, frame["dim"])
    return ax


def plot_totals_saved(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Time that SwitchBack's operations save."""
    plot_totals(frame[frame["panel"] == "saved"], ax)
    ax.axhline(0, color="black", lw=0.6)
    ax.set(ylabel="time saved (% of 16 bit)", title="all operations of a layer")
    return ax


def plot_share(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Share of time in quantize operations."""
    plot_totals(frame, ax).set(ylabel="time in quantize operations (%)")
    ax.set_ylim(bottom=0)
    return ax


def plot_layer_times(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Milliseconds of layers, nn.Linear in black."""
    ours = frame[frame["source"] != paper.SOURCE]
    for (mode, _), part in ours.groupby(["mode", "tokens"]):
        base = part.drop_duplicates("dim").sort_values("dim")
        line, name = ("-", "") if mode == "eager" else (DASHED, ", CUDA graph")
        look = {"color": "black", "lw": 1, "ls": line, "label": f"nn.Linear{name}"}
        ax.plot(base["dim"], base["base_ms"], **look)
    bench.plot_layer(ours, ax, "ms")
    style.log_axis(ax)
    ax.set(ylabel="forward + backward (ms)")
    return ax


def plot_layer_savings(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Time that layers save."""
    bench.plot_paper(frame, ax)
    bench.plot_layer(frame, ax, "value")
    ax.axhline(0, color="black", lw=0.6)
    ax.set(ylabel="time saved (% of nn.Linear)")
    return ax


FIGURES = {
    "op_profile": SpeedByDim(
        "ops",
        query_profile,
        (plot_operations, plot_totals_saved),
        "Operations of one linear layer on {device}, mean of dim to 4 dim and 4 dim to dim. Left: "
        "each operation. Right: time that SwitchBack's operations save compared to the three "
        f"16-bit products (bf16); gray: {PAPERS} on an A100 in fp16.",
        columns=4,
    ),
    "quantize_share": SpeedByDim(
        "ops",
        query_share,
        (plot_share,),
        "Share of SwitchBack's time spent on quantizing x, g and w, on {device}; gray: "
        f"{PAPERS} on an A100 in fp16.",
    ),
    "switchback_variants_speed": SpeedByDim(
        "layer",
        partial(query_layers, cases=("switchback", "switchback_m", "switchback_q")),
        (plot_layer_times, plot_layer_savings),
        "SwitchBack, SwitchBackM (saves int8 inputs) and SwitchBackQ (quantizes weights by row and "
        "by column): one linear layer on {device}, dim to 4 dim and 4 dim to dim together. Right: "
        "time saved compared to nn.Linear in bf16, run in the same way; gray: "
        f"{PAPERS} for SwitchBack's operations on an A100 in fp16.",
        columns=3,
    ),
    "switchback_vs_llmint8_speed": SpeedByDim(
        "layer",
        partial(query_layers, cases=("switchback", "llm_int8")),
        (plot_layer_savings,),
        "Forward and backward of one linear layer on {device}, dim to 4 dim and 4 dim to dim "
        "together: time saved compared to nn.Linear in bf16, run in the same way. Gray: "
        f"{PAPERS} for SwitchBack's operations on an A100 in fp16.",
    ),
}
