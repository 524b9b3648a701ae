"""Figures of recipes relative to bf16: validation loss and features, by model and learning rate."""

from dataclasses import replace

import numpy as np
import pandas as pd

from analysis import comparison, measures, naming, style
from analysis.evidence import Sample
from analysis.figures.scores import GREEN, look_by_gradient, rates, scores, weight_gradient
from analysis.grammar import Axis, by_model
from analysis.load import Runs
from analysis.points import Points, Rows
from analysis.size_judges import MARGIN, TRAINS, percent
from lowprec.runs.read import ENDED

EARLY = 0.2  # of the steps: the record of features


def relative_to_bf16(runs: Runs) -> pd.DataFrame:
    """`loss_change` in % and `feature_ratio` of each run, both relative to bf16.

    The features are E[abs(x)] of the output of the last vision block at the last record of the
    first fifth of the steps, and relative to those of the bf16 run of the same seed and settings.
    """
    heads = measures.with_recipe(measures.with_scores(runs, measures.named_heads(runs)))
    columns = (*measures.OF_A_RUN, "recipe", "loss_change", "step", "feature_ratio")
    frame = measures.by_run(runs, heads, (*columns, "validation_loss", "size"), _early_size)
    settings = _settings(runs, frame)
    frame["loss_change"] = loss_change(frame, settings)
    frame["feature_ratio"] = frame["size"] / _of_bf16(frame["size"], frame, settings)
    return frame.loc[frame["feature_ratio"].notna(), list(columns)].reset_index(drop=True)


def loss_change(frame: pd.DataFrame, settings: pd.Series) -> pd.Series:
    """The validation loss in %, relative to that of the bf16 run of the same seed and settings.

    That of a bf16 run is relative to the geometric mean over seeds. NaN without a bf16 run.
    """
    losses, is_base = np.log(frame["validation_loss"]), frame["recipe"] == "bf16"
    means = losses.where(is_base).groupby(settings).transform("mean")
    return 100 * np.expm1(losses - _of_bf16(losses, frame, settings).where(~is_base, means))


def _settings(runs: Runs, frame: pd.DataFrame) -> pd.Series:
    """For each row a text, equal for runs that differ in recipe and seed alone."""
    settings = comparison.signature(runs.runs, "precision.label", seed=False)
    return frame["run"].map(dict(zip(runs.runs["run"], settings, strict=True)))


def _of_bf16(values: pd.Series, frame: pd.DataFrame, settings: pd.Series) -> pd.Series:
    """For each row the value of the bf16 run of the same seed and settings, or NaN."""
    keys = pd.MultiIndex.from_arrays([settings, frame["seed"]])
    bases = values.set_axis(keys)[(frame["recipe"] == "bf16").to_numpy()]
    return bases[~bases.index.duplicated()].reindex(keys).set_axis(frame.index)


def _early_size(run: Runs, head: dict) -> pd.DataFrame:
    record = measures.last_size(run, head, EARLY)
    return record.assign(validation_loss=head["validation_loss"])


def at_step(frame: pd.DataFrame) -> str:
    """The label of the features relative to bf16."""
    step = naming.join(f"{step:,}" for step in sorted(frame["step"].unique()))
    return f"mean absolute value of the\nlast vision block, step {step},\nrelative to bf16"


def look_of_recipe(head: pd.Series) -> tuple:
    """The color of a recipe; bf16 is gray."""
    return style.color(head["recipe"], ""), "-"


def ended_at_several_rates(heads: pd.DataFrame) -> pd.DataFrame:
    """The runs that ended, of the precisions that ran at several rates if a model has some."""
    heads = heads[heads["state"].isin(ENDED)]
    if heads.empty:
        return heads
    num = heads.groupby(["model.name", "precision.label"])["optimizer.lr"].transform("nunique")
    most = num.groupby(heads["model.name"]).transform("max")
    return heads[(num > 1) | (most == 1)]


def loss_by_rate(runs: Runs) -> pd.DataFrame:
    """The validation loss at the last step of each run, and `loss_change`; NaN if it diverged."""
    frame = measures.with_recipe(scores(runs))
    frame["loss_change"] = loss_change(frame, _settings(runs, frame))
    return frame[[*measures.OF_A_RUN, "recipe", "validation_loss", "loss_change"]]


def degraded(frame: pd.DataFrame) -> tuple[float, str] | None:
    """The lowest learning rate from which on no run trains."""
    above = frame["validation_loss"] - in_bf16(frame)["validation_loss"].min()
    trains = (above <= TRAINS).groupby(frame["lr"]).any()
    from_here = [lr for lr in trains.index if not trains[lr:].any()]
    return (from_here[0], "all runs degraded") if from_here else None


def in_bf16(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of bf16."""
    return frame[frame["recipe"] == "bf16"]


def beside_bf16(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of other recipes than bf16."""
    return frame[frame["recipe"] != "bf16"]


def mean_change(changes: pd.Series) -> Sample | None:
    """The mean of three or more changes in %, and its 90% interval, both of their logarithms."""
    return percent(np.log1p(changes / 100)) if len(changes) > 2 else None


def change_in_words(part: pd.DataFrame) -> str:
    """`+0.8 (-1.0 to 2.7)`: `mean_change` of a row."""
    sample = mean_change(part["loss_change"])
    text = f"{sample.mean:+.1f} ({sample.low:.1f} to {sample.high:.1f})" if sample else ""
    return text.replace("-", "\N{MINUS SIGN}")


LOSS_CHANGE = Axis(column="loss_change", label="validation loss relative to bf16 (%)",
                   reference=0, equal=MARGIN)  # fmt: skip
FIGURES = {
    "recipes_by_size": Rows(
        studies=("weight_gradient", "equality"),
        table=relative_to_bf16,
        values=(
            replace(LOSS_CHANGE, where=beside_bf16, interval=mean_change,
                    note=change_in_words),
            Axis(column="feature_ratio", label=at_step, reference=1, log=True, where=beside_bf16),
        ),
        blocks=by_model,
        hue="recipe",
        order=tuple(sorted(naming.PRECISIONS, key=lambda name: weight_gradient(name) == "int8")),
        look=look_by_gradient,
        key=GREEN,
        name=lambda head: naming.precision(head["recipe"]),
        text="Both are relative to the bf16 run of the same seed (the loss of bf16: to its mean); "
        f"gray: {MARGIN:g}%, the margin of equality. Features: of the last vision block.",
    ),
    "rate_map": Points(
        studies=("lr_map", "weight_gradient", "equality"),
        same_but=("optimizer.lr", "precision.label", "gpu"),
        where=ended_at_several_rates,
        table=loss_by_rate,
        x=(Axis(column="lr", label="peak learning rate", names=rates),),
        y=(
            Axis(column="validation_loss", label="validation loss of bf16", log=True,
                 where=in_bf16),
            LOSS_CHANGE,
        ),
        hue="recipe",
        order=tuple(naming.PRECISIONS),
        look=look_of_recipe,
        name=lambda head: naming.precision(head["recipe"]),
        facet=by_model,
        shade=degraded,
        text="Right: relative to the bf16 run of the same rate and seed (bf16: to its mean); gray: "
        f"{MARGIN:g}%, the margin of equality.",
    ),
}  # fmt: skip
