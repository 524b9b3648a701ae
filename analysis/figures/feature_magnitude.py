"""E[abs(x_k)] of each block, early and late in training, with and without zero-init layer-scale.

Figure 5 (right), arXiv:2304.13013. Runs: `experiment=feature_magnitude`.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis import measures, naming, panels, style
from analysis.load import Runs

DASHES = {"first": (0, (1.2, 1.0)), "last": "-"}


def query(runs: Runs) -> pd.DataFrame:
    """One row per block of each run at the first and at the last recorded step (`at`)."""
    heads = measures.named_heads(runs, ("intervention.name",))
    return measures.first_and_last_features(runs, measures.by_intervention(heads))


def plot(frame: pd.DataFrame, ax: Axes) -> None:
    """One panel for one model: magnitude by depth, dotted early and solid late in training."""
    for (_, at), line in frame.groupby(["run", "at"], sort=False):
        head = line.iloc[0]
        label = f"{head['label']}, step {head['step']:,}"
        shade = naming.INTERVENTIONS.get(head["intervention"], ("", style.OTHER))[1]
        mean = line["feature_mean"].where(np.isfinite(line["feature_mean"]))
        ax.plot(line["block"], mean, color=style.paler(shade, head["variant"]), ls=DASHES[at],
                marker="o", ms=2.5, label=label)  # fmt: skip
    ax.set(xlabel="block k", ylabel=r"$\mathrm{E}[|x_k|]$")
    ax.set_title(naming.model(frame["model"].iloc[0]))
    style.log_axis(ax)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each model above one legend."""
    parts = [part for _, part in frame.groupby("model", sort=False)]
    axes = panels.grid(figure, len(parts))
    for part, ax in zip(parts, axes, strict=True):
        plot(part, ax)
    panels.legend_below(figure, axes)


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and the steps, and names runs that did not finish."""
    first = sorted(frame.loc[frame["at"] == "first", "step"].unique())
    return (
        "Mean magnitude of the output of each block of the vision tower of "
        f"{measures.of_runs(frame)}, at the first record (dotted: step {naming.join(first)}) and "
        "the last (solid). After figure 5 (right), arXiv:2304.13013, which begins at "
        "initialization. All runs: "
        f"{measures.methods(frame)}.{measures.caption_end(frame, crosses=False)}"
    )
