"""Judges each kind of claim: functions that map the evidence and a few settings to a finding.

A judge raises NoRunsError, which names what is missing and the commands that make it, if there is
no evidence.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from analysis import bench, comparison, evidence, figures, paper, spike_marks, style
from analysis.curves import join
from analysis.evidence import UNDECIDED, Evidence, Finding, Sample, at_scale, decide, lacking
from analysis.load import NoRunsError, Runs
from lowprec.diagnostics.spikes import loss_spikes

H14 = paper.ACCURACY_MODEL
LARGE = ("vit_l14", "vit_h14")
H14_KEYS = "model=vit_h14 model.patch_dropout=0.5 batch_size=256 compile=true checkpointing=true"
BF16 = "bf16"
COLLAPSED = 0.5  # share of bf16's accuracy: a run below it counts as diverged
TRAINS = 0.05  # excess over bf16's loss, as a share of it
SLOPE = 0.05  # of the exponent of the inner dimension
NO_GAIN = 2.0  # % of time: less is no speed-up
ABOUT = 2.0  # points of a share that the paper gives as "about"
SHARE = 0.8  # of loss spikes that follow: less is not the paper's 28 of 30
SURE = 0.5  # what the interval of that share must lie above; that of 28 of 30 begins at 79%
SPIKES = "num_loss_spikes"
OPTIMIZERS = {name: in_print for name, (in_print, *_) in style.OPTIMIZERS.items()}
PRINTED = {"model.name": style.MODELS, "optimizer.name": OPTIMIZERS}  # varied: names in print


def accuracy(
    records: Evidence,
    varied: str,
    one: object,
    other: object,
    rule: Callable[..., Finding],
    studies: Sequence[str],
    models: Sequence[str] = (H14,),
    only: dict | None = None,
    show_all: bool = False,
) -> Finding:
    """Judges the accuracy at `varied` = one minus that at other, paired by seed, for some models.

    `rule` takes our numbers in words and the Sample of each model. `only`: values of columns that
    runs must have. `show_all`: lists the mean at each value, with or without pairs.
    """
    runs = records.outcomes(*studies)
    for column, value in (only or {}).items():
        runs = runs[runs[column] == value]
    if runs["accuracy"].isna().all():
        raise lacking("runs with evaluation=zero_shot", studies[0])
    samples = evidence.paired(runs, varied, one, other, "accuracy")
    parts = [f"{style.model(model)} {sample}" for model, sample in samples.items()]
    if show_all:
        means = runs.groupby(["model.name", varied])["accuracy"].mean()
        key = comparison.short(varied)
        parts += [f"{style.model(m)}, {key} {v:g}: {mean:.2f}%" for (m, v), mean in means.items()]
    elif not samples:
        raise lacking(f"{one} and {other} with equal settings and seed", studies[0])
    ours = "; ".join(parts)
    if runs["scale"].iloc[0] == "paper" and set(models) <= set(samples):
        return rule(ours, *(samples[model] for model in models))
    if not show_all:
        runs = runs[runs["model.name"].isin(samples)]
    return evidence.out_of_reach(ours, runs, f"{join(map(style.model, models))} at paper scale")


def diverges(records: Evidence, precision: str, studies: Sequence[str]) -> Finding:
    """Judges whether every run of the large models diverges, or loses half of bf16's accuracy."""
    runs = records.outcomes(*studies)
    part = runs[runs["precision.label"] == precision]
    if part.empty:
        raise lacking(precision, studies[0])
    base = runs[runs["precision.label"] == BF16].groupby("model.name")["accuracy"].mean()
    low = part["accuracy"] < COLLAPSED * part["model.name"].map(base)
    diverged = (part["state"] == "diverged") | low
    counts = diverged.groupby(part["model.name"]).agg(["sum", "count"])
    counts = counts.loc[sorted(counts.index, key=lambda name: style.rank(name, style.MODELS))]
    ours = "; ".join(
        f"{style.model(name)}: {row['sum']} of {row['count']} runs diverged"
        for name, row in counts.iterrows()
    )
    is_large = part["model.name"].isin(LARGE)
    if runs["scale"].iloc[0] != "paper" or not is_large.any():
        return evidence.out_of_reach(ours, runs, "ViT-L/14 or ViT-H/14 at paper scale")
    seeds = part[is_large].groupby("model.name")["seed"].nunique().min()
    holds = evidence.all_or_none(diverged[is_large])
    return decide(ours, holds, seeds, runs, "some diverged, others did not")


def fix(records: Evidence, change: str, helps: bool) -> Finding:
    """Judges one change to fp8 tensor-wise training by whether it then trains like bf16."""
    runs = records.outcomes("fp8_fixes")
    is_fp8 = runs["precision.label"] == "fp8_tensorwise"
    clips = runs["optimizer.name"] == "adamw_clip"
    changes = runs["intervention.name"].where(~clips, "gradient clipping")
    arm = pd.Series(BF16, runs.index).where(~is_fp8, changes.replace("none", "plain"))
    names = (BF16, "plain", change)
    same = comparison.signature(runs, "precision.label", "optimizer.name", "intervention.name")
    shared = set.intersection(*(set(same[arm == name]) for name in names))
    if not shared:
        raise lacking(f"{join(names)} with equal settings and seed", "fp8_fixes")
    arms = {name: runs[(arm == name) & same.isin(shared)] for name in names}
    seeds = arms[BF16]["seed"].nunique()
    trains = {name: _trains(group, arms[BF16]) for name, group in arms.items()}
    ours = "; ".join(f"{name}: {_ends(group)}" for name, group in arms.items())
    if trains["plain"] and seeds > 1:
        return evidence.out_of_reach(ours, runs, "fp8 that fails without a change; here it trains")
    trains[BF16] = trains[BF16] or None  # a baseline that fails decides nothing
    unknown = [name for name in names if trains[name] is None]
    holds = None if unknown else trains[change] == helps
    why = f"{', '.join(unknown)}: seeds differ by more than the margin, or diverge"
    return decide(f"{ours} ({seeds} seeds)", holds, seeds, runs, why)


def features(records: Evidence, stopped: bool) -> Finding:
    """Judges whether E[abs(x_k)] grows with depth and training, or layer-scale stops that."""
    study = "feature_magnitude"
    try:
        runs = records.runs(study)
    except NoRunsError:
        if stopped:
            raise
        runs = records.runs("update_clipping", "loss_curves")
    frame = figures.load(study).query(runs)
    growth = {kind: _growth(part) for kind, part in frame.groupby("intervention")}
    kinds = ("none", "zero_init") if stopped else ("none",)
    if not set(kinds) <= set(growth):
        raise lacking(f"block statistics with intervention={' and '.join(kinds)}", study)
    ours = "; ".join(_growth_in_words(kind, growth[kind]) for kind in kinds)
    part = frame[frame["intervention"].isin(kinds)]
    seeds = part.groupby(["intervention", "model"])["seed"].nunique().min()
    if stopped:
        holds = bool(growth["zero_init"]["depth"].max() < growth["none"]["depth"].min())
        return decide(ours, holds, seeds, runs.runs)
    grows = (growth["none"] > 1).all(axis=1)
    ours += f", both above 1 in {grows.sum()}"
    holds = evidence.all_or_none(grows)
    return decide(ours, holds, seeds, runs.runs, "both ratios in some runs, not in all")


def noise(records: Evidence) -> Finding:
    """Judges whether the variance of a quantized dot product grows with its inner dimension."""
    lines = records.lines("quantization_variance")
    slopes = {
        case: np.polyfit(np.log(part["inner_dim"]), np.log(part["measured"]), 1)[0]
        for case, part in lines.groupby("case")
    }
    first, last = lines["inner_dim"].min(), lines["inner_dim"].max()
    ours = "; ".join(f"{case}: K^{slope:.3f}" for case, slope in slopes.items())
    ours += f" (K from {first:,} to {last:,})"
    return Finding(ours, at_scale(min(slopes.values()) >= 1 - SLOPE))


def end_to_end(records: Evidence, baseline: str, case: str) -> Finding:
    """Judges the least time saved for ViT-H/14 over all shapes; for LLM.int8() the largest."""
    frame = figures.load("end_to_end_speed").query(records.lines("model", H14_KEYS))
    frame = frame[(frame["model"] == H14) & (frame["baseline"] == baseline)]
    mine = frame[frame["series"] == case]
    if mine.empty:
        makes = f"python -m experiments.benchmarks model {H14_KEYS}"
        raise NoRunsError(f"{case} and {baseline} on {H14}: {makes}")
    ours = "; ".join(f"{row.value:.1f}% ({row.shape})" for row in mine.itertuples())
    ours += f", {bench.devices(frame)}, one measurement each"
    if case == "llm_int8":
        return Finding(ours, at_scale(mine["value"].max() <= NO_GAIN))
    high = frame[frame["series"] == "high"].set_index("shape")["value"]
    saved = [f"{value:.1f}%" for value in high.reindex(mine["shape"]).dropna()]
    is_standard = baseline == "open_clip" and saved
    why = f"our model in 16 bit saves {join(saved)} of it already" if is_standard else ""
    return Finding(ours, at_scale(mine["value"].min() >= paper.END_TO_END[0]), why)


def quantize_share(records: Evidence) -> Finding:
    """Judges whether quantizing is a small share of a layer's time, and smaller with dim."""
    frame = figures.load("quantize_share").query(records.lines("ops"))
    mine = frame[(frame["source"] != paper.SOURCE) & frame["dim"].isin(paper.DIMS)]
    mine = mine[mine["series"] == "int8"].sort_values("dim")
    if mine.empty:
        raise NoRunsError("python -m experiments.benchmarks ops")
    ours, holds = [], True
    for tokens, line in mine.groupby("tokens"):
        shares, dims = line["value"], line["dim"]
        ours.append(
            f"{shares.iloc[0]:.1f}% at {dims.iloc[0]:,} to {shares.iloc[-1]:.1f}% at "
            f"{dims.iloc[-1]:,} ({tokens:,} tokens)"
        )
        holds &= shares.max() <= paper.LARGEST_SHARE + ABOUT and shares.is_monotonic_decreasing
    return Finding(f"{'; '.join(ours)}, {bench.devices(frame)}", at_scale(bool(holds)))


def spike_trend(
    records: Evidence,
    varied: str,
    studies: Sequence[str],
    optimizers: Sequence[str] = ("adamw",),
    least_beta2: float = 0.0,
    gone: bool = False,
) -> Finding:
    """Judges whether loss spikes grow in number with a setting, or are gone at its first value.

    Values are ordered from small to large, optimizers as in the style.
    """
    counts = records.spikes(*studies)
    counts = counts[counts["optimizer.name"].isin(optimizers)]
    counts = comparison.comparable(counts[counts["optimizer.beta2"] >= least_beta2], varied)
    table = PRINTED.get(varied, {})
    values = sorted(counts[varied].unique(), key=lambda v: style.rank(v, table) if table else v)
    if len(values) < 2:
        raise lacking(f"two values of {varied}, all else equal", studies[0])
    means = [counts.loc[counts[varied] == value, SPIKES].mean() for value in values]
    names = [table[v] if v in table else f"{comparison.short(varied)} {v:g}" for v in values]
    sample = evidence.difference(counts, varied, values[-1], values[0], SPIKES)
    ours = "; ".join(f"{name}: {mean:g}" for name, mean in zip(names, means, strict=True))
    ours = f"loss spikes per run: {ours}; last minus first {sample} ({_runs(counts)})"
    if not max(means[1:] if gone else means):
        return Finding(ours, UNDECIDED, "none at any other value either" if gone else "no spikes")
    if gone:
        unless = "fewer, not none" if means[0] else ""
    else:
        unless = "fewer at some larger value" if (np.diff(means) < 0).any() else ""
    return evidence.larger(ours, sample, counts, unless)


def follow(records: Evidence, studies: Sequence[str]) -> Finding:
    """Judges the share of AdamW's loss spikes that follow an RMS spike of the patch embedding."""
    counts = records.spikes(*studies)
    counts = counts[(counts["optimizer.name"] == "adamw") & counts["has_rms"]]
    if counts.empty:
        raise lacking("AdamW with RMS_t of the patch embedding", studies[0])
    total, num = int(counts[SPIKES].sum()), int(counts["num_following"].sum())
    if not total:
        return Finding(f"no loss spike in {_runs(counts)}", UNDECIDED, "nothing spiked")
    spiked = counts[counts[SPIKES] > 0]
    chance = np.average(spiked["chance"], weights=spiked[SPIKES])
    low, high = evidence.share_interval(num, total)
    ours = (
        f"{num} of {total} follow ({num / total:.0%} [{low:.0%}, {high:.0%}] of spikes), by chance "
        f"{chance:.1%} ({_runs(counts)})"
    )
    least = max(SURE, chance)
    holds = True if num / total >= SHARE and low >= least else False if high < SHARE else None
    why = f"the interval contains {least if low < least else SHARE:.0%}"
    return decide(ours, holds, spiked["seed"].nunique(), counts, why)


def scale_falls(records: Evidence) -> Finding:
    """Judges whether a dynamic loss scale falls at loss spikes more often than anywhere else."""
    runs, steps = _scaled(records, "dynamic")
    num_spikes, falls = int(steps["spike"].sum()), steps[steps["falls"]]
    if not num_spikes:
        return Finding(f"no loss spike in {_runs(runs)}", UNDECIDED, "nothing spiked")
    seeds = steps.loc[steps["spike"], "seed"].nunique()
    if falls.empty:
        ours = f"{num_spikes} loss spikes, the scale never falls ({_runs(runs)})"
        return decide(ours, False, seeds, runs)
    num, total = int(falls["near"].sum()), len(falls)
    chance = falls["run"].map(steps.groupby("run")["near"].mean()).mean()
    low, high = evidence.share_interval(num, total)
    ours = (
        f"{num} of {total} falls of the scale are at one of {num_spikes} loss spikes "
        f"({num / total:.0%} [{low:.0%}, {high:.0%}]), by chance {chance:.1%} ({_runs(runs)})"
    )
    holds = evidence.above(low, high, chance)
    return decide(ours, holds, seeds, runs, "the interval contains chance")


def tensor_skips(records: Evidence) -> Finding:
    """Judges whether runs with a fixed scale reach their end by skipping single tensors."""
    runs, steps = _scaled(records, "fixed")
    num_ended, num_spikes = int((runs["state"] == "finished").sum()), int(steps["spike"].sum())
    skipping = steps[steps["skipped"] > 0]
    is_single = skipping["skipped"] < skipping["tensors"]
    ours = (
        f"{num_ended} of {len(runs)} runs reach their end; {num_spikes} loss spikes; in "
        f"{len(skipping)} steps a tensor is skipped, in {int(is_single.sum())} of them not all, "
        f"{int(skipping['near'].sum())} at a loss spike ({_runs(runs)})"
    )
    if num_ended < len(runs):
        return decide(ours, False, runs["seed"].nunique(), runs)
    if not num_spikes or skipping.empty:
        return Finding(ours, UNDECIDED, "no loss spike, or nothing was skipped")
    holds = True if is_single.any() else None
    return decide(ours, holds, skipping["seed"].nunique(), runs, "no single tensor skipped")


def schedules(records: Evidence) -> Finding:
    """Lists the final losses by schedule of beta2; the paper gives no number to compare with."""
    runs = records.outcomes("beta2_schedule")
    means = runs.groupby("optimizer.beta2_decay", dropna=False)["loss"].mean()
    named = {f"1 - t^-{k:g}" if k == k else "constant": mean for k, mean in means.items()}
    ours = "; ".join(f"{name}: last loss {loss:.3g}" for name, loss in named.items())
    return Finding(f"{ours} ({_runs(runs)})", UNDECIDED, "the paper gives no number to compare")


def _runs(runs: pd.DataFrame) -> str:
    seeds = runs["seed"].nunique()
    return f"{len(runs)} runs, {'one seed' if seeds == 1 else f'{seeds} seeds'}"


def _trains(group: pd.DataFrame, base: pd.DataFrame) -> bool | None:
    """Whether the interval of the last loss lies within the margin over bf16's; None: neither."""
    diverged = group["state"] == "diverged"
    if diverged.any():
        return False if diverged.all() else None
    losses, bases = (part.groupby("seed")["loss"].mean() for part in (group, base))
    excess = Sample.of(losses / bases - 1)
    return True if excess.high <= TRAINS else False if excess.low > TRAINS else None


def _ends(group: pd.DataFrame) -> str:
    num = int((group["state"] == "diverged").sum())
    return f"{num} of {len(group)} diverged" if num else f"last loss {group['loss'].mean():.3g}"


def _growth(frame: pd.DataFrame) -> pd.DataFrame:
    """By run: `depth`, last block over first at the end; `training`, last block, end over start."""
    rows = {}
    for name, run in frame.groupby("run"):
        values = run.set_index(["at", "block"])["feature_mean"]
        first, last = run["block"].min(), run["block"].max()
        depth = values["last", last] / values["last", first]
        rows[name] = {"depth": depth, "training": values["last", last] / values["first", last]}
    return pd.DataFrame.from_dict(rows, orient="index")


def _growth_in_words(kind: str, growth: pd.DataFrame) -> str:
    low, middle, high = growth.min(), growth.median(), growth.max()
    ranges = {k: f"{middle[k]:.3g} [{low[k]:.3g} to {high[k]:.3g}]" for k in growth}
    return (
        f"{style.INTERVENTIONS[kind][0]}: {ranges['depth']} times from first to last block, last "
        f"block {ranges['training']} times from first to last record (median of {len(growth)} runs)"
    )


def _scaled(records: Evidence, kind: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`Runs.runs` with a loss scaler, and a row for each of their steps after the ignored ones.

    Columns: run, seed, `spike` (a loss spike begins), `near` (at most the protocol's `within` steps
    from one), `falls` (the scale does, those `within` steps after another left out), `skipped`
    tensors, and the number of `tensors` recorded.
    """
    runs = records.runs("loss_scaler")
    runs = Runs(runs.runs[runs.runs["scaler.name"] == kind])
    if not len(runs):
        raise lacking(f"scaler={kind}", "loss_scaler")
    frames = []
    for head in runs.runs.to_dict("records"):
        protocol = spike_marks.protocol_of_run(head)
        alone = runs.only(head["run"])
        series = spike_marks.read_series(alone, head["run"])
        metrics = alone.metrics.set_index("step").reindex(range(1, len(series.loss) + 1))
        metrics = metrics.reindex(columns=["loss_scale", "skipped_tensors"]).astype(float)
        spikes = loss_spikes(series.loss, protocol)
        near = pd.Series(spikes).rolling(2 * protocol.within + 1, center=True, min_periods=1).max()
        at = np.flatnonzero(metrics["loss_scale"].ffill().diff() < 0)
        falls = np.zeros(len(spikes), dtype=bool)
        falls[at[np.diff(at, prepend=-np.inf) > protocol.within]] = True
        columns = {"spike": spikes, "near": near.to_numpy() > 0, "falls": falls}
        columns["skipped"] = metrics["skipped_tensors"].fillna(0).to_numpy()
        facts = {"run": head["run"], "seed": head["seed"], "tensors": series.rms.shape[1]}
        frames.append(pd.DataFrame(columns).assign(**facts).iloc[protocol.ignore_steps :])
    return runs.runs, pd.concat(frames, ignore_index=True)
