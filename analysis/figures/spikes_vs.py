"""Loss curves of a sweep: a panel for each value of one config key, a line for each beta2.

Figures 6, 7 and 8, arXiv:2304.13013. Runs: `experiment=spikes_vs_size`, `_batch` and `_lr`.
"""

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import curves, style
from analysis.load import Runs

COLUMNS = (*curves.COLUMNS, "beta2", "key", "value")
NAMES = {"model.name": "size", "batch_size": "batch", "optimizer.lr": "lr"}  # in print


def query(runs: Runs, key: str) -> pd.DataFrame:
    """A row a step of every run: exactly what is plotted. `value`: of the config key `key`.

    `label` is the beta2 and what else the runs of one panel differ in.
    """
    heads = curves.named_heads(runs, (key, "optimizer.beta2"))
    if heads.empty:
        return curves.losses(runs, heads, COLUMNS)
    short = curves.RENAMED.get(key, key)
    labels = curves.with_setting(heads, [f"beta2 = {beta2:g}" for beta2 in heads["beta2"]])
    if key != "model.name" and heads["model"].nunique() > 1:
        models = heads["model"].map(style.MODELS).fillna(heads["model"])
        labels = [f"{model}, {label}" for model, label in zip(models, labels, strict=True)]
    heads = heads.assign(label=labels, key=key, value=heads[short])
    by_size = pd.factorize(heads["value"])[0]  # heads come from small to large models
    order = heads.assign(rank=by_size if key == "model.name" else heads["value"])
    heads = heads.loc[order.sort_values(["rank", "beta2"], kind="stable").index]
    return curves.losses(runs, heads, COLUMNS)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel: the runs of one value, colored by beta2."""
    many = frame["optimizer"].nunique() > 1

    def look(head: pd.Series) -> tuple:
        dashes = style.line_style(head["optimizer"]) if many else "-"
        return style.beta2_color(head["beta2"], head["variant"]), dashes

    return curves.plot(frame, ax, look, title(frame.iloc[0]))


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """The whole figure: a panel a value, three a row."""
    panels = [panel for _, panel in frame.groupby("value", sort=False)]
    lines = max(panel["label"].nunique() for panel in panels)
    axes = curves.panels(figure, len(panels), lines, most=3)
    for panel, ax in zip(panels, axes, strict=True):
        plot(panel, ax)


def caption(frame: pd.DataFrame, after: str) -> str:
    """What is shown, in which method, which runs are incomplete."""
    runs = frame.drop_duplicates("run")
    text = f"{curves.caption(frame, after)} All runs: {curves.methods(runs)}. Colors: beta2."
    if runs["key"].iloc[0] != "model.name":
        runs = runs.assign(label=[f"{title(run)}, {run['label']}" for _, run in runs.iterrows()])
    return text + curves.caption_end(runs)


def title(head: pd.Series) -> str:
    """`ViT-B/32`, `batch 4,096`, `lr 0.002`: the value of a panel."""
    if head["key"] == "model.name":
        return style.MODELS.get(head["value"], head["value"])
    value = f"{head['value']:,}" if head["key"] == "batch_size" else f"{head['value']:g}"
    return f"{NAMES[head['key']]} {value}"


@dataclass(eq=False)
class Sweep:
    """The figure of one sweep."""

    EXPERIMENT: str
    key: str  # of the config, in which its panels differ
    after: str  # the paper's figure

    plot = staticmethod(plot)
    draw = staticmethod(draw)

    def query(self, runs: Runs) -> pd.DataFrame:
        """A row a step of every run: exactly what is plotted."""
        return query(runs, self.key)

    def caption(self, frame: pd.DataFrame) -> str:
        """What is shown, in which method, which runs are incomplete."""
        return caption(frame, self.after)


FIGURES = {
    "spikes_vs_size": Sweep("spikes_vs_size", "model.name", "figure 6"),
    "spikes_vs_batch": Sweep("spikes_vs_batch", "batch_size", "figure 7"),
    "spikes_vs_lr": Sweep("spikes_vs_lr", "optimizer.lr", "figure 8"),
}
