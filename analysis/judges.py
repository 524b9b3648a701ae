"""Judges each kind of claim: functions that map the evidence and a few settings to a finding.

If there is no evidence, a judge raises NoRunsError, which names what is missing and the commands
that make it. Times are compared as the share of time saved, as in the paper: a run that saves 10%
is 1 / 0.9 = 1.11 times as fast.
"""

import contextlib
import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis import bench, evidence, measures, naming, paper
from analysis.comparison import counted
from analysis.evidence import UNDECIDED, Evidence, Finding, Sample
from analysis.load import NoRunsError

H14 = paper.ACCURACY_MODEL
H14_KEYS = "model=vit_h14 model.patch_dropout=0.5 batch_size=256 compile=true checkpointing=true"
H14_WIDTH, BF16, RECIPE = 1280, "bf16", "precision.label"
OF_GROWTH = "less growth in absolute terms, not as a ratio, which is one of small numbers"


def higher(
    records: Evidence,
    varied: str,
    one: object,
    other: object,
    studies: Sequence[str],
    only: dict | None = None,
    by_size: bool = False,
) -> Finding:
    """Judges whether the mean R@1 with `varied` at `one` is above that at `other`, by seed.

    The largest model is judged. `only` maps columns to the values that runs must have. `by_size`
    judges the difference for the largest model minus that for the smallest.
    """
    pairs = records.differences(varied, one, other, "recall", studies, only)
    *_, largest = pairs.values()
    if not by_size:
        return records.larger(_of_models(pairs), largest)
    if len(pairs) < 2:
        raise records.lacking(f"{one} and {other} of two sizes", studies)
    growth = (largest - next(iter(pairs.values()))).dropna()
    ours = f"{_of_models(pairs)}; largest minus smallest {Sample.of(growth)}"
    return records.larger(ours, growth)


def same(
    records: Evidence, varied: str, one: object, other: object, studies: Sequence[str],
    planned: str = "",
) -> Finding:  # fmt: skip
    """Judges whether the mean R@1 with `varied` at both values is equal, in the largest model.

    The validation loss, relative to that at `other`, is given but not judged. `planned` is a study
    that takes the place of `studies` once all of its runs with these values have ended.
    """
    if planned:
        with contextlib.suppress(NoRunsError):
            records.need_all(planned, varied, (one, other))
            studies = (planned,)
    pairs = records.differences(varied, one, other, "recall", studies)
    logs = records.differences(varied, one, other, "log_loss", studies)
    *_, model = pairs
    of_losses = {
        name: Sample.of(100 * np.expm1(values[np.isfinite(values)]), evidence.TWO_ONE_SIDED)
        for name, values in logs.items()
    }
    of_largest = of_losses.pop(model, None)
    ours = _of_models(pairs)
    for name, of_loss in of_losses.items():
        ours += f"; {naming.model(name)}, validation loss, %, 90%: {of_loss}"
    ours += f"; 90%: {Sample.of(pairs[model], evidence.TWO_ONE_SIDED)}"
    if of_largest and of_largest.num:
        ours += f"; validation loss, %, 90%: {of_largest}"
    return records.equal(ours, pairs[model])


def costs(records: Evidence, recipe: str, study: str) -> Finding:
    """Judges whether a recipe costs R@1 compared with bf16, once a study has all runs of both.

    Seeds for which the study has both count.
    The size of features at the end, relative to that in bf16, is given but not judged.
    """
    records.need_all(study, RECIPE, (recipe, BF16))
    finding = higher(records, RECIPE, BF16, recipe, (study,))
    words = (
        f"; {naming.model(model)}, E[abs(x)] of the last vision block at the end: "
        f"{values.mean():.2f} times bf16's ({values.min():.2f} to {values.max():.2f})"
        for model, values in feature_ratios(records, recipe, (study,)).items()
    )
    return finding._replace(ours=finding.ours + "".join(words))


def feature_ratios(
    records: Evidence, recipe: str, studies: Sequence[str], step: int | None = None
) -> dict[str, pd.Series]:
    """By model and seed: E[abs(x)] of the last vision block, relative to bf16.

    At a step, or at the last one; runs that did not record it there are left out.
    """
    runs, loaded = records.outcomes(studies), records.runs(studies)
    runs = runs[runs[RECIPE].isin([recipe, BF16])]
    sizes = []
    for head in runs.to_dict("records"):
        values = measures.last_block(loaded.only(head["run"]), head["model.vision_layers"])
        sizes.append(values.get(step or head["num_steps"]))
    runs = runs.assign(log_size=np.log(np.array(sizes, float)))
    by_model = evidence.differences(runs, RECIPE, recipe, BF16, "log_size")
    return {model: np.exp(values) for model, values in by_model.items()}


def _of_models(pairs: dict[str, pd.Series]) -> str:
    words = (f"{naming.model(name)} {Sample.of(values)}" for name, values in pairs.items())
    return "; ".join(words) + " (mean R@1)"


def features(
    records: Evidence, stopped: str = "", studies: Sequence[str] = ("feature_magnitude",)
) -> Finding:
    """Judges whether E[abs(x_k)] grows with depth and training, or layer-scale stops one of them.

    `stopped`: "depth" or "training". The bf16 runs of the studies count.
    """
    runs = records.runs(studies)
    runs = runs.where(runs.summaries["precision.label"] == BF16)
    frame = measures.first_and_last_features(runs, measures.named_heads(runs)).sort_values("block")
    kinds = ("none", "zero_init") if stopped else ("none",)
    if not set(kinds) <= set(frame["intervention"]):
        raise records.lacking(f"block statistics with intervention={' and '.join(kinds)}", studies)
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
    if not stopped:
        grows = (growth[["depth", "training"]] > 1).all(axis=1)
        holds = True if grows.all() else None if grows.any() else False
        ours += f", both above 1 in {grows.sum()}"
        return records.decide(ours, holds, seeds, "both are above 1 in some runs, not in all")
    less = growth.loc["zero_init"].max() < growth.loc["none"].min()
    holds = bool(less[stopped])
    why = "less growth as a ratio, not in absolute terms" if less["depth"] else OF_GROWTH
    is_mixed = stopped == "depth" and less["by"] != less["depth"]
    return records.decide(ours, None if is_mixed else holds, seeds, why)


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
    if min(slopes.values()) < 1 - evidence.SLOPE:
        return Finding(ours, records.verdict(False), "the kernels fail a check that they must pass")
    why = "independent numbers must do so: a check of the kernels, passed, which decides nothing"
    return Finding(ours, evidence.NO_VERDICT, why)


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
        return Finding(ours, records.verdict(saved.max() <= evidence.NO_GAIN), why)
    why = "not a baseline of the paper" if baseline == "open_clip" else ""
    return Finding(ours, records.verdict(saved.min() >= paper.END_TO_END[0]), why)


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
    by_tokens = [(tokens, line) for tokens, line in mine.groupby("tokens")]
    ours = "; ".join(
        " to ".join(
            f"{row.value:.1f}% at dim {row.dim:,}" for row in line.iloc[[0, -1]].itertuples()
        )
        + f" ({tokens:,} tokens)"
        for tokens, line in by_tokens
    )
    ours += f", {bench.devices(frame)}"
    if len(wide := mine[mine["dim"] == H14_WIDTH]):
        ours += f"; {wide['value'].max():.1f}% at {H14_WIDTH:,}, the width of ViT-H/14"
    falls = all(line["value"].is_monotonic_decreasing for _, line in by_tokens)
    holds = falls and mine["value"].max() <= paper.LARGEST_TIMED_SHARE
    return Finding(ours, records.verdict(holds))
