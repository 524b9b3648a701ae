"""How many steps loss spikes come after, at or before RMS spikes of the patch embedding.

Not in the paper, which gives the share that follow by 1 to 8 steps. Runs of AdamW:
`experiment=stability`, and those of BASELINES.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import comparison, measures, panels, paper, spike_marks, style
from analysis.load import Runs
from lowprec.diagnostics.spikes import Protocol, rms_spikes

SIDES = {"step": "detection", "onset": "onset"}  # column of `spike_table`: in print
FOLLOWS, SAME, BEFORE = spike_marks.FOLLOWING, "#0072B2", spike_marks.OTHER
OF_A_RUN = ("run", "scale", "data", "model", "optimizer", "beta2", "seed", "state", "label")
COUNTS = ("num_spikes", "num_large", "by_chance")
COLUMNS = (*OF_A_RUN, "counted_from", "lead", *COUNTS, *spike_marks.THRESHOLDS)


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """AdamW's rows in which RMS_t can reach the threshold; one of runs that agree in everything."""
    return comparison.distinct(spike_marks.that_reach(heads))


def query(runs: Runs) -> pd.DataFrame:
    """Returns one row per run, side from which loss spikes are counted, and lead.

    The lead is that of `spike_marks.signed_leads`; that of spikes without an RMS spike near them is
    NaN. `num_large` counts spikes over `spike_marks.LARGE` nats. `by_chance` is the expected number
    if RMS spikes were shifted circularly along the run. Runs without RMS_t have no rows.
    """
    return spike_marks.by_run(runs, select(runs.runs), COLUMNS, _of_run)


def _of_run(series: spike_marks.Series, protocol: Protocol) -> pd.DataFrame:
    rms, num_steps = series.rms_of(spike_marks.TENSOR), len(series.loss) - protocol.ignore_steps
    most = protocol.max_lead
    num_rms_spikes, parts = rms_spikes(rms, protocol).sum(), []
    for side, name in SIDES.items():
        table = spike_marks.signed_leads(series, protocol, side)
        index = pd.Index([*range(-most, most + 1), np.nan], name="lead", dtype=float)
        near = table.groupby("lead", dropna=False)["is_large"].agg(["size", "sum"]).reindex(index)
        counts = near.fillna(0).set_axis(COUNTS[:2], axis=1)
        chance = np.where(np.isnan(index), np.nan, len(table) * num_rms_spikes / num_steps)
        parts.append(counts.assign(by_chance=chance, counted_from=name).reset_index())
    return pd.concat(parts, ignore_index=True)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draws the spikes of one side by lead; those of more than `LARGE` nats are darker."""
    counts = frame.groupby("lead")[list(COUNTS)].sum()
    colors = [FOLLOWS if lead > 0 else BEFORE if lead else SAME for lead in counts.index]
    ax.bar(counts.index, counts["num_spikes"], 0.8, color=[style.paler(c, 1) for c in colors])
    ax.bar(counts.index, counts["num_large"], 0.8, color=colors)
    ax.plot(counts.index, counts["by_chance"], color="black", ls=":", lw=1)
    name = frame["counted_from"].iloc[0]
    ax.set(xlabel=f"steps from RMS spike to {name} of the loss spike", ylabel="loss spikes")
    ax.set_xticks(range(int(counts.index.min()), int(counts.index.max()) + 1, 2))
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each side."""
    parts = [panel for _, panel in frame.groupby("counted_from", sort=False)]
    axes = panels.grid(figure, len(parts), 2.5)
    for panel, ax in zip(parts, axes, strict=True):
        plot(panel, ax)
    panels.share_limits(axes)
    names = {"before the RMS spike": BEFORE, "at its step": SAME, "after it": FOLLOWS}
    handles = [Patch(color=color, label=name) for name, color in names.items()]
    handles += axes[0].plot([], [], color="black", ls=":", lw=1, label="by chance")
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs, the counting, and the shares of both sides."""
    runs, most = frame.drop_duplicates("run"), int(frame["lead"].max())
    text = (
        f"Loss spikes of {measures.of_runs(runs)}, by the steps from an RMS spike of "
        f"{spike_marks.TENSOR}: the latest at or before the loss spike, or else the next. "
        f"{spike_marks.in_words(frame)} Dark: spikes over {spike_marks.LARGE:g} nat. Dotted: by "
        "chance, if RMS spikes were shifted along the run."
    )
    for name, part in frame.groupby("counted_from", sort=False):
        text += f" From the {name}: {in_words(part, 'num_spikes', most)}; "
        text += f"over {spike_marks.LARGE:g} nat: {in_words(part, 'num_large', most)}."
    return f"{text} The paper: {paper.FOLLOWING_SAID}.{measures.caption_end(runs, crosses=False)}"


def in_words(frame: pd.DataFrame, column: str, most: int) -> str:
    """`of 187 spikes, 102 come 1 to 8 steps after, 41 at the step of and 13 before one`."""
    counts = frame.groupby("lead")[column].sum()
    after, at, before = (counts[s].sum() for s in (counts.index > 0, counts.index == 0,
                                                   counts.index < 0))  # fmt: skip
    return (
        f"of {frame[column].sum():.0f} spikes, {after:.0f} come 1 to {most} steps after, "
        f"{at:.0f} at the step of and {before:.0f} before one"
    )
