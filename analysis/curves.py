"""Loss curves: names of runs, a tidy frame of losses, panels and captions.

A figure with loss curves chooses its panels and colors and uses these functions for the rest.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import ScaledTranslation

from analysis import comparison, style
from analysis.load import NoRunsError, Runs

Look = Callable[[pd.Series], tuple]  # of a run's row: color, line style

CAP_AFTER = 0.1  # the loss axis ends at the largest loss after this share of the run
MOST = 2  # but at most at this multiple of the first loss
LEGEND_DROP = 0.38  # inches below the axes, under the label of the steps
LABEL_LENGTH = 42  # characters of a legend line at column width
ACCURACY = "zero_shot/top1"
RECALL = ("retrieval/image_to_text_r1", "retrieval/text_to_image_r1")
VALIDATION_LOSS = "retrieval/loss"
OF_A_RUN = (
    *("run", "scale", "data", "data_digest", "batch_size", "num_steps", "model", "vision_layers"),
    *("precision", "scaler", "intervention", "optimizer", "lr", "beta2", "beta2_decay"),
    *("seed", "state", "method", "label", "variant"),
)
OF_A_STEP = ("step", "loss", "loss_median")
OF_A_LINE = ("model", "label", "beta2", "value")
COLUMNS = (*OF_A_RUN, *OF_A_STEP)
RENAMED = {
    "data.name": "data",
    "data.digest": "data_digest",
    "model.name": "model",
    "precision.label": "precision",
    "optimizer.name": "optimizer",
    "optimizer.lr": "lr",
    "optimizer.beta2": "beta2",
    "optimizer.beta2_decay": "beta2_decay",
    "intervention.name": "intervention",
    "scaler.name": "scaler",
    "model.vision_layers": "vision_layers",
}


def named_heads(runs: Runs, by: tuple[str, ...] = ()) -> pd.DataFrame:
    """One row per run that has steps, with `method`, `variant` and `label`, and short column names.

    A figure shows the config keys `by` in its own way, so `method` distinguishes runs only within
    one value of each. `precision` names its change too, and `optimizer` 8-bit moments and the
    response to warnings. `label` adds how the run ended. Runs with a damaged config are left out;
    NoRunsError if no run is left.
    """
    steps = runs.metrics.groupby("run")["step"]
    facts = pd.DataFrame({"reached": steps.max(), "recorded": steps.nunique()})
    heads = runs.runs[runs.runs["scale"].notna()].join(facts, on="run", how="inner")
    if heads.empty:
        raise NoRunsError(f"{runs.root}: no run has steps and an undamaged config yet")
    whole = ["batch_size", "num_steps", "seed", "reached", "recorded"]
    heads = heads.astype(dict.fromkeys(whole, int) | {"optimizer.beta2_decay": float})
    for key, name in (("precision.label", _precision), ("optimizer.name", _optimizer)):
        heads[key] = [name(head) for head in heads.to_dict("records")]
    groups = heads.groupby(list(by), dropna=False) if by else [((), heads)]
    heads = pd.concat([name_methods(group) for _, group in groups])
    heads["label"] = [_label(head) for head in heads[LABELED].to_dict("records")]
    keys = ["model.name", "precision.label", "optimizer.name", "variant", "seed", "run"]
    return heads.sort_values(keys, key=_order).rename(columns=RENAMED)


def _precision(head: dict) -> str:
    """The label of a run's precision: `nvfp4_then_bf16@1001` if it changes at that step."""
    label, step = head["precision.label"], head["precision_change.step"]
    if pd.isna(step):
        return label
    return f"{label}_then_{comparison.precision_after(head).label}@{step:.0f}"


def _optimizer(head: dict) -> str:
    """The optimizer with its rule: `stable_adamw_8bit`, `adamw_on_warning_clip`."""
    bits, action = head["optimizer.optim_bits"], head["optimizer.on_warning.action"]
    name = head["optimizer.name"] + ("_8bit" if bits == 8 else "")
    return name if action == "none" else f"{name}_on_warning_{action}"


def name_methods(heads: pd.DataFrame) -> pd.DataFrame:
    """Adds `method` and `variant` to rows of `Runs.runs`.

    `method` states every setting that changes weights (`analysis/comparison.py`) and in which runs
    of one method and model differ, or else their digests. `variant` counts the settings of one
    method.
    """
    pairs = zip(heads["precision.label"], heads["optimizer.name"], strict=True)
    heads = heads.assign(method=[style.method(*pair) for pair in pairs], variant=0)
    for _, group in heads.groupby("method"):
        settings = pd.Series("", index=group.index)
        for key in comparison.columns(group):
            texts = group[key].map(comparison.written)
            if len(set(texts)) == 1:
                continue
            if texts[texts != ""].groupby(group["model.name"]).nunique().gt(1).any():
                settings += [f", {comparison.short(key)}={text or 'unknown'}" for text in texts]
        settings = _tell_repeats_apart(settings.str.removeprefix(", "), group)
        if settings.any():
            order = {setting: i for i, setting in enumerate(sorted(set(settings)))}
            heads.loc[group.index, "method"] += " (" + settings + ")"
            heads.loc[group.index, "variant"] = settings.map(order)
    return heads


def with_setting(heads: pd.DataFrame, settings: list[str]) -> list[str]:
    """Labels that begin with the figure's own settings; a shared method is left out."""
    methods = [style.method(h.precision, h.optimizer) for h in heads.itertuples()]
    if len(set(methods)) > 1:
        return [f"{text}, {label}" for text, label in zip(settings, heads["label"], strict=True)]
    rest = heads["label"].str.removeprefix(methods[0])
    return [text + end for text, end in zip(settings, rest, strict=True)]


def by_intervention(heads: pd.DataFrame) -> pd.DataFrame:
    """Runs by model and intervention, in the order of the style; labels name the intervention."""
    names = [style.INTERVENTIONS.get(name, (name,))[0] for name in heads["intervention"]]
    rank = heads["intervention"].map(lambda name: style.rank(name, style.INTERVENTIONS))
    heads = heads.assign(label=with_setting(heads, names), rank=rank)
    return heads.assign(size=pd.factorize(heads["model"])[0]).sort_values(["size", "rank"])


def with_scores(runs: Runs, heads: pd.DataFrame) -> pd.DataFrame:
    """Adds each run's `accuracy`, `recall` and `validation_loss` at its last step, or NaN.

    The accuracy and the mean R@1 of both directions are in %; the loss is the contrastive one.
    """
    metrics = runs.metrics
    last = metrics.loc[metrics.groupby("run")["step"].idxmax()].set_index("run")
    last = last.reindex(columns=[ACCURACY, *RECALL, VALIDATION_LOSS]).astype(float)
    recall = 100 * last[list(RECALL)].mean(axis=1, skipna=False)
    scores = {"accuracy": 100 * last[ACCURACY], "recall": recall}
    scores["validation_loss"] = last[VALIDATION_LOSS]
    return heads.assign(**{name: heads["run"].map(scores[name]) for name in scores})


def by_run(
    runs: Runs,
    heads: pd.DataFrame,
    columns: tuple[str, ...],
    table: Callable[[Runs, dict], pd.DataFrame],
) -> pd.DataFrame:
    """The rows of `table(run, head)` for each row of `heads`, with the head's facts in `columns`.

    `run` holds one run; a run with an empty table has no rows.
    """
    frames = [pd.DataFrame(columns=list(columns))]
    for head in heads.to_dict("records"):
        frame = table(runs.only(head["run"]), head)
        facts = {name: head[name] for name in columns if name in head and name not in frame}
        frames += [frame.assign(**facts).reindex(columns=list(columns))] if len(frame) else []
    return pd.concat(frames[1:] or frames, ignore_index=True)


def losses(runs: Runs, heads: pd.DataFrame, columns: tuple[str, ...] = COLUMNS) -> pd.DataFrame:
    """One row per step of each run of `heads`; a missing step has no loss and leaves a gap.

    `loss_median` is over the runs, such as seeds, that share model, label, beta2 and panel.
    """
    frames = []
    for head in heads[[name for name in columns if name not in OF_A_STEP]].to_dict("records"):
        part = runs.metrics[runs.metrics["run"] == head["run"]]
        loss = part.set_index("step")["loss"].astype(float)
        loss = loss.reindex(pd.RangeIndex(1, loss.index.max() + 1, name="step"))
        frames.append(loss.rename("loss").reset_index().assign(**head))
    frame = pd.concat(frames, ignore_index=True)
    line = frame.groupby([*(key for key in OF_A_LINE if key in frame), "step"], dropna=False)
    return frame.assign(loss_median=line["loss"].transform("median"))[list(columns)]


def plot(frame: pd.DataFrame, ax: Axes, look: Look, title: str) -> Axes:
    """One panel: a thin line for each run, a thick one for the median of several, and a legend."""
    top = cap(frame)
    finite = frame.loc[np.isfinite(frame["loss"]), "loss"]
    bottom = finite.min() if len(finite) else 0.0
    handles = {}
    for label, runs in frame.groupby("label", sort=False):
        handles[label] = _draw_label(runs, ax, top, *look(runs.iloc[0]))
    ylim = (bottom - 0.03 * (top - bottom), top)
    ax.set(xlim=(0, frame["num_steps"].max()), ylim=ylim, ylabel="training loss", title=title)
    step_axis(ax)
    draw_chance(ax, frame["batch_size"])
    ax.locator_params(axis="y", nbins=6)
    below = ScaledTranslation(0, -LEGEND_DROP, ax.figure.dpi_scale_trans)
    place = {"loc": "upper left", "bbox_to_anchor": (0, 0), "borderaxespad": 0}
    place["bbox_transform"] = ax.transAxes + below
    labels = [wrap(label) for label in handles]
    ax.legend(handles.values(), labels, handlelength=2.6, **place)
    return ax


def wrap(label: str) -> str:
    """A long label in two lines."""
    return label if len(label) <= LABEL_LENGTH else label.replace(" (", "\n(")


def of_runs(frame: pd.DataFrame) -> str:
    """`ViT-B/32 and ViT-H/14 on shapes: 4 runs at mini scale`."""
    models, data, scales = (frame[name].unique() for name in ("model", "data", "scale"))
    runs = comparison.counted(frame["run"].nunique(), "run")
    return f"{join(map(style.model, models))} on {join(data)}: {runs} at {join(scales)} scale"


def seeds(frame: pd.DataFrame, *by: str) -> str:
    """`1 seed`, `2 and 5 seeds`: the numbers of seeds in the groups of runs by these columns."""
    *fewer, most = sorted(set(frame.groupby(list(by))["seed"].nunique()))
    return join([*fewer, comparison.counted(most, "seed")])


def title(frame: pd.DataFrame) -> str:
    """`ViT-B/32 (paper scale)`: the model of a panel."""
    model = frame["model"].iloc[0]
    return f"{style.model(model)} ({frame['scale'].iloc[0]} scale)"


def num_columns(num: int) -> int:
    """Number of panels in a row: two, or three if that leaves no gap."""
    return 3 if num % 2 and num % 3 == 0 else min(2, num)


def panels(
    figure: Figure, num: int, lines: int, height: float = 2.5, most: int | None = None
) -> list[Axes]:
    """`num` axes, at most `most` in a row; sizes the figure for legends of `lines` lines."""
    columns = min(most, num) if most else num_columns(num)
    rows = -(-num // columns)
    figure.set_size_inches(style.COLUMN_WIDTH * columns, (height + 0.17 * lines) * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[num:]:
        ax.remove()
    return axes[:num]


def draw_models(
    frame: pd.DataFrame, figure: Figure, plot: Callable, split: Callable = lambda part: [("", part)]
) -> None:
    """Draws a whole figure: panels for each model, from small to large, as `split` divides it."""
    models = sorted(frame["model"].unique(), key=lambda name: style.rank(name, style.MODELS))
    parts = [part for model in models for _, part in split(frame[frame["model"] == model])]
    lines = max(sum(1 + wrap(x).count("\n") for x in part["label"].unique()) for part in parts)
    axes = panels(figure, len(parts), lines)
    for part, ax in zip(parts, axes, strict=True):
        plot(part, ax)
    share_limits(axes)


def share_limits(axes: list[Axes]) -> None:
    """Sets the y axes of panels that are compared to one range, which covers all of theirs."""
    limits = [ax.get_ylim() for ax in axes]
    for ax in axes:
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def draw_chance(ax: Axes, batch_sizes: pd.Series) -> None:
    """A dotted line at chance, the loss ln(batch size), where the range of the axis includes it."""
    ylim = ax.get_ylim()
    for size in sorted(set(batch_sizes[batch_sizes > 0])):
        ax.hlines(np.log(size), 0, 1, transform=ax.get_yaxis_transform(), color=style.OTHER, lw=0.7,
                  linestyles="dotted", zorder=1)  # fmt: skip
        ax.annotate(f"chance, ln {size:,}", (0.99, np.log(size)), (0, 1.5), fontsize=5.5,
                    xycoords=ax.get_yaxis_transform(), textcoords="offset points", ha="right",
                    color=style.OTHER, annotation_clip=True)  # fmt: skip
    ax.set_ylim(ylim)


def step_axis(ax: Axes) -> None:
    """A step axis with few ticks: `10k`."""
    ax.set_xlabel("step")
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.locator_params(axis="x", nbins=5)


def caption(frame: pd.DataFrame, after: str) -> str:
    """Describes models, data, runs and lines; `after` is the paper's figure."""
    runs = frame.drop_duplicates("run")
    has_median = (frame["loss"].fillna(0) != frame["loss_median"].fillna(0)).any()
    median = " and thick the median of those that differ in seed alone" if has_median else ""
    return (
        f"Training loss of {of_runs(frame)} ({join(sorted(runs['num_steps'].unique()))} steps, "
        f"batch {join(sorted(runs['batch_size'].unique()))}). After {after}, arXiv:2304.13013. "
        f"Thin: every step of each run{median}. The loss axis ends at the largest loss, of runs "
        "that did not diverge, after the first tenth, at most at twice the first loss."
    )


def caption_end(frame: pd.DataFrame, crosses: bool = True) -> str:
    """Names the runs that diverged or are incomplete; `crosses`: the figure marks divergence."""
    runs, text = frame.drop_duplicates("run"), ""
    diverged = "Diverged (cross)" if crosses else "Diverged"
    for state, word in (("diverged", diverged), ("incomplete", "Incomplete")):
        named = runs[runs["label"].str.contains(f"({state}", regex=False)]
        if len(named):
            pairs = zip(named["model"], named["label"], strict=True)
            names = [f"{style.model(model)} {label}" for model, label in pairs]
            text += f" {word}: {'; '.join(names)}."
    return text


def methods(frame: pd.DataFrame) -> str:
    """The methods of the runs, in words."""
    pairs = frame[["precision", "optimizer"]].drop_duplicates().itertuples(index=False)
    return join([style.method(*pair) for pair in pairs])


def cap(frame: pd.DataFrame) -> float:
    """Upper end of the loss axis: the largest loss after `CAP_AFTER` of a run.

    It is at most `MOST` times the first loss. Diverged runs count only if all diverged.
    """
    first = frame.loc[frame["step"] == 1, "loss"].max()
    late = frame["step"] >= CAP_AFTER * frame["num_steps"]
    counted = late & (frame["state"] != "diverged")
    for losses in (frame["loss"][counted], frame["loss"][late], frame["loss"]):
        finite = losses[np.isfinite(losses)]
        if len(finite):
            return 1.05 * float(np.fmin(finite.max(), MOST * first))
    return 1.0


def join(items) -> str:
    """`a, b and c`."""
    words = [f"{item:,}" if isinstance(item, (int, np.integer)) else str(item) for item in items]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


LABELED = ["method", "state", "num_steps", "reached", "recorded"]


def _label(head: dict) -> str:
    """The method, and how the run ended if it is not finished or lacks rows."""
    method, recorded, reached = head["method"], head["recorded"], head["reached"]
    if head["state"] == "diverged":
        missing = reached - recorded
        lacks = f"; {missing:,} steps missing" if missing else ""
        return f"{method} (diverged at step {reached:,}{lacks})"
    if head["state"] != "finished" or recorded < head["num_steps"]:
        return f"{method} (incomplete: {recorded:,} of {head['num_steps']:,} steps)"
    return method


def _tell_repeats_apart(settings: pd.Series, group: pd.DataFrame) -> pd.Series:
    """Adds the digest to the names of runs that share their settings and seed."""
    same = [settings, group["model.name"], group["seed"]]
    several = settings.groupby(same).transform("size") > 1
    twice = group.groupby([*same, group["digest"]]).cumcount()  # copies of one run
    names = "run " + group["digest"] + twice.map(lambda n: f", copy {n}" if n else "")
    return settings.where(~several, (settings + ", " + names).str.removeprefix(", "))


def _draw_label(
    runs: pd.DataFrame, ax: Axes, top: float, color: tuple, dashes: str | tuple
) -> Line2D:
    """Draws the runs that share a label; returns its legend entry."""
    end, is_alone = {}, runs["run"].nunique() == 1
    thin = {"lw": 0.8, "linestyle": dashes} if is_alone else {"lw": 0.4, "alpha": 0.5}
    for _, run in runs.groupby("run", sort=False):
        ax.plot(run["step"], run["loss"], color=color, zorder=1.5, rasterized=True, **thin)
        if run["state"].iloc[0] == "diverged":
            finite = run[np.isfinite(run["loss"])]
            at = finite if len(finite) else run.assign(loss=top)
            step, loss = at.iloc[-1][["step", "loss"]]
            end = {"marker": "X", "ms": 5.5, "mec": "white", "mew": 0.6}
            ax.plot([step], [min(loss, top)], color=color, zorder=4, clip_on=False, **end)
    if not is_alone:
        median = runs.drop_duplicates("step").sort_values("step")
        ax.plot(median["step"], median["loss_median"], color=color, linestyle=dashes, lw=1.1)
    return Line2D([], [], color=color, linestyle=dashes, **end)


def _order(column: pd.Series) -> pd.Series:
    """Sort keys of a column: the order of the style's tables, where there is one."""
    tables = {"model.name": style.MODELS, "precision.label": style.PRECISIONS}
    table = (tables | {"optimizer.name": style.OPTIMIZERS}).get(column.name)
    return column if table is None else column.map(lambda name: style.rank(name, table))
