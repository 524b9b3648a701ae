"""Judges each kind of claim: functions that map the evidence and a few settings to a finding.

If there is no evidence, a judge raises NoRunsError, which names what is missing and the commands
that make it. Times are compared as the share of time saved, as in the paper: a run that saves 10%
is 1 / 0.9 = 1.11 times as fast.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from analysis import bench, comparison, evidence, figures, paper, spike_marks, style
from analysis.comparison import counted
from analysis.curves import join
from analysis.evidence import (
    ABOUT,
    FOLLOWING,
    HIGHEST,
    NO_GAIN,
    SHARE,
    SLOPE,
    SPIKES,
    SURE,
    TRAINS,
    UNDECIDED,
    WINDOWS,
    Evidence,
    Finding,
    Sample,
    above,
    at_scale,
    decide,
    lacking,
)
from analysis.load import NoRunsError
from lowprec.diagnostics.spikes import loss_spikes

H14, SMALLEST = paper.ACCURACY_MODEL, "vit_b32"
H14_KEYS = "model=vit_h14 model.patch_dropout=0.5 batch_size=256 compile=true checkpointing=true"
BF16 = "bf16"
TENSORS_OF_BLOCK = {"none": 12, "zero_init": 14, "kq_norm": 16}  # by intervention
TENSORS_OUTSIDE = 14  # of blocks, in a CLIP model
OPTIMIZERS = {name: in_print for name, (in_print, *_) in style.OPTIMIZERS.items()}
PRINTED_VALUES = {SPIKES: "loss spikes per run", HIGHEST: "highest loss spike of a run, in nats"}
PRINTED = {"model.name": style.MODELS, "optimizer.name": OPTIMIZERS}  # varied: names in print


def accuracy(
    records: Evidence,
    varied: str,
    one: object,
    other: object,
    rule: Callable[..., Finding],
    studies: Sequence[str],
    scale: str,
    only: dict | None = None,
    by_size: bool = False,
) -> Finding:
    """Judges the accuracy with `varied` at `one` minus that at `other`, paired by seed.

    At paper scale, this is the zero-shot accuracy of the paper's largest model; at mini scale, the
    mean R@1 of our largest model (or the zero-shot accuracy of runs without R@1). `only` maps
    columns to the values that runs must have. `by_size` judges the difference for the largest
    model minus that for the smallest. `equal` at mini scale also judges the validation loss,
    relative to that at `other`.
    """
    runs = records.outcomes(studies, scale)
    for column, value in (only or {}).items():
        runs = runs[runs[column] == value]
    metric = "recall" if scale == "mini" and runs["recall"].max() > 0 else "accuracy"
    groups = evidence.paired(runs, varied, one, other, metric)
    compared = varied, one, other
    pairs = {name: evidence.difference(g, *compared, metric) for name, g in groups.items()}
    sizes = [name for name in pairs if scale == "mini" or name in (SMALLEST, H14)]
    if not sizes or (scale == "paper" and sizes[-1] != H14) or (by_size and len(sizes) < 2):
        what = f"{one} and {other} with equal settings, equal seeds and an evaluation"
        raise lacking(what + (", two sizes" if by_size else ""), studies, scale)
    ours = "; ".join(f"{style.model(name)} {Sample.of(values)}" for name, values in pairs.items())
    ours += {"recall": " (mean R@1)", "accuracy": " (zero-shot)"}[metric]
    largest = pairs[sizes[-1]]
    if rule is evidence.equal and scale == "mini":
        *smaller, change = (_loss_change(groups[name], *compared) for name in sizes)
        for name, losses in zip(sizes, smaller, strict=False):  # not judged
            if len(losses):
                of_loss = Sample.of(losses, evidence.TWO_ONE_SIDED)
                ours += f"; {style.model(name)}, validation loss, %, 90%: {of_loss}"
        return rule(ours, largest, runs, change)
    if not by_size:
        return rule(ours, largest, runs)
    growth = (largest - pairs[sizes[0]]).dropna()
    return rule(f"{ours}; largest minus smallest {Sample.of(growth)}", growth, runs)


def _loss_change(runs: pd.DataFrame, varied: str, one: object, other: object) -> pd.Series:
    """By seed: how much higher the validation loss is at `one` than at `other`, in %."""
    logs = runs.assign(log_loss=np.log(runs["validation_loss"]))
    change = evidence.difference(logs, varied, one, other, "log_loss")
    return 100 * np.expm1(change.dropna())


def fix(records: Evidence, change: str, helps: bool) -> Finding:
    """Judges one change to fp8 tensor-wise training by whether it then trains like bf16."""
    runs = records.outcomes(("fp8_fixes",))
    runs = runs[runs["precision.label"].isin([BF16, "fp8_tensorwise"])]  # the miniature is in e2m1
    is_fp8 = runs["precision.label"] == "fp8_tensorwise"
    clips = runs["optimizer.clip_norm"].notna()
    changes = runs["intervention.name"].where(~clips, "gradient clipping")
    arm = pd.Series(BF16, runs.index).where(~is_fp8, changes.replace("none", "plain"))
    names = (BF16, "plain", change)
    same = comparison.signature(runs, "precision.label", "optimizer.name", "intervention.name")
    shared = set.intersection(*(set(same[arm == name]) for name in names))
    if not shared:
        what = f"{join(names)} with equal settings and seeds"
        raise lacking(what, ("fp8_fixes",), "paper")
    arms = {name: runs[(arm == name) & same.isin(shared)] for name in names}
    seeds = arms[BF16]["seed"].nunique()
    trains = {name: _trains(group, arms[BF16]) for name, group in arms.items()}
    ours = "; ".join(f"{name}: {_ends(group)}" for name, group in arms.items())
    if trains["plain"]:
        return decide(ours, None, seeds, runs, "fp8 trains unchanged: nothing to rescue")
    trains[BF16] = trains[BF16] or None  # a baseline that fails decides nothing
    unknown = [name for name in names if trains[name] is None]
    holds = None if unknown else trains[change] == helps
    why = f"{', '.join(unknown)}: seeds differ by more than the margin, or some diverge"
    return decide(f"{ours} ({counted(seeds, 'seed')})", holds, seeds, runs, why)


def features(records: Evidence, stopped: str = "") -> Finding:
    """Judges whether E[abs(x_k)] grows with depth and training, or layer-scale stops one of them.

    `stopped`: "depth" or "training".
    """
    study = "feature_magnitude"
    runs = records.runs((study,))
    frame = figures.load(study).query(runs).sort_values("block")
    by_run = frame.groupby(["intervention", "model", "seed", "run", "at"])["feature_mean"]
    blocks = by_run.agg(first_block="first", last_block="last").unstack("at")
    depth = blocks["last_block", "last"] / blocks["first_block", "last"]
    growth = depth.to_frame("depth")
    growth["training"] = blocks["last_block", "last"] / blocks["last_block", "first"]
    kinds = ("none", "zero_init") if stopped else ("none",)
    if not set(kinds) <= set(growth.index.get_level_values(0)):
        raise lacking(f"block statistics with intervention={' and '.join(kinds)}", (study,))
    growth = growth.loc[list(kinds)]
    ours = "; ".join(
        f"{style.INTERVENTIONS[kind][0]}: {part['depth'].median():.3g} times as large in the last "
        f"block as in the first, in the last block {part['training'].median():.3g} times as large "
        f"at the last record as at the first (medians of {len(part)} runs)"
        for kind, part in growth.groupby(level=0)
    )
    seeds = growth.reset_index("seed").groupby(level=[0, 1])["seed"].nunique().min()
    if stopped:
        holds = bool(growth.loc["zero_init", stopped].max() < growth.loc["none", stopped].min())
        return decide(ours, holds, seeds, runs.runs)
    grows = (growth > 1).all(axis=1)
    holds = True if grows.all() else None if grows.any() else False
    ours += f", both above 1 in {grows.sum()}"
    return decide(ours, holds, seeds, runs.runs, "both are above 1 in some runs, not in all")


def noise(records: Evidence) -> Finding:
    """Judges whether the variance of a quantized dot product grows with its inner dimension."""
    lines = records.lines("quantization_variance").dropna(subset="predicted")
    slopes = {
        case: np.polyfit(np.log(part["inner_dim"]), np.log(part["measured"]), 1)[0]
        for case, part in lines.groupby("case")
    }
    first, last = lines["inner_dim"].min(), lines["inner_dim"].max()
    ours = "; ".join(f"{case}: K^{slope:.3f}" for case, slope in slopes.items())
    ours += f" (independent random numbers, K from {first:,} to {last:,})"
    why = "random numbers confirm the theory; the next row asks whether training needs 16 bits"
    return Finding(ours, at_scale(min(slopes.values()) >= 1 - SLOPE), why)


def end_to_end(records: Evidence, baseline: str, case: str, slug: str = "model") -> Finding:
    """Judges the least time saved for ViT-H/14 over all shapes, or for LLM.int8() the most.

    Undecided if the windows of a benchmark that measures several lie on both sides of the margin.
    """
    lines, figure = records.lines(slug, H14_KEYS), figures.load("end_to_end_speed")
    frame = figure.query(lines)
    frame, at = frame[frame["model"] == H14], ["file", "shape"]
    times = frame.pivot_table(index=at, columns="series", values="ms")
    times = times.join(frame.pivot_table(index=at, columns="baseline", values="base_ms"))
    if not {case, baseline} <= set(times) or times[[case, baseline]].dropna().empty:
        makes = f"python -m experiments.benchmarks {slug} {H14_KEYS}"
        raise NoRunsError(f"{case} and {baseline} on {H14}: {makes}")
    saved = bench.saved_percent(times[case], times[baseline]).dropna()
    saved = saved.groupby("shape").tail(1).sort_index(level="shape")  # of the newest file
    ours = "; ".join(
        f"{percent:.1f}% of the time ({1 / (1 - percent / 100):.3f} times as fast) ({shape})"
        for (_, shape), percent in saved.items()
    )
    ours += f", {bench.devices(frame)}, one measurement each"
    if by_window := _saved_by_window(figure.with_settings(lines), saved.index, case, baseline):
        ours += f"; over its windows {min(by_window):.1f}% to {max(by_window):.1f}%"
        if min(by_window) < paper.END_TO_END[0] <= max(by_window):
            return Finding(ours, UNDECIDED, "its windows lie on both sides of the margin")
    if case == "llm_int8":
        return Finding(ours, at_scale(saved.max() <= NO_GAIN))
    why = "not a baseline of the paper" if baseline == "open_clip" else ""
    return Finding(ours, at_scale(saved.min() >= paper.END_TO_END[0]), why)


def _saved_by_window(lines: pd.DataFrame, at: pd.MultiIndex, case: str, baseline: str) -> list:
    """The time in % that each window saves over each of the baseline's, in files and shapes."""
    keys = [*at.names, "case"]
    timed = lines.reindex(columns=[*keys, "windows_ms"]).dropna(subset="windows_ms")
    windows = timed.drop_duplicates(keys, keep="last").set_index(keys)["windows_ms"].unstack()
    pairs = windows.reindex(index=at, columns=[case, baseline]).dropna().to_numpy()
    pairs = (pair for ours, bases in pairs for pair in itertools.product(ours, bases))
    return [bench.saved_percent(ms, base_ms) for ms, base_ms in pairs]


def quantize_share(records: Evidence) -> Finding:
    """Judges whether quantization is a small share of a layer's time, and falls with dim."""
    frame = figures.load("quantize_share").query(records.lines("ops"))
    mine = frame[(frame["source"] != paper.SOURCE) & frame["dim"].isin(paper.DIMS)]
    mine = mine[mine["series"] == "int8"].sort_values("dim")
    if mine.empty:
        raise NoRunsError("python -m experiments.benchmarks ops")
    ours, holds, largest = [], True, mine["value"].max()
    for tokens, line in mine.groupby("tokens"):
        first, last = (
            f"{row.value:.1f}% at dim {row.dim:,}" for row in line.iloc[[0, -1]].itertuples()
        )
        ours.append(f"{first} to {last} ({tokens:,} tokens)")
        holds &= line["value"].is_monotonic_decreasing
    ours = f"{'; '.join(ours)}, {bench.devices(frame)}"
    holds &= largest <= paper.LARGEST_SHARE + ABOUT
    tolerated = holds and largest > paper.LARGEST_SHARE
    why = f"only within the tolerance: {largest:.1f}% is above {paper.LARGEST_SHARE:g}%"
    return Finding(ours, at_scale(bool(holds)), why if tolerated else "")


def spike_trend(
    records: Evidence,
    varied: str,
    studies: Sequence[str],
    optimizers: Sequence[str] = ("adamw",),
    least_beta2: float = 0.0,
    gone: bool = False,
    value: str = SPIKES,
) -> Finding:
    """Judges whether loss spikes grow with a setting, or (`gone`) disappear at its first value.

    `value` is the number of spikes per run, or HIGHEST. Values of the setting are ordered from
    small to large, optimizers as in `style.OPTIMIZERS`.
    """
    counts = records.spikes(studies)
    counts = counts[counts["optimizer.name"].isin(optimizers)]
    counts = comparison.comparable(counts[counts["optimizer.beta2"] >= least_beta2], varied)
    table = PRINTED.get(varied, {})
    values = sorted(counts[varied].unique(), key=lambda v: style.rank(v, table) if table else v)
    if len(values) < 2:
        raise lacking(f"two values of {varied} with all else equal", studies)
    means = [counts.loc[counts[varied] == one, value].mean() for one in values]
    names = [table[v] if v in table else f"{comparison.short(varied)} {v:g}" for v in values]
    ends = varied, values[-1], values[0]
    differences = evidence.difference(counts, *ends, value)
    ours = "; ".join(f"{name}: {mean:.3g}" for name, mean in zip(names, means, strict=True))
    ours = f"{PRINTED_VALUES[value]}: {ours}; last minus first {Sample.of(differences)}"
    for window in WINDOWS:
        other = evidence.difference(counts, *ends, f"{value} {window}").mean()
        ours += f"; with a window of {window} steps {other:+.2f}"
    ours += f" ({_runs(counts)})"
    if not max(means[1:] if gone else means):
        return Finding(ours, UNDECIDED, "no spikes at the other values" if gone else "no spikes")
    by_seed = counts[counts[varied] == values[0]].groupby("seed")[value].mean()
    if gone and Sample.of(by_seed).low > 0:
        return decide(f"{ours}; spikes remain", False, counts["seed"].nunique(), counts)
    if gone:
        unless = "fewer, but not none" if means[0] else ""
    else:
        unless = "lower at some larger value" if (np.diff(means) < 0).any() else ""
    return evidence.larger(ours, differences, counts, unless)


def follow(records: Evidence, studies: Sequence[str]) -> Finding:
    """Judges the share of AdamW's loss spikes that follow an RMS spike of the patch embedding.

    Only runs in which RMS_t can reach the threshold count. Leads are counted from the detection and
    from the onset of the loss spike, and both shares must be large enough.
    """
    counts = records.spikes(studies)
    counts = counts[counts["optimizer.name"] == "adamw"]
    num_left_out = (~counts["can_spike"]).sum()
    counts = counts[counts["can_spike"]]
    if counts.empty:
        raise lacking("AdamW whose RMS_t of the patch embedding can spike", studies)
    spiked = counts[counts[SPIKES] > 0]
    if spiked.empty:
        return Finding(f"no loss spike in {_runs(counts)}", UNDECIDED, "no loss spikes")
    chance = np.average(spiked["chance"], weights=spiked[SPIKES])
    least, parts, verdicts = max(SURE, chance), [], []
    for name, num, total in (
        ("follow", FOLLOWING, SPIKES),
        ("from the onset", "num_by_onset", "num_onsets"),
    ):
        low, high = evidence.share_over_runs(spiked[num], spiked[total])
        num, total = spiked[num].sum(), spiked[total].sum()
        parts.append(f"{num} of {total} {name} ({num / total:.0%} [{low:.0%}, {high:.0%}])")
        is_large = num / total >= SHARE and low >= least
        verdicts.append(True if is_large else False if high < SHARE else None)
    ours = f"{', '.join(parts)}, by chance {chance:.1%} ({_runs(counts)}; "
    ours += f"{num_left_out} left out because RMS_t is unknown or cannot reach the threshold)"
    for window in WINDOWS:
        num, total = (counts[f"{name} {window}"].sum() for name in (FOLLOWING, SPIKES))
        ours += f"; with a window of {window} steps {num} of {total}"
    holds = False if False in verdicts else None if None in verdicts else True
    why = f"an interval contains {SHARE:.0%}, or begins below {least:.0%}"
    return decide(ours, holds, spiked["seed"].nunique(), counts, why)


def scale_falls(records: Evidence) -> Finding:
    """Judges whether a dynamic loss scale falls at loss spikes more often than anywhere else."""
    runs = _scaled(records, "dynamic")
    num, total, spikes = (int(runs[name].sum()) for name in ("falls_near", "falls", "spikes"))
    ours = f"{num} of {total} falls of the scale are at one of {spikes} loss spikes"
    if not spikes:
        return Finding(f"{ours} ({_runs(runs)})", UNDECIDED, "no loss spikes")
    seeds = runs.loc[runs["spikes"] > 0, "seed"].nunique()
    if not total:
        return Finding(f"{ours} ({_runs(runs)})", UNDECIDED, "the scale never fell")
    chance = np.average(runs["near"], weights=runs["falls"])
    low, high = evidence.share_interval(num, total)
    ours += f" ({num / total:.0%} [{low:.0%}, {high:.0%}]), by chance {chance:.1%} ({_runs(runs)})"
    return decide(ours, above(low, high, chance), seeds, runs, "the interval contains chance")


def tensor_skips(records: Evidence) -> Finding:
    """Judges whether runs with a fixed scale reach their end by skipping single tensors."""
    runs = _scaled(records, "fixed")
    ended, skipping = runs["state"] == "finished", runs[runs["skips"] > 0]
    spikes, skips, single = (int(runs[name].sum()) for name in ("spikes", "skips", "single"))
    ours = (
        f"{ended.sum()} of {len(runs)} runs reach their end; {spikes} loss spikes; tensors are "
        f"skipped in {skips} steps, in {single} of them not all tensors ({_runs(runs)})"
    )
    if not ended.all():
        return decide(ours, False, runs["seed"].nunique(), runs)
    if not spikes or not skips:
        return Finding(ours, UNDECIDED, "nothing was skipped" if spikes else "no loss spike")
    seeds = skipping["seed"].nunique()
    return decide(ours, True if single else None, seeds, runs, "no single ones")


def _runs(runs: pd.DataFrame) -> str:
    seeds = runs["seed"].nunique()
    return f"{counted(len(runs), 'run')}, {'one seed' if seeds == 1 else f'{seeds} seeds'}"


def _trains(group: pd.DataFrame, base: pd.DataFrame) -> bool | None:
    """Whether the interval of the last loss is within the margin above bf16's; None: in part."""
    diverged = group["state"] == "diverged"
    if diverged.any():
        return False if diverged.all() else None
    losses, bases = (part.groupby("seed")["loss"].mean() for part in (group, base))
    excess = Sample.of(losses / bases - 1)
    return True if excess.high <= TRAINS else False if excess.low > TRAINS else None


def _ends(group: pd.DataFrame) -> str:
    num = int((group["state"] == "diverged").sum())
    return f"{num} of {len(group)} diverged" if num else f"last loss {group['loss'].mean():.3g}"


def _scaled(records: Evidence, kind: str) -> pd.DataFrame:
    """Returns the runs with a kind of loss scaler, and counts over their steps.

    Runs with a smaller initial scale than others are left out: their gradients overflow more
    rarely. The ignored first steps do not count. `spikes`: loss spikes. `near`: the share of steps
    at most `within` steps from a loss spike. `falls`: falls of the scale, except those at most
    `within` steps after another; `falls_near`: those near a loss spike. `skips`: steps that skip a
    tensor; `single`: those that skip some of the model's tensors but not all, if none is frozen
    (`optimizer.lr_scale`) or added by `optimizer.stable_embedding`.
    """
    runs = records.runs(("loss_scaler",))
    heads = runs.runs[runs.runs["scaler.name"] == kind]
    heads = heads[heads["scaler.init_scale"] == heads["scaler.init_scale"].max()]
    rows = []
    for head in heads.to_dict("records"):
        protocol = spike_marks.protocol_of_run(head)
        alone = runs.only(head["run"])
        series = spike_marks.read_series(alone)
        metrics = alone.metrics.set_index("step").reindex(range(1, len(series.loss) + 1))
        spikes = pd.Series(loss_spikes(series.loss, protocol), metrics.index)
        near = spikes.rolling(2 * protocol.within + 1, center=True, min_periods=1).max() > 0
        lower = metrics.get("loss_scale", near).astype(float).ffill().diff() < 0
        falls = lower & ~lower.shift(fill_value=False).rolling(protocol.within, 1).max().gt(0)
        skipped = metrics.get("skipped_tensors", near * 0).fillna(0)
        steps = {"spikes": spikes, "falls": falls, "falls_near": falls & near, "skips": skipped > 0}
        num_blocks = head["model.vision_layers"] + head["model.text_layers"]
        of_block = TENSORS_OF_BLOCK.get(head["intervention.name"], np.nan)  # then none is single
        num_tensors = of_block * num_blocks + TENSORS_OUTSIDE
        steps["single"] = (skipped > 0) & (skipped < num_tensors)
        counts = {name: marks.iloc[protocol.ignore_steps :].sum() for name, marks in steps.items()}
        rows.append({**head, **counts, "near": near.iloc[protocol.ignore_steps :].mean()})
    if not rows:
        raise lacking(f"scaler={kind}", ("loss_scaler",))
    return pd.DataFrame(rows)
