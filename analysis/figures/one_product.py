"""Mean R@1 and validation loss if one product of each layer has narrow operands, by its format.

Not in the paper. Runs: `experiment=one_product`, and those of BASELINES in 16 bits.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import comparison, curves, style
from analysis.figures.accuracy_vs_size import plot_runs
from analysis.figures.formats import MEASURES, draw_measures
from analysis.load import Runs
from lowprec.nn.recipe import PRODUCTS

EXPERIMENT, BASELINES = "one_product", ("accuracy_vs_size",)
COLUMNS = ("product", "format", *curves.OF_A_RUN, *MEASURES)
COLORS = {"int8": "#D55E00", "e3m2": "#009E73", "e2m1": "#CC79A7"}  # format: color
NAMES = ("none", "output", "input\ngradient", "weight\ngradient")  # of no product and of PRODUCTS
APART = 0.22  # of the distance of two products, between formats


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """The study's rows, and those of other studies that differ from one in the recipe alone."""
    heads = comparison.with_baselines(heads, EXPERIMENT, "precision.label")
    return heads[(heads["experiment"] == EXPERIMENT) | (heads["precision.recipe"] == "high")]


def query(runs: Runs) -> pd.DataFrame:
    """One row per run: its narrow product and format, and both measures at its last step, or NaN.

    In 16 bits, `product` is "" and `format` that of the autocast. Runs with several narrow products
    are left out, as are those that have no measure and did not diverge.
    """
    runs = runs.where(runs.summaries["run"].isin(select(runs.runs)["run"]))
    heads = curves.with_scores(runs, curves.named_heads(runs))
    narrow = comparison.narrow_products(heads)
    names, parts = narrow.where(narrow != "", heads["precision"]), narrow.str.partition(" ")
    ends = [head.label.removeprefix(head.method) for head in heads.itertuples()]
    heads = heads.assign(method=names, label=names + ends)
    heads["product"], heads["format"] = parts[0], parts[2].where(narrow != "", heads["precision"])
    is_over = heads[list(MEASURES)].notna().any(axis=1) | (heads["state"] == "diverged")
    return heads.loc[is_over & ~narrow.str.contains("+", regex=False), list(COLUMNS)]


def plot(frame: pd.DataFrame, ax: Axes, measure: str = "recall") -> Axes:
    """One panel: points for runs and bars for means of a measure, by product and format."""
    products = ["", *PRODUCTS]
    formats = sorted(set(frame.loc[frame["product"] != "", "format"]), key=_rank)
    for name, line in frame.groupby("format", sort=False):
        shift = formats.index(name) - (len(formats) - 1) / 2 if name in formats else 0
        at = line["product"].map(products.index).astype(float) + APART * shift
        color = COLORS.get(name, style.color(name, line["optimizer"].iloc[0]))
        plot_runs(ax, at, line[measure], color, None, name)
    ax.set_xticks(range(len(products)), NAMES)
    ax.set(xlabel="narrow product", ylabel=MEASURES[measure], xlim=(-0.5, len(products) - 0.5))
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each measure above one legend."""
    handles, labels = draw_measures(frame, figure, 2, plot)[0].get_legend_handles_labels()
    pairs = sorted(zip(labels, handles, strict=True), key=lambda pair: _rank(pair[0]))
    names, marks = zip(*pairs, strict=True)
    figure.legend(marks, names, loc="outside lower left", ncols=4, handlelength=1.5)


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and the axes."""
    seeds = curves.seeds(frame, "product", "format")
    return (
        "Mean R@1 of both directions and validation loss at the last step of "
        f"{curves.of_runs(frame)} ({seeds} of each setting). The operands of "
        "one product of each layer have the format of the legend, and its other products run in 16 "
        "bits. Points: runs; bars: means of seeds; a cross below: a run without that measure."
        f"{curves.caption_end(frame)}"
    )


def _rank(name: str) -> tuple[int, str]:
    return style.rank(name, tuple(COLORS))
