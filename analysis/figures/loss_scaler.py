"""Loss and loss scale around the highest loss spike of each run under fp16, by scaler.

After the appendix of arXiv:2304.13013. Runs: `experiment=loss_scaler`.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import measures, panels, spike_marks, style
from analysis.load import Runs

AROUND = 100  # steps shown on either side: 2,850 to 3,050 in the paper
ROWS = {"loss": "training loss", "loss_scale": "loss scale"}  # column: in print
COLUMNS = (*measures.OF_A_RUN, "spike", "step", *ROWS, "skipped_tensors")


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """The rows of `Runs.runs` that the figure is about: runs with a loss scaler."""
    return heads[heads["scaler.name"] != "none"]


def query(runs: Runs) -> pd.DataFrame:
    """One row per step around the highest loss spike, at step `spike`, of each run with a scaler.

    Runs without a loss spike are left out; unrecorded values are NaN.
    """
    heads = measures.named_heads(runs, ("scaler.name",))
    scaled = heads[heads["scaler"] != "none"].sort_values("scaler", kind="stable")
    return measures.by_run(runs, scaled, COLUMNS, _around_highest_spike)


def _around_highest_spike(run: Runs, head: dict) -> pd.DataFrame:
    series = spike_marks.read_series(run, spike_marks.TENSOR)
    spikes = spike_marks.spike_table(series, spike_marks.protocol_of_run(head))
    if spikes.empty:
        return pd.DataFrame()
    spike = int(spikes.loc[spikes["height"].idxmax(), "step"])
    metrics = run.metrics.set_index("step").reindex(columns=[*ROWS, "skipped_tensors"])
    steps = range(max(1, spike - AROUND), min(spike + AROUND, metrics.index.max()) + 1)
    around = metrics.astype(float).reindex(pd.Index(steps, name="step"))
    return around.assign(spike=spike).reset_index()


def plot(frame: pd.DataFrame, ax: Axes, column: str = "loss") -> None:
    """One panel: a line for each run of a scaler, with ticks at steps that skip a tensor."""
    for i, (_, run) in enumerate(frame.groupby("run", sort=False)):
        head, at = run.iloc[0], run["step"] - run["spike"]
        color = style.paler(style.color(head["precision"], head["optimizer"]), i)
        finite = np.isfinite(run[column].astype(float))
        ax.plot(at[finite], run.loc[finite, column], color=color, lw=0.9)
        skips = at[run["skipped_tensors"].fillna(0) > 0]
        ax.plot(skips, [0.06 + 0.05 * i] * len(skips), "|", color=spike_marks.FOLLOWING, ms=5,
                mew=0.8, transform=ax.get_xaxis_transform())  # fmt: skip
    ax.axvline(0, color=spike_marks.OTHER, lw=0.7, ls=":")
    if column == "loss":
        panels.draw_chance(ax, frame["batch_size"])
    else:
        ax.set_yscale("log", base=2)
    ax.set(xlim=(-AROUND, AROUND), ylabel=ROWS[column])


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a column for each scaler, with the loss above the loss scale."""
    parts = list(frame.groupby("scaler", sort=False))
    rows = [column for column in ROWS if frame[column].notna().any()]
    width = max(1, 0.9 * len(parts)) * style.COLUMN_WIDTH
    figure.set_size_inches(width, 1.7 * len(rows) + 0.3)
    axes = figure.subplots(len(rows), len(parts), squeeze=False, sharex=True, sharey="row")
    for (scaler, part), column in zip(parts, axes.T, strict=True):
        for name, ax in zip(rows, column, strict=True):
            plot(part, ax, name)
            ax.label_outer()
        column[0].set_title(f"{scaler} loss scale")
        column[-1].set_xlabel("steps from the highest loss spike")


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and the steps."""
    runs = frame.drop_duplicates("run")
    return (
        f"{AROUND} steps on either side of the highest loss spike of {measures.of_runs(frame)}, a "
        "line for each. After the appendix of arXiv:2304.13013. Orange ticks: steps in which the "
        "gradient of some tensor was not finite, so that the step (dynamic scaler) or the tensor "
        "(fixed) was skipped."
    ) + measures.caption_end(runs, crosses=False)
