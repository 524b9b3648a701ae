"""Figures of loss spikes: how high they are and what they cost, and the loss scale around them."""

from dataclasses import asdict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import measures, naming, panels, spike_marks, style
from analysis.grammar import Panels, by
from analysis.load import Runs

FLOOR = 0.08  # nats: lower spikes are marked there
WIDTH = 0.8  # of the slot that the optimizers share at each beta2 on the axis
RESETS = {"stable_spam": 1000}  # steps between resets of the moments, the library's default
AFTER_RESET = "evaluated right after a reset of the optimizer's moments"


def heights(runs: Runs) -> pd.DataFrame:
    """The heights for the left panel and the recall for the right one, as plotted.

    Part `spikes` has one row per loss spike after the ignored steps, with its `height`: the largest
    loss up to `within` steps after it minus the median loss of the window before it. Part `runs`
    has one row per run, with its last step and `recall`, the mean R@1 of both directions in %, or
    NaN. `after_reset`: whether the optimizer reset its moments at the run's last step or the one
    before.
    """
    heads = measures.named_heads(runs, ("optimizer.beta2",))
    heads = measures.with_scores(runs, heads)

    def parts(run: Runs, head: dict) -> pd.DataFrame:
        series = spike_marks.read_series(run, spike_marks.TENSOR)
        protocol = spike_marks.protocol_of_run(head)
        spikes = spike_marks.spike_table(series, protocol)[["step", "height"]]
        end = pd.DataFrame({"step": [head["reached"]], "recall": [head["recall"]]})
        table = pd.concat([spikes.assign(part="spikes"), end.assign(part="runs")])
        gap = RESETS.get(head["optimizer"], np.inf)
        after_reset = head["reached"] >= gap and head["reached"] % gap <= 1
        return table.assign(after_reset=after_reset, **asdict(protocol))

    columns = ("part", *measures.OF_A_RUN, "step", "height", "recall", "after_reset")
    frame = measures.by_run(runs, heads, (*columns, *spike_marks.THRESHOLDS), parts)
    return frame.astype({"height": float, "recall": float, "after_reset": bool})


def plot_heights(frame: pd.DataFrame, ax: Axes) -> None:
    """The left panel: a point for each loss spike and a bar at the median of each group."""
    spikes, places = frame[frame["part"] == "spikes"], _places(frame)
    optimizers = _slots(frame)
    for optimizer, middle in optimizers.items():
        color = _color(frame, optimizer)
        for beta2, group in spikes[spikes["optimizer"] == optimizer].groupby("beta2"):
            at = places[beta2] + middle
            spread = np.linspace(-0.3, 0.3, len(group)) if len(group) > 1 else np.zeros(1)
            by_step = group.sort_values("step")["height"]
            at_spikes, is_low = at + spread * WIDTH / len(optimizers), by_step < FLOOR
            ax.plot(at_spikes[~is_low], by_step[~is_low], "o", color=color, ms=2.5)
            if is_low.any():
                ax.plot(at_spikes[is_low], [FLOOR] * is_low.sum(), "v", color=color, ms=4)
            half = min(0.11, 0.45 * WIDTH / len(optimizers))
            ax.hlines(by_step.median(), at - half, at + half, color=color, lw=2)
    ax.set_yscale("log")
    ax.set_ylim(bottom=0.9 * FLOOR)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set(ylabel="height of a loss spike (nats)", title="one point per loss spike; bars: medians")
    _name_axis(ax, frame)


def plot_recall(frame: pd.DataFrame, ax: Axes) -> None:
    """The right panel: a point for each run and a line through each optimizer's means.

    With one beta2, bars are the means, and the axis names the optimizers in place of the legend. A
    vertical line goes from the smallest to the largest run of a setting. Points are open where the
    run ends right after a reset of the moments.
    """
    ends, places = frame[frame["part"] == "runs"].sort_values("beta2"), _places(frame)
    for optimizer, group in ends.groupby("optimizer", sort=False):
        color, several = _color(frame, optimizer), len(places) > 1
        name = naming.optimizer_name(optimizer) if several else None
        at = group["beta2"].map(places) + _slots(frame)[optimizer]
        dashes = style.line_style(optimizer)
        means = "line" if several else "bar"
        hollow = group["after_reset"]
        look = {"color": color, "label": name, "dashes": dashes, "hollow": hollow}
        every = [place + _slots(frame)[optimizer] for place in places.values()]
        panels.draw_runs(ax, at, group["recall"], means=means, every=every, **look)
        spread = group["recall"].groupby(at).agg(["min", "max"]).dropna()
        ax.vlines(spread.index, spread["min"], spread["max"], color=color, lw=0.8)
    if ends["after_reset"].any():
        ax.plot([], [], "o", color=style.OTHER, mfc="white", ms=4, label=AFTER_RESET)
    ax.set(ylabel="mean R@1 at the end (%)", title="one point per run; thin lines: min to max")
    _name_axis(ax, frame)


def _color(frame: pd.DataFrame, optimizer: str) -> str | tuple:
    """The color of an optimizer; with one beta2, whose axis names optimizers, AdamW stands out."""
    if frame["beta2"].nunique() > 1:
        return style.color("bf16", optimizer)
    return "black" if optimizer == "adamw" else style.RMS


def _places(frame: pd.DataFrame) -> dict[float, int]:
    return {beta2: i for i, beta2 in enumerate(sorted(set(frame["beta2"])))}


def _slots(frame: pd.DataFrame) -> dict[str, float]:
    """By optimizer: its place beside a value of beta2 on the axis."""
    names = sorted(set(frame["optimizer"]), key=lambda name: naming.rank(name, style.OPTIMIZERS))
    return {n: (i - (len(names) - 1) / 2) * WIDTH / len(names) for i, n in enumerate(names)}


def _name_axis(ax: Axes, frame: pd.DataFrame) -> None:
    """Names the values of beta2 on the axis, or with a single one the optimizers."""
    places, slots = _places(frame), _slots(frame)
    ax.set(xlabel="beta2", xlim=(-0.6, len(places) - 0.4))
    ax.set_xticks(list(places.values()), [f"{beta2:g}" for beta2 in places])
    if len(places) == 1:
        names = [naming.optimizer_name(name) for name in slots]
        ax.set_xticks(list(slots.values()), names, rotation=30, ha="right", rotation_mode="anchor")
        ax.set(
            xlabel=f"optimizer (beta2 {next(iter(places)):g})", xlim=(-0.55 * WIDTH, 0.55 * WIDTH)
        )


AROUND = 100  # steps shown on either side: 2,850 to 3,050 in the paper
SCALED = {"loss": "training loss", "loss_scale": "loss scale"}  # column: in print


def with_scaler(heads: pd.DataFrame) -> pd.DataFrame:
    """The rows of `Runs.runs` with a loss scaler."""
    return heads[heads["scaler.name"] != "none"]


def around_highest(runs: Runs) -> pd.DataFrame:
    """One row per step around the highest loss spike, at step `spike`, of each run.

    Runs without a loss spike are left out; unrecorded values are NaN.
    """
    heads = measures.named_heads(runs, ("scaler.name",)).sort_values("scaler", kind="stable")
    columns = (*measures.OF_A_RUN, "spike", "step", *SCALED, "skipped_tensors")
    return measures.by_run(runs, heads, columns, _around_highest)


def _around_highest(run: Runs, head: dict) -> pd.DataFrame:
    series = spike_marks.read_series(run, spike_marks.TENSOR)
    spikes = spike_marks.spike_table(series, spike_marks.protocol_of_run(head))
    if spikes.empty:
        return pd.DataFrame()
    spike = int(spikes.loc[spikes["height"].idxmax(), "step"])
    metrics = run.metrics.set_index("step").reindex(columns=[*SCALED, "skipped_tensors"])
    steps = range(max(1, spike - AROUND), min(spike + AROUND, metrics.index.max()) + 1)
    around = metrics.astype(float).reindex(pd.Index(steps, name="step"))
    return around.assign(spike=spike).reset_index()


def plot_around(frame: pd.DataFrame, ax: Axes, column: str) -> None:
    """A line for each run of a scaler."""
    for _, run in frame.groupby("run", sort=False):
        head, at = run.iloc[0], run["step"] - run["spike"]
        color = style.color(head["precision"], head["optimizer"])
        finite = np.isfinite(run[column].astype(float))
        ax.plot(at[finite], run.loc[finite, column], color=color, lw=0.9)
    ax.axvline(0, color=spike_marks.OTHER, lw=0.7, ls=":")
    ax.set(xlim=(-AROUND, AROUND), xlabel="steps from detection of the highest loss spike")
    ax.set_ylabel(SCALED[column])


def plot_loss_around(frame: pd.DataFrame, ax: Axes) -> None:
    """The loss of each run of a scaler; ticks at the top mark steps that skip a tensor."""
    plot_around(frame, ax, "loss")
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.25 * (high - low))
    for i, (_, run) in enumerate(frame.groupby("run", sort=False)):
        skips = (run["step"] - run["spike"])[run["skipped_tensors"].fillna(0) > 0]
        ax.plot(skips, [0.97 - 0.05 * i] * len(skips), "|", color=spike_marks.FOLLOWING, ms=4,
                mew=0.7, transform=ax.get_xaxis_transform(),
                label=None if i else "the step or a tensor is skipped (a row per run)")  # fmt: skip
    panels.draw_chance(ax, frame["batch_size"])


def plot_scale_around(frame: pd.DataFrame, ax: Axes) -> None:
    """The loss scale of each run of a scaler."""
    plot_around(frame, ax, "loss_scale")
    ax.set_yscale("log", base=2)


FIGURES = {
    "spike_heights": Panels(
        studies=("stability",),
        table=heights,
        plots=(plot_heights, plot_recall),
        size=(1, 3.0),
        what="loss spikes and retrieval",
        text="Left: height of each loss spike, its largest loss minus the median loss of the "
        f"window before it; bars: medians; triangles: lower than {FLOOR:g}. Right: mean R@1 of "
        "both directions at the last step; the points are seeds, the lines (with gaps where an "
        "optimizer was not run) or bars are their means, and the vertical lines go from the "
        f"smallest to the largest. Open points: {AFTER_RESET}.",
    ),
    "loss_scaler": Panels(
        studies=("loss_scaler",),
        where=with_scaler,
        table=around_highest,
        plots=(plot_loss_around, plot_scale_around),
        facet=by("scaler", "{} loss scale".format),
        size=(0.9, 1.8),
        what=f"{AROUND} steps on either side of the highest loss spike",
        text="A line for each run. After the appendix of arXiv:2304.13013. Orange ticks: steps in "
        "which the gradient of some tensor was not finite, so that the step (dynamic scaler) or "
        "the tensor (fixed) was skipped.",
    ),
}
