"""The figure of the page of results: loss by learning rate, what int8 costs, and features."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from analysis import marks, naming, panels, paper, style
from analysis.evidence import Sample
from analysis.figures.recipes import MAIN, all_sizes, in_bf16, in_main_recipes, rate_and_format
from analysis.grammar import ANYTHING, Figure, by_model
from analysis.load import Runs

RECIPES = {name: naming.precision(name).removeprefix("hardware ") for name in MAIN}
ASIDE = marks.slots(RECIPES, 0.6)  # of the distance of two models, or of two rates
DISTANCE, PAPER_RATE, TICKS = 1.5, 2e-3, (5e-4, 1e-3, 2e-3)


@dataclass(eq=False, kw_only=True)
class Headline(Figure):
    """A row of panels by learning rate, and below it a panel by size and one by model."""

    def query(self, runs: Runs) -> pd.DataFrame:
        """The table of the selected runs."""
        return all_sizes(self.selected(runs))

    def draw(self, frame: pd.DataFrame, canvas: Canvas) -> None:
        """All panels; those of models with many rates are wider."""
        canvas.set_size_inches(2 * style.COLUMN_WIDTH, 4.8)
        models, (upper, lower) = by_model(frame[frame["model"] != "mini_b"]), canvas.add_gridspec(2)
        widths = [1 + part["lr"].nunique() / 20 for _, part in models]
        cells = upper.subgridspec(1, len(models), width_ratios=widths)
        [above] = cells.subplots(sharex=True, sharey=True, squeeze=False)
        for ax, (title, part) in zip(above, models, strict=True):
            draw_rates(ax, part)
            is_same = {*part["data_digest"]} == {*models[-1][1]["data_digest"]}
            data = "" if is_same else ", its own data"
            ax.set_title(f"{title}\n{part['pixels'].iloc[0]:.0f} px{data}")
        above[0].set_xticks(TICKS, map(naming.number, TICKS))
        panels.value_axis(above[0], log=True)
        above[0].set(xlim=(2e-4, 3e-3), ylim=(None, 2.5 * above[0].get_ylim()[1]))
        above[0].text(0.05, 0.75, "gray: range of\nbf16's seeds", color=style.OTHER, fontsize=7,
                      transform=above[0].transAxes, va="top")  # fmt: skip
        panels.name_values(above[0], "validation loss (nats)", "y")
        left, right = lower.subgridspec(1, 2, width_ratios=(1.35, 1)).subplots()
        frame = frame[frame["counts"] & (frame["recipe"] != "bf16")]
        draw_cost(left, frame[frame["recall_change"].notna()])
        draw_features(right, frame[frame["feature_ratio"].notna()])
        for ax in (above[-1], left, right):
            panels.name_lines(canvas, [ax])


def draw_rates(ax: Axes, part: pd.DataFrame) -> None:
    """The validation loss of a model by learning rate, a line for each recipe."""
    ax.set_xscale("log")
    seeds = in_bf16(part).groupby("lr")["validation_loss"].agg(["min", "max", "count"])
    seeds = seeds[seeds["count"] > 1]
    ax.vlines(seeds.index, seeds["min"], seeds["max"], color="0.85", lw=16, zorder=0.5)
    for recipe, own in part.groupby("recipe", sort=False):
        at = {lr: lr * DISTANCE ** ASIDE[recipe] for lr in part["lr"]}
        marks.draw_runs(ax, own["lr"].map(at), own["validation_loss"], every=at.values(),
                        color=style.color(recipe, ""), label=RECIPES[recipe])  # fmt: skip
    ax.minorticks_off()
    ax.set_xlabel("learning rate")
    ax.annotate("paper", (PAPER_RATE, 0.88), (PAPER_RATE, 1), xycoords=ax.get_xaxis_transform(),
                ha="center", va="top", fontsize=7, color=style.OTHER,
                arrowprops={"arrowstyle": "->", "color": style.OTHER, "lw": 0.8})  # fmt: skip


def draw_cost(ax: Axes, frame: pd.DataFrame) -> None:
    """R@1 relative to bf16 by parameters, with 95% intervals and numbers of seeds; the paper's."""
    in_paper = pd.DataFrame(paper.ACCURACY_BY_SIZE)
    for recipe, (side, end) in {"switchback": (-1, "high"), "llm_int8": (1, "low")}.items():
        ax.plot(paper.PARAMETERS.values(), in_paper[recipe] - in_paper["bf16"], "s-", lw=1, ms=4,
                color="#A6A6A6", label=f"paper, {RECIPES[recipe]}", zorder=1.5)  # fmt: skip
        own = frame[frame["recipe"] == recipe].groupby(["parameters", "model"])
        rows = {size: vars(Sample.of(part["recall_change"])) for size, part in own}
        rows = pd.DataFrame(rows, ["mean", "low", "high", "num"]).T
        at, color = rows.index.get_level_values(0) * 1.07**side, style.color(recipe, "")
        ax.plot(at, rows["mean"], "o", ls="-", lw=0, ms=4.5, color=color, label=RECIPES[recipe])
        ax.vlines(at, rows["low"], rows["high"], color=color, lw=1.2)
        for place, height, num in zip(at, rows[end], rows["num"], strict=True):
            ax.annotate(f"{num:.0f}", (place, height), (0, -6 * side), textcoords="offset points",
                        ha="center", va="center", fontsize=6.5, color=color)  # fmt: skip
    ax.axhline(0, color=style.OTHER, lw=0.8, zorder=0.5)
    ax.set_xscale("log")
    sizes = {title.partition("/")[0]: part["parameters"].iloc[0] for title, part in by_model(frame)}
    ax.set_xticks([*sizes.values()], [f"{k}\n{num / 1e6:,.0f} M" for k, num in sizes.items()])
    ax.minorticks_off()
    ax.margins(y=0.08)
    ax.set(xlabel="parameters (log scale)", ylabel="R@1 relative to bf16 (points)",
           title="Cost of int8 at the best rate run\n95% intervals, number of seeds")  # fmt: skip


def draw_features(ax: Axes, frame: pd.DataFrame) -> None:
    """Early features relative to bf16, by model."""
    rates = {title: naming.number(part["lr"].iloc[0]) for title, part in by_model(frame)}
    places = frame["model"].map(naming.model).map([*rates].index) + frame["recipe"].map(ASIDE)
    for recipe, own in frame.groupby("recipe", sort=False):
        marks.draw_runs(ax, places[own.index], own["feature_ratio"], label=RECIPES[recipe],
                        color=style.color(recipe, ""))  # fmt: skip
    marks.draw_reference(ax, 1, 0, "y")
    panels.name_places(ax, [f"{title}\nat {rate}" for title, rate in rates.items()])
    panels.value_axis(ax, log=True)
    panels.name_values(ax, "relative to bf16", "y")
    steps = naming.join(sorted(frame["step"].astype(int).unique()))
    ax.set_title(f"Features at step {steps}\nlast vision block, dots: seeds")


FIGURES = {
    "headline": Headline(
        studies=("lr_map", "weight_gradient", "equality", "accuracy_vs_size", "interventions"),
        same_but=ANYTHING,
        scales=("mini",),
        where=in_main_recipes,
        title=rate_and_format,
        what="validation loss by learning rate, R@1 by size and early features",
        text="Gray: the range of seeds in bf16, and the paper's accuracy on ImageNet. Below: the "
        "rate at which bf16 has its lowest loss; intervals are 95%, with numbers of seeds.",
    )
}
