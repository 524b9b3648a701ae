"""What happens around one spike under fp16: loss, loss scale, features, RMS_t, gradients.

After the appendix of arXiv:2304.13013. Runs: `experiment=loss_scaler`.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from analysis import measures, naming, panels, paper, spike_marks, style
from analysis.load import Runs

WIDTH = 2.7  # inches of a column
AROUND = 100  # steps shown on either side: 2,850 to 3,050 in the paper
DEPTH = 20 / 23  # of the block whose features are shown: block 20 of the paper's 24
FIRST_BLOCK = paper.BLOCK.format(0)
PANELS = {  # column: in print
    "loss": "training loss",
    "loss_scale": "loss scale",
    "feature_mean": "$\\mathrm{E}[|x_k|]$,\na block",
    "rms": "$\\mathrm{RMS}_t$,\nconv1",
    "grad_class_embedding": "max gradient,\nclass_embedding",
    "grad_in_proj": "max gradient,\nblock 0, in_proj",
}
LOGARITHMIC = {"loss_scale": 2, "grad_class_embedding": 10, "grad_in_proj": 10}  # column: base
COLUMNS = (*measures.OF_A_RUN, "block", "spike", "step", *PANELS, "skipped_tensors")


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """The rows of `Runs.runs` that the figure is about: runs with a loss scaler."""
    return heads[heads["scaler.name"] != "none"]


def query(runs: Runs) -> pd.DataFrame:
    """One row per step around the highest loss spike, at step `spike`, of each run with a scaler.

    Runs without a loss spike are left out; unrecorded values are NaN.
    """
    heads = measures.named_heads(runs, ("scaler.name",))
    scaled = heads[heads["scaler"] != "none"].sort_values("scaler", kind="stable")
    return measures.by_run(runs, scaled, COLUMNS, _around_highest_spike)


def plot(frame: pd.DataFrame, ax: Axes, column: str = "loss") -> Axes:
    """One panel: a column of one run; dotted at the spike, ticks at skipped steps."""
    head = frame.iloc[0]
    color = style.color(head["precision"], head["optimizer"])
    finite = frame[np.isfinite(frame[column].astype(float))]
    marker = "o" if len(finite) < AROUND else ""
    ax.plot(finite["step"], finite[column], color=color, lw=0.9, marker=marker, ms=2)
    ax.axvline(head["spike"], color=spike_marks.OTHER, lw=0.7, ls=":")
    skipped = frame.loc[frame["skipped_tensors"].fillna(0) > 0, "step"]
    ax.plot(skipped, [0.06] * len(skipped), "|", color=spike_marks.FOLLOWING, ms=6, mew=0.8,
            transform=ax.get_xaxis_transform())  # fmt: skip
    ends = head["spike"] - AROUND, head["spike"] + AROUND
    ax.set_xlim(max(0, ends[0]), min(head["num_steps"], ends[1]))
    if column in LOGARITHMIC and len(finite):
        ax.set_yscale("log", base=LOGARITHMIC[column])
        ax.yaxis.set_minor_formatter(NullFormatter())
    if column == "loss":
        panels.draw_chance(ax, frame["batch_size"])
    ax.set_ylabel(PANELS[column].replace("a block", f"block {head['block']}"))
    ax.locator_params(axis="x", nbins=5)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a column for each run and a row for each recorded quantity."""
    runs = [run for _, run in frame.groupby("run", sort=False)]
    recorded = [column for column in PANELS if frame[column].notna().any()]
    figure.set_size_inches(WIDTH * len(runs), 1.25 * len(recorded) + 0.6)
    axes = figure.subplots(len(recorded), len(runs), squeeze=False, sharex="col")
    for i, run in enumerate(runs):
        head = run.iloc[0]
        model = naming.model(head["model"])
        seed = f", seed {head['seed']}" if len(runs) > frame["scaler"].nunique() else ""
        title = f"{model}, {head['scaler']} scaler{seed}\n"
        title += f"{head['label']}, beta2 = {head['beta2']:g}"
        axes[0, i].set_title(title.replace(" (", "\n("))
        for column, ax in zip(recorded, axes[:, i], strict=True):
            plot(run, ax, column)
        axes[-1, i].set_xlabel("step")


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and the steps."""
    runs = frame.drop_duplicates("run")
    text = (
        f"{AROUND} steps on either side of the highest loss spike of {measures.of_runs(frame)}. "
        "After the appendix of arXiv:2304.13013. Orange ticks: steps in which the gradient of some "
        "tensor was not finite, so that the step (dynamic scaler) or the tensor (fixed) was "
        "skipped; such values are left out of the lines."
    )
    for run in runs.itertuples():
        text += f" {naming.model(run.model)}, {run.scaler} scaler, seed {run.seed}:"
        text += f" step {run.spike:,}."
    return text + measures.caption_end(runs, crosses=False)


def _around_highest_spike(run: Runs, head: dict) -> pd.DataFrame:
    """The recorded quantities at the steps around the highest loss spike, if there is one."""
    series = spike_marks.read_series(run, spike_marks.TENSOR)
    spikes = spike_marks.spike_table(series, spike_marks.protocol_of_run(head))
    if spikes.empty:
        return pd.DataFrame()
    spike = int(spikes.loc[spikes["height"].idxmax(), "step"])
    metrics = run.metrics.set_index("step")
    block = round(DEPTH * (head["vision_layers"] - 1)) if head["vision_layers"] else 0
    metrics = metrics.reindex(columns=["loss", "loss_scale", "skipped_tensors"]).astype(float)
    steps = range(max(1, spike - AROUND), min(spike + AROUND, metrics.index.max()) + 1)
    around = metrics.reindex(pd.Index(steps, name="step"))
    for column, tensor, statistic in (
        ("feature_mean", paper.BLOCK.format(block), "feature_mean"),
        ("rms", spike_marks.TENSOR, "rms"),
        ("grad_class_embedding", "visual.class_embedding", "grad_abs_max"),
        ("grad_in_proj", f"{FIRST_BLOCK}.attn.in_proj_weight", "grad_abs_max"),
    ):
        around[column] = run.series(tensor, statistic)
    return around.assign(block=block, spike=spike).reset_index()
