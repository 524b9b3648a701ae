"""Judges each kind of claim: functions that map the evidence and a few settings to a finding.

If there is no evidence, a judge raises NoRunsError, which names what is missing and the commands
that make it. Times are compared as the share of time saved, as in the paper: a run that saves 10%
is 1 / 0.9 = 1.11 times as fast.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from analysis import bench, evidence, measures, naming, paper
from analysis.comparison import counted
from analysis.evidence import (
    ABOUT,
    NO_GAIN,
    NO_VERDICT,
    SLOPE,
    UNDECIDED,
    Evidence,
    Finding,
    Sample,
    at_scale,
    decide,
    lacking,
)
from analysis.load import NoRunsError

H14 = paper.ACCURACY_MODEL
H14_KEYS = "model=vit_h14 model.patch_dropout=0.5 batch_size=256 compile=true checkpointing=true"
H14_WIDTH, BF16 = 1280, "bf16"


def accuracy(
    records: Evidence,
    varied: str,
    one: object,
    other: object,
    rule: Callable[..., Finding],
    studies: Sequence[str],
    only: dict | None = None,
    by_size: bool = False,
) -> Finding:
    """Judges the mean R@1 with `varied` at `one` minus that at `other`, paired by seed.

    The largest model is judged. `only` maps columns to the values that runs must have. `by_size`
    judges the difference for the largest model minus that for the smallest. `equal` also gives the
    validation loss, relative to that at `other`.
    """
    runs = records.outcomes(studies)
    for column, value in (only or {}).items():
        runs = runs[runs[column] == value]
    compared = varied, one, other
    pairs = evidence.differences(runs, *compared, "recall")
    sizes = list(pairs)
    if len(sizes) < 1 + by_size:
        what = f"{one} and {other} with equal settings, equal seeds and an evaluation"
        raise lacking(what + (", two sizes" if by_size else ""), studies)
    ours = "; ".join(f"{naming.model(name)} {Sample.of(values)}" for name, values in pairs.items())
    ours += " (mean R@1)"
    largest = pairs[sizes[-1]]
    if rule is evidence.equal:
        logs = evidence.differences(runs, *compared, "log_loss")  # given, not judged
        changes = {name: 100 * np.expm1(log[np.isfinite(log)]) for name, log in logs.items()}
        change = changes.pop(sizes[-1], None)
        for name, losses in changes.items():
            of_loss = Sample.of(losses, evidence.TWO_ONE_SIDED)
            ours += f"; {naming.model(name)}, validation loss, %, 90%: {of_loss}"
        return rule(ours, largest, runs, change)
    if not by_size:
        return rule(ours, largest, runs)
    growth = (largest - pairs[sizes[0]]).dropna()
    return rule(f"{ours}; largest minus smallest {Sample.of(growth)}", growth, runs)


def features(
    records: Evidence,
    stopped: str = "",
    study: str = "feature_magnitude",
    scale: str = evidence.SCALE,
) -> Finding:
    """Judges whether E[abs(x_k)] grows with depth and training, or layer-scale stops one of them.

    `stopped`: "depth" or "training". The bf16 runs of the study count.
    """
    runs = records.runs((study,), scale)
    runs = runs.where(runs.summaries["precision.label"] == BF16)
    frame = measures.first_and_last_features(runs, measures.named_heads(runs)).sort_values("block")
    kinds = ("none", "zero_init") if stopped else ("none",)
    if not set(kinds) <= set(frame["intervention"]):
        raise lacking(f"block statistics with intervention={' and '.join(kinds)}", (study,), scale)
    by_run = frame.groupby(["intervention", "model", "seed", "run", "at"])["feature_mean"]
    blocks = by_run.agg(first_block="first", last_block="last").unstack("at")
    first, last = blocks["first_block", "last"], blocks["last_block", "last"]
    growth = pd.DataFrame({"depth": last / first, "by": last - first})
    growth["training"] = last / blocks["last_block", "first"]
    growth = growth.loc[list(kinds)]
    ours = "; ".join(
        f"{naming.INTERVENTIONS[kind][0]}: {part['depth'].median():.3g} times as large in the last "
        f"block as in the first ({part['by'].median():+.3g}), in the last block "
        f"{part['training'].median():.3g} times as large at the last record as at the first "
        f"(medians of {counted(len(part), 'run')})"
        for kind, part in growth.groupby(level=0)
    )
    seeds = growth.reset_index("seed").groupby(level=[0, 1])["seed"].nunique().min()
    if stopped:
        less = growth.loc["zero_init"].max() < growth.loc["none"].min()
        holds = {bool(less[name]) for name in (stopped, *(["by"] if stopped == "depth" else []))}
        why = "less growth in absolute terms, not as a ratio, which is one of small numbers"
        if less["depth"]:
            why = "less growth as a ratio, not in absolute terms"
        earlier = at_scale(bool(less[stopped]), runs.runs)
        why += f"; by the ratio alone, the rule until 2026-11-26: {earlier}"
        return decide(ours, holds.pop() if len(holds) == 1 else None, seeds, runs.runs, why)
    grows = (growth[["depth", "training"]] > 1).all(axis=1)
    holds = True if grows.all() else None if grows.any() else False
    ours += f", both above 1 in {grows.sum()}"
    return decide(ours, holds, seeds, runs.runs, "both are above 1 in some runs, not in all")


def noise(records: Evidence) -> Finding:
    """Checks that the variance of a quantized dot product grows with its inner dimension.

    It must for independent numbers, so this confirms the kernels and decides nothing on training.
    """
    lines = records.lines("quantization_variance").dropna(subset="predicted")
    slopes = {
        case: np.polyfit(np.log(part["inner_dim"]), np.log(part["measured"]), 1)[0]
        for case, part in lines.groupby("case")
    }
    first, last = lines["inner_dim"].min(), lines["inner_dim"].max()
    ours = "; ".join(f"{case}: K^{slope:.3f}" for case, slope in slopes.items())
    ours += f" (independent random numbers, K from {first:,} to {last:,})"
    if min(slopes.values()) < 1 - SLOPE:
        return Finding(ours, at_scale(False), "the kernels fail a check that they must pass")
    why = "independent numbers must do so: a check of the kernels, passed, which decides nothing; "
    why += f"until 2026-11-26: {at_scale(True)}"
    return Finding(ours, NO_VERDICT, why)


def end_to_end(records: Evidence, baseline: str, case: str, slug: str = "model") -> Finding:
    """Judges the least time saved for ViT-H/14 over all shapes, or for LLM.int8() the most.

    Undecided if the windows of a benchmark that measures several lie on both sides of the margin.
    """
    lines = records.lines(slug, H14_KEYS)
    frame = bench.end_to_end(lines)
    of_case = (frame["series"] == case) & (frame["baseline"] == baseline)
    saved = frame[of_case & (frame["model"] == H14)].set_index(["file", "shape"])["value"]
    if saved.empty:
        makes = f"python -m experiments.benchmarks {slug} {H14_KEYS}"
        raise NoRunsError(f"{case} and {baseline} on {H14}: {makes}")
    saved = saved.sort_index().groupby("shape").tail(1).sort_index(level="shape")  # newest file
    ours = "; ".join(
        f"{percent:.1f}% of the time ({1 / (1 - percent / 100):.3f} times as fast) ({shape})"
        for (_, shape), percent in saved.items()
    )
    ours += f", {bench.devices(frame)}, one measurement each"
    if by_window := _saved_by_window(bench.with_settings(lines), saved.index, case, baseline):
        ours += f"; over its windows {min(by_window):.1f}% to {max(by_window):.1f}%"
        if min(by_window) < paper.END_TO_END[0] <= max(by_window):
            return Finding(ours, UNDECIDED, "its windows lie on both sides of the margin")
    if case == "llm_int8":
        at_case = lines[(lines["case"] == case) & lines["file"].isin(saved.index.unique("file"))]
        why = ", ".join(at_case.get("quantized", pd.Series(dtype=str)).dropna().unique())
        why = f"timed with {why} layers in 8 bits" if why else ""
        return Finding(ours, at_scale(saved.max() <= NO_GAIN), why)
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
    frame = bench.quantize_shares(records.lines("ops"))
    mine = frame[frame["dim"].isin(paper.DIMS) & (frame["series"] == "int8")].sort_values("dim")
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
    if len(wide := mine[mine["dim"] == H14_WIDTH]):
        ours += f"; {wide['value'].max():.1f}% at {H14_WIDTH:,}, the width of ViT-H/14"
    bar = paper.LARGEST_SHARE + ABOUT
    earlier = f"by the earlier bar of {bar:g}%: {at_scale(bool(holds and largest <= bar))}"
    return Finding(ours, at_scale(bool(holds and largest <= paper.LARGEST_TIMED_SHARE)), earlier)
