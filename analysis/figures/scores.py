"""Figures with a point for each run: accuracy, validation loss and features by setting."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from analysis import comparison, measures, naming, spike_marks, style
from analysis.grammar import ANYTHING, Axis, by_model
from analysis.load import NoRunsError, Runs
from analysis.points import Points
from analysis.size_judges import MARGIN
from lowprec.nn.recipe import PRODUCTS
from lowprec.runs.read import ENDED

TOP1, RECALL = "zero-shot top-1", "mean R@1"
SCORES = (Axis(column="recall", label=f"{RECALL} (%)"),
          Axis(column="validation_loss", label="validation loss", log=None))  # fmt: skip
MEASURES = tuple(axis.column for axis in SCORES)


def models_of(frame: pd.DataFrame) -> dict[str, str]:
    """The models from small to large, with their names in print."""
    return {part["model"].iloc[0]: name for name, part in by_model(frame)}


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
        studies = ", ".join(heads["experiment"].unique())
        raise NoRunsError(f"{len(heads)} runs of {studies} have no accuracy at their last step yet")
    return heads[[*measures.OF_A_RUN, "accuracy", "metric"]]


def named_by_exception(head: pd.Series) -> str:
    """The method of a run, with its autocast if that is not bf16 where methods differ in it."""
    pattern = r" \(autocast=(\w+), scaler=\w+\)"
    return re.sub(pattern, lambda text: f", {text[1]}".replace(", bf16", ""), head["method"])


def accuracy_by_beta2(runs: Runs) -> pd.DataFrame:
    """Zero-shot top-1 in % at the last step of each run, or NaN."""
    heads = measures.with_scores(runs, measures.named_heads(runs, ("optimizer.beta2",)))
    return heads.sort_values("beta2", kind="stable")[[*measures.OF_A_RUN, "accuracy"]]


def values_of(column: str):
    """The values of a column from small to large, with their names."""
    return lambda frame: {value: f"{value:g}" for value in sorted(set(frame[column]))}


def one_narrow_product(runs: Runs) -> pd.DataFrame:
    """The narrow product and format of each run, and both scores at its last step, or NaN.

    In 16 bits, `product` is "" and `format` that of the autocast. Runs with several narrow products
    are left out, as are those that have no score and did not diverge.
    """
    heads = scores(runs)
    narrow = comparison.narrow_products(heads)
    names, parts = (
        narrow.where(narrow != "", heads["precision"]),
        narrow.str.partition(" ").reindex(columns=range(3)),
    )
    ends = [head.label.removeprefix(head.method) for head in heads.itertuples()]
    heads = heads.assign(method=names, label=names + ends)
    heads["product"], heads["format"] = parts[0], parts[2].where(narrow != "", heads["precision"])
    columns = ["product", "format", *measures.OF_A_RUN, *MEASURES]
    return heads.loc[~narrow.str.contains("+", regex=False), columns]


ROUNDING, SEEDS, OTHERS = "rounding alone", "seeds", "seeds of other\nrecipes, centered"
ARMS = {ROUNDING: style.color("bf16", "stable_adamw"), SEEDS: style.color("bf16", "adamw_clip"),
        OTHERS: style.OTHER}  # fmt: skip
ARMS_IN_PRINT = {ROUNDING: f"{ROUNDING}\n(open: not compiled)"}


def arms_of_rounding(runs: Runs) -> pd.DataFrame:
    """Both scores of each run, or NaN, and the `arm` it belongs to.

    A run of another study with this study's recipe and seed has a row in two arms. Scores of other
    recipes are moved by a constant for each, so that its mean is that of SEEDS.
    """
    heads = measures.with_scores(runs, measures.named_heads(runs))
    own = heads["experiment"] == "rounding"
    is_its = heads["precision"].isin(heads.loc[own, "precision"])
    same = own | (is_its & heads["seed"].isin(heads.loc[own, "seed"]))
    seeds, others = heads[~own & is_its], heads[~is_its].copy()
    for measure in MEASURES:
        means = others.groupby("method")[measure].transform("mean")
        others[measure] += seeds[measure].mean() - means
    arms = [heads[same].assign(arm=ROUNDING), seeds.assign(arm=SEEDS), others.assign(arm=OTHERS)]
    frame = pd.concat(arms, ignore_index=True)[["arm", *measures.OF_A_RUN, "compile", *MEASURES]]
    return frame[frame[list(MEASURES)].notna().any(axis=1)]


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
    return rf"$\mathrm{{E}}[|x|]$ at step {step}, relative to bf16"


def look_of_recipe(head: pd.Series) -> tuple:
    """The color of a recipe; bf16 is gray."""
    recipe = head["recipe"]
    return style.OTHER if recipe == "bf16" else style.color(recipe, "stable_adamw"), "-"


def loss_by_rate(runs: Runs) -> pd.DataFrame:
    """The validation loss at the last step of each run, and `loss_change`; NaN if it diverged."""
    frame = measures.with_recipe(scores(runs))
    frame["loss_change"] = loss_change(frame, _settings(runs, frame))
    return frame[[*measures.OF_A_RUN, "recipe", "validation_loss", "loss_change"]]


def rates(frame: pd.DataFrame) -> dict[float, str]:
    """The learning rates, with their numbers of seeds."""
    names = {}
    for rate, part in frame.groupby("lr"):
        num = part.groupby("recipe")["seed"].nunique()
        least, most = num.min(), num.max()
        seeds = comparison.counted(most, "seed")
        names[rate] = f"{naming.number(rate)}\n{seeds if least == most else f'{least}-{seeds}'}"
    return names


def recall_and_size(runs: Runs) -> pd.DataFrame:
    """R@1 and E[abs(x)] of the last vision block, both at the end of each run."""
    heads = measures.with_scores(runs, measures.named_heads(runs))
    columns = (*measures.OF_A_RUN, "recall", "size")
    return measures.by_run(runs, heads, columns, partial(measures.last_size, share=1))


def ended_at_several_rates(heads: pd.DataFrame) -> pd.DataFrame:
    """The runs that ended, of the precisions that ran at several rates if a model has some."""
    heads = heads[heads["state"].isin(ENDED)]
    if heads.empty:
        return heads
    num = heads.groupby(["model.name", "precision.label"])["optimizer.lr"].transform("nunique")
    most = num.groupby(heads["model.name"]).transform("max")
    return heads[(num > 1) | (most == 1)]


def logits(runs: Runs) -> pd.DataFrame:
    """The largest attention logit at the last record, and R@1 at the last step, of each run."""
    heads = measures.with_scores(runs, measures.named_heads(runs))
    changes = {name: f", {in_print}" for name, (in_print, _) in naming.INTERVENTIONS.items()}
    heads["setting"] = [
        f"{naming.model(head.model)}, lr {naming.number(head.lr)}, batch {head.batch_size:,}"
        + changes.get(head.intervention, "").replace(", no change", "")
        for head in heads.itertuples()
    ]
    columns = (*measures.OF_A_RUN, "setting", "step", "logit_max", "recall")
    frame = measures.by_run(runs, heads, columns, _largest_logit)
    return frame[frame["recall"].notna()].reset_index(drop=True)


USUAL = ("lr 2e-3", "batch 1,024")  # left out of names of settings


def _largest_logit(run: Runs, head: dict) -> pd.DataFrame:
    try:
        values = run.tensors("*resblocks.*", "logit_max").drop(columns="run").set_index("step")
    except LookupError:
        return pd.DataFrame()
    return values.iloc[-1:].max(axis=1).rename("logit_max").reset_index()


def look_of_change(head: pd.Series) -> tuple:
    """A color for what a setting changes: the intervention, the rate, the batch, or the model."""
    name = head["setting"]
    if head["intervention"] != "none":
        return naming.INTERVENTIONS[head["intervention"]][1], "-"
    return "#D55E00" if USUAL[0] not in name else style.RMS if USUAL[
        1
    ] not in name else "black", "-"


def adamw_in_16_bits(heads: pd.DataFrame) -> pd.DataFrame:
    """AdamW's rows in 16 bits, runs that agree in every setting and the seed once."""
    heads = heads[heads["scale"].notna() & (heads["precision.recipe"] == "high")]
    return comparison.distinct(spike_marks.of_adamw(heads))


LOSS_CHANGE = Axis(column="loss_change", label="validation loss relative to bf16 (%)",
                   reference=0, equal=MARGIN)  # fmt: skip
COLORS = {"int8": "#D55E00", "e3m2": "#009E73", "e2m1": "#CC79A7"}  # format: color
PRODUCTS_IN_PRINT = dict(zip(("", *PRODUCTS), (
    "none", "output", "input\ngradient", "weight\ngradient"), strict=True))  # fmt: skip
FIGURES = {
    "accuracy_vs_size": Points(
        studies=("accuracy_vs_size",),
        table=accuracies,
        x=(Axis(column="model", label="", names=models_of),),
        y=(Axis(column="accuracy", label=lambda frame: f"{frame['metric'].iloc[0]} (%)"),),
        name=named_by_exception,
        text="After figure 1, arXiv:2304.13013.",
    ),
    "update_clipping": Points(
        studies=("update_clipping", "stability"),
        table=accuracy_by_beta2,
        x=(Axis(column="beta2", label="beta2", names=values_of("beta2")),),
        y=(Axis(column="accuracy", label=f"{TOP1} (%)"),),
        means="line",
        facet=by_model,
        text="After figure 10, arXiv:2304.13013.",
    ),
    "one_product": Points(
        studies=("one_product", "accuracy_vs_size"),
        same_but=("precision.label",),
        where=in_16_bits_beside("one_product"),
        table=one_narrow_product,
        x=(Axis(column="product", label="narrow product", names=lambda _: PRODUCTS_IN_PRINT),),
        y=(SCORES[0], replace(SCORES[1], log=True)),
        hue="format",
        order=tuple(COLORS),
        name=lambda head: {"e2m1": "e2m1 (FP4)"}.get(head["format"], head["format"]),
        look=lambda head: (COLORS.get(head["format"], style.look(head)[0]), "-"),
        text="The operands of one product of each layer have the format of the legend, and its "
        "other products run in 16 bits.",
    ),
    "rounding": Points(
        studies=("rounding", "accuracy_vs_size"),
        same_but=("compile", "precision.label", "optimizer.lr"),
        table=arms_of_rounding,
        x=(Axis(column="arm", label="", names=lambda frame: {
            arm: ARMS_IN_PRINT.get(arm, arm) for arm in ARMS if arm in set(frame["arm"])}),),
        y=SCORES,
        hue="arm",
        order=tuple(ARMS),
        look=lambda head: (ARMS[head["arm"]], "-"),
        hollow=lambda frame: ~frame["compile"],
        text="Left: one seed, with learning rates that differ in the last digits, or without "
        "compilation (open). Middle: seeds. Right: seeds of other recipes, moved to the same mean.",
    ),
    "recipes_by_size": Points(
        studies=("weight_gradient", "equality"),
        table=relative_to_bf16,
        x=(Axis(column="model", label="", names=models_of),),
        y=(
            LOSS_CHANGE,
            Axis(column="feature_ratio", label=at_step, reference=1, log=True),
        ),
        hue="recipe",
        order=tuple(naming.PRECISIONS),
        look=look_of_recipe,
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
            Axis(column="validation_loss", label="validation loss", log=True),
            LOSS_CHANGE,
        ),
        hue="recipe",
        order=tuple(naming.PRECISIONS),
        look=look_of_recipe,
        name=lambda head: naming.precision(head["recipe"]),
        means="line",
        facet=by_model,
        text="Right: relative to the bf16 run of the same rate and seed (bf16: to its mean); gray: "
        f"{MARGIN:g}%, the margin of equality.",
    ),
    "interventions": Points(
        studies=("interventions", "lr_map", "weight_gradient", "equality"),
        same_but=("optimizer.lr",),
        where=in_16_bits_beside("interventions"),
        table=recall_and_size,
        x=(Axis(column="lr", label="peak learning rate", names=lambda frame: {
            lr: naming.number(lr) for lr in sorted(set(frame["lr"]))}),),
        y=(
            SCORES[0],
            Axis(column="size", label=r"$\mathrm{E}[|x|]$ of the last vision block", log=True),
        ),
        hue="intervention",
        order=tuple(naming.INTERVENTIONS),
        look=lambda head: (naming.INTERVENTIONS[head["intervention"]][1], "-"),
        name=lambda head: naming.INTERVENTIONS[head["intervention"]][0],
        means="line",
        text="Both at the end of training in 16 bits.",
    ),
    "attention_logits": Points(
        studies=("spikes_vs_size", "spikes_vs_lr", "spikes_vs_batch", "optimizers",
                 "gradient_magnitude"),
        same_but=ANYTHING,
        where=adamw_in_16_bits,
        table=logits,
        x=(Axis(column="logit_max", label="largest attention logit at the end", log=True),),
        y=(Axis(column="recall", label=f"{RECALL} (%)"),),
        hue="setting",
        name=lambda head: re.sub(rf", ({'|'.join(USUAL)})\b| layer-scale", "", head["setting"]),
        look=look_of_change,
        text=f"Where a name does not say: {', '.join(USUAL)}.",
        means="",
    ),
}  # fmt: skip
