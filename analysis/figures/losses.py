"""Figures of the training loss by step: a line for each run, in a panel for each setting."""

import math
from dataclasses import replace
from functools import partial

import pandas as pd

from analysis import measures, naming, spike_marks, style
from analysis.figures.scores import in_16_bits_beside
from analysis.grammar import Hue, Lines, by

PLAIN, CLIPPING = "no change", "gradient clipping"
TENSORWISE = {"custom": ("tensor-wise FP4", "#2A1AE6")}  # of `fp8_fixes_mini`
CHANGES = ("bf16", PLAIN, CLIPPING, "KQ layer norm", "zero-init layer-scale")
SWEEPS = {  # of spikes: the config key, the figure that it follows, and what a title says
    "size": ("model.name", "figure 6", "in larger models"),
    "batch": ("batch_size", "figure 7", "in larger batches"),
    "lr": ("optimizer.lr", "figure 8", "at higher learning rates"),
    "precision": ("precision.label", "figures 6 to 8", "in {}"),
}
DASHES = (0, (5, 1.2))


def look_of_beta2(head: pd.Series) -> tuple:
    """A color for each beta2; optimizers other than the sweeps' AdamW are dashed."""
    averaged = math.log10(1 / (1 - head["beta2"]))  # of steps: 0.3 of 0.5, 3 of 0.999
    color = style.setting_color(averaged - 0.3, 2.7, head["variant"])
    return color, "-" if head["optimizer"] == "adamw" else DASHES


def without_near_rates(heads: pd.DataFrame) -> pd.DataFrame:
    """Leaves out runs of `stability` whose learning rate is within 5% of a rounder one."""
    rates = {rate: len(naming.number(rate)) for rate in set(heads["optimizer.lr"].dropna())}
    near = [
        rate
        for rate in rates
        if any(abs(other / rate - 1) < 0.05 and rates[other] < rates[rate] for other in rates)
    ]
    return heads[~(heads["optimizer.lr"].isin(near) & (heads["experiment"] == "stability"))]


def look_of_schedule(head: pd.Series) -> tuple:
    """Constants are gray and schedules are blue."""
    color = style.OTHER if pd.isna(head["beta2_decay"]) else style.RMS
    return style.paler(color, head["variant"]), "-"


def schedule(head: pd.Series) -> str:
    """A constant, or a schedule with its value at the last step."""
    decay = head["beta2_decay"]
    if pd.isna(decay):
        return f"beta2 = {head['beta2']:g}"
    at_end = 1 - head["num_steps"] ** -decay
    return f"beta2 = $1 - t^{{-{decay:g}}}$, {at_end:.3f} at the end"


def change(head: pd.Series) -> str:
    """What differs from training without a change."""
    if head["intervention"] != "none":
        return naming.setting("intervention.name", head["intervention"])
    if head["precision.recipe"] == "high":
        return naming.precision(head["precision"])
    return CLIPPING if pd.notna(head["optimizer.clip_norm"]) else PLAIN


def look_of_change(head: pd.Series) -> tuple:
    """The color of the intervention, of clipping, or of one scale per tensor; bf16 is gray."""
    color = naming.INTERVENTIONS.get(head["intervention"], ("", style.OTHER))[1]
    if head["label"].startswith(CLIPPING):
        color = naming.OPTIMIZERS["adamw_clip"][2]
    elif head["label"].startswith(PLAIN):
        color = TENSORWISE.get(head["precision"], ("", style.color(head["precision"])))[1]
    elif head["intervention"] == "none":
        return style.look_of_recipe(head)
    return style.paler(color, head["variant"]), "-"


def by_narrow_format(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """A panel for each precision, with bf16 beside others; one for bf16 if that has changes."""
    is_bf16, is_changed = frame["precision"] == "bf16", frame["intervention"] != "none"
    parts = []
    for name, part in frame[~is_bf16].groupby("precision", sort=False):
        title = TENSORWISE.get(name, (naming.precision(name),))[0]
        own = frame[frame.index.isin(part.index) | (is_bf16 & ~is_changed)]
        parts.append((title + " and bf16" * (len(own) > len(part)), own))
    if not parts or (is_bf16 & is_changed).any():
        parts.append(("bf16", frame[is_bf16]))
    return parts


def by_optimizer(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """A panel for each optimizer, which its title names if there are several."""
    parts = by("optimizer", naming.optimizer_name)(frame)
    return parts if len(parts) > 1 else [("", frame)]


def final_losses(frame: pd.DataFrame, by: list[str]) -> pd.Series:
    """`measures.final_loss` of each run, by some columns."""
    return frame.groupby([*by, "run"], sort=False)["loss"].agg(measures.final_loss)


def compare_ends(frame: pd.DataFrame) -> str:
    """The title of `loss_curves`: whether the ranges over seeds of two recipes overlap.

    Empty if runs of a recipe differ in more than the seed.
    """
    ends = final_losses(frame, ["model", "optimizer", "precision"])
    spans = ends.groupby(level=[0, 1, 2], sort=False).agg(["min", "max", "size"])
    names = spans.index.unique("precision")
    if len(names) == 2 and (spans["size"] > 1).all() and not frame["variant"].any():
        spans = spans.unstack()
        overlap = spans["min"].max(axis=1) <= spans["max"].min(axis=1)
        pair = " and ".join(map(naming.precision, names))
        if overlap.all():
            return f"The losses of {pair} overlap across seeds"
    return ""


def best_change(frame: pd.DataFrame) -> str:
    """The title of `fp8_fixes`: the change with the lowest loss at the end.

    Empty if a run without a change ends lower than one of its runs, or a change has two optimizers.
    """
    frame = frame.assign(change=frame["label"].str.split(r" \(|, ", regex=True).str[0])
    losses = final_losses(frame, ["change"])
    changes, ends = losses.index.get_level_values(0), losses.groupby(level=0, sort=False).mean()
    is_mixed = frame.groupby("change")["optimizer"].nunique().gt(1).any()
    if is_mixed or frame["precision"].nunique() > 2 or not {"bf16", PLAIN} < {*ends.index}:
        return ""
    best = ends.drop("bf16").idxmin()
    if best != PLAIN and losses[changes == best].max() > losses[changes == PLAIN].min():
        return ""
    text = "No change helps" if best == PLAIN else f"{best} helps most"
    return f"{text}: loss {ends[best]:.1f} at the end, {ends['bf16']:.1f} in bf16"


def alike_at_the_end(frame: pd.DataFrame) -> str:
    """The title of `beta2_schedule`: the mean loss at the end, and the number of loss spikes.

    Empty without both a constant and a schedule, each with as many runs.
    """
    runs = frame.drop_duplicates("run")
    if runs["beta2_decay"].isna().nunique() < 2 or runs["label"].value_counts().nunique() > 1:
        return ""
    ends = final_losses(frame, ["label"]).groupby(level=0).mean()
    counts = naming.join(frame.groupby("label", sort=False)["height"].count())
    return (
        f"With beta2 constant or scheduled, the loss ends at {naming.span(ends)}, after {counts} "
        "spikes"
    )


def more_spikes(setting: str, words: str, frame: pd.DataFrame) -> str:
    """The title of a sweep: how the number of large spikes grows with a setting, or in each.

    Empty if the values have unequal numbers of runs, or none has a large spike.
    """
    groups = frame.groupby(measures.RENAMED.get(setting, setting), sort=False)
    if groups["run"].nunique().nunique() > 1:
        return ""
    large = groups["height"].agg(lambda heights: (heights > spike_marks.LARGE).sum())
    if not large.any():
        return ""
    is_more = (large.diff().dropna() > 0).all() and setting != "precision.label" and len(large) > 1
    words = words.format(naming.join(naming.setting(setting, value) for value in large.index))
    return f"{'More l' if is_more else 'L'}oss spikes over 1 nat {words}: {naming.join(large)}"


BETA2 = Hue(
    keys=("optimizer.beta2",),
    name=lambda head: f"beta2 = {head['beta2']:g}",
    order=lambda head: head["beta2"],
    look=look_of_beta2,
)
SCHEDULE = Hue(
    keys=("optimizer.beta2", "optimizer.beta2_decay"),
    name=schedule,
    order=lambda head: (pd.notna(head["beta2_decay"]), head["beta2_decay"], head["beta2"]),
    look=look_of_schedule,
)
CHANGE = Hue(
    keys=("intervention.name", "optimizer.clip_norm"),
    name=change,
    is_method=True,
    order=lambda head: naming.rank(change(head), CHANGES),
    look=look_of_change,
)
FIGURES = {
    "loss_curves": Lines(
        studies=("loss_curves", "accuracy_vs_size"),
        hue=Hue(look=style.look_of_recipe),
        split=by_optimizer,
        smooth=True,
        title=compare_ends,
        shows=measures.comparing("model", "optimizer", "precision"),
        text="After figure 2, arXiv:2304.13013.",
    ),
    "fp8_fixes": Lines(
        studies=("fp8_fixes", "accuracy_vs_size"),
        same_but=("precision.label",),
        where=in_16_bits_beside("fp8_fixes"),
        hue=CHANGE,
        split=by_narrow_format,
        smooth=True,
        title=best_change,
        shows=measures.comparing("precision", "intervention", "optimizer", "optimizer.clip_norm"),
        text="After figure 5 (left), arXiv:2304.13013. The study's runs that are not in 16 bits "
        "have one scale per tensor in all three products, in fp8 or, in `fp8_fixes_mini`, in e2m1 "
        "(FP4). The paper's ViT-L/14, in fp8: zero-init layer-scale trains as bf16 does; gradient "
        "clipping and KQ layer norm do not help.",
    ),
    "beta2_schedule": Lines(
        studies=("beta2_schedule",),
        hue=SCHEDULE,
        facet="label",
        spikes=True,
        title=alike_at_the_end,
        shows=measures.comparing("beta2", "beta2_decay"),
        text="After the study of beta2 schedules, arXiv:2304.13013: beta2 = 1 - t^-lambda at step "
        "t.",
    ),
    **{
        f"spikes_vs_{name}": Lines(
            studies=(f"spikes_vs_{name}", "stability"),
            same_but=(key,),
            where=without_near_rates,
            hue=replace(BETA2, look=style.look_of_recipe) if name == "precision" else BETA2,
            facet=key,
            spikes=True,
            title=partial(more_spikes, key, words),
            shows=measures.comparing(measures.RENAMED.get(key, key)),
            text=f"After {after}, arXiv:2304.13013.",
        )
        for name, (key, after, words) in SWEEPS.items()
    },
}
