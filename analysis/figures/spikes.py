"""Figures of loss spikes: how high they are and what they cost, and the loss scale around them."""

from dataclasses import asdict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import measures, naming, panels, spike_marks, style
from analysis.evidence import Sample
from analysis.figures.scores import values_of
from analysis.grammar import Axis, Panels, by
from analysis.load import Runs
from analysis.points import Points, Rows

LEAST = 0.08  # nats: where the axis of heights begins
RESETS = {"stable_spam": 1000}  # steps between resets of the moments, the library's default


def heights(runs: Runs) -> pd.DataFrame:
    """The heights for the left panel and the recall for the right one, as plotted.

    Part `spikes` has one row per loss spike after the ignored steps, with its `height`: the largest
    loss up to `within` steps after it minus the median loss of the window before it. Part `runs`
    has one row per run, with its last step and `recall`, the mean R@1 of both directions in %, or
    NaN. `after_reset`: whether the optimizer reset its moments at the run's last step or the one
    before. With one beta2, the optimizer with the highest mean recall is first.
    """
    heads = measures.named_heads(runs, ("optimizer.beta2",))
    heads = measures.with_scores(runs, heads)
    if heads["beta2"].nunique() == 1:
        means = heads.groupby("optimizer")["recall"].transform("mean")
        heads = heads.loc[means.sort_values(ascending=False, kind="stable").index]

    def parts(run: Runs, head: dict) -> pd.DataFrame:
        spikes = spike_marks.spikes_of_run(run, head)[["step", "height"]]
        end = pd.DataFrame({"step": [head["reached"]], "recall": [head["recall"]]})
        gap = RESETS.get(head["optimizer"], np.inf)
        end["after_reset"] = head["reached"] >= gap and head["reached"] % gap <= 1
        spikes["after_reset"] = False
        table = pd.concat([spikes.assign(part="spikes"), end.assign(part="runs")])
        return table.assign(**asdict(spike_marks.protocol_of_run(head)))

    columns = ("part", *measures.OF_A_RUN, "step", "height", "recall", "after_reset")
    frame = measures.by_run(runs, heads, (*columns, *spike_marks.THRESHOLDS), parts)
    return frame.astype({"height": float, "recall": float, "after_reset": bool})


def compare_optimizers(frame: pd.DataFrame) -> str:
    """The title of `spike_heights`, at the largest beta2 that AdamW and others share."""
    num = frame.groupby("beta2")["optimizer"].nunique()
    own = frame[frame["beta2"] == num[num > 1].index.max()]
    recall = own.groupby("optimizer")["recall"].mean()
    heights = own.groupby("optimizer")["height"].median().fillna(0)
    if "adamw" not in recall:
        return ""
    others = recall.drop("adamw")
    best = others.idxmax()
    if len(num) == 1 and others[best] > recall["adamw"]:
        name = naming.optimizer_name(best)
        return f"{name} ends highest: {recall[best]:.0f}% mean R@1, AdamW {recall['adamw']:.0f}%"
    is_worst = heights["adamw"] > heights.drop("adamw").max() and recall["adamw"] < others.min()
    if len(num) == 1 or not is_worst:
        return ""
    return (
        f"At beta2 {own['beta2'].iloc[0]:g}, AdamW has the highest loss spikes and the lowest R@1: "
        f"{recall['adamw']:.0f}%, {naming.optimizer_name(best)} {recall[best]:.0f}%"
    )


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


def with_kq_norm(frame: pd.DataFrame) -> str:
    """The title of `kq_norm`: at which beta2 it changes the highest spike, by pairs of seeds."""
    pairs = frame.pivot_table("highest", ["beta2", "seed"], "intervention").dropna()
    if not {"none", "kq_norm"} <= {*pairs} or not frame["highest"].any():
        return ""
    by_beta2 = (pairs["kq_norm"] - pairs["none"]).groupby(level="beta2")
    samples = {beta2: Sample.of(change) for beta2, change in by_beta2}
    parts = {"lower": [at for at, sample in samples.items() if sample.high < 0],
             "higher": [at for at, sample in samples.items() if sample.low > 0]}  # fmt: skip
    texts = [f"{word} at {naming.join(at)}" for word, at in parts.items() if at]
    if not texts:
        return "KQ layer norm is not shown to change the highest loss spike"
    where = ", ".join(texts).replace(" at ", " at beta2 ", 1)
    return f"With KQ layer norm, the highest loss spike is {where}"


AROUND = 100  # steps shown on either side: 2,850 to 3,050 in the paper
RECORDED = ["loss", "loss_scale", "skipped_tensors"]
SKIPS = {"dynamic": "skipped steps", "fixed": "steps that skip tensors"}


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
    """The loss of each run of a scaler in a tone of its own, and ticks where it skips."""
    head, counts, above = frame.iloc[0], [], ax.get_xaxis_transform()
    tones = style.tones(style.color(head["precision"]), frame["run"].nunique())
    for i, (_, run) in enumerate(frame.groupby("run", sort=False)):
        color, at = tones[i], run["step"] - run["spike"]
        finite = np.isfinite(run["loss"].astype(float))
        ax.plot(at[finite], run.loc[finite, "loss"], color=color, lw=0.9)
        skips = at[run["skipped_tensors"].fillna(0) > 0]
        ax.plot(skips, [0.91 - 0.05 * i] * len(skips), "|", ms=4, mew=0.7, color=color,
                transform=above)  # fmt: skip
        counts.append(len(skips))
    ax.set_ylim(0, 1.3 * ax.get_ylim()[1])
    text = f"{SKIPS.get(head['scaler'], 'skips')}, by run: {naming.join(counts)}"
    ax.text(3 - AROUND, 0.95, text, fontsize=7, transform=above)
    ax.axvline(0, ymax=0.78, color=style.OTHER, lw=0.7, ls=":")
    ax.set(xlim=(-AROUND, AROUND), xlabel="steps from detection of the highest loss spike")
    scales = frame["loss_scale"].dropna()
    first, *ends = (
        f"$2^{{{np.log2(scale):g}}}$"
        for scale in (head["scaler.init_scale"], scales.min(), scales.max())
    )
    here = f" at the start, {' to '.join(dict.fromkeys(ends))} here" if {*ends} != {first} else ""
    ax.set(ylabel="training loss (nats)", title=f"{head['scaler']} loss scale: {first}{here}")
    panels.draw_chance(ax, frame["batch_size"])


def compare_scalers(frame: pd.DataFrame) -> str:
    """The title of `loss_scaler`: how high the loss rises with each scaler."""
    peaks = frame.groupby(["scaler", "run"])["loss"].max().groupby(level=0).mean().sort_values()
    parts = [f"{value:.1f} nats with a {name} scale" for name, value in peaks.items()]
    return f"On average, the loss peaks at {', at '.join(parts)}"


FIGURES = {
    "spike_heights": Points(
        studies=("stability",),
        where=spike_marks.at_main_rate,
        table=heights,
        x=Axis(column="beta2", label="beta2", names=values_of("beta2")),
        values=(
            Axis(
                column="height",
                label="spike heights with medians (nats)",
                log=True,
                least=LEAST,
                where=lambda frame: frame[frame["part"] == "spikes"],
                median=True,
            ),
            Axis(
                column="recall",
                label="R@1 of runs with means (%)",
                where=lambda frame: frame[frame["part"] == "runs"],
            ),
        ),
        hue="optimizer",
        order=tuple(naming.OPTIMIZERS),
        look=lambda head: (style.color("bf16", head["optimizer"]), "-"),
        name=lambda head: naming.optimizer_name(head["optimizer"]),
        hollow=(lambda frame: frame["after_reset"], "right after a reset"),
        title=compare_optimizers,
        shows=measures.comparing("beta2", "optimizer", value="recall"),
        what="height of loss spikes and mean R@1",
        text="Left: height of each loss spike, its largest loss minus the median loss of the "
        f"window before it; bars: medians; a triangle: less than {LEAST:g}. Right: mean R@1 of "
        "both directions at the last step. Open points: evaluated right after a reset of the "
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
        title=with_kq_norm,
        shows=measures.comparing("intervention", "beta2"),
        text="0 without a spike.",
    ),
    "loss_scaler": Panels(
        studies=("loss_scaler",),
        where=lambda heads: heads[heads["scaler.name"] != "none"],
        table=around_highest,
        plots=(plot_around,),
        title=compare_scalers,
        shows=measures.comparing("scaler"),
        facet=by("scaler", lambda _: ""),  # the title names it
        what=f"{AROUND} steps on either side of the highest loss spike",
        text="A line and a row of ticks in one tone for each run. Ticks: steps in which the "
        "gradient of some tensor was not finite, so that the step (dynamic scaler) or the tensor "
        "(fixed) was skipped. After the appendix of arXiv:2304.13013.",
    ),
}
