"""Figures of loss spikes: how high they are and what they cost, and the loss scale around them."""

from dataclasses import asdict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import marks, measures, naming, panels, spike_marks, style
from analysis.grammar import Axis, Panels, by
from analysis.load import Runs
from analysis.points import Rows

FLOOR = 0.08  # nats: lower spikes are marked there
WIDTH = 0.8  # of the slot that the optimizers share at each beta2 on the axis
RESETS = {"stable_spam": 1000}  # steps between resets of the moments, the library's default


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
        spikes = spike_marks.spikes_of_run(run, head)[["step", "height"]]
        end = pd.DataFrame({"step": [head["reached"]], "recall": [head["recall"]]})
        table = pd.concat([spikes.assign(part="spikes"), end.assign(part="runs")])
        gap = RESETS.get(head["optimizer"], np.inf)
        after_reset = head["reached"] >= gap and head["reached"] % gap <= 1
        protocol = asdict(spike_marks.protocol_of_run(head))
        return table.assign(after_reset=after_reset, **protocol)

    columns = ("part", *measures.OF_A_RUN, "step", "height", "recall", "after_reset")
    frame = measures.by_run(runs, heads, (*columns, *spike_marks.THRESHOLDS), parts)
    return frame.astype({"height": float, "recall": float, "after_reset": bool})


def plot_heights(frame: pd.DataFrame, ax: Axes) -> None:
    """The left panel: a point for each loss spike and a bar at the median of each group."""
    spikes = frame[frame["part"] == "spikes"].sort_values("step")
    label, title = "height of a loss spike (nats)", "points: loss spikes; bars: medians"
    if _has_rows(frame):
        _draw_rows(frame, ax, spikes, "height", pd.Series.median)
        low = (
            spikes.loc[spikes["height"] < FLOOR, "optimizer"].map(_rows(frame).index).astype(float)
        )
        ax.plot([FLOOR] * len(low), low + marks.UNDER, "<", color=style.OTHER, ms=4)
        ax.set(xscale="log", xlabel=label, title=title)
        ax.set_xlim(left=0.9 * FLOOR)
        ax.xaxis.set_major_formatter("{x:g}")
        return
    places, slots = _places(frame), _slots(frame)
    for i, optimizer in enumerate(slots):
        ax.text(0.03, 0.97 - 0.06 * i, naming.optimizer_name(optimizer), va="top", fontsize=7,
                color=style.color("bf16", optimizer), transform=ax.transAxes)  # fmt: skip
    for (optimizer, beta2), part in frame.groupby(["optimizer", "beta2"]):
        group = spikes[spikes["run"].isin(part["run"])]
        heights, color = group["height"], style.color("bf16", optimizer)
        at, width = places[beta2] + slots[optimizer], WIDTH / len(slots)
        if group.empty:
            ax.text(at, FLOOR, "none", color=color, fontsize=6.5, ha="center")
            continue
        spread = np.linspace(-0.3, 0.3, len(group)) if len(group) > 1 else np.zeros(1)
        spread, is_low = at + spread * width, heights < FLOOR
        ax.plot(spread[~is_low], heights[~is_low], "o", color=color, ms=2.5, alpha=0.5, mew=0)
        ax.plot(spread[is_low], [FLOOR] * is_low.sum(), "v", color=color, ms=4)
        ax.plot(at, heights.median(), "_", color=color, ms=10, mew=2)
    ax.set(yscale="log", ylabel=label, title=title)
    ax.set_ylim(bottom=0.9 * FLOOR)
    ax.yaxis.set_major_formatter("{x:g}")
    _name_beta2(ax, places)


def plot_recall(frame: pd.DataFrame, ax: Axes) -> None:
    """The right panel: a point for each run and a line through each optimizer's means.

    A vertical line goes from the smallest to the largest run of a setting. With one beta2, there is
    a row for each optimizer. Points are open where the run ends right after a reset of the moments.
    """
    ends = frame[frame["part"] == "runs"].sort_values("beta2")
    label = "mean R@1 at the end (%)"
    if _has_rows(frame):
        _draw_rows(frame, ax, ends, "recall", pd.Series.mean)
        ax.set(xlabel=label, title="points: runs; bars: means")
        return
    places, slots = _places(frame), _slots(frame)
    for optimizer, group in ends.groupby("optimizer", sort=False):
        at, color = group["beta2"].map(places) + slots[optimizer], style.color("bf16", optimizer)
        marks.draw_runs(
            ax, at, group["recall"], color=color, hollow=group["after_reset"],
            label=naming.optimizer_name(optimizer),
            every=[place + slots[optimizer] for place in places.values()],
        )  # fmt: skip
        spread = group["recall"].groupby(at).agg(["min", "max"]).dropna()
        ax.vlines(spread.index, spread["min"], spread["max"], color=color, lw=0.8)
    ax.set(ylabel=label, title="pale points: runs; dark points: means")
    _name_beta2(ax, places)


def _has_rows(frame: pd.DataFrame) -> bool:
    """Whether there is a row for each optimizer, not a line by beta2."""
    return frame["beta2"].nunique() == 1


def _rows(frame: pd.DataFrame) -> list[str]:
    """The optimizers, that with the highest mean R@1 first."""
    means = frame.groupby("optimizer", sort=False)["recall"].mean()
    return [*means.sort_values(ascending=False, kind="stable").index]


def _draw_rows(frame: pd.DataFrame, ax: Axes, values: pd.DataFrame, column: str, middle) -> None:
    """A row for each optimizer, AdamW's black."""
    rows, log = _rows(frame), column == "height"
    spread = marks.spread(values["optimizer"], values[column], log)
    for row, optimizer in enumerate(rows):
        part = values[values["optimizer"] == optimizer]
        own, hollow = part[column], part["after_reset"] & (column == "recall")
        color = "black" if optimizer == "adamw" else style.RMS
        marks.draw_row(ax, row, own, middle(own), color, spread=spread[own.index], hollow=hollow)
        if own.empty:
            ax.annotate("none", (0.02, row), xycoords=ax.get_yaxis_transform(), color=style.OTHER,
                        fontsize=6.5, va="center")  # fmt: skip
    marks.name_rows(ax, [naming.optimizer_name(name) for name in rows])


def _places(frame: pd.DataFrame) -> dict[float, int]:
    return {beta2: i for i, beta2 in enumerate(sorted(set(frame["beta2"])))}


def _slots(frame: pd.DataFrame) -> dict[str, float]:
    """By optimizer: its place beside a value of beta2 on the axis."""
    names = sorted(set(frame["optimizer"]), key=lambda name: naming.rank(name, style.OPTIMIZERS))
    return {n: (i - (len(names) - 1) / 2) * WIDTH / len(names) for i, n in enumerate(names)}


def _name_beta2(ax: Axes, places: dict[float, int]) -> None:
    ax.set(xlabel="beta2", xlim=(-0.5, len(places) - 0.5))
    ax.set_xticks(list(places.values()), [f"{beta2:g}" for beta2 in places])


def highest(runs: Runs) -> pd.DataFrame:
    """The height of the highest loss spike of each run, 0 without one."""
    heads = measures.named_heads(runs, ("intervention.name", "optimizer.beta2"))
    heads = heads.sort_values("beta2", kind="stable")

    def of_run(run: Runs, head: dict) -> pd.DataFrame:
        protocol = spike_marks.protocol_of_run(head)
        heights = spike_marks.spikes_of_run(run, head)["height"]
        return pd.DataFrame([{"highest": max(heights, default=0.0), **asdict(protocol)}])

    columns = (*measures.OF_A_RUN, "highest", *spike_marks.THRESHOLDS)
    return measures.by_run(runs, heads, columns, of_run)


AROUND = 100  # steps shown on either side: 2,850 to 3,050 in the paper
RECORDED = ["loss", "loss_scale", "skipped_tensors"]
SKIPS = {"dynamic": "skipped steps", "fixed": "steps that skip tensors"}


def with_scaler(heads: pd.DataFrame) -> pd.DataFrame:
    """The rows of `Runs.runs` with a loss scaler."""
    return heads[heads["scaler.name"] != "none"]


def around_highest(runs: Runs) -> pd.DataFrame:
    """One row per step around the highest loss spike, at step `spike`, of each run.

    Runs without a loss spike are left out; unrecorded values are NaN.
    """
    heads = measures.named_heads(runs, ("scaler.name",)).sort_values("scaler", kind="stable")
    columns = (*measures.OF_A_RUN, "scaler.init_scale", "spike", "step", *RECORDED)
    return measures.by_run(runs, heads, columns, _around_highest)


def _around_highest(run: Runs, head: dict) -> pd.DataFrame:
    spikes = spike_marks.spikes_of_run(run, head)
    if spikes.empty:
        return pd.DataFrame()
    spike = int(spikes.loc[spikes["height"].idxmax(), "step"])
    metrics = run.metrics.set_index("step").reindex(columns=RECORDED)
    steps = range(max(1, spike - AROUND), min(spike + AROUND, metrics.index.max()) + 1)
    around = metrics.astype(float).reindex(pd.Index(steps, name="step"))
    return around.assign(spike=spike).reset_index()


def plot_around(frame: pd.DataFrame, ax: Axes) -> None:
    """The loss of each run of a scaler in a shade of its own, and ticks where it skips."""
    head, counts, above = frame.iloc[0], [], ax.get_xaxis_transform()
    for i, (_, run) in enumerate(frame.groupby("run", sort=False)):
        color, at = style.paler(style.color(head["precision"], ""), i), run["step"] - run["spike"]
        finite = np.isfinite(run["loss"].astype(float))
        ax.plot(at[finite], run.loc[finite, "loss"], color=color, lw=0.9)
        skips = at[run["skipped_tensors"].fillna(0) > 0]
        ax.plot(skips, [0.91 - 0.05 * i] * len(skips), "|", ms=4, mew=0.7, color=color,
                transform=above)  # fmt: skip
        counts.append(len(skips))
    ax.set_ylim(0, 1.3 * ax.get_ylim()[1])
    text = f"{SKIPS.get(head['scaler'], 'skips')}, by run: {naming.join(counts)}"
    ax.text(3 - AROUND, 0.95, text, fontsize=7, transform=above)
    ax.axvline(0, ymax=0.78, color=spike_marks.OTHER, lw=0.7, ls=":")
    ax.set(xlim=(-AROUND, AROUND), xlabel="steps from detection of the highest loss spike")
    scales = frame["loss_scale"].dropna()
    first, *ends = (
        f"$2^{{{np.log2(scale):g}}}$"
        for scale in (head["scaler.init_scale"], scales.min(), scales.max())
    )
    here = f" at the start, {' to '.join(dict.fromkeys(ends))} here" if {*ends} != {first} else ""
    ax.set(ylabel="training loss (nats)", title=f"{head['scaler']} loss scale: {first}{here}")
    panels.draw_chance(ax, frame["batch_size"])


FIGURES = {
    "spike_heights": Panels(
        studies=("stability",),
        table=heights,
        plots=(plot_heights, plot_recall),
        size=(1, 3.0),
        what="loss spikes and retrieval",
        text="Left: height of each loss spike, its largest loss minus the median loss of the "
        f"window before it; bars: medians; triangles: lower than {FLOOR:g}. Right: mean R@1 of "
        "both directions at the last step; the points are seeds, the lines (dotted across a beta2 "
        "at which an optimizer was not run) or bars are their means, and the vertical lines go "
        "from the smallest to the largest. Open points: evaluated right after a reset of the "
        "optimizer's moments.",
    ),
    "kq_norm": Rows(
        studies=("kq_norm", "stability"),
        same_but=("intervention.name", "gpu"),
        table=highest,
        values=(Axis(column="highest", label="highest loss spike of a run (nats)"),),
        blocks=by("beta2", lambda beta2: f"beta2 {beta2:g}"),
        size=1.4,
        hue="intervention",
        order=tuple(naming.INTERVENTIONS),
        look=lambda head: (naming.INTERVENTIONS[head["intervention"]][1], "-"),
        name=lambda head: naming.INTERVENTIONS[head["intervention"]][0],
        text="0 without a spike.",
    ),
    "loss_scaler": Panels(
        studies=("loss_scaler",),
        where=with_scaler,
        table=around_highest,
        plots=(plot_around,),
        facet=by("scaler", lambda _: ""),  # the title names it
        what=f"{AROUND} steps on either side of the highest loss spike",
        text="A line and a row of ticks in one shade for each run. Ticks: steps in which the "
        "gradient of some tensor was not finite, so that the step (dynamic scaler) or the tensor "
        "(fixed) was skipped. After the appendix of arXiv:2304.13013.",
    ),
}
