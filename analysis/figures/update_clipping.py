"""AdamW, with gradient clipping, with update clipping: loss and accuracy by beta2.

Figure 10, arXiv:2304.13013. Runs: `experiment=update_clipping`, or else those of FALLBACK.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import comparison, curves, paper, style
from analysis.figures.accuracy_vs_size import plot_runs
from analysis.load import Runs

FALLBACK = "stability"
COLUMNS = ("part", *curves.COLUMNS, "accuracy")


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """The rows of each model that agree in the most frequent settings besides beta2 and optimizer.

    Runs at another learning rate, such as a control, are left out.
    """
    if heads["optimizer.name"].isna().all():  # no run has a readable config
        return heads
    settings = comparison.signature(heads, "optimizer.name", "optimizer.beta2", seed=False)
    usual = settings.groupby(heads["model.name"]).agg(lambda texts: texts.value_counts().idxmax())
    return heads[settings == heads["model.name"].map(usual)]


def query(runs: Runs) -> pd.DataFrame:
    """Losses for the left panel and accuracies for the right one: exactly what is plotted.

    Part `loss` has one row per step of the runs with the largest beta2 that all methods of a model
    share. Part `accuracy` has one row per run: zero-shot top-1 in % at its last step, or NaN.
    """
    runs = runs.where(runs.summaries["run"].isin(select(runs.runs)["run"]))
    heads = curves.named_heads(runs, ("optimizer.beta2",))
    is_common = heads["beta2"] == heads["model"].map(_common_beta2(heads))
    loss = curves.losses(runs, heads[is_common]).assign(part="loss", accuracy=np.nan)
    ends = heads.assign(part="accuracy", step=heads["reached"], loss=np.nan, loss_median=np.nan)
    ends = curves.with_scores(runs, ends).sort_values("beta2", kind="stable")[list(COLUMNS)]
    return pd.concat([loss[list(COLUMNS)], ends], ignore_index=True)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """The left panel: losses of one model at one beta2."""
    head = frame.iloc[0]
    name = style.model(head["model"])
    title = f"{name}, beta2 = {head['beta2']:g} ({head['scale']} scale)"
    return curves.plot(frame, ax, style.look, title)


def plot_accuracy(frame: pd.DataFrame, ax: Axes) -> Axes:
    """The right panel: mean accuracy by beta2 for one model; crosses lack accuracy."""
    for _, line in frame.groupby(["precision", "optimizer", "variant"], sort=False):
        color, dashes = style.look(line.iloc[0])
        name = style.method(line["precision"].iloc[0], line["optimizer"].iloc[0])
        plot_runs(ax, 1 - line["beta2"], line["accuracy"], color, dashes, name)
    ticks = set(frame["beta2"])
    if _is_papers(frame):
        for optimizer, numbers in paper.ACCURACY.items():
            color = style.color("bf16", optimizer)
            at = 1 - np.array(list(numbers))
            label = "the paper's, +-0.2" if optimizer == "adamw" else None
            ax.plot(at, list(numbers.values()), "D", ms=4, mfc="none", mec=color, label=label)
            ticks |= set(numbers)
    ax.set_xscale("log")
    ax.invert_xaxis()
    ax.set_xticks([1 - beta2 for beta2 in sorted(ticks)], [f"{b:g}" for b in sorted(ticks)])
    ax.minorticks_off()
    ax.set(xlabel="beta2", ylabel="zero-shot top-1 (%)", title="accuracy at the end")
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.2), borderaxespad=0, handlelength=2.6)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a row for each model: loss on the left and accuracy on the right."""
    models = list(dict.fromkeys(frame["model"]))
    lines = frame.groupby("model")["label"].nunique().max()
    axes = curves.panels(figure, 2 * len(models), lines)
    for i, model in enumerate(models):
        of_model = frame[frame["model"] == model]
        plot(of_model[of_model["part"] == "loss"], axes[2 * i])
        plot_accuracy(of_model[of_model["part"] == "accuracy"], axes[2 * i + 1])


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and names those that did not finish."""
    ends = frame[frame["part"] == "accuracy"]
    text = curves.caption(ends, "figure 10").replace("Training loss", "Training loss and accuracy")
    text += " Right: zero-shot top-1 at the last step by beta2; a cross below: the run has none."
    if _is_papers(ends):
        text += " Diamonds: the paper's ViT-H/14, read by eye from plots (+-0.2)."
    labels = [f"beta2 = {row.beta2:g}, {row.label}" for row in ends.itertuples()]
    return text + curves.caption_end(ends.assign(label=labels))


def _common_beta2(heads: pd.DataFrame) -> dict[str, float]:
    """By model: the largest beta2 that all its methods ran with; if there is none, the largest."""
    largest = {}
    for model, group in heads.groupby("model"):
        methods = group.groupby("beta2")["optimizer"].nunique()
        largest[model] = methods.index[methods == methods.max()].max()
    return largest


def _is_papers(frame: pd.DataFrame) -> bool:
    return frame["scale"].iloc[0] == "paper" and frame["model"].iloc[0] == paper.ACCURACY_MODEL
