"""Figures of loss and RMS_t of the patch embedding on one time axis: 9, 16 to 21 in the paper."""

import pandas as pd
from matplotlib.axes import Axes

from analysis import comparison, measures, naming, panels, paper, spike_marks, style
from analysis.grammar import Panels, by
from analysis.load import Runs

LOWEST = 0.1  # RMS_t of an axis; that of a collapsed model goes to 0
MARKS = ("step", "loss", "rms", "loss_spike", "rms_spike", "follows")
COLUMNS = (*measures.OF_A_RUN, *MARKS)


def one_seed_each(heads: pd.DataFrame) -> pd.DataFrame:
    """AdamW's rows of `Runs.runs`, one per setting.

    Of the undamaged runs, it is the one with the seed that most settings have, or else the one with
    the smallest seed.
    """
    heads = spike_marks.of_adamw(heads)
    has_config = heads["scale"].notna()
    if not has_config.any():
        return heads
    setting, seeds = comparison.signature(heads, seed=False), heads["seed"].astype(float)
    shared = setting.groupby(seeds).nunique().idxmax()
    order = pd.DataFrame({"setting": setting, "is_damaged": heads["note"] != ""})
    order = order.assign(is_other=seeds != shared, seed=seeds)
    first = order.sort_values(["is_damaged", "is_other", "seed"]).drop_duplicates("setting")
    return heads[~has_config | heads.index.isin(first.index)]


def marked(runs: Runs) -> pd.DataFrame:
    """One row per step of each run that recorded RMS_t of the patch embedding.

    `loss_spike` and `rms_spike` mark the steps where a spike begins, by the thresholds of the run's
    own config; `follows` marks those where a loss spike begins after an RMS spike.
    """
    frame = spike_marks.by_run(runs, COLUMNS, spike_marks.mark)
    rank = frame["model"].map(naming.order("model.name"))
    order = frame.assign(rank=rank).sort_values(["rank", "beta2"], kind="stable").index
    return frame.loc[order]


def plot(frame: pd.DataFrame, ax: Axes) -> None:
    """Draws one run: the loss in the upper part of the subplot `ax`, RMS_t in the lower part."""
    head = frame.iloc[0]
    parts = ax.get_subplotspec().subgridspec(2, 1, height_ratios=(3, 2))
    ax.set_subplotspec(parts[0])
    below = ax.figure.add_subplot(parts[1], sharex=ax)
    top, color = panels.cap(frame), style.color(head["precision"], head["optimizer"])
    ax.plot(frame["step"], frame["loss"], color=color, lw=0.7, rasterized=True)
    ax.set(ylabel="training loss", ylim=(None, top))
    panels.draw_chance(ax, frame["batch_size"])
    below.plot(frame["step"], frame["rms"], color=style.RMS, lw=0.7, rasterized=True)
    below.axhline(head["rms_threshold"], color=style.OTHER, lw=0.7, ls=(0, (4, 2)))
    at = frame[frame["rms_spike"]]
    below.plot(at["step"], at["rms"], "^", color=style.RMS, ms=3.5, label=f"RMS spike ({len(at)})")
    others = frame["loss_spike"] & ~frame["follows"]
    after = f"loss spike 1-{head['max_lead']:g} steps after one"
    for spikes, color, name in (
        (frame[frame["follows"]], spike_marks.FOLLOWING, after),
        (frame[others], style.OTHER, "other loss spike"),
    ):
        losses, label = spikes["loss"].clip(upper=top), f"{name} ({len(spikes)})"
        ax.plot(spikes["step"], losses, "v", color=color, ms=4, label=label, zorder=3)
        for step in spikes["step"]:
            for panel in (ax, below):
                panel.axvline(step, color=color, lw=0.5, alpha=0.5, zorder=1)
    ax.set_title(title(head))
    ax.tick_params(labelbottom=False)
    ax.set_xlim(0, head["num_steps"])
    below.set_ylabel(r"$\mathrm{RMS}_t$")
    below.set_ylim(bottom=max(LOWEST, 0.9 * frame["rms"].min()))
    style.log_axis(below)
    panels.step_axis(below)
    handles = [*below.get_legend_handles_labels()[0], *ax.get_legend_handles_labels()[0]]
    place = {"loc": "upper left", "bbox_to_anchor": (0, -0.48), "borderaxespad": 0}
    below.legend(handles=handles, handlelength=1, handletextpad=0.3, **place)


def title(head: pd.Series) -> str:
    """The model, beta2, the method and the seed of a run."""
    label = head["label"].replace(" (", "\n(")
    return f"{naming.model(head['model'])}, beta2 = {head['beta2']:g}\n{label}, seed {head['seed']}"


FIGURES = {
    slug: Panels(
        studies=studies,
        where=one_seed_each,
        table=marked,
        plots=(plot,),
        facet=by("run", lambda _: ""),  # the plot names it
        size=(1, 3.6),
        what="RMS_t of the patch embedding and training loss",
        text="One seed of each setting. After figure 9, arXiv:2304.13013. The loss axis ends at "
        f"the largest loss {panels.IN_PRINT}, at most at twice the first loss, and "
        f"that of RMS_t begins at {LOWEST:g} or above. {paper.FOLLOWING_SAID}",
    )
    for slug, studies in {
        "rms_and_loss": ("rms_and_loss", "stability"),
        **{f"spike_lead_{name}": (f"spikes_vs_{name}",) for name in ("size", "batch", "lr")},
    }.items()
}
