"""Loss with a constant beta2 and with AdaFactor's schedule 1 - t^-lambda. After arXiv:2304.13013.

Runs: `experiment=beta2_schedule`.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import curves, style
from analysis.load import Runs

COLUMNS = (*curves.COLUMNS, "beta2", "beta2_decay")
DASHES = (0, (5, 1.2))


def query(runs: Runs) -> pd.DataFrame:
    """A row a step of every run: exactly what is plotted; `beta2_decay` is lambda or NaN."""
    heads = curves.named_heads(runs, ("optimizer.beta2", "optimizer.beta2_decay"))
    if heads.empty:
        return curves.losses(runs, heads, COLUMNS)
    heads = heads.astype({"beta2_decay": float})
    settings = [_setting(head) for head in heads.to_dict("records")]
    heads["label"] = curves.with_setting(heads, settings)
    heads = heads.sort_values(["beta2_decay", "beta2"], na_position="first", kind="stable")
    return curves.losses(runs, heads, COLUMNS)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel: the runs of one model; schedules are dashed."""
    return curves.plot(frame, ax, _look, curves.title(frame))


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """The whole figure: a panel a model."""
    curves.draw_models(frame, figure, plot, lines=2)


def caption(frame: pd.DataFrame) -> str:
    """What is shown, which runs are incomplete."""
    text = curves.caption(frame, "the study of beta2 schedules")
    return (
        f"{text} Dashed: beta2 = 1 - t^-lambda at step t, in parentheses its value at the last "
        f"step. All runs: {curves.methods(frame)}.{curves.caption_end(frame)}"
    )


def _setting(head: dict) -> str:
    decay = head["beta2_decay"]
    if decay != decay:
        return f"beta2 = {head['beta2']:g}"
    return f"1 - t^-{decay:g} (to {1 - head['num_steps'] ** -decay:.3f})"


def _look(head: pd.Series) -> tuple:
    if pd.isna(head["beta2_decay"]):
        return style.beta2_color(head["beta2"], head["variant"]), "-"
    return style.decay_color(head["beta2_decay"], head["variant"]), DASHES
