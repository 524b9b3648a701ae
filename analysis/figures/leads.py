"""Figures of RMS spikes before loss spikes: how many steps before, and of which tensors.

Not in the paper, which gives the share of loss spikes that follow an RMS spike of the patch
embedding by 1 to 8 steps.
"""

from dataclasses import asdict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy import stats

from analysis import comparison, measures, naming, paper, spike_marks, style
from analysis.grammar import ANYTHING, Panels, by
from analysis.load import NoRunsError, Runs
from lowprec.diagnostics.spikes import Protocol, lag_coincidence, loss_spikes, onsets, rms_spikes

SIDES = {"step": "detection", "onset": "onset"}  # column of `spike_table`: in print
KINDS = {"before the RMS spike": style.OTHER, "at its step": style.RMS,
         "after it": spike_marks.FOLLOWING}  # fmt: skip
REACHING = "Only runs in which RMS_t can reach its threshold."
OF_A_LEAD = ("num_spikes", "num_large", "by_chance")


def leads(runs: Runs) -> pd.DataFrame:
    """One row per run, side from which loss spikes are counted, and lead.

    The lead is that of `spike_marks.signed_leads`; that of spikes without an RMS spike near them is
    NaN. `num_large` counts spikes over `spike_marks.LARGE` nats. `by_chance` is the expected number
    if RMS spikes were shifted circularly along the run. Runs without RMS_t have no rows.
    Raises NoRunsError without a loss spike.
    """
    columns = (*spike_marks.OF_A_RUN, "counted_from", "lead", *OF_A_LEAD)
    frame = spike_marks.by_run(runs, columns, _leads)
    if len(frame) and not frame["num_spikes"].any():
        raise NoRunsError("no run has what is drawn: loss spikes")
    return frame


def _leads(series: spike_marks.Series, protocol: Protocol) -> pd.DataFrame:
    rms, num_steps = series.rms_of(spike_marks.TENSOR), len(series.loss) - protocol.ignore_steps
    most = protocol.max_lead
    num_rms_spikes, parts = rms_spikes(rms, protocol).sum(), []
    for side, name in SIDES.items():
        table = spike_marks.signed_leads(series, protocol, side)
        index = pd.Index([*range(-most, most + 1), np.nan], name="lead", dtype=float)
        near = table.groupby("lead", dropna=False)["is_large"].agg(["size", "sum"]).reindex(index)
        counts = near.fillna(0).set_axis(OF_A_LEAD[:2], axis=1)
        chance = np.where(np.isnan(index), np.nan, len(table) * num_rms_spikes / num_steps)
        parts.append(counts.assign(by_chance=chance, counted_from=name).reset_index())
    return pd.concat(parts, ignore_index=True)


def plot_leads(frame: pd.DataFrame, ax: Axes) -> None:
    """The spikes of one side by lead; those of more than `LARGE` nats are darker."""
    counts = frame.groupby("lead")[list(OF_A_LEAD)].sum()
    kinds = np.sign(counts.index).astype(int) + 1
    for kind, (name, color) in enumerate(KINDS.items()):
        part = counts[kinds == kind]
        ax.bar(part.index, part["num_spikes"], 0.8, color=style.paler(color, 1))
        ax.bar(part.index, part["num_large"], 0.8, color=color, label=name)
    ax.text(0.98, 0.97, f"pale: at most {spike_marks.LARGE:g} nat high", fontsize=7, ha="right",
            va="top", transform=ax.transAxes)  # fmt: skip
    ax.plot(counts.index, counts["by_chance"], color="black", ls=":", lw=1, label="by chance")
    name = frame["counted_from"].iloc[0]
    ax.set(xlabel=f"steps from RMS spike to {name} of the loss spike", ylabel="loss spikes")
    ax.set_xticks(range(int(counts.index.min()), int(counts.index.max()) + 1, 2))


def shares_following(frame: pd.DataFrame) -> str:
    """The title of `lead_histogram`."""
    follows = frame["num_spikes"].where(frame["lead"] > 0, 0).groupby(frame["counted_from"]).sum()
    shares = follows / frame.groupby("counted_from")["num_spikes"].sum()
    if shares.isna().any():
        return ""
    return (
        f"{shares['detection']:.0%} of loss spikes are detected, and {shares['onset']:.0%} begin, "
        f"1 to {frame['lead'].max():.0f} steps after an RMS spike"
    )


NUM_TENSORS = 10  # drawn
LEVEL = 0.05  # false discovery rate
OF_A_TENSOR = ("num_loss_spikes", "num_rms_spikes", "num_following", "num_first", "expected")


def tensors(runs: Runs) -> pd.DataFrame:
    """One row per run and tensor with an RMS spike, which the plot pools over runs.

    RMS spikes are read from the events, which name all tensors. Each loss spike counts once, from
    its onset. `num_following` counts those 1 to `max_lead` steps after an RMS spike of the tensor,
    and `num_first` those of them for which no tensor has an earlier RMS spike within these steps.
    `expected` is the number that follow by chance, the mean over all shifts of the RMS spikes.
    """
    heads = measures.named_heads(runs, ("optimizer.beta2",))
    columns = (*measures.OF_A_RUN, "tensor", *OF_A_TENSOR, *spike_marks.THRESHOLDS)
    return measures.by_run(runs, heads, columns, _tensors)


def _tensors(run: Runs, head: dict) -> pd.DataFrame:
    protocol = spike_marks.protocol_of_run(head)
    loss = run.metrics["loss"].to_numpy(float)
    onset = np.unique(onsets(loss, np.flatnonzero(loss_spikes(loss, protocol)) + 1))
    spikes = spike_marks.rms_events(run.events)
    spikes = spikes[spikes["step"] > protocol.ignore_steps].groupby("tensor")["step"]
    steps = {name: np.unique(at) for name, at in spikes}
    before = {name: onset[:, None] - at for name, at in steps.items()}
    longest = {  # by tensor: steps from its earliest RMS spike in reach to each loss spike
        name: np.where((lead >= 1) & (lead <= protocol.max_lead), lead, 0).max(axis=1)
        for name, lead in before.items()
    }
    most = np.max([*longest.values()], axis=0) if longest else onset
    rows = []
    for name, at in steps.items():
        marks = np.zeros((2, len(loss)), bool)
        marks[0, onset - 1], marks[1, at - 1] = True, True
        chance = lag_coincidence(*marks, protocol).chance if len(onset) else 0.0
        num = (longest[name] > 0).sum(), ((longest[name] == most) & (most > 0)).sum()
        rows.append((name, len(onset), len(at), *num, chance * len(onset)))
    return pd.DataFrame(rows, columns=["tensor", *OF_A_TENSOR]).assign(**asdict(protocol))


def pooled(frame: pd.DataFrame) -> pd.DataFrame:
    """Sums each tensor's counts over the runs; adds `share`, `chance`, `p` and `q`; sorts by `p`.

    `p`: the binomial probability that at least as many loss spikes follow by chance. `q`: `p`
    adjusted by the method of Benjamini and Hochberg over the tensors with an RMS spike.
    """
    table = frame.groupby("tensor")[list(OF_A_TENSOR)].sum().astype(float)
    table["num_loss_spikes"] = frame.drop_duplicates("run")["num_loss_spikes"].sum()
    total = table["num_loss_spikes"].clip(lower=1)
    table["share"], table["chance"] = table["num_following"] / total, table["expected"] / total
    table["p"] = stats.binom.sf(table["num_following"] - 1, total, table["chance"])
    table["q"] = stats.false_discovery_control(table["p"]) if len(table) else []
    return table.sort_values(["p", "num_following"], ascending=[True, False])


def plot_tensors(frame: pd.DataFrame, ax: Axes) -> None:
    """A bar per tensor: loss spikes that follow its RMS spikes, and those it is first for."""
    table = pooled(frame)
    if not table["num_following"].any():
        raise NoRunsError("no loss spike follows an RMS spike of any tensor")
    table = table.head(NUM_TENSORS).sort_values("num_following", kind="stable")
    rows = np.arange(len(table))
    colors = [spike_marks.FOLLOWING if q < LEVEL else "#BBBBBB" for q in table["q"]]
    pale = [style.paler(color, 1) for color in colors]
    ax.barh(rows, table["num_following"], 0.7, color=pale, label="another tensor is earlier")
    ax.barh(rows, table["num_first"], 0.7, color=colors, label="no other tensor is earlier")
    ax.plot(table["expected"], rows, "|", color="black", ms=9, mew=1.5, label="by chance")
    ax.set_yticks(rows, [naming.tensor(name) for name in table.index])
    ax.grid(visible=False, axis="y")
    num = table["num_loss_spikes"].max()
    ax.set_xlabel(f"loss spikes that follow an RMS spike of the tensor (of {num:.0f})")
    ax.legend(loc="lower right")


def most_followed(frame: pd.DataFrame) -> str:
    """The title of `tensors_before_spikes`, of the tensors with more than by chance."""
    table = pooled(frame)
    table = table[table["q"] < LEVEL]
    if table.empty:
        return ""
    first = table.loc[table["num_following"].idxmax()]
    name = naming.tensor(first.name)
    counts = f"{first['num_following']:.0f} of {first['num_loss_spikes']:.0f} loss spikes"
    return f"{name[0].upper()}{name[1:]} first: {counts} follow one of its RMS spikes"


FIGURES = {
    "lead_histogram": Panels(
        studies=("stability", "spikes_vs_size", "spikes_vs_lr", "spikes_vs_batch"),
        same_but=ANYTHING,
        where=lambda heads: comparison.distinct(spike_marks.reaching_threshold(heads)),
        table=leads,
        plots=(plot_leads,),
        facet=by("counted_from", lambda _: ""),  # the axes name it
        title=shares_following,
        shows=measures.repeated,
        what="loss spikes, by the steps from an RMS spike of the patch embedding,",
        text=f"{REACHING} The RMS spike is the latest at or before the loss spike, or else the "
        "next. Dark: "
        f"spikes over {spike_marks.LARGE:g} nat. Dotted: by chance, if RMS spikes were shifted "
        f"along the run. {paper.FOLLOWING_SAID}",
    ),
    "tensors_before_spikes": Panels(
        studies=("stability",),
        where=lambda heads: spike_marks.reaching_threshold(spike_marks.at_main_rate(heads)),
        table=tensors,
        plots=(plot_tensors,),
        size=(2, 2.8),
        title=most_followed,
        shows=measures.repeated,
        what="loss spikes after RMS spikes of each tensor",
        text=f"{REACHING} Counted from the onset of the loss spikes. Orange: tensors after whose "
        "RMS spikes "
        "more loss spikes follow than by chance, at a false discovery rate of "
        f"{LEVEL:g} over the tensors with RMS spikes, if loss spikes are independent of each "
        f"other. {paper.FOLLOWING_SAID}",
    ),
}
