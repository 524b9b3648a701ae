"""Accuracy by model size: int8 on the left, fp8 on the right. Figure 1, arXiv:2304.13013.

Runs: `experiment=accuracy_vs_size`.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import curves, paper, style
from analysis.load import NoRunsError, Runs

OURS, PAPERS = "ours", "the paper's, +-0.2"
TOP1, RECALL = "zero-shot top-1", "mean R@1"
COLUMNS = ("source", *curves.OF_A_RUN, "accuracy")
APART = 0.05  # of the distance of two models, between methods
ALL = 0.6  # of the same distance: all methods together where there is one model
LOW = 0.04  # of the height of a panel: where a run without accuracy has its cross


def query(runs: Runs) -> pd.DataFrame:
    """One row per run: its accuracy in % at its last step, or NaN.

    `metric` is the same in all rows: zero-shot top-1, or at mini scale the mean R@1 of both
    directions, if more runs have that. At paper scale there are also rows with the paper's numbers
    for the same models, by `source`. Raises NoRunsError if no run has an accuracy or diverged.
    """
    heads = curves.named_heads(runs)
    is_paper = (heads["scale"] == "paper").all()
    heads, metric = curves.with_scores(runs, heads), TOP1
    if not is_paper and heads["recall"].count() >= max(1, heads["accuracy"].count()):
        heads, metric = heads.assign(accuracy=heads["recall"]), RECALL
    if heads["accuracy"].isna().all() and not (heads["state"] == "diverged").any():
        studies = ", ".join(heads["experiment"].unique())
        raise NoRunsError(f"{len(heads)} runs of {studies} have no accuracy at their last step yet")
    ours = heads.assign(source=OURS)[list(COLUMNS)]
    frame = pd.concat([ours, *([_papers(ours)] if is_paper else [])], ignore_index=True)
    frame["metric"] = metric
    order = frame["model"].map(lambda name: style.rank(name, style.MODELS)[0])
    return frame.loc[order.sort_values(kind="stable").index].reset_index(drop=True)


def _papers(ours: pd.DataFrame) -> pd.DataFrame:
    """The paper's numbers for the methods and models of our runs."""
    rows = [
        {"source": PAPERS, "run": "", "model": model, "precision": precision, "accuracy": value,
         "variant": 0, "method": precision, "state": "diverged" if value is None else "finished"}
        for precision, values in paper.ACCURACY_BY_SIZE.items()
        for model, value in values.items()
        if model in set(ours["model"]) and precision in set(ours["precision"])
    ]  # fmt: skip
    return pd.DataFrame(rows).astype({"accuracy": float}) if rows else pd.DataFrame()


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel: points for runs, bars for the means of seeds; crosses lack accuracy."""
    models = list(dict.fromkeys(frame["model"]))
    ours = frame[frame["source"] == OURS]
    methods = list(dict.fromkeys(ours["method"]))
    apart = APART if len(models) > 1 else ALL / len(methods)
    for method, line in ours.groupby("method", sort=False):
        head = line.iloc[0]
        color = style.color(head["precision"], head["optimizer"], head["variant"])
        shift = apart * (methods.index(method) - (len(methods) - 1) / 2)
        at = line["model"].map(models.index).astype(float) + shift
        plot_runs(ax, at, line["accuracy"], color, None, method)
        theirs = frame[(frame["source"] == PAPERS) & (frame["precision"] == head["precision"])]
        at = theirs["model"].map(models.index).astype(float) + shift
        ax.plot(at, theirs["accuracy"], "D", ms=5, mfc="none", mec=color)
        crosses(ax, at[theirs["accuracy"].isna()], 2.2 * LOW, color, mfc="none")
    if (frame["source"] == PAPERS).any():
        ax.plot([], [], "D", ms=5, mfc="none", mec=style.OTHER, label=PAPERS)
    ax.set_xticks(range(len(models)), [style.model(name) for name in models])
    ax.set_xlim(-0.35, len(models) - 0.65)
    ax.margins(y=0.14)
    ax.set(ylabel=f"{frame['metric'].iloc[0]} (%)")
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.13), borderaxespad=0, handlelength=2.6)
    return ax


def plot_runs(
    ax: Axes,
    at: pd.Series,
    accuracy: pd.Series,
    color: tuple,
    dashes: str | tuple | None,
    label: str,
    bar: float = 11,
) -> None:
    """A point for each run and a line through the means, or bars; a cross for runs without.

    Bars are for `dashes` of None and `bar` points wide.
    """
    mean = accuracy.groupby(at, sort=False).mean().dropna()  # in the order of the runs
    bars = {"ls": "none", "marker": "_", "ms": bar, "mew": 1.6}
    look = bars if dashes is None else {"ls": dashes}
    ax.plot(mean.index, mean, color=color, label=curves.wrap(label), **look)
    ax.plot(at, accuracy, "o", color=color, ms=3)
    crosses(ax, at[accuracy.isna()], LOW, color)


def crosses(ax: Axes, at: pd.Series, height: float, color: tuple, **look) -> None:
    """A cross at each place, at a share of the height of the panel."""
    for place in at:
        ax.plot(place, height, "X", color=color, ms=5.5, transform=ax.get_xaxis_transform(), **look)


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for int8 and one for fp8, with the 16-bit runs in both, on one scale."""
    panels = style.families(frame)
    lines = max(panel["method"].nunique() for _, panel in panels) + 1
    axes = curves.panels(figure, len(panels), lines)
    for (family, panel), ax in zip(panels, axes, strict=True):
        plot(panel, ax)
        scale = panel["scale"].iloc[0]
        ax.set_title(f"{family} ({scale} scale)" if family else f"{scale} scale")
    curves.share_limits(axes)
    if axes[0].get_ylim()[0] > 0:
        for ax in axes:
            ax.set_ylabel(f"{frame['metric'].iloc[0]} (%, axis not from 0)")


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and the paper's numbers, and names runs that did not finish."""
    runs = frame[frame["source"] == OURS]
    seeds, metric = curves.seeds(runs, "model", "method"), runs["metric"].iloc[0]
    text = (
        f"{metric[0].upper()}{metric[1:]} at the last step of {curves.of_runs(runs)} ({seeds} of "
        "each method and size). After figure 1, arXiv:2304.13013. Points: runs; bars: means of "
        "seeds; a cross below: a run without accuracy at its last step."
    )
    if (frame["source"] == PAPERS).any():
        text += " Diamonds and open crosses: the paper's, read by eye from plots of a draft."
    else:
        text += " The paper's accuracies are for other models and data and are left out."
    return text + curves.caption_end(runs)
