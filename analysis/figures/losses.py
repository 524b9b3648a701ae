"""Figures of the training loss by step: a line for each run, in a panel for each setting."""

from dataclasses import replace

import pandas as pd

from analysis import naming, style
from analysis.figures.scores import in_16_bits_beside
from analysis.grammar import Hue, Lines

PLAIN, CLIPPING = "no change", "gradient clipping"
TENSORWISE = {"custom": "FP4 (e2m1)"}  # of `fp8_fixes_mini`
CHANGES = ("bf16", PLAIN, CLIPPING, "KQ layer norm", "zero-init layer-scale")
SWEEPS = {  # of spikes: the config key, the figure that it follows
    "size": ("model.name", "figure 6"),
    "batch": ("batch_size", "figure 7"),
    "lr": ("optimizer.lr", "figure 8"),
    "precision": ("precision.label", "figures 6 to 8"),
}
DASHES = (0, (5, 1.2))


def look_of_beta2(head: pd.Series) -> tuple:
    """A color for each beta2; optimizers other than the sweeps' AdamW are dashed."""
    dashes = "-" if head["optimizer"] == "adamw" else DASHES
    return style.beta2_color(head["beta2"], head["variant"]), dashes


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
        color = naming.PRECISIONS["fp8_tensorwise"][1]
    elif head["intervention"] == "none":
        return style.look_of_precision(head)
    return style.paler(color, head["variant"]), "-"


def by_narrow_format(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """One panel, whose title has the precision of the runs with changes."""
    names = [label for label in frame["precision"].unique() if label != "bf16"]
    names = naming.join(TENSORWISE.get(name, naming.precision(name)) for name in names)
    return [(f"all but bf16 in {names}", frame)]


def families_and_optimizers(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Panels by family of recipes, and by optimizer if there are several."""
    if frame["optimizer"].nunique() == 1:
        return naming.families(frame)
    families = naming.families(frame)
    several = len(families) > 1
    return [
        (", ".join(filter(None, [family * several, naming.optimizer_name(optimizer)])), part)
        for family, of_family in families
        for optimizer, part in of_family.groupby("optimizer", sort=False)
    ]


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
        hue=Hue(look=style.look_of_precision),
        split=families_and_optimizers,
        smooth=True,
        text="After figure 2, arXiv:2304.13013.",
    ),
    "fp8_fixes": Lines(
        studies=("fp8_fixes", "accuracy_vs_size"),
        same_but=("precision.label",),
        where=in_16_bits_beside("fp8_fixes"),
        hue=CHANGE,
        split=by_narrow_format,
        smooth=True,
        text="After figure 5 (left), arXiv:2304.13013. All runs but those in 16 bits have one "
        "scale per tensor in all three products, in fp8 or, in `fp8_fixes_mini`, in e2m1 (FP4), "
        "and one change. The paper's ViT-L/14: zero-init layer-scale trains as bf16 does; gradient "
        "clipping and KQ layer norm do not help.",
    ),
    "beta2_schedule": Lines(
        studies=("beta2_schedule",),
        hue=SCHEDULE,
        facet="label",
        spikes=True,
        text="After the study of beta2 schedules, arXiv:2304.13013: beta2 = 1 - t^-lambda at step "
        "t.",
    ),
    **{
        f"spikes_vs_{name}": Lines(
            studies=(f"spikes_vs_{name}", "stability"),
            same_but=(key,),
            where=without_near_rates,
            hue=replace(BETA2, look=style.look_of_precision) if name == "precision" else BETA2,
            facet=key,
            spikes=True,
            text=f"After {after}, arXiv:2304.13013.",
        )
        for name, (key, after) in SWEEPS.items()
    },
}
