"""Loss curves by model size and method. Figure 2, arXiv:2304.13013.

Runs: `experiment=loss_curves`, or else those of FALLBACK.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from analysis import curves, style
from analysis.load import Runs

FALLBACK = "accuracy_vs_size"
MIN_STEPS_FOR_INSET = 1000
INSET = (0.5, 0.62, 0.48, 0.36)  # left, bottom, width and height, as shares of the axes
INSET_SHARE = 0.1  # of the run, at its end: 2,000 of the paper's 20,000 steps
COLUMNS = curves.COLUMNS


def query(runs: Runs) -> pd.DataFrame:
    """One row per step of each run: exactly what is plotted.

    `method` names the line, `label` adds how the run ended, and `variant` counts the settings of
    one method. A missing step has no loss, so that the line has a gap. Runs with a damaged config
    are left out.
    """
    return curves.losses(runs, curves.named_heads(runs))


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel: the runs of one model."""
    title, family = curves.title(frame), style.families(frame)[0][0]
    curves.plot(frame, ax, style.look, f"{title}, {family}" if family else title)
    if frame["num_steps"].max() >= MIN_STEPS_FOR_INSET:
        _draw_inset(frame, ax)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each model, or two if it ran in int8 and in fp8."""
    curves.draw_models(frame, figure, plot, style.families)


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and names those that did not finish."""
    text = curves.caption(frame, "figure 2")
    if frame["num_steps"].max() >= MIN_STEPS_FOR_INSET:
        text += " Inset: the medians of the last tenth of the steps."
    return text + curves.caption_end(frame)


def _draw_inset(frame: pd.DataFrame, ax: Axes) -> None:
    """Draws the median loss of the last tenth of the steps, if a run reached it."""
    num_steps = frame["num_steps"].max()
    start = round(num_steps * (1 - INSET_SHARE))
    late = frame[(frame["step"] >= start) & frame["loss_median"].notna()]
    if late.empty:
        return
    inset = ax.inset_axes(INSET)
    for _, runs in late.groupby("label", sort=False):
        color, dashes = style.look(runs.iloc[0])
        median = runs.drop_duplicates("step").sort_values("step")
        inset.plot(median["step"], median["loss_median"], color=color, linestyle=dashes, lw=0.8)
    inset.set(xlim=(start, num_steps), xticks=[start, num_steps])
    inset.margins(y=0.1)
    inset.xaxis.set_major_formatter(EngFormatter(sep=""))
    inset.locator_params(axis="y", nbins=3)
    inset.tick_params(labelsize=6, length=2)
    inset.spines[["top", "right"]].set_visible(True)
