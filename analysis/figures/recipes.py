"""Figures of recipes relative to bf16: validation loss and features, by model and learning rate."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from analysis import comparison, measures, naming
from analysis.evidence import TWO_ONE_SIDED, Sample
from analysis.figures.scores import largest_features, scores, values_of, weight_gradient
from analysis.grammar import Axis, by_model
from analysis.load import NoRunsError, Runs
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
    last_size = partial(measures.last_size, share=EARLY)
    frame = measures.by_run(runs, heads, (*columns, "validation_loss", "size"), last_size)
    settings = _settings(runs, frame)
    frame["loss_change"] = loss_change(frame, settings)
    bases = measures.of_bf16(frame["size"], frame["recipe"], settings, frame["seed"])
    frame["feature_ratio"] = frame["size"] / bases
    return frame.loc[frame["feature_ratio"].notna(), list(columns)].reset_index(drop=True)


def loss_change(frame: pd.DataFrame, settings: pd.Series) -> pd.Series:
    """The validation loss in %, relative to that of the bf16 run of the same seed and settings.

    That of a bf16 run is relative to the geometric mean over seeds. NaN without a bf16 run.
    """
    losses, is_base = np.log(frame["validation_loss"]), frame["recipe"] == "bf16"
    means = losses.where(is_base).groupby(settings).transform("mean")
    bases = measures.of_bf16(losses, frame["recipe"], settings, frame["seed"])
    return 100 * np.expm1(losses - bases.where(~is_base, means))


def _settings(runs: Runs, frame: pd.DataFrame) -> pd.Series:
    """For each row a text, equal for runs that differ in recipe and seed alone."""
    settings = comparison.signature(runs.runs, "precision.label", seed=False)
    return frame["run"].map(dict(zip(runs.runs["run"], settings, strict=True)))


def at_step(frame: pd.DataFrame) -> str:
    """The label of the features relative to bf16."""
    step = naming.join(f"{step:,}" for step in sorted(frame["step"].unique()))
    return f"mean absolute value of the\nlast vision block, step {step},\nrelative to bf16"


def ended_at_several_rates(heads: pd.DataFrame) -> pd.DataFrame:
    """The runs that ended, of the precisions that ran at several rates if a model has some."""
    heads = heads[heads["state"].isin(ENDED)]
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
    return (from_here[0], f"no run within\n{TRAINS:g} nats of the best") if from_here else None


def best_rate(frame: pd.DataFrame) -> str:
    """The title of `rate_map`."""
    losses = in_bf16(frame).groupby("lr")["validation_loss"].mean()
    text = f"bf16 ends lowest at {naming.number(losses.idxmin())}"
    if found := degraded(frame):
        rate = naming.number(found[0])
        text += f"; from {rate} on, no recipe ends within {TRAINS:g} nats of that"
    return text


def at_best_rate(frame: pd.DataFrame) -> pd.Series:
    """Whether a run is at its model's best rate, and in the study with most runs of its recipe.

    Of the rates with the most recipes, the best is that at which bf16 has its lowest loss.
    """
    at = ["model", "lr"]
    rates = frame.groupby(at)["recipe"].nunique().to_frame()
    rates["loss"] = in_bf16(frame).groupby(at)["validation_loss"].mean()
    rates = rates.sort_values(["recipe", "loss"], ascending=[False, True]).reset_index()
    is_best = frame["lr"] == frame["model"].map(rates.groupby("model")["lr"].first())
    of_recipe = [frame["model"], frame["recipe"]]
    num = is_best.groupby([*of_recipe, frame["experiment"]]).transform("sum")
    return is_best & (num == num.groupby(of_recipe).transform("max"))


MAIN = ("bf16", "switchback", "hw_fp8_tensorwise", "llm_int8")


def in_main_recipes(heads: pd.DataFrame) -> pd.DataFrame:
    """The ended runs in MAIN under bf16 without an intervention; a repeated run counts once."""
    is_main = heads["precision.label"].isin(MAIN) & (heads["precision.autocast"] == "bf16")
    is_main &= heads["intervention.name"] == "none"
    return comparison.distinct(heads[is_main & heads["state"].isin(ENDED)])


def loss_and_recall(runs: Runs) -> pd.DataFrame:
    """The validation loss of each run, and what changes relative to bf16 of the same seed.

    `counts` is `at_best_rate`. Raises NoRunsError if all runs that count are in bf16.
    """
    heads = measures.with_scores(runs, measures.named_heads(runs))
    columns = [*measures.OF_A_RUN, "experiment", "recall", "validation_loss"]
    frame = heads[columns].assign(recipe=heads["precision"])
    settings = _settings(runs, frame)
    frame["counts"] = at_best_rate(frame)
    if beside_bf16(frame[frame["counts"]]).empty:
        raise NoRunsError("no run of a recipe besides bf16 has ended yet")
    frame["loss_change"] = loss_change(frame, settings)
    bases = measures.of_bf16(frame["recall"], frame["recipe"], settings, frame["seed"])
    frame["recall_change"] = frame["recall"] - bases
    return frame.drop(columns="recall")


def while_some_train(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows at learning rates below those of `degraded`."""
    found = degraded(frame)
    return frame[frame["lr"] < found[0]] if found else frame


def in_bf16(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of bf16."""
    return frame[frame["recipe"] == "bf16"]


def beside_bf16(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of other recipes than bf16."""
    return frame[frame["recipe"] != "bf16"]


def mean_change(changes: pd.Series) -> Sample | None:
    """The mean of three or more changes in %, and its 90% interval, both of their logarithms."""
    return percent(np.log1p(changes / 100)) if len(changes) > 2 else None


def mean_of_several(changes: pd.Series) -> Sample | None:
    """The mean of three or more changes, and its 90% interval."""
    return Sample.of(changes, TWO_ONE_SIDED) if len(changes) > 2 else None


def change_in_words(part: pd.DataFrame) -> str:
    """`+0.8 (-1.0 to 2.7)`: `mean_change` of a row."""
    sample = mean_change(part["loss_change"])
    text = f"{sample.mean:+.1f} ({sample.low:.1f} to {sample.high:.1f})" if sample else ""
    return naming.in_minus(text)


def against_bf16(frame: pd.DataFrame) -> str:
    """The title of `recipes_by_size`: which losses equal bf16's, or else what features do."""
    rows = beside_bf16(frame).groupby(["recipe", "model"], sort=False)
    samples = {recipe: mean_change(part["loss_change"]) for (recipe, _), part in rows}
    if frame["model"].nunique() == 1 and None not in samples.values():
        equal = [name for name, s in samples.items() if -MARGIN < s.low and s.high < MARGIN]
        higher = [name for name, s in samples.items() if s.low > 0 and name not in equal]
        names = [naming.join(map(naming.precision, part)) for part in (equal, higher)]
        text = f"The mean loss of {names[0]} is within {MARGIN:g}% of bf16's"
        return (text + f"; that of {names[1]} is higher" * bool(higher)) * bool(equal)
    ratios = rows["feature_ratio"].mean()
    is_int8 = ratios.index.get_level_values("recipe").map(weight_gradient) == "int8"
    return largest_features(ratios, is_int8)


def shows_rates(frame: pd.DataFrame) -> bool:
    """Whether the runs can show the best rate of bf16: there are several, and seeds at the best."""
    own = in_bf16(frame)
    losses = own.groupby("lr")["validation_loss"].mean().dropna()
    if len(losses) < 2 or not measures.alike(frame, "lr", "precision"):
        return False
    return measures.repeated(own[own["lr"] == losses.idxmin()])


def rate_and_format(frame: pd.DataFrame) -> str:
    """The title of `headline`: the largest model's loss by rate and, at the best, by recipe."""
    title, part = by_model(frame)[-1]
    losses = in_bf16(part).groupby("lr")["validation_loss"].mean()
    own = part[part["counts"]]
    costs = beside_bf16(own).groupby("recipe")["loss_change"].mean()
    best, worst = own["lr"].max(), losses.idxmax()
    if not losses[worst] / losses[best] > 1 + costs.max() / 100 > 1:
        return ""
    return (
        f"In bf16, {title}'s loss is {losses[worst] / losses[best]:.2g} times as high at "
        f"{naming.number(worst)} as at {naming.number(best)}, where "
        f"{naming.precision(costs.idxmax())}{', the costliest recipe,' * (len(costs) > 1)} ends "
        f"{costs.max():.1f}% above bf16"
    )


def shows_rates_and_recipes(frame: pd.DataFrame) -> bool:
    """Whether the largest model has seeds of all recipes, and of bf16 at both rates."""
    _, part = by_model(frame)[-1]
    own, in_16_bits = part[part["counts"]], in_bf16(part)
    worst = in_16_bits.groupby("lr")["validation_loss"].mean().idxmax()
    rates = in_16_bits[in_16_bits["lr"].isin([own["lr"].max(), worst])]
    return measures.comparing("precision")(own) and measures.comparing("lr")(rates)


LOSS_CHANGE = Axis(column="loss_change", label="validation loss relative to bf16 (%)",
                   reference=0, equal=MARGIN)  # fmt: skip
FIGURES = {
    "recipes_by_size": Rows(
        studies=("weight_gradient", "equality"),
        table=relative_to_bf16,
        values=(
            replace(LOSS_CHANGE, where=beside_bf16, interval=mean_change,
                    note=change_in_words, noted="mean (90%), %"),
            Axis(column="feature_ratio", label=at_step, reference=1, log=True, where=beside_bf16),
        ),
        blocks=by_model,
        hue="recipe",
        order=tuple(sorted(naming.PRECISIONS, key=lambda name: weight_gradient(name) == "int8")),
        name=lambda head: naming.precision(head["recipe"]),
        title=against_bf16,
        shows=measures.comparing("model", "precision", "recipe"),
        text="Both are relative to the bf16 run of the same seed (the loss of bf16: to its mean); "
        f"gray: {MARGIN:g}%, the margin of equality. Features: of the last vision block.",
    ),
    "rate_map": Points(
        studies=("lr_map", "weight_gradient", "equality"),
        same_but=("optimizer.lr", "precision.label", "gpu"),
        where=ended_at_several_rates,
        table=loss_by_rate,
        x=Axis(column="lr", label="peak learning rate", names=values_of("lr")),
        values=(
            Axis(column="validation_loss", label="validation loss of bf16 (nats)", log=True,
                 where=in_bf16),
            replace(LOSS_CHANGE, where=while_some_train),
        ),
        hue="recipe",
        order=tuple(naming.PRECISIONS),
        name=lambda head: naming.precision(head["recipe"]),
        facet=by_model,
        shade=degraded,
        title=best_rate,
        shows=shows_rates,
        text="Right: relative to the bf16 run of the same rate and seed (bf16: to its mean), at "
        f"the rates that are not shaded left; gray: {MARGIN:g}%, the margin of equality.",
    ),
}  # fmt: skip
