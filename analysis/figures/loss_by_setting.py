"""Loss curves of studies that vary one setting: a line for each value, or a panel and lines.

`fp8_fixes` is figure 5 (left) of arXiv:2304.13013, `spikes_vs_size`, `_batch` and `_lr` are figures
6, 7 and 8, and `beta2_schedule` follows its text; `spikes_vs_precision` is not in the paper. Each
is drawn from the experiment of its name. Those with a panel for each value of a setting also draw
the runs of BASELINES that differ from theirs in that setting alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import comparison, curves, style
from analysis.load import Runs

PLAIN, CLIPPING = "no change", "gradient clipping"
CHANGES = ("bf16", PLAIN, CLIPPING, "KQ layer norm", "zero-init layer-scale")
SWEEPS = {  # config key: in print, the figure that its sweep follows
    "model.name": ("size", "figure 6"),
    "batch_size": ("batch", "figure 7"),
    "optimizer.lr": ("lr", "figure 8"),
    "precision.label": ("precision", "figures 6 to 8"),
}
TABLES = {"model.name": style.MODELS, "precision.label": style.PRECISIONS}
DASHES = (0, (5, 1.2))


@dataclass(eq=False)
class LossBySetting:
    """One of the figures."""

    EXPERIMENT: str
    by: tuple[str, ...]  # config keys that the figure shows in its own way
    arrange: Callable[[pd.DataFrame], pd.DataFrame]  # runs in order, with labels and own columns
    look: Callable[[pd.Series], tuple]
    after: str  # the part of the paper that it follows
    text: str  # of the caption; its field is for the methods
    key: str = ""  # config key with a panel for each value; without it, a panel for each model
    BASELINES: tuple[str, ...] = ()  # experiments with the same runs at another value of `key`

    def select(self, heads: pd.DataFrame) -> pd.DataFrame:
        """The study's rows, and those of other studies that differ from one in `key` alone.

        Without a key, the rows of other studies are those in 16 bits.
        """
        if not self.BASELINES:
            return heads
        varied = self.key or "precision.label"
        heads = comparison.with_baselines(heads, self.EXPERIMENT, varied)
        own, is_16_bit = heads["experiment"] == self.EXPERIMENT, heads["precision.recipe"] == "high"
        return heads if self.key or not own.any() else heads[own | is_16_bit]

    def query(self, runs: Runs) -> pd.DataFrame:
        """One row per step of each run: exactly what is plotted."""
        runs = runs.where(runs.summaries["run"].isin(self.select(runs.runs)["run"]))
        heads = curves.named_heads(runs, self.by)
        value = heads[curves.RENAMED.get(self.key, self.key)] if self.key else ""
        heads = self.arrange(heads.assign(key=self.key, value=value))
        return curves.losses(runs, heads, (*curves.COLUMNS, "key", "value"))

    def plot(self, frame: pd.DataFrame, ax: Axes) -> Axes:
        """One panel."""
        title = panel_title(frame.iloc[0]) if self.key else curves.title(frame)
        return curves.plot(frame, ax, self.look, title)

    def draw(self, frame: pd.DataFrame, figure: Figure) -> None:
        """The whole figure: at most three panels in a row."""
        if not self.key:
            return curves.draw_models(frame, figure, self.plot)
        panels = [panel for _, panel in frame.groupby("value", sort=False)]
        lines = max(panel["label"].nunique() for panel in panels)
        axes = curves.panels(figure, len(panels), lines, 3)
        for panel, ax in zip(panels, axes, strict=True):
            self.plot(panel, ax)
        curves.share_limits(axes)

    def caption(self, frame: pd.DataFrame) -> str:
        """Describes the runs and the lines, and names the runs that did not finish."""
        runs = frame.drop_duplicates("run")
        text = self.text.format(methods=curves.methods(runs))
        if self.key not in ("", "model.name"):
            labels = [f"{panel_title(run)}, {run['label']}" for _, run in runs.iterrows()]
            runs = runs.assign(label=labels)
        return f"{curves.caption(frame, self.after)} {text}{curves.caption_end(runs)}"


def panel_title(head: pd.Series) -> str:
    """`ViT-B/32`, `batch 4,096`, `lr 0.002`, `LLM.int8()`: the value of a panel."""
    if head["key"] == "model.name":
        return style.model(head["value"])
    if head["key"] == "precision.label":
        return style.precision(head["value"])
    value = f"{head['value']:,}" if head["key"] == "batch_size" else f"{head['value']:g}"
    return f"{SWEEPS[head['key']][0]} {value}"


def arrange_sweep(heads: pd.DataFrame) -> pd.DataFrame:
    """Lines by beta2."""
    labels = curves.with_setting(heads, [f"beta2 = {beta2:g}" for beta2 in heads["beta2"]])
    table = TABLES.get(heads["key"].iloc[0])
    ranks = heads["value"].map(lambda value: style.rank(value, table) if table else value)
    return heads.assign(label=labels, rank=ranks).sort_values(["rank", "beta2"], kind="stable")


def arrange_schedules(heads: pd.DataFrame) -> pd.DataFrame:
    """Constant values of beta2, then schedules with the value at the last step."""
    settings = [
        f"beta2 = {head.beta2:g}"
        if pd.isna(head.beta2_decay)
        else f"1 - t^-{head.beta2_decay:g} (to {1 - head.num_steps**-head.beta2_decay:.3f})"
        for head in heads.itertuples()
    ]
    heads["label"] = curves.with_setting(heads, settings)
    return heads.sort_values(["beta2_decay", "beta2"], na_position="first", kind="stable")


def arrange_fixes(heads: pd.DataFrame) -> pd.DataFrame:
    """Lines by `value`, what differs from training without a change."""
    heads["value"] = [_change(head) for head in heads.to_dict("records")]
    methods = map(style.method, heads["precision"], heads["optimizer"])
    ends = [label.removeprefix(m) for label, m in zip(heads["label"], methods, strict=True)]
    heads["label"] = heads["value"] + pd.Series(ends, heads.index)
    models = list(heads["model"].unique())
    ranks = [(models.index(h.model), *style.rank(h.value, CHANGES)) for h in heads.itertuples()]
    return heads.assign(rank=ranks).sort_values("rank", kind="stable")


def _change(head: dict) -> str:
    if head["intervention"] != "none":
        return style.INTERVENTIONS.get(head["intervention"], (head["intervention"],))[0]
    if head["precision.recipe"] == "high":
        return style.precision(head["precision"])
    return CLIPPING if pd.notna(head["optimizer.clip_norm"]) else PLAIN


def look_of_sweep(head: pd.Series) -> tuple:
    """A color for each beta2; optimizers other than the sweeps' AdamW are dashed."""
    dashes = "-" if head["optimizer"] == "adamw" else DASHES
    return style.beta2_color(head["beta2"], head["variant"]), dashes


def look_of_schedule(head: pd.Series) -> tuple:
    """Constants are solid and schedules are dashed."""
    if pd.isna(head["beta2_decay"]):
        return style.beta2_color(head["beta2"], head["variant"]), "-"
    return style.decay_color(head["beta2_decay"], head["variant"]), DASHES


def look_of_fix(head: pd.Series) -> tuple:
    """The color of the intervention or of clipping, or else of the method."""
    color, dashes = style.look(head)
    if head["intervention"] != "none" and head["intervention"] in style.INTERVENTIONS:
        color = style.paler(style.INTERVENTIONS[head["intervention"]][1], head["variant"])
    elif head["value"] == CLIPPING:
        color = style.paler(style.OPTIMIZERS["adamw_clip"][2], head["variant"])
    return color, dashes


FIGURES = {
    "fp8_fixes": LossBySetting(
        "fp8_fixes",
        ("intervention.name", "optimizer.clip_norm"),
        arrange_fixes,
        look_of_fix,
        "figure 5 (left)",
        "All runs but those in 16 bits have one scale per tensor in all three products, in fp8 or, "
        "in `fp8_fixes_mini`, in e2m1 (FP4), and one change. The paper's ViT-L/14: zero-init "
        "layer-scale trains as bf16 does; gradient clipping and KQ layer norm do not help.",
        BASELINES=("accuracy_vs_size",),
    ),
    "beta2_schedule": LossBySetting(
        "beta2_schedule",
        ("optimizer.beta2", "optimizer.beta2_decay"),
        arrange_schedules,
        look_of_schedule,
        "the study of beta2 schedules",
        "Dashed: beta2 = 1 - t^-lambda at step t, in parentheses its value at the last step. All "
        "runs: {methods}.",
    ),
}
FIGURES |= {
    f"spikes_vs_{name}": LossBySetting(
        f"spikes_vs_{name}",
        (key, "optimizer.beta2"),
        arrange_sweep,
        look_of_sweep,
        after,
        "All runs: {methods}. Colors: beta2.",
        key,
        ("stability",),
    )
    for key, (name, after) in SWEEPS.items()
}
