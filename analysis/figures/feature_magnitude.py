"""E[abs(x_k)] of each block, early and late in training, with and without zero-init layer-scale.

Figure 5 (right), arXiv:2304.13013. Runs: `experiment=feature_magnitude`.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis import curves, paper, style
from analysis.load import Runs

COLUMNS = (*curves.OF_A_RUN, "at", "step", "block", "feature_mean")
DASHES = {"first": (0, (1.2, 1.0)), "last": "-"}


def query(runs: Runs) -> pd.DataFrame:
    """One row per block of each run at the first and at the last recorded step (`at`)."""
    heads = curves.named_heads(runs, ("intervention.name",))
    return curves.by_run(runs, curves.by_intervention(heads), COLUMNS, _first_and_last)


def _first_and_last(run: Runs, head: dict) -> pd.DataFrame:
    try:
        values = run.tensors(paper.BLOCK.format("*"), "feature_mean")
    except LookupError:
        return pd.DataFrame()
    values = values.drop(columns="run").set_index("step").sort_index()
    values = values.rename(columns=lambda name: int(name.rpartition(".")[2])).sort_index(axis=1)
    ends = values.iloc[[0, -1]].set_axis(["first", "last"])
    steps = pd.Series(values.index[[0, -1]], ends.index, name="step")
    table = ends.rename_axis(index="at", columns="block").stack().rename("feature_mean")
    return table.reset_index().join(steps, on="at")


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel for one model: magnitude by depth, dotted early and solid late in training."""
    named = set()
    for (_, at), line in frame.groupby(["run", "at"], sort=False):
        head = line.iloc[0]
        label = f"{head['label']}, step {head['step']:,}"
        shade = style.INTERVENTIONS.get(head["intervention"], ("", style.OTHER))[1]
        mean = line["feature_mean"].where(np.isfinite(line["feature_mean"]))
        ax.plot(line["block"], mean, color=style.paler(shade, head["variant"]), ls=DASHES[at],
                marker="o", ms=2.5, label=None if label in named else label)  # fmt: skip
        named.add(label)
    ax.set(xlabel="block k", ylabel=r"$\mathrm{E}[|x_k|]$", title=curves.title(frame))
    style.log_axis(ax)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.2), borderaxespad=0, handlelength=2.6)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each model."""
    panels = [panel for _, panel in frame.groupby("model", sort=False)]
    lines = max(len(panel[["label", "at", "step"]].drop_duplicates()) for panel in panels)
    for panel, ax in zip(panels, curves.panels(figure, len(panels), lines), strict=True):
        plot(panel, ax)


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and the steps, and names runs that did not finish."""
    first = sorted(frame.loc[frame["at"] == "first", "step"].unique())
    return (
        f"Mean magnitude of the output of each block of the vision tower of {curves.of_runs(frame)}"
        f", at the first record (dotted: step {curves.join(first)}) and the last (solid). After "
        "figure 5 (right), arXiv:2304.13013, which begins at initialization. All runs: "
        f"{curves.methods(frame)}.{curves.caption_end(frame, crosses=False)}"
    )
