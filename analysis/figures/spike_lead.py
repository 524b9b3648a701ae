"""Loss spikes and RMS spikes of the patch embedding over a sweep: losses, and leads.

After the appendix of arXiv:2304.13013. Runs: `experiment=spikes_vs_size`, `_batch` and `_lr`.
"""

from functools import partial
from types import SimpleNamespace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import curves, paper, spike_marks, style
from analysis.figures.loss_by_setting import panel_title
from analysis.figures.rms_and_loss import marked_steps, plot_loss
from analysis.load import Runs
from lowprec.diagnostics.spikes import lag_coincidence

LEAST_BETA2 = 0.99  # smaller ones are left out: the smaller, the fewer spikes
OF_A_STEP = ("step", "loss", "loss_spike", "rms_spike", "lead", "follows")
COLUMNS = (*curves.OF_A_RUN, "key", "value", *OF_A_STEP, *spike_marks.THRESHOLDS)


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """The rows of `Runs.runs` in the figure: AdamW's, those of large beta2 if there are any."""
    heads = spike_marks.of_adamw(heads)
    if "optimizer.beta2" not in heads:  # every config is damaged
        return heads
    is_large = heads["optimizer.beta2"] >= LEAST_BETA2
    return heads[is_large | heads["optimizer.beta2"].isna()] if is_large.any() else heads


def query(runs: Runs, key: str) -> pd.DataFrame:
    """One row per step of each selected run that recorded RMS_t of the patch embedding.

    Thresholds are those of the run's config. `value` is the value of the config key `key`.
    """
    heads = curves.named_heads(runs, (key, "optimizer.beta2"))
    heads = heads[heads["run"].isin(select(runs.runs)["run"])]
    if not heads.empty:
        value = heads[curves.RENAMED.get(key, key)]
        rank = value.map(lambda v: style.rank(v, style.MODELS)) if key == "model.name" else value
        heads = heads.assign(key=key, value=value, rank=rank).sort_values(["beta2", "rank", "seed"])
    return marked_steps(runs, heads, COLUMNS)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel for one run: its loss with loss spikes, RMS spikes along the bottom."""
    head = frame.iloc[0]
    plot_loss(frame, ax)
    at = frame.loc[frame["rms_spike"].astype(bool), "step"]
    ax.plot(at, [0.03] * len(at), "|", color=style.RMS, ms=6, mew=0.7, zorder=4,
            transform=ax.get_xaxis_transform(), label="RMS spike")  # fmt: skip
    ax.set_xlim(0, head["num_steps"])
    ax.set_title(
        f"{panel_title(head)}, beta2 = {head['beta2']:g}, seed {head['seed']}\n{head['label']}"
    )
    curves.step_axis(ax)
    return ax


def plot_leads(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Histogram of the steps from an RMS spike to a loss spike, over all runs."""
    last = int(frame["max_lead"].max())
    lead = frame.loc[frame["loss_spike"].astype(bool), "lead"].astype(float)
    counts = [int((lead == steps).sum()) for steps in range(1, last + 1)]
    counts += [int((lead > last).sum()), int(lead.isna().sum())]
    colors = [spike_marks.FOLLOWING] * last + [spike_marks.OTHER] * 2
    ax.bar(range(1, last + 3), counts, color=colors, width=0.75)
    ax.plot([0.5, last + 0.5], [by_chance(frame) / last] * 2, color="black", lw=1, ls=(0, (2, 1)),
            label="by chance")  # fmt: skip
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    ax.set_xticks(range(1, last + 3), [*map(str, range(1, last + 1)), f">{last}", "none"])
    ax.set(xlabel="steps after the RMS spike", ylabel="loss spikes", title="all runs")
    ax.yaxis.get_major_locator().set_params(integer=True)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each run, three in a row, then the leads over all runs."""
    runs = [run for _, run in frame.groupby("run", sort=False)]
    has_spikes = frame["loss_spike"].any()
    axes = curves.panels(figure, len(runs) + has_spikes, 0, most=3)
    for run, ax in zip(runs, axes, strict=False):
        plot(run, ax)
    curves.share_limits(axes[: len(runs)])
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    if has_spikes:
        plot_leads(frame, axes[-1])


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and the spikes, and counts those that follow, also by chance."""
    runs = frame.drop_duplicates("run")
    num, num_rms, following = frame[["loss_spike", "rms_spike", "follows"]].astype(bool).sum()
    share = f" ({following / num:.1%})" if num else ""
    return (
        f"Training loss of {curves.of_runs(frame)}, beta2 "
        f"{curves.join(runs['beta2'].unique())}. After the appendix of arXiv:2304.13013. "
        f"{spike_marks.in_words(frame)} Blue: RMS spikes of {spike_marks.TENSOR}. The loss axis "
        f"ends at the largest loss after the first tenth. {following} of {num} loss spikes{share} "
        f"follow one of {num_rms} RMS spikes, by chance {by_chance(frame):.1f}. The paper: "
        f"{paper.FOLLOWING_SAID}.{curves.caption_end(runs, crosses=False)}"
    )


def by_chance(frame: pd.DataFrame) -> float:
    """How many loss spikes follow RMS spikes by chance: the mean over shifts in each run."""
    total = 0.0
    for _, run in frame[frame.groupby("run")["loss_spike"].transform("any")].groupby("run"):
        marks = (run[name].to_numpy(bool) for name in ("loss_spike", "rms_spike"))
        counts = lag_coincidence(*marks, spike_marks.protocols(run)[0])
        total += counts.chance * counts.num_loss_spikes
    return total


def _figure(experiment: str, key: str) -> SimpleNamespace:
    """The figure of one sweep, whose panels differ in a key of the config."""
    functions = {"select": select, "plot": plot, "draw": draw, "caption": caption}
    return SimpleNamespace(EXPERIMENT=experiment, query=partial(query, key=key), **functions)


FIGURES = {
    "spike_lead_size": _figure("spikes_vs_size", "model.name"),
    "spike_lead_batch": _figure("spikes_vs_batch", "batch_size"),
    "spike_lead_lr": _figure("spikes_vs_lr", "optimizer.lr"),
}
