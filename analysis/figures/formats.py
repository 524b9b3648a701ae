"""Mean R@1 and validation loss by number format: against bits per operand and time per step.

Not in the paper, which precedes most of the formats. Runs: `experiment=formats`, and those of
BASELINES that differ from them in the recipe alone: 16 bits, int8 and fp8.
"""

import math
import re

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis import comparison, curves, style
from analysis.figures.accuracy_vs_size import plot_runs
from analysis.load import Runs
from lowprec.nn.recipe import RECIPES, Operand

EXPERIMENT, BASELINES = "formats", "accuracy_vs_size"
MEASURES = {"recall": "mean R@1 (%)", "validation_loss": "validation loss"}
COLUMNS = (*curves.OF_A_RUN, "bits", "step_ms", "no_time", *MEASURES)
MOST_WAITING = 0.05  # of the time: above this, the time per step is that of the data
SCALE_BITS = {"float32": 32, "e8m0": 8, "e4m3": 8}
APART = 0.3  # bits between methods
BAR = 5  # points: the width of a mean
WIDE = 3  # ratio of the largest to the smallest loss on a logarithmic axis


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """The study's rows, and those of other studies that differ from one in the recipe alone."""
    own = heads["experiment"] == EXPERIMENT
    settings = comparison.signature(heads, "precision.label", seed=False)
    return heads[own | settings.isin(settings[own])] if own.any() else heads


def query(runs: Runs) -> pd.DataFrame:
    """One row per run: bits per operand, ms per step, and both measures at its last step, or NaN.

    `no_time` says why a run has no time. Runs that have no measure and did not diverge are left
    out, as are custom recipes.
    """
    is_selected = runs.summaries["run"].isin(select(runs.runs)["run"])
    runs = Runs(runs.summaries[is_selected], runs.root, runs.files)
    heads = curves.named_heads(runs)
    if len(heads):
        heads["recall"] = heads["run"].map(curves.last_recall(runs))
        heads["validation_loss"] = heads["run"].map(curves.last_validation_loss(runs))
        is_over = heads[list(MEASURES)].notna().any(axis=1) | (heads["state"] == "diverged")
        heads = heads[is_over & heads["precision.recipe"].isin(list(RECIPES))]
    if heads.empty:
        return pd.DataFrame(columns=list(COLUMNS))
    heads["bits"] = list(map(bits, heads["precision.recipe"], heads["precision.autocast"]))
    products = [RECIPES[name].products for name in heads["precision.recipe"]]
    is_simulated = [any(p and not p.native for p in three) for three in products]
    timing = runs.timing.reindex(columns=["run", "step_ms", "data_wait"])
    medians = timing.groupby("run").median().astype(float)
    step_ms, waiting = (heads["run"].map(medians[name]) for name in medians)
    reasons = [is_simulated, step_ms.isna(), waiting > MOST_WAITING]
    heads["no_time"] = np.select(reasons, ["simulated", "not recorded", "waits for data"], "")
    heads["step_ms"] = step_ms.where(heads["no_time"] == "")
    return heads.sort_values("bits", ascending=False, kind="stable")[list(COLUMNS)]


def bits(recipe: str, autocast: str) -> float:
    """Mean bits per number over the six operands of a layer's products, with scales of tiles.

    Scales of whole rows, columns and tensors count nothing: less than 0.1 bits at width 384.
    """
    high = 32.0 if autocast == "fp32" else 16.0
    products = RECIPES[recipe].products
    pairs = [(_bits(p.first), _bits(p.second)) if p else (high, high) for p in products]
    return float(np.mean(pairs))


def _bits(operand: Operand) -> float:
    parts = re.match(r"e(\d+)m(\d+)", operand.format)
    tile = re.fullmatch(r"(\d+)x(\d+)", operand.granularity)
    scale = SCALE_BITS[operand.scale] / math.prod(map(int, tile.groups())) if tile else 0
    return (1 + int(parts[1]) + int(parts[2]) if parts else 8) + scale


def plot(frame: pd.DataFrame, ax: Axes, measure: str, at: dict[str, float]) -> Axes:
    """One panel: points for runs and bars for means of a measure, at a place for each method."""
    for method, line in frame.groupby("method", sort=False):
        head = line.iloc[0]
        color = style.color(head["precision"], head["optimizer"], head["variant"])
        places = pd.Series(at[method], line.index)
        plot_runs(ax, places, line[measure], color, None, f"{method}, {head['bits']:.3g} bits", BAR)
    if measure == "validation_loss" and frame[measure].max() > WIDE * frame[measure].min():
        style.log_axis(ax)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a row for each measure: against bits, and against time if any run has one."""
    measures = [name for name in MEASURES if frame[name].notna().any()] or ["recall"]
    columns = 2 if frame["step_ms"].notna().any() else 1
    lines = math.ceil(frame["method"].nunique() / columns)
    height = 2.1 * len(measures) + 0.17 * lines + 0.4
    figure.set_size_inches(style.COLUMN_WIDTH * columns, height)
    axes = figure.subplots(len(measures), columns, squeeze=False, sharex="col", sharey="row")
    for measure, row in zip(measures, axes, strict=True):
        plot(frame, row[0], measure, _apart(frame.groupby("method")["bits"].first()))
        row[0].set_ylabel(MEASURES[measure])
        if columns > 1:
            plot(frame, row[1], measure, _times(frame, row[1], measure == measures[0]))
    axes[-1, -1].set_xlabel("time per step (ms)")
    axes[-1, 0].set(xlabel="bits per operand, with scales", xticks=[4, 8, 12, 16])
    axes[0, 0].set_title(curves.title(frame))
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, handlelength=1.5)


def _apart(values: pd.Series) -> dict[str, float]:
    """Places on an axis by method: values closer than APART are set apart around their mean."""
    values = values.sort_values(kind="stable")
    clusters = values.groupby((values.diff() > APART).cumsum())
    rank = clusters.cumcount() - (clusters.transform("size") - 1) / 2
    return (clusters.transform("mean") + APART * rank).to_dict()


def _times(frame: pd.DataFrame, ax: Axes, is_top: bool) -> dict[str, float]:
    """Places by method: its median time, or a shaded strip to the right of all times."""
    times = frame.groupby("method", sort=False)["step_ms"].median()
    low, high = times.min(), times.max()
    slot = max(high - low, 0.1 * high) / 10
    ax.set_xlim(low - slot, high + slot)
    ax.set_xticks([tick for tick in MaxNLocator(4).tick_values(low, high) if tick <= high + slot])
    places, end = times.dropna().to_dict(), high + 2 * slot
    without = frame[frame["method"].map(times).isna()]
    for reason, group in without.groupby("no_time", sort=False):
        methods = group["method"].unique()
        inside = end + slot * np.linspace(0, max(4, len(methods) + 1), len(methods) + 2)
        places |= dict(zip(methods, inside[1:-1], strict=True))
        ax.axvspan(inside[0], inside[-1], color="#F2F2F2", zorder=0, lw=0)
        text = f"{reason}:\nno time" if is_top else ""
        ax.text(inside.mean(), 1.01, text, transform=ax.get_xaxis_transform(), ha="center",
                va="bottom", fontsize=6.5, color=style.OTHER)  # fmt: skip
        end = inside[-1] + slot / 2
    ax.set_xlim(low - slot, end)
    return places


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs, the axes, and why methods have no time."""
    seeds = curves.join(sorted(frame.groupby("method")["seed"].nunique().unique()))
    reasons = frame[frame["no_time"] != ""].groupby("no_time")["method"].nunique()
    without = curves.join(f"{num} methods ({reason})" for reason, num in reasons.items())
    return (
        "Mean R@1 of both directions and validation loss at the last step of "
        f"{curves.of_runs(frame)} ({seeds} seeds of each method). Points: runs; bars: means of "
        "seeds; a cross below: a run without that measure. Bits: mean over the operands of a "
        "layer's three products, with the scales of tiles; a product left in 16 bits counts as 16. "
        "Methods with nearly equal bits are set apart. Time: median over the steps of a run, "
        "comparable only if each run had a GPU for itself, which is not recorded. Without a time: "
        f"{without or 'none'}.{curves.caption_end(frame)}"
    )
