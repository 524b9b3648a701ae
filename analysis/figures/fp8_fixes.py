"""Loss of fp8 tensor-wise training with one thing changed, beside bf16. Fig. 5 left.

Runs: `experiment=fp8_fixes`. Source: arXiv:2304.13013.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import curves, style
from analysis.load import Runs

COLUMNS = (*curves.COLUMNS, "intervention", "change")
PLAIN, CLIPPING = "fp8, no change", "gradient clipping"
ORDER = ("bf16", PLAIN, CLIPPING, "KQ layer norm", "zero-init layer-scale")


def query(runs: Runs) -> pd.DataFrame:
    """A row a step of every run: exactly what is plotted. `change`: what differs from plain fp8."""
    heads = curves.named_heads(runs, ("intervention.name",))
    if heads.empty:
        return curves.losses(runs, heads, COLUMNS)
    heads["change"] = [_change(head) for head in heads.itertuples()]
    heads["label"] = [
        head.change + head.label.removeprefix(style.method(head.precision, head.optimizer))
        for head in heads.itertuples()
    ]
    place = {model: i for i, model in enumerate(heads["model"].unique())}
    heads["order"] = [(place[h.model], *style.rank(h.change, ORDER)) for h in heads.itertuples()]
    return curves.losses(runs, heads.sort_values("order", kind="stable"), COLUMNS)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel: the runs of one model. Raw loss faint, smoothed loss over it, legend below."""
    return curves.plot(frame, ax, _look, curves.title(frame))


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """The whole figure: a panel a model."""
    curves.draw_models(frame, figure, plot)


def caption(frame: pd.DataFrame) -> str:
    """What is shown, what the paper found, which runs are incomplete."""
    return (
        f"{curves.caption(frame, 'figure 5 (left)')} All but the runs in 16 bit: fp8 tensor-wise "
        "in all three products, one thing changed. The paper's ViT-L/14: zero-init layer-scale "
        "trains as bf16 does, gradient clipping and KQ layer norm do not help."
        f"{curves.caption_end(frame)}"
    )


def _change(head) -> str:
    if head.intervention != "none":
        return style.INTERVENTIONS.get(head.intervention, (head.intervention,))[0]
    if not style.family(head.precision):
        return style.PRECISIONS.get(head.precision, (head.precision,))[0]
    return CLIPPING if head.optimizer == "adamw_clip" else PLAIN


def _look(head: pd.Series) -> tuple:
    shade = style.color(head["precision"], head["optimizer"], head["variant"])
    if head["intervention"] != "none" and head["intervention"] in style.INTERVENTIONS:
        shade = style.paler(style.INTERVENTIONS[head["intervention"]][1], head["variant"])
    return shade, style.line_style(head["optimizer"])
