"""Loss spikes and retrieval by beta2 and optimizer: how high the spikes are, and what they cost.

Not in the paper, which counts spikes. Runs: `experiment=stability`.
"""

from dataclasses import asdict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import measures, naming, panels, spike_marks, style
from analysis.comparison import counted
from analysis.load import Runs

COLUMNS = ("part", *measures.OF_A_RUN, "step", "height", "recall", "after_reset")
COLUMNS += tuple(spike_marks.THRESHOLDS)
WIDTH = 0.8  # of the slot that the optimizers share at each beta2 on the axis
RESETS = {"stable_spam": 1000}  # steps between resets of the moments, the library's default
AFTER_RESET = "evaluated right after a reset of the optimizer's moments"


def query(runs: Runs) -> pd.DataFrame:
    """Returns the heights for the left panel and the recall for the right one, as plotted.

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

    frame = measures.by_run(runs, heads, COLUMNS, parts)
    return frame.astype({"height": float, "recall": float, "after_reset": bool})


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draws the left panel: a point for each loss spike and a bar at the median of each group."""
    spikes, places = frame[frame["part"] == "spikes"], _places(frame)
    optimizers = _slots(frame)
    for optimizer, middle in optimizers.items():
        color = style.color("bf16", optimizer)
        for beta2, group in spikes[spikes["optimizer"] == optimizer].groupby("beta2"):
            at = places[beta2] + middle
            spread = np.linspace(-0.3, 0.3, len(group)) if len(group) > 1 else np.zeros(1)
            by_step = group.sort_values("step")["height"]
            ax.plot(at + spread * WIDTH / len(optimizers), by_step, "o", color=color, ms=2.5)
            half = min(0.11, 0.45 * WIDTH / len(optimizers))
            ax.hlines(by_step.median(), at - half, at + half, color=color, lw=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set(ylabel="height of a loss spike (nats)", title="one point per loss spike")
    _name_axis(ax, frame)
    return ax


def plot_recall(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draws the right panel: a point for each run and a line through each optimizer's means.

    With one beta2, bars are the means. A vertical line goes from the smallest to the largest run of
    a setting. Points are open where the run ends right after a reset of the moments.
    """
    ends, places = frame[frame["part"] == "runs"].sort_values("beta2"), _places(frame)
    for optimizer, group in ends.groupby("optimizer", sort=False):
        color, name = style.color("bf16", optimizer), naming.optimizer_name(optimizer)
        at = group["beta2"].map(places) + _slots(frame)[optimizer]
        dashes = style.line_style(optimizer)
        means = "line" if len(places) > 1 else "bar"
        hollow = group["after_reset"]
        look = {"color": color, "label": name, "dashes": dashes, "hollow": hollow}
        panels.draw_runs(ax, at, group["recall"], means=means, **look)
        spread = group["recall"].groupby(at).agg(["min", "max"]).dropna()
        ax.vlines(spread.index, spread["min"], spread["max"], color=color, lw=0.8)
    if ends["after_reset"].any():
        ax.plot([], [], "o", color=style.OTHER, mfc="white", ms=4, label=AFTER_RESET)
    ax.set(ylabel="mean R@1 at the end (%)", title="one point per run; thin lines: min to max")
    _name_axis(ax, frame)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws both panels, and one legend below them; it leaves out what the axes name."""
    left, right = panels.grid(figure, 2, 2.8)
    plot(frame, left)
    plot_recall(frame, right)
    if frame["beta2"].nunique() == 1:
        for line in right.lines:
            line.set_label(line.get_label() if line.get_label() == AFTER_RESET else None)
        figure.set_figheight(3.3)
    panels.legend_below(figure, [right])


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and counts the spikes."""
    ends, spikes = (frame[frame["part"] == part] for part in ("runs", "spikes"))
    counts = "; ".join(
        f"{naming.optimizer_name(name)} {(spikes['optimizer'] == name).sum()} in "
        f"{counted(num, 'run')}"
        for name, num in ends.groupby("optimizer").size().items()
    )
    return (
        f"Loss spikes and retrieval of {measures.of_runs(ends)}, beta2 "
        f"{naming.join(sorted(ends['beta2'].unique()))}. {spike_marks.in_words(frame)} Left: "
        "height of each loss spike, its largest loss minus the median loss of the window before "
        "it; the bars are medians. Right: mean R@1 of both directions at the last step; the points "
        "are seeds, the lines or bars are their means, and the vertical lines go from the smallest "
        f"to the largest. {_of_resets(ends)}Loss spikes: "
        f"{counts}.{measures.caption_end(ends)}"
    )


def _of_resets(ends: pd.DataFrame) -> str:
    names = ends.loc[ends["after_reset"], "optimizer"].unique()
    if not len(names):
        return ""
    return f"Open points: {naming.join(naming.optimizer_name(n) for n in names)}, {AFTER_RESET}. "


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
