"""Loss and RMS_t of the patch embedding on one time axis. Figure 9, arXiv:2304.13013.

Runs: `experiment=rms_and_loss`, or else `stability`. The figures `spike_lead_*`, 16 to 21, show
those of `spikes_vs_*`.
"""

import functools

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from analysis import comparison, measures, naming, panels, paper, spike_marks, style
from analysis.load import Runs
from lowprec.diagnostics.spikes import lag_coincidence

OTHER, RMS = spike_marks.OTHER, style.RMS
LOWEST = 0.1  # RMS_t of an axis; that of a collapsed model goes to 0
MARKS = ("step", "loss", "rms", "loss_spike", "rms_spike", "follows")
COLUMNS = (*measures.OF_A_RUN, "num_seeds", *MARKS)


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """Selects the rows of `Runs.runs` in the figure; adds `num_seeds`, the seeds of their setting.

    These are AdamW runs, one per setting: of the undamaged runs, the one with the seed that most
    settings have, or else the one with the smallest seed.
    """
    heads = spike_marks.of_adamw(heads)
    has_config = heads["scale"].notna()
    if not has_config.any():
        return heads.assign(num_seeds=np.nan)
    setting, seeds = comparison.signature(heads, seed=False), heads["seed"].astype(float)
    shared = setting.groupby(seeds).nunique().idxmax()
    order = pd.DataFrame({"setting": setting, "is_damaged": heads["note"] != ""})
    order = order.assign(is_other=seeds != shared, seed=seeds)
    first = order.sort_values(["is_damaged", "is_other", "seed"]).drop_duplicates("setting")
    heads = heads.assign(num_seeds=seeds.groupby(setting).transform("nunique"))
    return heads[~has_config | heads.index.isin(first.index)]


def query(runs: Runs) -> pd.DataFrame:
    """Returns one row per step of each selected run that recorded RMS_t of the patch embedding.

    `loss_spike` and `rms_spike` mark the steps where a spike begins, by the thresholds of the run's
    own config; `follows` marks those where a loss spike begins after an RMS spike.
    """
    heads = select(runs.runs).set_index("run")
    mark = functools.partial(spike_marks.mark, tensor=spike_marks.TENSOR)
    chosen = runs.where(runs.summaries["run"].isin(heads.index))
    frame = spike_marks.by_run(chosen, COLUMNS, mark)
    frame["num_seeds"] = frame["run"].map(heads["num_seeds"])
    rank = frame["model"].map(lambda name: naming.rank(name, naming.MODELS))
    order = frame.assign(rank=rank).sort_values(["rank", "beta2"], kind="stable").index
    return frame.loc[order]


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draws one run: the loss in the upper part of the subplot `ax`, RMS_t in the lower part."""
    head = frame.iloc[0]
    parts = ax.get_subplotspec().subgridspec(2, 1, height_ratios=(3, 2))
    ax.set_subplotspec(parts[0])
    below = ax.figure.add_subplot(parts[1], sharex=ax)
    top, color = panels.cap(frame), style.color(head["precision"], head["optimizer"])
    ax.plot(frame["step"], frame["loss"], color=color, lw=0.7, rasterized=True)
    ax.set(ylabel="training loss", ylim=(None, top))
    panels.draw_chance(ax, frame["batch_size"])
    below.plot(frame["step"], frame["rms"], color=RMS, lw=0.7, rasterized=True)
    below.axhline(head["rms_threshold"], color=OTHER, lw=0.7, ls=(0, (4, 2)))
    at = frame[frame["rms_spike"]]
    below.plot(at["step"], at["rms"], "^", color=RMS, ms=3.5, label=f"RMS spike ({len(at)})")
    for spikes, color, name in spike_marks.kinds(frame):
        losses, label = spikes["loss"].clip(upper=top), f"{name} ({len(spikes)})"
        ax.plot(spikes["step"], losses, "v", color=color, ms=4, label=label, zorder=3)
        for step in spikes["step"]:
            for panel in (ax, below):
                panel.axvline(step, color=color, lw=0.5, alpha=0.5, zorder=1)
    ax.set_title(_title(head))
    ax.tick_params(labelbottom=False)
    ax.set_xlim(frame["step"].min() - 1, frame["step"].max())
    below.set(ylabel=r"$\mathrm{RMS}_t$", xlabel="step")
    below.set_ylim(bottom=max(LOWEST, 0.9 * frame["rms"].min()))
    style.log_axis(below)
    below.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.locator_params(axis="x", nbins=5)
    handles = [*below.get_legend_handles_labels()[0], *ax.get_legend_handles_labels()[0]]
    place = {"loc": "upper left", "bbox_to_anchor": (0, -0.48), "borderaxespad": 0}
    below.legend(handles=handles, handlelength=1, **place)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each run, in the order of model and beta2."""
    runs = [run for _, run in frame.groupby("run", sort=False)]
    axes = panels.grid(figure, len(runs), 3.6)
    for run, ax in zip(runs, axes, strict=True):
        plot(run, ax).set_xlim(0, run["num_steps"].iloc[0])
    panels.share_limits(axes)
    panels.share_limits([ax for ax in figure.axes if ax not in axes])


def caption(frame: pd.DataFrame) -> str:
    """Describes the data and the protocol, and counts each setting's seeds and spikes."""
    text = (
        f"RMS_t of {spike_marks.TENSOR} and training loss of {measures.of_runs(frame)}. After "
        f"figure 9, arXiv:2304.13013. {spike_marks.in_words(frame)} The loss axis ends at the "
        "largest loss after the first tenth of training, at most at twice the first loss, and "
        f"that of RMS_t begins at {LOWEST:g} or above."
    )
    for _, run in frame.groupby("run", sort=False):
        head = run.iloc[0]
        of_seeds = f" of {head['num_seeds']}" if head["num_seeds"] > 1 else ""
        text += f" {_title(head, ', ')}{of_seeds}: {_counts(run)}."
    return f"{text} The paper: {paper.FOLLOWING_SAID}."


def _counts(run: pd.DataFrame) -> str:
    protocol, head = spike_marks.protocols(run)[0], run.iloc[0]
    beta2 = spike_marks.beta2_by_step(head["beta2"], head["beta2_decay"], len(run))
    if reason := spike_marks.why_unreachable(beta2, protocol):
        return f"loss spikes: {run['loss_spike'].sum()}; {reason}"
    if not run["loss_spike"].any():
        return f"no loss spike, {run['rms_spike'].sum()} RMS spikes"
    marks = run["loss_spike"].to_numpy(), run["rms_spike"].to_numpy()
    counts = lag_coincidence(*marks, protocol)
    return (
        f"{counts.num_following} of {counts.num_loss_spikes} loss spikes follow an RMS spike (of "
        f"{counts.num_rms_spikes}) by 1 to {protocol.max_lead} steps, by chance {counts.chance:.1%}"
    )


def _title(head: pd.Series, between: str = "\n") -> str:
    name = naming.model(head["model"])
    label = head["label"].replace(" (", f"{between}(") if between == "\n" else head["label"]
    return f"{name}, beta2 = {head['beta2']:g}{between}{label}, seed {head['seed']}"
