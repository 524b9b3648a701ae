"""Zero-shot accuracy by model size: int8 on the left, fp8 on the right. Figure 1, arXiv:2304.13013.

Runs: `experiment=accuracy_vs_size`.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import curves, paper, style
from analysis.load import NoRunsError, Runs

OURS, PAPERS = "ours", "the paper's, +-0.2"
OF_A_RUN = (
    *("run", "scale", "data", "data_digest", "batch_size", "num_steps", "model", "precision"),
    *("optimizer", "seed", "state", "method", "label", "variant"),
)
COLUMNS = ("source", *OF_A_RUN, "accuracy")
APART = 0.05  # of the distance of two models, between methods
LOW = 0.04  # of the height of a panel: where a run without accuracy has its cross


def query(runs: Runs) -> pd.DataFrame:
    """One row per run: zero-shot top-1 in % at its last step, or NaN.

    At paper scale there are also rows with the paper's numbers for the same models, by `source`.
    Raises NoRunsError if no run has an accuracy or diverged.
    """
    heads = curves.named_heads(runs)
    if heads.empty:
        return pd.DataFrame(columns=list(COLUMNS))
    accuracy = 100 * heads["run"].map(curves.last_accuracy(runs)).astype(float)
    if accuracy.isna().all() and not (heads["state"] == "diverged").any():
        raise NoRunsError(
            f"{len(heads)} runs of {', '.join(heads['experiment'].unique())} have no accuracy at "
            "their last step yet"
        )
    ours = heads.assign(source=OURS, accuracy=accuracy)[list(COLUMNS)]
    frame = pd.concat([ours, *_papers(ours)], ignore_index=True)
    order = [style.rank(name, style.MODELS) for name in frame["model"]]
    return frame.iloc[np.argsort([place for place, _ in order], kind="stable")].reset_index(
        drop=True
    )


def _papers(ours: pd.DataFrame) -> list[pd.DataFrame]:
    """The paper's numbers for the methods and models that were run at its scale."""
    if ours["scale"].iloc[0] != "paper":
        return []
    rows = [
        {"source": PAPERS, "run": "", "model": model, "precision": precision,
         "accuracy": np.nan if value is None else value, "variant": 0, "method": precision,
         "state": "diverged" if value is None else "finished"}
        for precision, values in paper.ACCURACY_BY_SIZE.items()
        for model, value in values.items()
        if model in set(ours["model"]) and precision in set(ours["precision"])
    ]  # fmt: skip
    return [pd.DataFrame(rows)] if rows else []


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel: a line for each method through the means of its seeds; crosses lack accuracy."""
    models = list(dict.fromkeys(frame["model"]))
    methods = list(dict.fromkeys(frame["method"][frame["source"] == OURS]))
    for place, (name, line) in enumerate(
        frame[frame["source"] == OURS].groupby("method", sort=False)
    ):
        head = line.iloc[0]
        shade = style.color(head["precision"], head["optimizer"], head["variant"])
        shift = APART * (place - (len(methods) - 1) / 2)
        at = np.array([models.index(model) for model in line["model"]]) + shift
        mean = line.groupby(at)["accuracy"].mean().dropna()
        dashes = style.line_style(head["optimizer"])
        ax.plot(mean.index, mean, color=shade, ls=dashes, label=curves.wrap(name))
        ax.plot(at, line["accuracy"], "o", color=shade, ms=3)
        _crosses(ax, at[line["accuracy"].isna()], shade, filled=True)
        theirs = frame[(frame["source"] == PAPERS) & (frame["precision"] == head["precision"])]
        at = np.array([models.index(model) for model in theirs["model"]]) + shift
        ax.plot(at, theirs["accuracy"], "D", ms=5, mfc="none", mec=shade)
        _crosses(ax, at[theirs["accuracy"].isna()], shade, filled=False)
    if (frame["source"] == PAPERS).any():
        ax.plot([], [], "D", ms=5, mfc="none", mec=style.OTHER, label=PAPERS)
    ax.set_xticks(range(len(models)), [style.model(name) for name in models])
    ax.set_xlim(-0.35, len(models) - 0.65)
    ax.margins(y=0.14)
    ax.set(ylabel="zero-shot top-1 [%]")
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.13), borderaxespad=0, handlelength=2.6)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for int8 and one for fp8, with the 16-bit runs in both, on one scale."""
    panels = style.families(frame)
    lines = max(panel["method"].nunique() for _, panel in panels) + 1
    axes = curves.panels(figure, len(panels), lines)
    for (family, panel), ax in zip(panels, axes, strict=True):
        plot(panel, ax)
        scale = panel["scale"].iloc[0]
        ax.set_title(f"{family} ({scale} scale)" if family else f"{scale} scale")
    low = min(ax.get_ylim()[0] for ax in axes)
    high = max(ax.get_ylim()[1] for ax in axes)
    for ax in axes:
        ax.set_ylim(low, high)


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and the paper's numbers, and names runs that did not finish."""
    runs = frame[frame["source"] == OURS]
    models = curves.models(runs)
    seeds = runs.groupby(["model", "method"])["seed"].nunique()
    counts = curves.join(sorted(seeds.unique())) + (" seeds" if seeds.max() > 1 else " seed")
    text = (
        f"Zero-shot top-1 at the last step of {models} on "
        f"{curves.join(runs['data'].unique())}: {len(runs)} runs at "
        f"{curves.join(runs['scale'].unique())} scale ({counts} of each method and size). After "
        "figure 1, arXiv:2304.13013. Points: runs; lines: means of seeds; a cross below: a run "
        "without accuracy at its last step."
    )
    if (frame["source"] == PAPERS).any():
        text += " Diamonds and open crosses: the paper's, read by eye from plots of a draft."
    else:
        text += " The paper's accuracies are for other models and data and are left out."
    return text + curves.caption_end(runs)


def _crosses(ax: Axes, at: np.ndarray, shade: tuple, filled: bool) -> None:
    for place in at:
        ax.plot(place, LOW if filled else 2.2 * LOW, "X", color=shade, ms=5.5,
                mfc=shade if filled else "none", transform=ax.get_xaxis_transform())  # fmt: skip
