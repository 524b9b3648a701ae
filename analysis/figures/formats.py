"""Mean R@1 and validation loss by number format, against bits per operand and step time.

Not in the paper, which precedes most of the formats. Runs: `experiment=formats`, and those of
BASELINES that differ from them in the recipe alone: 16 bits, int8 and fp8. Step times: lines of
`python -m experiments.benchmarks step` in the folder of the runs, if there are any.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression

from analysis import bench, comparison, curves, style
from analysis.figures.accuracy_vs_size import plot_runs
from analysis.load import Runs
from lowprec.nn.recipe import RECIPES, Operand

EXPERIMENT, BASELINES = "formats", ("accuracy_vs_size",)
MEASURES = {"recall": "mean R@1 (%)", "validation_loss": "validation loss"}
OF_A_LINE = ("ms", "batches", "timed_with", "file")
COLUMNS = (*curves.OF_A_RUN, "gpu", "bits", *OF_A_LINE, *MEASURES)
AXES = {"bits": "bits per operand, with scales", "ms": "ms per training step"}
AS_RUN = {  # key of a step's line: the same of a run
    "device": "gpu",
    "dtype": "precision.autocast",
    "image_size": "model.image_size",
    "patch_dropout": "model.patch_dropout",
    "compiled": "compile",
    "accumulate": "accumulate",
}
NATIVE = [  # recipes without fake-quantized products
    name for name, recipe in RECIPES.items() if all(p is None or p.native for p in recipe.products)
]
SCALE_BITS = {"float32": 32, "e8m0": 8, "e4m3": 8}
APART = 0.3  # bits between methods
BAR = 5  # points: the width of a mean
WIDE = 3  # ratio of the largest to the smallest loss on a logarithmic axis


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """The study's rows, and those of other studies that differ from one in the recipe alone."""
    return comparison.with_baselines(heads, EXPERIMENT, "precision.label")


def query(runs: Runs) -> pd.DataFrame:
    """One row per run: bits per operand, ms per step, and both measures at its last step, or NaN.

    Runs that have no measure and did not diverge are left out, as are custom recipes.
    """
    is_selected = runs.summaries["run"].isin(select(runs.runs)["run"])
    runs = runs.where(is_selected)
    heads = curves.with_scores(runs, curves.named_heads(runs))
    is_over = heads[list(MEASURES)].notna().any(axis=1) | (heads["state"] == "diverged")
    heads = heads[is_over & heads["precision.recipe"].isin(list(RECIPES))]
    of_run = [_mean_bits(head) for head in heads.to_dict("records")]
    heads = heads.assign(bits=of_run).sort_values("bits", ascending=False, kind="stable")
    return with_times(heads, bench.read_lines(runs.root, "step"))[list(COLUMNS)]


def with_times(heads: pd.DataFrame, lines: pd.DataFrame) -> pd.DataFrame:
    """Adds the `ms` of a training step, and the line's `batches` and `file`, to each run, or NaN.

    A line counts if its GPU, model, batch, recipe and other settings are the run's; its optimizer
    may be another (`timed_with`). Those of one setting are from one file, the newest with a time in
    16 bits. Fake-quantized recipes and runs that change their precision have none.
    """
    checkpointed = heads["checkpointing"].map({True: ", checkpointing", False: ""})
    shape = heads["model"] + " batch " + heads["batch_size"].astype(str) + checkpointed
    setting = comparison.joined(heads.assign(shape=shape), ["shape", *AS_RUN.values()])
    is_constant = heads["precision_change.step"].isna()
    heads = heads.assign(setting=setting, case=heads["precision.recipe"].where(is_constant))
    lines = lines.rename(columns={"optimizer": "timed_with"}).assign(accumulate=1)
    lines = lines.reindex(columns=["shape", *AS_RUN, "case", *OF_A_LINE]).astype({"case": str})
    lines = lines[lines["ms"].notna() & lines["case"].isin(NATIVE)]
    lines = lines.assign(setting=comparison.joined(lines, ["shape", *AS_RUN]))
    newest = lines[lines["case"] == "high"].groupby("setting")["file"].max()
    lines = lines[lines["file"] == lines["setting"].map(newest)]
    lines = lines.drop_duplicates(["setting", "case"], keep="last")
    return heads.join(lines.set_index(["setting", "case"])[[*OF_A_LINE]], on=["setting", "case"])


def _mean_bits(head: dict) -> float:
    """The mean of `bits` over the steps of a run, whose precision may change."""
    before = bits(head["precision.recipe"], head["precision.autocast"])
    if pd.isna(head["precision_change.step"]):
        return before
    precision = comparison.precision_after(head)
    share = (head["precision_change.step"] - 1) / head["num_steps"]
    return share * before + (1 - share) * bits(precision.recipe, precision.autocast)


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


def plot(frame: pd.DataFrame, ax: Axes, measure: str = "recall", by: str = "bits") -> Axes:
    """One panel: points for runs and bars for means of a measure, by one of AXES."""
    frame = frame[frame[by].notna()]
    at = frame.groupby("method")[by].first()
    at = _apart(at) if by == "bits" else at
    for method, line in frame.groupby("method", sort=False):
        head = line.iloc[0]
        color = style.color(head["precision"], head["optimizer"], head["variant"])
        places = pd.Series(at[method], line.index)
        plot_runs(ax, places, line[measure], color, None, f"{method}, {head['bits']:.3g} bits", BAR)
    ax.set(xlabel=AXES[by], ylabel=MEASURES[measure])
    if by == "bits":
        ax.set_xticks([4, 8, 12, 16])
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each measure, and again by step time if there are any, above one legend."""
    plots = [functools.partial(plot, by=by) for by in AXES if frame[by].notna().any()]
    axes = draw_measures(frame, figure, math.ceil(frame["method"].nunique() / 2), *plots)
    legend = axes[0].get_legend_handles_labels()
    ncols = curves.num_columns(len(axes))
    figure.legend(*legend, loc="outside lower left", ncols=ncols, handlelength=1.5)


def draw_measures(frame: pd.DataFrame, figure: Figure, lines: int, *plots: Callable) -> list[Axes]:
    """Draws a panel by each plot for each recorded measure, above a legend of `lines` lines."""
    measures = [name for name in MEASURES if frame[name].notna().any()] or ["recall"]
    axes = curves.panels(figure, len(plots) * len(measures), lines)
    for (plot, measure), ax in zip(itertools.product(plots, measures), axes, strict=True):
        plot(frame, ax, measure)
        lowest, highest = ax.dataLim.intervaly
        if measure == "validation_loss" and highest > WIDE * lowest:
            style.log_axis(ax)
    axes[0].set_title(curves.title(frame))
    return axes


def _apart(values: pd.Series) -> dict[str, float]:
    """Places on an axis by method, at least APART from each other and else close to the values."""
    values = values.sort_values(kind="stable")
    least = APART * np.arange(len(values))
    return (isotonic_regression(values - least).x + pd.Series(least, values.index)).to_dict()


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and the axes."""
    seeds = curves.seeds(frame, "method")
    return (
        "Mean R@1 of both directions and validation loss at the last step of "
        f"{curves.of_runs(frame)} ({seeds} of each method). Points: runs; bars: means of "
        "seeds; a cross below: a run without that measure. Bits: mean over the operands of a "
        "layer's three products, with the scales of tiles; a product left in 16 bits counts as 16, "
        "and a run that changes its format as the mean over its steps. "
        f"Methods with nearly equal bits are set apart.{_times(frame)}{curves.caption_end(frame)}"
    )


def _times(frame: pd.DataFrame) -> str:
    timed = frame[frame["ms"].notna()]
    if timed.empty:
        return ""
    names = ("gpu", "batches", "timed_with")
    gpus, batches, optimizers = (curves.join(timed[name].unique()) for name in names)
    num = comparison.counted(timed["file"].nunique(), "run")
    optimizer = style.method("", timed["optimizer"].iloc[0])
    methods = frame.loc[frame["ms"].isna(), "method"].str.replace(optimizer, "", regex=False)
    untimed = "; ".join(methods.unique())
    return (
        f" Step times: {num} of the benchmark `step` on {gpus} with batches {batches} "
        f"and optimizer={optimizers}."
        + f" No step time (fake-quantized or not measured): {untimed}."
        * bool(untimed)
    )
