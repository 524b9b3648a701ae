"""Figures with a point for each run: accuracy, validation loss and features by setting."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
from scipy import stats

from analysis import comparison, measures, naming, spike_marks, style
from analysis.evidence import LEVEL, Sample
from analysis.grammar import ANYTHING, Axis, by_model
from analysis.load import NoRunsError, Runs
from analysis.points import Points, Rows
from lowprec.nn.recipe import PRODUCTS, RECIPES

TOP1, RECALL = "zero-shot top-1", "mean R@1"
SCORES = (Axis(column="recall", label=f"{RECALL} (%)"),
          Axis(column="validation_loss", label="validation loss (nats)", log=None))  # fmt: skip
MEASURES = tuple(axis.column for axis in SCORES)


def in_16_bits_beside(study: str):
    """Selects the runs of a study, and those of others in 16 bits."""

    def select(heads: pd.DataFrame) -> pd.DataFrame:
        own = heads["experiment"] == study
        return heads[own | (heads["precision.recipe"] == "high")] if own.any() else heads

    return select


def scores(runs: Runs) -> pd.DataFrame:
    """Named runs with MEASURES at the last step, if they have one or diverged."""
    heads = measures.with_scores(runs, measures.named_heads(runs))
    has_score = heads[list(MEASURES)].notna().any(axis=1)
    return heads[has_score | (heads["state"] == "diverged")]


def accuracies(runs: Runs) -> pd.DataFrame:
    """Accuracy in % at the last step of each run, or NaN, by model.

    `metric` is the same in all rows: zero-shot top-1, or at mini scale the mean R@1 of both
    directions, if more runs have that. Raises NoRunsError if no run has an accuracy or diverged.
    """
    heads = measures.with_scores(runs, measures.named_heads(runs)).assign(metric=TOP1)
    is_mini = (heads["scale"] != "paper").any()
    if is_mini and heads["recall"].count() >= max(1, heads["accuracy"].count()):
        heads = heads.assign(accuracy=heads["recall"], metric=RECALL)
    if heads["accuracy"].isna().all() and not (heads["state"] == "diverged").any():
        raise NoRunsError("no run has an accuracy at its last step yet")
    return heads[[*measures.OF_A_RUN, "accuracy", "metric"]]


def named_by_exception(head: pd.Series) -> str:
    """The method of a run, with what is unusual: another autocast than bf16, or simulation."""
    pattern = r" \(autocast=(\w+), scaler=\w+\)"
    name = re.sub(pattern, lambda text: f", {text[1]}".replace(", bf16", ""), head["method"])
    recipe = RECIPES.get(head["precision"])
    is_simulated = recipe and any(recipe.products) and not recipe.is_native
    return name + ", simulated" * bool(is_simulated)


def accuracy_by_beta2(runs: Runs) -> pd.DataFrame:
    """Zero-shot top-1 in % at the last step of each run, or NaN."""
    heads = measures.with_scores(runs, measures.named_heads(runs, ("optimizer.beta2",)))
    return heads.sort_values("beta2", kind="stable")[[*measures.OF_A_RUN, "accuracy"]]


def values_of(column: str):
    """The values of a column from small to large, with their names."""
    return lambda frame: {value: naming.number(value) for value in sorted(set(frame[column]))}


def one_narrow_product(runs: Runs) -> pd.DataFrame:
    """The narrow product and format of each run, and both scores at its last step, or NaN.

    In 16 bits, `product` is "" and `format` that of the autocast. Runs with several narrow products
    are left out, as are those that have no score and did not diverge.
    """
    heads = scores(runs)
    narrow = comparison.narrow_products(heads)
    parts, is_wide = narrow.str.partition(" ").reindex(columns=range(3)), narrow == ""
    names = narrow.mask(is_wide, heads["precision"])
    ends = [head.label.removeprefix(head.method) for head in heads.itertuples()]
    heads = heads.assign(method=names, label=names + ends)
    heads["product"], heads["format"] = parts[0], parts[2].mask(is_wide, heads["precision"])
    columns = ["product", "format", *measures.OF_A_RUN, *MEASURES]
    return heads.loc[~narrow.str.contains("+", regex=False), columns]


def arms_of_rounding(runs: Runs) -> pd.DataFrame:
    """Both scores of each run, or NaN, and the `arm` it belongs to, which has its number of runs.

    A run of another study with this study's recipe and seed has a row in two arms. Scores of other
    recipes are moved by a constant for each, so that its mean is that of the seeds of this recipe.
    Raises NoRunsError without runs of this study.
    """
    heads = measures.with_scores(runs, measures.named_heads(runs))
    heads = heads[heads[list(MEASURES)].notna().any(axis=1)]
    own, later = (heads["experiment"] == name for name in ("rounding", "equality"))
    if not own.any():
        raise NoRunsError(f"{runs.root}: no run of experiment=rounding has a score")
    is_its = heads["precision"].isin(heads.loc[own, "precision"])
    same = own | (is_its & ~later & heads["seed"].isin(heads.loc[own, "seed"]))
    seeds, others = heads[~own & ~later & is_its], heads[~is_its].copy()
    for measure in MEASURES:
        means = others.groupby("method")[measure].transform("mean")
        others[measure] += seeds[measure].mean() - means
    arms = {
        "bf16, one seed, {} roundings": heads[same],
        "bf16, {} seeds": seeds,
        "bf16, {} later seeds": heads[later],
        "8-bit recipes, centered, {} runs": others,
    }
    frame = pd.concat(part.assign(arm=name.format(len(part))) for name, part in arms.items())
    return frame[["arm", *measures.OF_A_RUN, "compile", *MEASURES]].reset_index(drop=True)


def deviation(column: str, part: pd.DataFrame) -> Sample | None:
    """The standard deviation of runs within recipes, with its 95% interval."""
    rest = part[column] - part.groupby("precision")[column].transform("mean")
    num = len(part) - part["precision"].nunique()
    if not num:
        return None
    ends = num / stats.chi2.ppf([0.5, (1 + LEVEL) / 2, (1 - LEVEL) / 2], num)
    ends[0] = 1
    return Sample(*np.sqrt((rest**2).sum() / num * ends), len(part))


def sigma(column: str, part: pd.DataFrame) -> str:
    """`0.73 (0.47 to 1.61)`: `deviation`, of the loss in % of its mean."""
    sample = deviation(column, part)
    if sample is None:
        return ""
    share, form = (1, ".2f") if column == "recall" else (100 / part[column].mean(), ".1f")
    ends = (f"{share * end:{form}}" for end in (sample.mean, sample.low, sample.high))
    return "{} ({} to {})".format(*ends)


def scatter(frame: pd.DataFrame) -> str:
    """The title of `rounding`, if the interval of its deviation includes that of 8-bit recipes."""
    is_own, is_narrow = frame["arm"].str.endswith("roundings"), frame["precision"] != "bf16"
    own, others = (deviation("recall", frame[rows]) for rows in (is_own, is_narrow))
    if None in (own, others) or not own.low < others.mean < own.high:
        return ""
    return (
        f"Rounding alone scatters {RECALL} ({own.mean:.1f} points) about as much as 8-bit recipes' "
        f"seeds ({others.mean:.1f})"
    )


def lowest_recipe(frame: pd.DataFrame) -> str:
    """The title of `accuracy_vs_size`: the recipe that ends lowest in all models, against bf16."""
    means = frame.groupby(["model", "precision"])["accuracy"].mean().unstack()
    base = means.get("bf16", pd.Series([np.nan]))
    lowest = [] if base.isna().any() else means.idxmin(axis=1).unique()
    if len(lowest) != 1 or lowest[0] == "bf16":
        return ""
    name, below = naming.precision(lowest[0]), naming.span(base - means[lowest[0]])
    return f"{name} ends lowest: {frame['metric'].iloc[0]} is {below} points below bf16's"


def costliest_product(frame: pd.DataFrame) -> str:
    """The title of `one_product`."""
    means = frame[frame["product"] != ""].groupby(["format", "product"])["recall"].mean().unstack()
    is_whole = set(means) == set(PRODUCTS) and means.notna().all(axis=None)
    lowest = means.idxmin(axis=1).unique() if is_whole else []
    if len(lowest) != 1:
        return ""
    return f"Of a layer's products, few bits cost most in the {PRODUCTS_IN_PRINT[lowest[0]]}"


def at_highest_rate(frame: pd.DataFrame) -> str:
    """The title of `interventions`: mean R@1 of each change at the largest rate that all have."""
    means = frame.groupby(["lr", "intervention"])["recall"].mean().unstack().dropna()
    at = frame["lr"] == means.index.max()
    if not measures.comparing("intervention")(frame[at]):
        return ""
    best = means.iloc[-1].sort_values(ascending=False)
    parts = [f"{value:.0f}% with {naming.INTERVENTIONS[name][0]}" for name, value in best.items()]
    text = naming.join(parts).replace("with no change", "without a change")
    return f"At learning rate {naming.number(best.name)}, {RECALL} is {text}"


def weight_gradient(recipe: str) -> str:
    """The format of the output gradient in the weight gradient of a recipe; "" in 16 bits."""
    if " " in recipe:
        return recipe.removeprefix("grad_weight ") if recipe.startswith("grad_weight") else ""
    product = RECIPES[recipe].grad_weight if recipe in RECIPES else None
    return product.first.format if product else ""


def largest_features(means: pd.Series, is_int8: np.ndarray) -> str:
    """A title about mean features relative to bf16: those of int8 weight gradients, if largest."""
    own, others = means[is_int8], means[~is_int8]
    if own.empty or others.empty or own.min() <= max(1, others.max()):
        return ""
    return (
        f"With an int8 weight gradient, features are on average {naming.span(own)} times as large "
        f"as in bf16, otherwise at most {others.max():.1f} times"
    )


def by_format(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The runs of each format of a narrow product, and those without one."""
    is_wide = frame["product"] == ""
    formats = sorted(frame.loc[~is_wide, "format"].unique(), reverse=True)  # int8 first
    return [
        (f"one product in {name}", frame[is_wide | (frame["format"] == name)]) for name in formats
    ]


def by_model_and_precision(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """A panel for each model, whose title names the precision."""
    return [
        (f"{title}, {naming.join(map(naming.precision, part['precision'].unique()))}", part)
        for title, part in by_model(frame)
    ]


def recall_and_size(runs: Runs) -> pd.DataFrame:
    """R@1 and E[abs(x)] of the last vision block, both at the end of each run."""
    heads = measures.with_scores(runs, measures.named_heads(runs))
    columns = (*measures.OF_A_RUN, "recall", "size")
    return measures.by_run(runs, heads, columns, partial(measures.last_size, share=1))


def logits(runs: Runs) -> pd.DataFrame:
    """The largest attention logit at the last record, and R@1 at the last step, of each run."""
    heads = measures.with_scores(runs, measures.named_heads(runs))
    changes = {name: f", {in_print}" for name, (in_print, _) in naming.INTERVENTIONS.items()}
    heads["setting"] = [
        f"{naming.model(head.model)}, learning rate {naming.number(head.lr)}, "
        f"batch {head.batch_size:,}" + changes.get(head.intervention, "").replace(", no change", "")
        for head in heads.itertuples()
    ]
    columns = (*measures.OF_A_RUN, "setting", "step", "logit_max", "recall")
    frame = measures.by_run(runs, heads, columns, _largest_logit)
    return frame[frame["recall"].notna()].reset_index(drop=True)


USUAL = ("learning rate 2e-3", "batch 1,024")  # left out of names of settings


def _largest_logit(run: Runs, head: dict) -> pd.DataFrame:
    name = "logit_max/*resblocks.*"
    return measures.recorded(run, name).tail(1).rename(columns={name: "logit_max"})


def look_of_change(head: pd.Series) -> tuple:
    """A color for what a setting changes: the intervention, the rate, the batch, or the model."""
    name = head["setting"]
    if head["intervention"] != "none":
        return naming.INTERVENTIONS[head["intervention"]][1], "-"
    if USUAL[0] not in name:
        return "#D55E00", "-"
    return style.RMS if USUAL[1] not in name else "black", "-"


def falling(frame: pd.DataFrame) -> str:
    """The title of `attention_logits`, if R@1 falls with them."""
    rank = stats.spearmanr(frame["logit_max"], frame["recall"]).statistic
    text = (
        f"Mean R@1 is lower where attention logits are larger (Spearman's correlation {rank:.2f})"
    )
    return naming.in_minus(text) if rank < 0 else ""


PRODUCTS_IN_PRINT = dict(zip(("", *PRODUCTS), (
    "none (bf16)", "output", "input gradient", "weight gradient"), strict=True))  # fmt: skip
FIGURES = {
    "accuracy_vs_size": Rows(
        studies=("accuracy_vs_size",),
        table=accuracies,
        values=(Axis(column="accuracy", label=lambda frame: f"{frame['metric'].iloc[0]} (%)"),),
        blocks=by_model,
        name=named_by_exception,
        size=1.4,
        title=lowest_recipe,
        shows=measures.comparing("model", "precision", value="accuracy"),
        text="After figure 1, arXiv:2304.13013.",
    ),
    "update_clipping": Points(
        studies=("update_clipping", "stability"),
        table=accuracy_by_beta2,
        x=Axis(column="beta2", label="beta2", names=values_of("beta2")),
        values=(Axis(column="accuracy", label=f"{TOP1} (%)"),),
        look=style.look,
        facet=by_model,
        text="After figure 10, arXiv:2304.13013.",
    ),
    "one_product": Rows(
        studies=("one_product", "accuracy_vs_size"),
        same_but=("precision.label",),
        where=in_16_bits_beside("one_product"),
        table=one_narrow_product,
        values=SCORES[:1],
        hue="product",
        order=tuple(PRODUCTS_IN_PRINT),
        name=lambda head: PRODUCTS_IN_PRINT[head["product"]],
        look=lambda head: (style.color(head["product"] or "bf16"), "-"),
        facet=by_format,
        title=costliest_product,
        shows=measures.comparing("precision", "product", "format"),
        text="The operands of one product of each layer have the format of the panel, and its "
        "other products run in 16 bits.",
    ),
    "rounding": Rows(
        studies=("rounding", "accuracy_vs_size", "equality"),
        same_but=("compile", "precision.label", "optimizer.lr", "gpu"),
        where=lambda heads: heads[
            (heads["experiment"] != "equality") | (heads["precision.recipe"] == "high")
        ],
        table=arms_of_rounding,
        values=tuple(
            replace(axis, note=partial(sigma, axis.column), noted=f"$\\sigma$ ({unit}, 95%)")
            for axis, unit in zip(SCORES, ("points", "%"), strict=True)
        ),
        hue="arm",
        look=lambda head: (style.OTHER if head["precision"] == "bf16" else style.RMS, "-"),
        hollow=(lambda frame: ~frame["compile"], "eager"),
        title=scatter,
        text="First row: one seed, with learning rates that differ in the last digits, or without "
        "compilation (open). Last row: seeds of other recipes, moved to the mean of the second "
        "row. Beside: the standard deviation within recipes.",
    ),
    "interventions": Points(
        studies=("interventions", "lr_map", "weight_gradient", "equality"),
        same_but=("optimizer.lr",),
        where=lambda heads: heads[heads["precision.recipe"] == "high"],
        table=recall_and_size,
        x=Axis(column="lr", label="peak learning rate", names=values_of("lr")),
        values=(
            SCORES[0],
            Axis(column="size", label="mean absolute value of the\nlast vision block's output",
                 log=True),
        ),
        hue="intervention",
        order=tuple(reversed(naming.INTERVENTIONS)),
        look=lambda head: (naming.INTERVENTIONS[head["intervention"]][1], "-"),
        name=lambda head: naming.INTERVENTIONS[head["intervention"]][0],
        facet=by_model_and_precision,
        title=at_highest_rate,
        text="At the end of training in 16 bits.",
    ),
    "attention_logits": Points(
        studies=("spikes_vs_size", "spikes_vs_lr", "spikes_vs_batch", "optimizers",
                 "gradient_magnitude"),
        same_but=ANYTHING,
        where=lambda heads: comparison.distinct(
            spike_marks.of_adamw(
                heads[heads["scale"].notna() & (heads["precision.recipe"] == "high")]
            )
        ),
        table=logits,
        x=Axis(column="logit_max", label="largest attention logit at the end", log=True),
        values=(Axis(column="recall", label=f"{RECALL} (%)"),),
        hue="setting",
        name=lambda head: re.sub(
            rf", ({'|'.join(USUAL)})\b| layer-scale|learning (?=rate)", "", head["setting"]
        ),
        look=look_of_change,
        title=falling,
        shows=measures.comparing("model", "lr", "batch_size", "intervention"),
        what=f"{RECALL} by the largest attention logit,",
        text=f"Where a name does not say: {', '.join(USUAL)}.",
        means=False,
    ),
}  # fmt: skip
