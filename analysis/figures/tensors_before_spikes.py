"""Which tensors' RMS_t spikes before the loss does: all tensors of AdamW runs, pooled over runs.

Not in the paper, which looks only at the patch embedding. Runs: `experiment=stability`.
"""

from dataclasses import asdict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from analysis import measures, naming, paper, spike_marks, style
from analysis.load import Runs
from lowprec.diagnostics.spikes import lag_coincidence, loss_spikes, onsets

NUM_TENSORS = 15  # drawn
LEVEL = 0.05  # false discovery rate
COUNTS = ("num_loss_spikes", "num_rms_spikes", "num_following", "num_first", "expected")
COLUMNS = (*measures.OF_A_RUN, "tensor", *COUNTS, *spike_marks.THRESHOLDS)


select = spike_marks.that_reach


def query(runs: Runs) -> pd.DataFrame:
    """Returns one row per run and tensor with an RMS spike, which the plot pools over runs.

    RMS spikes are read from the events, which name all tensors. Each loss spike counts once, from
    its onset. `num_following` counts those 1 to `max_lead` steps after an RMS spike of the tensor,
    and `num_first` those of them for which no tensor has an earlier RMS spike within these steps.
    `expected` is the number that follow by chance, the mean over all shifts of the RMS spikes.
    """
    heads = measures.named_heads(runs, ("optimizer.beta2",))
    heads = heads[heads["run"].isin(select(runs.runs)["run"])]
    return measures.by_run(runs, heads, COLUMNS, _count)


def _count(run: Runs, head: dict) -> pd.DataFrame:
    protocol = spike_marks.protocol_of_run(head)
    loss = run.metrics["loss"].to_numpy(float)
    onset = np.unique(onsets(loss, np.flatnonzero(loss_spikes(loss, protocol)) + 1))
    spikes = spike_marks.rms_events(run.events)
    spikes = spikes[spikes["step"] > protocol.ignore_steps].groupby("tensor")["step"]
    steps = {name: np.unique(at) for name, at in spikes}
    leads = {name: onset[:, None] - at for name, at in steps.items()}
    longest = {  # by tensor: steps from its earliest RMS spike in reach to each loss spike
        name: np.where((lead >= 1) & (lead <= protocol.max_lead), lead, 0).max(axis=1)
        for name, lead in leads.items()
    }
    most = np.max([*longest.values()], axis=0) if longest else onset
    rows = []
    for name, at in steps.items():
        marks = np.zeros((2, len(loss)), bool)
        marks[0, onset - 1], marks[1, at - 1] = True, True
        chance = lag_coincidence(*marks, protocol).chance if len(onset) else 0.0
        num = (longest[name] > 0).sum(), ((longest[name] == most) & (most > 0)).sum()
        rows.append((name, len(onset), len(at), *num, chance * len(onset)))
    return pd.DataFrame(rows, columns=["tensor", *COUNTS]).assign(**asdict(protocol))


def pooled(frame: pd.DataFrame) -> pd.DataFrame:
    """Sums each tensor's counts over the runs; adds `share`, `chance`, `p` and `q`; sorts by `p`.

    `p`: the binomial probability that at least as many loss spikes follow by chance. `q`: `p`
    adjusted by the method of Benjamini and Hochberg over the tensors with an RMS spike.
    """
    table = frame.groupby("tensor")[list(COUNTS)].sum().astype(float)
    table["num_loss_spikes"] = frame.drop_duplicates("run")["num_loss_spikes"].sum()
    total = table["num_loss_spikes"].clip(lower=1)
    table["share"], table["chance"] = table["num_following"] / total, table["expected"] / total
    table["p"] = stats.binom.sf(table["num_following"] - 1, total, table["chance"])
    table["q"] = stats.false_discovery_control(table["p"]) if len(table) else []
    return table.sort_values(["p", "num_following"], ascending=[True, False])


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draws a bar per tensor: loss spikes that follow its RMS spikes, and those it is first for."""
    table = pooled(frame).head(NUM_TENSORS).iloc[::-1]
    rows = np.arange(len(table))
    colors = [spike_marks.FOLLOWING if q < LEVEL else "#BBBBBB" for q in table["q"]]
    look = {"color": colors, "height": 0.7}
    ax.barh(rows, table["num_following"], alpha=0.45, label="follow", **look)
    ax.barh(rows, table["num_first"], label="follow, and no other tensor is earlier", **look)
    ax.plot(table["expected"], rows, "|", color="black", ms=9, mew=1.5, label="by chance")
    ax.set_yticks(rows, [naming.short_tensor(name) for name in table.index], fontsize=7)
    num = int(table["num_loss_spikes"].max()) if len(table) else 0
    ax.set_xlabel(f"number of loss spikes (of {num})")
    ax.set_title("loss spikes that follow RMS spikes, by tensor")
    ax.legend(loc="lower right")
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws the single panel."""
    figure.set_size_inches(2 * style.COLUMN_WIDTH, 3.6)
    plot(frame, figure.add_subplot())


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs, how spikes are counted, and the tensor with the smallest `p`."""
    runs, table = frame.drop_duplicates("run"), pooled(frame)
    text = (
        f"Loss spikes after RMS spikes of each tensor in {measures.of_runs(runs)}, "
        f"beta2 {naming.join(sorted(runs['beta2'].unique()))}. {spike_marks.in_words(frame)} Loss "
        "spikes are counted from their onset. Orange: tensors after whose RMS spikes more loss "
        f"spikes follow than by chance, at a false discovery rate of {LEVEL:g} over the "
        f"{len(table)} tensors with RMS spikes, if loss spikes are independent of each other."
    )
    for name, row in table.head(1).iterrows():
        text += f" {name}: {row['num_following']:.0f} of {row['num_loss_spikes']:.0f} follow its "
        text += f"{row['num_rms_spikes']:.0f} RMS spikes, {row['expected']:.1f} by chance."
    return f"{text} The paper: {paper.FOLLOWING_SAID}.{measures.caption_end(runs, crosses=False)}"
