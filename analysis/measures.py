"""Runs as named tables: what each run is called, its scores, its losses, and words about runs.

Figures and verdicts share these measures; nothing here draws.
"""

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from scipy import stats

from analysis import comparison, naming, paper
from analysis.load import NoRunsError, Runs
from lowprec.runs.read import ENDED

ACCURACY = "zero_shot/top1"
RECALL = ("retrieval/image_to_text_r1", "retrieval/text_to_image_r1")
VALIDATION_LOSS = "retrieval/loss"
OF_A_RUN = (
    *("run", "scale", "data", "data_digest", "batch_size", "num_steps", "model", "vision_layers"),
    *("precision", "scaler", "intervention", "optimizer", "lr", "beta2", "beta2_decay"),
    *("seed", "state", "method", "label", "variant"),
)
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
COMPARED = (  # settings in which compared runs agree, but for those that are compared
    *("data_digest", "batch_size", "num_steps", "model", "precision"),
    *("intervention", "optimizer", "lr", "beta2", "beta2_decay"),
)
MOST_FINAL_STEPS = 40  # whose losses are averaged
LABELED = ["method", "state", "num_steps", "reached", "recorded"]


def final_loss(losses: np.ndarray) -> float:
    """Mean of the finite losses among the last tenth of the steps, at most MOST_FINAL_STEPS."""
    losses = np.asarray(losses, float)
    last = losses[-max(1, min(MOST_FINAL_STEPS, len(losses) // 10)) :]
    return float(last[np.isfinite(last)].mean()) if np.isfinite(last).any() else math.nan


def named_heads(runs: Runs, by: tuple[str, ...] = ()) -> pd.DataFrame:
    """One row per run that has steps, with `method`, `variant` and `label`, and short column names.

    A figure shows the config keys `by` in its own way, so `method` states only settings in which
    runs differ within one value of each. `precision` names its change too, and `optimizer` 8-bit
    moments and the response to warnings. `label` adds how the run ended. `scale` is that of the
    run's study, NaN without one. Runs with a damaged config are left out; NoRunsError if no run is
    left.
    """
    steps = runs.metrics.groupby("run")["step"]
    facts = pd.DataFrame({"reached": steps.max(), "recorded": steps.nunique()})
    heads = runs.runs[runs.runs["scale"].notna()].join(facts, on="run", how="inner")
    if heads.empty:
        why = f"no run has steps and an undamaged config yet{runs.notes}"
        raise NoRunsError(f"{runs.root}: {why if len(runs) else 'the figure shows no such runs'}")
    whole = ["batch_size", "num_steps", "seed", "reached", "recorded"]
    heads = heads.astype(dict.fromkeys(whole, int) | {"optimizer.beta2_decay": float})
    for key, name in (("precision.label", _precision), ("optimizer.name", _optimizer)):
        heads[key] = [name(head) for head in heads.to_dict("records")]
    if by:  # in the order of their values, which need not be of one type
        heads = pd.concat([group for _, group in heads.groupby(list(by), dropna=False)])
    heads = name_methods(heads, by)
    heads.loc[heads["data.name"] == "unknown", "batch_size"] = 0  # another trainer's
    heads["label"] = [_label(head) for head in heads[LABELED].to_dict("records")]
    heads["scale"] = heads["scale"].where(heads["experiment"].notna())
    keys = ["model.name", "precision.label", "optimizer.name", "variant", "seed", "run"]
    in_order = heads.sort_values(keys, key=lambda values: values.map(naming.order(values.name)))
    return in_order.rename(columns=RENAMED)


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


def name_methods(heads: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """Adds `method` and `variant` to rows of `Runs.runs`.

    `method` states every setting that changes weights (`analysis/comparison.py`) and in which runs
    of one method and model differ within one value of each of the keys `by`, or else their digests.
    `variant` numbers the settings of one method, from the one with the most runs on. A run of
    unknown precision, as `watch` records it, has its name as the method, if there is one.
    """
    pairs = zip(heads["precision.label"], heads["optimizer.name"], strict=True)
    heads = heads.assign(method=[naming.method(*pair) for pair in pairs], variant=0)
    for _, group in heads.groupby("method"):
        within = [group[key].map(comparison.written) for key in ("model.name", *by)]
        if set(group["precision.label"]) == {"unknown"} and not _repeats(group["run"], within[1:]):
            heads.loc[group.index, "method"] = group["run"]
            continue
        settings = pd.Series("", index=group.index)
        for key in comparison.columns(group):
            texts = group[key].map(comparison.written)
            if len(set(texts)) > 1 and _repeats(texts[texts != ""], within):
                settings += [f", {comparison.short(key)}={text or 'unknown'}" for text in texts]
        settings = _tell_repeats_apart(settings.str.removeprefix(", "), group, within)
        if settings.any():
            usual = settings.value_counts()
            order = sorted(usual.index, key=lambda setting: (-usual[setting], setting))
            heads.loc[group.index, "method"] += " (" + settings + ")"
            heads.loc[group.index, "variant"] = settings.map(order.index)
    return heads


def with_setting(heads: pd.DataFrame, settings: list[str]) -> list[str]:
    """Labels that begin with the figure's own settings; a shared method is left out."""
    methods, ends = [], []
    for text, head in zip(settings, heads.itertuples(), strict=True):
        names = [naming.precision(head.precision), naming.optimizer_name(head.optimizer)]
        names = [head.run] if head.method == head.run else names
        methods.append([text, *(name for name in names if name != text)])
        ends.append(head.label.removeprefix(", ".join(names)))
    if len({tuple(method[1:]) for method in methods}) == 1:
        methods = [method[:1] for method in methods]
    return [", ".join(method) + end for method, end in zip(methods, ends, strict=True)]


def by_intervention(runs: Runs) -> pd.DataFrame:
    """`named_heads` by model and intervention, as the style orders them; labels name the latter."""
    heads = named_heads(runs, ("intervention.name",))
    names = [naming.setting("intervention.name", name) for name in heads["intervention"]]
    rank = heads["intervention"].map(naming.order("intervention.name"))
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


def with_recipe(
    heads: pd.DataFrame, name: str = "recipe", label: str = "precision"
) -> pd.DataFrame:
    """Adds a column with the label of each run or, for a custom recipe, `narrow_products`."""
    narrow = comparison.narrow_products(heads)
    return heads.assign(**{name: narrow.where(narrow != "", heads[label])})


def of_bf16(values: pd.Series, recipes: pd.Series, *keys: pd.Series) -> pd.Series:
    """For each value that of the (first) row in bf16 with the same keys, or NaN."""
    index = pd.MultiIndex.from_arrays(keys)
    bases = values.set_axis(index)[(recipes == "bf16").to_numpy()]
    return bases[~bases.index.duplicated()].reindex(index).set_axis(values.index)


def repeated(frame: pd.DataFrame, *by: str) -> bool:
    """Whether the runs of a frame have several seeds, at each value of some columns."""
    groups = frame.groupby(list(by), dropna=False)["seed"] if by else frame["seed"]
    return bool(np.min(groups.nunique()) > 1)


def comparing(*columns: str, value: str = "") -> Callable[[pd.DataFrame], bool]:
    """A function: whether the runs of a frame can show how the values of some columns compare.

    There are several values, each with runs of several seeds, all of which have ended, and the runs
    agree in all other settings of COMPARED. With `value`, its means must also `differ`.
    """
    return lambda frame: bool(
        len(frame[list(columns)].drop_duplicates()) > 1
        and frame["state"].isin(ENDED).all()
        and repeated(frame, *columns)
        and alike(frame, *columns)
        and (not value or differ(frame, *columns, value=value))
    )


def differ(frame: pd.DataFrame, *by: str, value: str) -> bool:
    """Whether the means of some groups differ by more than runs scatter: p < 5% by an F test.

    The groups are those of the last column, tested within each value of the others.
    """
    *within, last = by
    frame = frame.dropna(subset=value)
    for _, part in frame.groupby(within) if within else [("", frame)]:
        samples = [group for _, group in part.groupby(last)[value]]
        with warnings.catch_warnings(action="ignore"):  # of equal values
            if len(samples) > 1 and not stats.f_oneway(*samples).pvalue < 0.05:
                return False
    return True


def alike(frame: pd.DataFrame, *but: str) -> bool:
    """Whether the runs of a frame agree in all settings of COMPARED but some."""
    settings = frame[[key for key in COMPARED if key not in but]]
    return bool((settings.nunique(dropna=False) == 1).all())


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


def of_runs(frame: pd.DataFrame) -> str:
    """`ViT-B/32 and ViT-H/14 on shapes: 4 runs at mini scale`, and the method if they share it.

    Without the scale if a run is of no study.
    """
    models, data, scales = (frame[name].unique() for name in ("model", "data", "scale"))
    runs = comparison.counted(frame["run"].nunique(), "run")
    if frame["scale"].notna().all():
        runs += f" at {naming.join(scales)} scale"
    what = f"{naming.join(map(naming.model, models))} on {naming.join(data)}"
    methods = frame.reindex(columns=["precision", "optimizer"]).dropna().drop_duplicates()
    shared = [f", {naming.method(*pair)}" for pair in methods.itertuples(index=False)]
    return f"{what}: {runs}{shared[0] if len(shared) == 1 else ''}"


def caption_end(frame: pd.DataFrame) -> str:
    """Names the runs that diverged or are incomplete."""
    runs, text = frame.drop_duplicates("run"), ""
    for state in ("diverged", "incomplete"):
        named = runs[runs["label"].str.contains(f"({state}", regex=False)]
        if len(named):
            pairs = zip(named["model"], named["label"], strict=True)
            names = [f"{naming.model(model)} {label}" for model, label in pairs]
            text += f" {state.capitalize()}: {'; '.join(names)}."
    return text


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


def _repeats(values: pd.Series, within: list[pd.Series]) -> bool:
    """Whether rows that agree in `within` have different values."""
    keys = [one[values.index] for one in within] or [pd.Series(0, values.index)]
    return bool(values.groupby(keys).nunique().gt(1).any())


def _tell_repeats_apart(
    settings: pd.Series, group: pd.DataFrame, within: list[pd.Series]
) -> pd.Series:
    """Adds the digest to the names of runs that share their settings and seed."""
    same = [settings, *within, group["seed"]]
    several = settings.groupby(same).transform("size") > 1
    twice = group.groupby([*same, group["digest"]]).cumcount()  # copies of one run
    names = "run " + group["digest"] + twice.map(lambda n: f", copy {n}" if n else "")
    return settings.where(~several, (settings + ", " + names).str.removeprefix(", "))


def recorded(runs: Runs, name: str) -> pd.DataFrame:
    """Columns step and `name`: the recorded values of a quantity, in order of steps; for one run.

    `name` is a column of metrics or timing, or STATISTIC/TENSOR (the largest if TENSOR is a glob).
    A metric of every step is NaN at a step without a row. The frame is empty if the run lacks it.
    """
    for table in (runs.metrics, runs.timing):
        if name in table and name not in ("run", "step"):
            values = pd.to_numeric(table[name], errors="coerce")
            values = values.set_axis(pd.Index(table["step"], name="step")).rename(name)
            if table is runs.timing or "/" in name:
                return values.dropna().reset_index()
            steps = pd.RangeIndex(1, values.index.max() + 1, name="step")
            return values[~values.index.duplicated(keep="last")].reindex(steps).reset_index()
    statistic, _, tensor = name.partition("/")
    try:
        table = runs.tensors(tensor or "*", statistic).drop(columns="run").set_index("step")
    except LookupError:
        return pd.DataFrame()
    table = table[~table.index.duplicated(keep="last")]
    return table.max(axis=1).rename(name).reset_index()


def first_and_last_features(runs: Runs, heads: pd.DataFrame) -> pd.DataFrame:
    """E[abs(x)] of each vision block of each run at the first and the last recorded step (`at`)."""
    columns = (*OF_A_RUN, "at", "step", "block", "feature_mean")
    return by_run(runs, heads, columns, _first_and_last)


def _first_and_last(run: Runs, head: dict) -> pd.DataFrame:
    try:
        values = run.tensors(paper.BLOCK.format("*"), "feature_mean")
    except LookupError:
        return pd.DataFrame()
    values = values.drop(columns="run").set_index("step").sort_index()
    values = values.rename(columns=lambda name: int(name.rpartition(".")[2])).sort_index(axis=1)
    ends = values.iloc[[0, -1]].set_axis(["first", "last"])
    steps = pd.Series(values.index[[0, -1]], ends.index, name="step")
    table = ends.rename_axis(index="at", columns="block").stack().rename("feature_mean")
    return table.reset_index().join(steps, on="at")


def last_block(run: Runs, vision_layers: float) -> pd.Series:
    """E[abs(x)] of the last vision block of one run by step; empty if it is not recorded."""
    return run.series(paper.BLOCK.format(int(vision_layers) - 1), "feature_mean")


def last_size(run: Runs, head: dict, share: float) -> pd.DataFrame:
    """The last record of `last_block` in a share of the steps: `step` and `size`, or no row."""
    values = last_block(run, head["vision_layers"])
    within = values[values.index <= share * head["num_steps"]]
    return within.iloc[-1:].rename("size").reset_index()
