"""Time of a whole model's forward and backward that 8 bits save, over two 16-bit baselines.

Lines: `python -m experiments.benchmarks model`, one for each case of a run. The baselines are
open_clip's model, eager or compiled, whichever is faster, and our model with algorithm 5
(`autograd_high`).
Source: figure 4, right, arXiv:2304.13013.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import bench, paper, style
from analysis.load import NoRunsError

LINES = "model"
BASELINES = {  # baseline: (in print, cases of which the fastest counts)
    "open_clip": ("open_clip, eager or compiled", ("open_clip", "open_clip eager")),
    "autograd_high": ("our model, autograd function", ("autograd_high",)),
}
CASES = {  # case: (in print, color)
    "high": ("ours, 16 bit", style.color("bf16", "stable_adamw")),
    **{
        name: (style.PRECISIONS[name][0], style.color(name, ""))
        for name in ("switchback", "hw_fp8_switchback", "llm_int8")
    },
}
SETTINGS = {"image_size": "{:.0f} px", "patch_dropout": "patch dropout {:g}"}  # of a line, in words


def with_settings(lines: pd.DataFrame) -> pd.DataFrame:
    """Adds the settings of the model to `shape`, where a line holds them."""
    shape = lines["shape"]
    for name, words in SETTINGS.items():
        if name in lines:
            shape = shape + lines[name].map(f", {words}".format).where(lines[name].notna(), "")
    return lines.assign(shape=shape)


def in_lines(shape: str) -> str:
    """A tick label: the model, its batch and its settings on lines of their own."""
    model, _, more = shape.partition(" ")
    return "\n".join([style.model(model), *more.replace("patch ", "patch, ").split(", ")])


def query(lines: pd.DataFrame) -> pd.DataFrame:
    """One row per shape, baseline and case of one file; `value` is the time saved in %.

    A shape is the model, whose name is its first word, the batch and the settings. If a file has a
    case twice, the last counts. Raises NoRunsError if no case has a baseline.
    """
    lines = with_settings(lines)
    timed = lines[lines["ms"].notna()]
    timed = timed.assign(model=timed["shape"].str.extract(r"^(\w+)", expand=False))
    at = ["file", "shape"]
    timed = timed.drop_duplicates([*at, "case"], keep="last")
    frames = []
    for baseline, (_, cases) in BASELINES.items():
        base = timed[timed["case"].isin(cases)].groupby(at)["ms"].min().rename("base_ms")
        part = timed[timed["case"].isin(CASES)].join(base, on=at, how="inner")
        frames.append(part.assign(baseline=baseline))
    table = pd.concat(frames, ignore_index=True)
    if table.empty:
        raise NoRunsError(
            f"slug {LINES}: no line of {', '.join(CASES)} has {' or '.join(BASELINES)} next to it, "
            "of the same shape, in one file"
        )
    table = bench.newest(table, ["shape", "baseline"])
    table["value"] = bench.saved_percent(table["ms"], table["base_ms"])
    table = table.rename(columns={"device": "source", "case": "series"})
    columns = ["file", "source", "model", "shape", "baseline", "series", "ms", "base_ms", "value"]
    return table[columns].reset_index(drop=True)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Bars over one baseline: a group for each model, from small to large, a bar for each case."""
    shapes = frame[["model", "shape"]].drop_duplicates().itertuples(index=False)
    shapes = sorted(shapes, key=lambda pair: (style.rank(pair[0], style.MODELS), pair[1]))
    cases = [case for case in CASES if case in set(frame["series"])]
    places, width = [shape for _, shape in shapes], 0.8 / len(cases)
    for place, case in enumerate(cases):
        part, (name, color) = frame[frame["series"] == case], CASES[case]
        middles = part["shape"].map(places.index) + (place - (len(cases) - 1) / 2) * width
        drawn = ax.bar(middles, part["value"], width * 0.92, color=color, label=name)
        ax.bar_label(drawn, fmt=lambda value: f"{round(value):d}", fontsize=6, padding=1)  # no -0
    ax.set_xticks(range(len(places)), [in_lines(shape) for shape in places])
    ax.grid(visible=False, axis="x")
    ax.axhspan(*paper.END_TO_END, color="0.88", lw=0, zorder=0.5, label=f"{paper.SOURCE}: ViT-H/14")
    ax.axhline(0, color="black", lw=0.6)
    ax.margins(y=0.15)
    ax.set(title=f"over {BASELINES[frame['baseline'].iloc[0]][0]}", ylabel="time saved (%)")
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each baseline above one legend."""
    baselines = [baseline for baseline in BASELINES if baseline in set(frame["baseline"])]
    figure.set_size_inches(style.COLUMN_WIDTH * max(1.2, len(baselines)), 3.0)
    axes = figure.subplots(1, len(baselines), squeeze=False, sharey=True)[0]
    for baseline, ax in zip(baselines, axes, strict=True):
        plot(frame[frame["baseline"] == baseline], ax)
    bench.legend_below(figure, list(axes), ncols=4)


def caption(frame: pd.DataFrame) -> str:
    """Names the device and the paper's numbers."""
    low, high = paper.END_TO_END
    return (
        f"Forward and backward of the whole model on {bench.devices(frame)}: time saved; each bar "
        f"against a baseline of the same run. Gray: the paper's own range for training ViT-H/14 "
        f"with SwitchBack on A100s in fp16, {low:g} to {high:g}%."
    )
