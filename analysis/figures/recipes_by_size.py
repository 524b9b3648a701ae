"""Validation loss and feature size by recipe and model, relative to bf16 with the same seed.

Not in the paper. Runs: `experiment=weight_gradient`.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import comparison, curves, paper, style
from analysis.load import Runs
from analysis.size_judges import MARGIN

EXPERIMENT = "weight_gradient"
BF16, NARROW = "bf16", "grad_weight int8"
EARLY = 0.2  # of the steps: the record of features
WIDTH = 0.5  # of the distance of two models, for all recipes
COLUMNS = (*curves.OF_A_RUN, "recipe", "loss_change", "step", "feature_ratio")


def query(runs: Runs) -> pd.DataFrame:
    """One row per run: `loss_change` in % and `feature_ratio`, both relative to bf16.

    A run is compared with the bf16 run of the same seed and settings; `loss_change` of a bf16 run
    is relative to the geometric mean over seeds.
    """
    heads = curves.with_scores(runs, curves.named_heads(runs))
    narrow = comparison.narrow_products(runs.runs).set_axis(runs.runs["run"])
    heads["recipe"] = heads["run"].map(narrow).replace("", None).fillna(heads["precision"])
    frame = curves.by_run(runs, heads, (*COLUMNS, "validation_loss", "size"), _sizes)
    settings = comparison.signature(runs.runs, "precision.label", seed=False)
    settings = frame["run"].map(dict(zip(runs.runs["run"], settings, strict=True)))
    is_base = frame["recipe"] == BF16
    losses = np.log(frame["validation_loss"])
    means = losses[is_base].groupby(settings[is_base]).mean()
    keys = pd.MultiIndex.from_arrays([settings, frame["seed"]])
    bases = pd.DataFrame({"loss": losses, "size": frame["size"]})[is_base].set_index(keys[is_base])
    bases = bases[~bases.index.duplicated()].reindex(keys).set_axis(frame.index)
    of_losses = bases["loss"].where(~is_base, settings.map(means))
    frame["loss_change"] = 100 * np.expm1(losses - of_losses)
    frame["feature_ratio"] = frame["size"] / bases["size"]
    return frame.loc[frame["feature_ratio"].notna(), list(COLUMNS)].reset_index(drop=True)


def _sizes(run: Runs, head: dict) -> pd.DataFrame:
    values = run.series(paper.BLOCK.format(int(head["vision_layers"]) - 1), "feature_mean")
    early = values[values.index <= EARLY * head["num_steps"]].iloc[-1:]
    return early.to_frame("size").reset_index().assign(validation_loss=head["validation_loss"])


def plot(frame: pd.DataFrame, ax: Axes, value: str = "loss_change") -> Axes:
    """One panel: a dot per run, a bar for the mean of seeds."""
    models, recipes = list(dict.fromkeys(frame["model"])), _recipes(frame)
    if value == "feature_ratio":
        recipes.remove(BF16)
    for place, recipe in enumerate(recipes):
        line = frame[frame["recipe"] == recipe]
        at = line["model"].map(models.index) + WIDTH * (place / max(len(recipes) - 1, 1) - 0.5)
        means = line[value].groupby(at).mean()
        look = {"color": _color(recipe), "ls": "none"}
        ax.plot(means.index, means, marker="_", ms=9, mew=1.8, label=_printed(recipe), **look)
        ax.plot(at, line[value], marker="o", ms=3, **look)
    ax.set_xticks(range(len(models)), [style.model(name) for name in models])
    ax.set_xlim(-0.5, len(models) - 0.5)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel of the validation loss and one of the features, above one legend."""
    figure.set_size_inches(2 * style.COLUMN_WIDTH, 2.6)
    of_loss, of_size = figure.subplots(1, 2)
    of_loss.axhspan(-MARGIN, MARGIN, color="0.92", lw=0, zorder=0)
    of_loss.axhline(0, color=style.OTHER, lw=0.8, zorder=0)
    plot(frame, of_loss).set(ylabel="validation loss relative to bf16 (%)")
    of_size.axhline(1, color=style.OTHER, lw=0.8, zorder=0)
    plot(frame, of_size, "feature_ratio").set_yscale("log")
    ticks = [
        t for t in (0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4) if t <= 1.1 * frame["feature_ratio"].max()
    ]
    of_size.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    of_size.minorticks_off()
    step = curves.join(f"{step:,}" for step in sorted(frame["step"].unique()))
    of_size.set(ylabel=r"$\mathrm{E}[|x|]$ relative to bf16", title=f"features at step {step}")
    of_loss.set(title="at the end of training")
    handles, labels = of_loss.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs, and gives each recipe's mean change and mean ratio by model."""
    step = curves.join(f"{step:,}" for step in sorted(frame["step"].unique()))
    text = (
        f"{curves.of_runs(frame)}. Left: validation loss at the end, relative to the bf16 run with "
        f"the same seed (bf16: to its mean over seeds); gray: {MARGIN:g}%, which count as equal. "
        f"Right: E[abs(x)] of the output of the last vision block at step {step}, relative to "
        "bf16 with the same seed. Dots: runs; bars: means of seeds."
    )
    rest = frame[frame["recipe"] != BF16]
    for (model, recipe), part in rest.groupby(["model", "recipe"], sort=False):
        text += f" {style.model(model)}, {_printed(recipe)}: {part['loss_change'].mean():+.1f}%, "
        text += f"{part['feature_ratio'].mean():.2f}."
    return text + curves.caption_end(frame, crosses=False)


def _recipes(frame: pd.DataFrame) -> list[str]:
    """The recipes, bf16 first, those with an int8 weight gradient last."""
    last = [NARROW, "llm_int8"]
    names = [name for name in dict.fromkeys(frame["recipe"]) if name not in (BF16, *last)]
    return [BF16, *sorted(names, reverse=True), *(n for n in last if n in set(frame["recipe"]))]


def _color(recipe: str) -> tuple | str:
    if recipe == NARROW:
        return "#0B5D47"
    return style.OTHER if recipe == BF16 else style.color(recipe, "stable_adamw")


def _printed(recipe: str) -> str:
    return "int8 weight gradient only" if recipe == NARROW else style.precision(recipe)
