"""Loss curves by model size, a line a method. Figure 2, arXiv:2304.13013.

Runs: `experiment=loss_curves` (paper scale), `experiment=loss_curves_demo`.
"""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import ScaledTranslation

from analysis import naming, style
from analysis.load import Runs

MIN_STEPS_FOR_INSET = 1000
CAP_AFTER = 0.1  # the loss axis ends at the largest smoothed loss after this share of the run
INSET_PLACES = ((0.5, 0.48), (0.66, 0.32), (0.36, 0.44), (0.2, 0.4))  # left, width: best first
LEGEND_DROP = 0.38  # inches below the axes, under the label of the steps
LABEL_LENGTH = 42  # characters of a legend line at column width
INSET_SHARE = 0.1  # of the run, at its end: 2,000 of the paper's 20,000 steps
COLUMNS = (
    *("run", "scale", "data", "data_digest", "batch_size", "num_steps"),
    *("model", "precision", "optimizer"),
    *("seed", "state", "method", "label", "variant", "step", "loss", "loss_smoothed"),
)
OF_A_STEP = ("step", "loss", "loss_smoothed")
RENAMED = {
    "data.name": "data",
    "data.digest": "data_digest",
    "model.name": "model",
    "precision.label": "precision",
    "optimizer.name": "optimizer",
}


def query(runs: Runs) -> pd.DataFrame:
    """A row a step of every run that has steps, up to its last: exactly what is plotted.

    `method` names the line, `label` adds how the run ended and what it lacks, `variant` counts the
    settings of one method. A step whose row is missing has no loss, so that the line has a gap. A
    run whose config is damaged has no name and is left out.
    """
    steps = runs.metrics.groupby("run")["step"]
    facts = pd.DataFrame({"reached": steps.max(), "recorded": steps.nunique()})
    heads = runs.runs[runs.runs["scale"].notna()].join(facts, on="run", how="inner")
    if heads.empty:
        return pd.DataFrame(columns=list(COLUMNS))
    whole = ["batch_size", "num_steps", "seed", "reached", "recorded"]
    heads = naming.name_methods(heads.astype(dict.fromkeys(whole, int)))
    heads["label"] = [naming.label(head) for head in heads.to_dict("records")]
    heads = heads.rename(columns=RENAMED)[[name for name in COLUMNS if name not in OF_A_STEP]]
    frames = []
    for run, part in runs.metrics.groupby("run"):
        loss = part.set_index("step")["loss"].astype(float)
        loss = loss.reindex(pd.RangeIndex(1, loss.index.max() + 1, name="step"))
        frames.append(loss.reset_index().assign(run=run))
    frame = (
        pd.concat(frames, ignore_index=True)
        .merge(heads, on="run", how="inner")
        .sort_values(
            ["model", "precision", "optimizer", "variant", "seed", "run", "step"], key=_order
        )
    )
    frame["loss_smoothed"] = np.nan
    for _, part in frame.groupby("run"):
        width = style.smoothing_width(part["num_steps"].iloc[0])
        frame.loc[part.index, "loss_smoothed"] = style.smooth(part["loss"], width)
    return frame[list(COLUMNS)].reset_index(drop=True)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel: the runs of one model. Raw loss faint, smoothed loss over it, legend below."""
    top = _cap(frame)
    finite = frame.loc[np.isfinite(frame["loss"]), "loss"]
    bottom = finite.min() if len(finite) else 0.0
    handles = {}
    for _, run in frame.groupby("run", sort=False):
        line, label = _draw_run(run, ax, top)
        handles.setdefault(label, line)
    num_steps = frame["num_steps"].max()
    ax.set(xlim=(0, num_steps), ylim=(bottom - 0.03 * (top - bottom), top), ylabel="training loss")
    ax.set_xlabel("step")
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.locator_params(axis="x", nbins=5)
    ax.locator_params(axis="y", nbins=6)
    model = frame["model"].iloc[0]
    ax.set_title(f"{style.MODELS.get(model, model)} ({frame['scale'].iloc[0]} scale)")
    below = ScaledTranslation(0, -LEGEND_DROP, ax.figure.dpi_scale_trans)
    ax.legend(
        handles.values(),
        [label if len(label) <= LABEL_LENGTH else label.replace(" (", "\n(") for label in handles],
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + below,
        handlelength=2.6,
        borderaxespad=0,
    )
    if num_steps >= MIN_STEPS_FOR_INSET:
        _draw_inset(frame, ax)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """The whole figure: one panel per model size, two a row."""
    models = sorted(frame["model"].unique(), key=lambda name: style.rank(name, style.MODELS))
    columns = min(2, len(models))
    rows = math.ceil(len(models) / columns)
    lines = frame.groupby("model")["label"].nunique().max()
    figure.set_size_inches(style.COLUMN_WIDTH * columns, (2.5 + 0.17 * lines) * rows)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for model, ax in zip(models, axes, strict=False):
        plot(frame[frame["model"] == model], ax)
    for ax in list(axes)[len(models) :]:
        ax.remove()


def caption(frame: pd.DataFrame) -> str:
    """What is shown: scale, data, runs, how it was smoothed and cut, which runs are incomplete."""
    runs = frame.drop_duplicates("run")
    widths = sorted({style.smoothing_width(n) for n in runs["num_steps"]})
    models = [style.MODELS.get(name, name) for name in frame["model"].unique()]
    text = (
        f"Training loss of {_join(models)} on {_join(runs['data'].unique())}: {len(runs)} "
        f"run{'s' if len(runs) > 1 else ''} at {_join(runs['scale'].unique())} scale "
        f"({_join(sorted(runs['num_steps'].unique()))} steps, batch "
        f"{_join(sorted(runs['batch_size'].unique()))}). After figure 2, arXiv:2304.13013. "
        f"Lines: centered box average over {_join(widths)} steps, edges cut"
    )
    if widths != [style.SMOOTHING]:
        text += f" (the paper's {style.SMOOTHING} steps, at most a tenth of a run)"
    text += (
        "; faint: every step. The loss axis ends at the largest smoothed loss, of runs that did "
        "not diverge, after the first tenth of training."
    )
    if runs["num_steps"].max() >= MIN_STEPS_FOR_INSET:
        text += " Inset: the last tenth of the steps."
    for state, word in (("diverged", "Diverged (cross)"), ("incomplete", "Incomplete")):
        named = runs[runs["label"].str.contains(f"({state}", regex=False)]
        if len(named):
            shown = [f"{style.MODELS.get(m, m)} {label}" for m, label in _pairs(named)]
            text += f" {word}: {'; '.join(shown)}."
    data = sorted(set(runs["data_digest"]) - {""})
    if len(data) > 1:
        text += f" The runs saw {len(data)} different sets of data: {_join(data)}."
    return text


def _draw_run(run: pd.DataFrame, ax: Axes, top: float) -> tuple[Line2D, str]:
    """Draws one run; returns its legend entry."""
    head = run.iloc[0]
    color = style.color(head["precision"], head["optimizer"], head["variant"])
    dashes = style.line_style(head["optimizer"])
    ax.plot(run["step"], run["loss"], color=color, alpha=0.18, lw=0.5, zorder=1.5, rasterized=True)
    ax.plot(run["step"], run["loss_smoothed"], color=color, linestyle=dashes, zorder=2.5)
    end = {}
    if head["state"] == "diverged":
        finite = run[np.isfinite(run["loss"])]
        step, loss = finite.iloc[-1][["step", "loss"]] if len(finite) else (head["step"], top)
        end = {"marker": "X", "markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.6}
        ax.plot([step], [min(loss, top)], color=color, zorder=4, clip_on=False, **end)
    return Line2D([], [], color=color, linestyle=dashes, **end), head["label"]


def _draw_inset(frame: pd.DataFrame, ax: Axes) -> None:
    """The last tenth of the steps, smoothed, where a run reached it."""
    num_steps = frame["num_steps"].max()
    start = round(num_steps * (1 - INSET_SHARE))
    late = frame[(frame["step"] >= start) & frame["loss_smoothed"].notna()]
    if late.empty:
        return
    left, width = _free_place(frame, ax)
    inset = ax.inset_axes([left, 0.62, width, 0.36])
    for _, run in late.groupby("run", sort=False):
        head = run.iloc[0]
        color = style.color(head["precision"], head["optimizer"], head["variant"])
        dashes = style.line_style(head["optimizer"])
        inset.plot(run["step"], run["loss_smoothed"], color=color, linestyle=dashes, lw=1.0)
    inset.set(xlim=(start, num_steps), xticks=[start, num_steps])
    inset.margins(y=0.1)
    inset.xaxis.set_major_formatter(EngFormatter(sep=""))
    inset.locator_params(axis="y", nbins=3)
    inset.tick_params(labelsize=6, length=2)
    inset.spines[["top", "right"]].set_visible(True)


def _free_place(frame: pd.DataFrame, ax: Axes) -> tuple[float, float]:
    """Left end and width of an inset at the top of the panel, where it hides fewest points."""
    x, y = ax.transLimits.transform(frame[["step", "loss_smoothed"]].to_numpy(float)).T
    high = x[(y > 0.5) & (y < 1)]
    return min(INSET_PLACES, key=lambda at: ((high > at[0] - 0.1) & (high < sum(at))).sum())


def _cap(frame: pd.DataFrame) -> float:
    """Upper end of the loss axis; runs that diverged do not stretch it."""
    late = frame[frame["step"] >= CAP_AFTER * frame["num_steps"]]
    kept = late[late["state"] != "diverged"]
    choices = (kept["loss_smoothed"], late["loss_smoothed"], frame["loss_smoothed"], frame["loss"])
    for losses in choices:
        finite = losses[np.isfinite(losses)]
        if len(finite):
            return 1.05 * finite.max()
    return 1.0


def _order(column: pd.Series) -> pd.Series:
    """Sort keys of a column: the order of the style's tables, where there is one."""
    tables = {"model": style.MODELS, "precision": style.PRECISIONS, "optimizer": style.OPTIMIZERS}
    if column.name not in tables:
        return column
    names = sorted(column.unique(), key=lambda name: style.rank(name, tables[column.name]))
    return column.map({name: i for i, name in enumerate(names)})


def _pairs(runs: pd.DataFrame) -> list[tuple[str, str]]:
    return list(zip(runs["model"], runs["label"], strict=True))


def _join(items) -> str:
    """`a, b and c`."""
    words = [f"{item:,}" if isinstance(item, (int, np.integer)) else str(item) for item in items]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
