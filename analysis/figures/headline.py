"""The figure of the page of results: loss by learning rate, and by recipe at the best rate."""

from dataclasses import dataclass, replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from analysis import marks, naming, panels, paper, style
from analysis.figures import recipes
from analysis.grammar import ANYTHING, Axis, by_model
from analysis.points import HEIGHT, REST, Rows
from analysis.size_judges import MARGIN

RECIPES = {name: naming.precision(name).removeprefix("hardware ") for name in recipes.MAIN}
ASIDE = marks.slots(RECIPES, 0.4)  # of the distance of two rates
DISTANCE, PAPER_RATE = 1.5, 2e-3
IN_PAPER = {"vit_b14": "vit_b32", "vit_l14": "vit_l14", "vit_h14": "vit_h14"}  # by ours
GRAY = "#A6A6A6"


@dataclass(eq=False, kw_only=True)
class Headline(Rows):
    """The largest model by learning rate, and beside it the rows of all at their best rates."""

    def draw(self, frame: pd.DataFrame, canvas: Canvas) -> None:
        """All panels in a row."""
        own = self._sorted(recipes.beside_bf16(frame[frame["counts"]]))
        rows = self._rows(own, self._labels(own))
        canvas.set_size_inches(2 * style.COLUMN_WIDTH, 1.4 * REST + HEIGHT * len(rows))
        left, *right = canvas.subplots(1, 1 + len(self.values))
        draw_rates(left, *by_model(frame)[-1])
        for ax, axis in zip(right, self.values, strict=True):
            self.plot(rows, ax, axis)
        draw_paper(right[-1], [part for _, part in rows])
        panels.label_outer(right)
        panels.name_lines(canvas, [left])


def draw_rates(ax: Axes, title: str, part: pd.DataFrame) -> None:
    """The validation loss of a model by learning rate, a line for each recipe."""
    for recipe, own in part.groupby("recipe", sort=False):
        at = {lr: lr * DISTANCE ** ASIDE[recipe] for lr in part["lr"]}
        marks.draw_runs(ax, own["lr"].map(at), own["validation_loss"], every=at.values(),
                        color=style.color(recipe), label=RECIPES[recipe])  # fmt: skip
    panels.number_axis(ax, part["lr"])
    panels.value_axis(ax, log=True)
    ax.set(xlabel="learning rate", title=title, ylim=(None, 2 * ax.get_ylim()[1]))
    panels.name_values(ax, "validation loss (nats)", "y")
    ax.annotate("paper", (PAPER_RATE, 0.9), (PAPER_RATE, 1), xycoords=ax.get_xaxis_transform(),
                ha="center", va="top", fontsize=7, color=style.OTHER,
                arrowprops={"arrowstyle": "->", "color": style.OTHER, "lw": 0.8})  # fmt: skip


def draw_paper(ax: Axes, parts: list[pd.DataFrame]) -> None:
    """Gray squares at the paper's accuracies relative to bf16, in the rows of its recipes."""
    texts = {0: "gray: the paper,\non ImageNet"}
    for row, part in enumerate(parts):
        if part.empty or (model := IN_PAPER.get(part["model"].iloc[0])) is None:
            continue
        recipe = part["recipe"].iloc[0].removeprefix("hw_")
        own, base = (paper.ACCURACY_BY_SIZE[name][model] for name in (recipe, "bf16"))
        if own is None:
            texts[row] = "paper: diverges"
        else:
            ax.plot(own - base, row, "s", ms=4, color=GRAY, zorder=1.5)
    for row, text in texts.items():
        marks.note_in_row(ax, row, text)


def at_rate(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """A block for each model, whose title has its learning rate."""
    rates = frame.groupby("model")["lr"].max().map(naming.number)
    return [(f"{title} at {rates[part['model'].iloc[0]]}", part) for title, part in by_model(frame)]


FIGURES = {
    "headline": Headline(
        studies=("lr_map", "weight_gradient", "equality", "interventions"),
        same_but=ANYTHING,
        where=recipes.in_main_recipes,
        table=recipes.loss_and_recall,
        values=(
            replace(recipes.LOSS_CHANGE, label="validation loss\nrelative to bf16 (%)",
                    interval=recipes.mean_change),
            Axis(column="recall_change", label="mean R@1\nrelative to bf16 (points)",
                 reference=0, interval=recipes.mean_of_several),
        ),
        blocks=at_rate,
        hue="recipe",
        order=recipes.MAIN,
        name=lambda head: RECIPES[head["recipe"]],
        title=recipes.rate_and_format,
        shows=recipes.shows_rates_and_recipes,
        what="validation loss by learning rate, and loss and mean R@1 relative to bf16",
        text="Left: points are runs, lines join means. Right: relative to bf16 of the same seed, "
        "at the rate at which bf16 has its lowest loss; 90% intervals of three or more runs. Gray: "
        f"{MARGIN:g}% of the loss, the margin of equality, and the paper's accuracy on ImageNet "
        "(ViT-B/32 in place of B/14).",
    )
}  # fmt: skip
