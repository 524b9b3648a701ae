"""Loss spikes and RMS spikes over a sweep: losses, leads, shares, control layers.

After the appendix of arXiv:2304.13013. Runs: `experiment=spikes_vs_size`, `_batch` and `_lr`.
"""

import math
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import curves, paper, spike_marks, style
from analysis.figures.loss_by_setting import panel_title
from analysis.figures.rms_and_loss import plot_loss
from analysis.load import Runs
from lowprec.diagnostics.spikes import lag_coincidence

LEAST_BETA2 = 0.99  # smaller ones are left out: the smaller, the fewer spikes
TENSORS = {  # in print: name; the first is the paper's, the others are controls
    "patch embedding": spike_marks.TENSOR,
    "middle block, c_fc": "visual.transformer.resblocks.{middle}.mlp.c_fc.weight",
    "last block, c_proj": "visual.transformer.resblocks.{last}.mlp.c_proj.weight",
    "token embedding": "token_embedding.weight",
}
FIRST = next(iter(TENSORS))
OF_A_STEP = ("step", "loss", "loss_spike", "rms_spike", "lead", "follows")
OF_A_TENSOR = ("tensor", "num_loss_spikes", "num_rms_spikes", "num_following", "share", "chance")
OF_A_RUN = (*curves.OF_A_RUN, "key", "value")
COLUMNS = ("part", *OF_A_RUN, *OF_A_STEP, *OF_A_TENSOR, *spike_marks.THRESHOLDS)


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """The rows of `Runs.runs` in the figure: AdamW's, those of large beta2 if there are any."""
    heads = spike_marks.of_adamw(heads)
    if "optimizer.beta2" not in heads:  # every config is damaged
        return heads
    is_large = heads["optimizer.beta2"] >= LEAST_BETA2
    return heads[is_large | heads["optimizer.beta2"].isna()] if is_large.any() else heads


def query(runs: Runs, key: str) -> pd.DataFrame:
    """Steps and tensors of the selected runs that recorded RMS_t: exactly what is plotted.

    Part `steps` has one row per step, with the RMS spikes of the patch embedding. Part `tensors`
    counts, for the patch embedding and each control layer, the loss spikes that follow its RMS
    spikes. Thresholds are those of the run's config. `value` is the value of the config key `key`.
    """
    heads = curves.named_heads(runs, (key, "optimizer.beta2"))
    heads = heads[heads["run"].isin(select(runs.runs)["run"])]
    frames = [pd.DataFrame(columns=list(COLUMNS))]
    if not heads.empty:
        value = heads[curves.RENAMED.get(key, key)]
        rank = value.map(lambda v: style.rank(v, style.MODELS)) if key == "model.name" else value
        heads = heads.assign(key=key, value=value, rank=rank).sort_values(["beta2", "rank", "seed"])
    for head in heads.to_dict("records"):
        frames += _steps_and_tensors(runs.only(head["run"]), head)
    return pd.concat(frames[1:] or frames, ignore_index=True)


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
    spiked = frame[(frame["part"] == "steps") & (frame["loss_spike"] == True)]  # noqa: E712
    lead = spiked["lead"].astype(float)
    counts = [int((lead == steps).sum()) for steps in range(1, last + 1)]
    counts += [int((lead > last).sum()), int(lead.isna().sum())]
    colors = [spike_marks.FOLLOWING] * last + [spike_marks.OTHER] * 2
    ax.bar(range(1, last + 3), counts, color=colors, width=0.75)
    shares = pooled(frame)
    if FIRST in shares.index:
        by_chance = shares.loc[FIRST, "chance"] * len(spiked) / last
        ax.plot([0.5, last + 0.5], [by_chance] * 2, color="black", lw=1, ls=(0, (2, 1)),
                label="by chance")  # fmt: skip
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    ax.set_xticks(range(1, last + 3), [*map(str, range(1, last + 1)), f">{last}", "none"])
    ax.set(xlabel="steps after the RMS spike", ylabel="loss spikes", title="all runs")
    ax.yaxis.get_major_locator().set_params(integer=True)
    return ax


def plot_shares(frame: pd.DataFrame, ax: Axes) -> Axes:
    """The share of loss spikes that follow RMS spikes of each tensor, and the share by chance."""
    shares = pooled(frame).iloc[::-1]
    rows = np.arange(len(shares))
    colors = [spike_marks.FOLLOWING if name == FIRST else "#BBBBBB" for name in shares.index]
    ax.barh(rows, 100 * shares["share"], color=colors, height=0.6)
    for row, (_, share) in zip(rows, shares.iterrows(), strict=True):
        text = f" {share['num_following']:.0f} of {share['num_loss_spikes']:.0f}"
        ax.text(100 * share["share"], row, text, va="center", fontsize=7)
    ax.plot(100 * shares["chance"], rows, "|", color="black", ms=12, mew=1.5, label="by chance")
    ax.set_yticks(rows, shares.index)
    ax.set_xticks(range(0, 101, 20))
    ax.set(xlim=(0, 115), xlabel="loss spikes that follow [%]", title="all runs, by tensor")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each run, three in a row, then leads and shares over all runs."""
    steps = frame[frame["part"] == "steps"]
    panels = [panel for _, panel in steps.groupby("run", sort=False)]
    columns = 3
    rows = math.ceil(len(panels) / columns)
    has_spikes = not pooled(frame).empty
    figure.set_size_inches(style.COLUMN_WIDTH * columns, 2.2 * rows + (2.7 if has_spikes else 0.5))
    grid = figure.add_gridspec(rows + has_spikes, columns)
    for i, panel in enumerate(panels):
        ax = plot(panel, figure.add_subplot(grid[i // columns, i % columns]))
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    if has_spikes:
        plot_leads(frame, figure.add_subplot(grid[rows, 0]))
        plot_shares(frame, figure.add_subplot(grid[rows, 1:]))


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and the spikes, and counts those that follow, also by chance."""
    steps = frame[frame["part"] == "steps"]
    runs = steps.drop_duplicates("run")
    text = (
        f"Training loss of {curves.of_runs(steps)}, beta2 "
        f"{curves.join(runs['beta2'].unique())}. After the appendix of arXiv:2304.13013. "
        f"{spike_marks.in_words(frame)} Blue: RMS spikes of {spike_marks.TENSOR}. The loss axis "
        "ends at the largest loss after the first tenth."
    )
    for name, row in pooled(frame).iterrows():
        text += (
            f" {name}: {row['num_following']:.0f} of {row['num_loss_spikes']:.0f} loss spikes "
            f"({row['share']:.1%}) follow its {row['num_rms_spikes']:.0f} RMS spikes, by chance "
            f"{row['chance']:.1%}."
        )
    if not steps["loss_spike"].astype(bool).any():
        text += " There is no loss spike."
    return f"{text} The paper: {paper.FOLLOWING_SAID}.{curves.caption_end(runs, crosses=False)}"


def pooled(frame: pd.DataFrame) -> pd.DataFrame:
    """By tensor, over all runs with loss spikes: the counts, `share` and `chance`.

    Chance is the mean over the shifts of `following`, weighted by the loss spikes of each run.
    """
    part = frame[(frame["part"] == "tensors") & (frame["num_loss_spikes"] > 0)]
    part = part.assign(expected=part["chance"] * part["num_loss_spikes"])
    counts = ["num_loss_spikes", "num_rms_spikes", "num_following", "expected"]
    total = part.groupby("tensor")[counts].sum().astype(float)
    total["share"] = total["num_following"] / total["num_loss_spikes"]
    total["chance"] = total.pop("expected") / total["num_loss_spikes"]
    return total.loc[[name for name in TENSORS if name in total.index]]


def _steps_and_tensors(alone: Runs, head: dict) -> list[pd.DataFrame]:
    """The rows of one run; none if it did not record RMS_t of the patch embedding."""
    protocol = spike_marks.protocol_of_run(head)
    layers = int(head["vision_layers"] or 0)
    rows, frames = [], []
    for name, pattern in TENSORS.items():
        tensor = pattern.format(middle=layers // 2, last=layers - 1)
        series = spike_marks.read_series(alone, head["run"], tensor)
        marks = spike_marks.mark(series, protocol, tensor)
        if marks["rms"].isna().all():
            continue
        if name == FIRST:
            frames = [marks[list(OF_A_STEP)].assign(part="steps")]
        spikes = marks["loss_spike"].to_numpy(), marks["rms_spike"].to_numpy()
        rows.append({"tensor": name, **lag_coincidence(*spikes, protocol)._asdict()})
    if not frames:
        return []
    frame = pd.concat([*frames, pd.DataFrame(rows).assign(part="tensors")], ignore_index=True)
    facts = {name: head[name] for name in OF_A_RUN} | asdict(protocol)
    return [frame.assign(**facts).reindex(columns=list(COLUMNS))]


def _figure(experiment: str, key: str) -> SimpleNamespace:
    """The figure of one sweep, whose panels differ in a key of the config."""
    functions = {"select": select, "plot": plot, "draw": draw, "caption": caption}
    return SimpleNamespace(EXPERIMENT=experiment, query=partial(query, key=key), **functions)


FIGURES = {
    "spike_lead_size": _figure("spikes_vs_size", "model.name"),
    "spike_lead_batch": _figure("spikes_vs_batch", "batch_size"),
    "spike_lead_lr": _figure("spikes_vs_lr", "optimizer.lr"),
}
