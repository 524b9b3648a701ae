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

OF_A_RUN = (
    *("run", "scale", "data", "data_digest", "batch_size", "num_steps", "model", "precision"),
    *("optimizer", "intervention", "variant", "seed", "state", "label"),
)
COLUMNS = (*OF_A_RUN, "at", "step", "block", "feature_mean")
DASHES = {"first": (0, (1.2, 1.0)), "last": "-"}


def query(runs: Runs) -> pd.DataFrame:
    """One row per block of each run at the first and at the last recorded step (`at`)."""
    heads = curves.named_heads(runs, ("intervention.name",))
    frames = [pd.DataFrame(columns=list(COLUMNS))]
    for head in curves.by_intervention(heads).to_dict("records"):
        alone = runs.only(head["run"])
        try:
            values = alone.tensors(paper.BLOCK.format("*"), "feature_mean")
        except LookupError:
            continue
        values = values.drop(columns="run").set_index("step").sort_index()
        for at, row in (("first", values.iloc[0]), ("last", values.iloc[-1])):
            blocks = row.rename(lambda name: int(name.rpartition(".")[2])).sort_index()
            facts = {"at": at, "step": row.name} | {key: head[key] for key in OF_A_RUN}
            frame = pd.DataFrame({"block": blocks.index, "feature_mean": blocks.to_numpy(float)})
            frames.append(frame.assign(**facts)[list(COLUMNS)])
    return pd.concat(frames[1:] or frames, ignore_index=True)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel for one model: magnitude by depth, dotted early and solid late in training."""
    for (_, at), line in frame.groupby(["run", "at"], sort=False):
        head = line.iloc[0]
        shade = style.INTERVENTIONS.get(head["intervention"], ("", style.OTHER))[1]
        mean = line["feature_mean"].where(np.isfinite(line["feature_mean"]))
        ax.plot(line["block"], mean, color=style.paler(shade, head["variant"]), ls=DASHES[at],
                marker="o", ms=2.5, label=f"{head['label']}, step {head['step']:,}")  # fmt: skip
    ax.set(xlabel="block k", ylabel=r"$\mathrm{E}[|x_k|]$", title=curves.title(frame))
    style.log_axis(ax)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.2), borderaxespad=0, handlelength=2.6)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each model."""
    panels = [panel for _, panel in frame.groupby("model", sort=False)]
    lines = max(2 * panel["run"].nunique() for panel in panels)
    axes = curves.panels(figure, len(panels), lines)
    for panel, ax in zip(panels, axes, strict=True):
        plot(panel, ax)


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and the steps, and names runs that did not finish."""
    runs = frame.drop_duplicates("run")
    models = curves.models(runs)
    first = sorted(frame.loc[frame["at"] == "first", "step"].unique())
    return (
        f"Mean magnitude of the output of each block of the vision tower of {models} on "
        f"{curves.join(runs['data'].unique())}: {len(runs)} runs at "
        f"{curves.join(runs['scale'].unique())} scale, at the first record (dotted: step "
        f"{curves.join(f'{step:,}' for step in first)}) and the last (solid). After figure 5 "
        "(right), arXiv:2304.13013, which begins at initialization. "
        f"All runs: {curves.methods(runs)}.{curves.caption_end(runs, crosses=False)}"
    )
