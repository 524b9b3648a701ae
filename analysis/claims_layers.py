"""Claims C5 to C8 of the paper, on features, noise and speed, judged by runs and benchmarks."""

import numpy as np
import pandas as pd

from analysis import bench, paper, style
from analysis.curves import join
from analysis.evidence import Evidence, lacking
from analysis.figures import end_to_end_speed, feature_magnitude, quantize_share
from analysis.load import NoRunsError
from analysis.verdicts import Claim, Finding, at_scale, decide

MODEL = "vit_h14"
H14 = (  # the keys with which bench_model measures the paper's case
    f"model={MODEL} model.patch_dropout=0.5 batch_size=256 compile=true checkpointing=true"
)
SLOPE = 0.05  # of the exponent of the inner dimension
NO_GAIN = 2.0  # % of time: less is no speed-up
ABOUT = 2.0  # points of a share that the paper gives as "about"


def _features(stopped: bool):
    """Judges E[abs(x_k)]: it grows with depth and training; zero-init layer-scale stops it."""

    def finding(evidence: Evidence) -> Finding:
        name = "feature_magnitude"
        try:
            runs = evidence.runs(name, needed="mini")
        except NoRunsError:
            if stopped:
                raise
            runs = evidence.runs("update_clipping", "loss_curves", needed="mini")
        frame = feature_magnitude.query(runs)
        if frame.empty:
            raise lacking("block statistics", name, "mini")
        growth = {kind: _growth(part) for kind, part in frame.groupby("intervention")}
        kinds = ("none", "zero_init") if stopped else ("none",)
        absent = sorted(set(kinds) - set(growth))
        if absent:
            raise lacking(f"intervention={' and '.join(absent)}", name, "mini")
        ours = "; ".join(_in_words(kind, growth[kind]) for kind in kinds)
        shown = frame[frame["intervention"].isin(kinds)]
        seeds = shown.groupby(["intervention", "model"])["seed"].nunique().min()
        if stopped:
            holds = bool(growth["zero_init"]["depth"].max() < growth["none"]["depth"].min())
            return decide(ours, holds, seeds, runs.runs)
        grows = (growth["none"] > 1).all(axis=1)
        ours += f", both above 1 in {grows.sum()}"
        holds = True if grows.all() else None if grows.any() else False
        return decide(ours, holds, seeds, runs.runs, "both ratios in some runs, not in all")

    return finding


def _growth(frame: pd.DataFrame) -> pd.DataFrame:
    """By run: `depth`, last block over first at the end; `training`, last block, end over start."""
    rows = {}
    for name, run in frame.groupby("run"):
        values = run.set_index(["at", "block"])["feature_mean"]
        first, last = run["block"].min(), run["block"].max()
        end = values["last", last]
        rows[name] = {
            "depth": end / values["last", first],
            "training": end / values["first", last],
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def _in_words(kind: str, growth: pd.DataFrame) -> str:
    low, middle, high = growth.min(), growth.median(), growth.max()
    ranges = {k: f"{middle[k]:.3g} [{low[k]:.3g} to {high[k]:.3g}]" for k in growth}
    return (
        f"{style.INTERVENTIONS[kind][0]}: {ranges['depth']} times from first to last block, last "
        f"block {ranges['training']} times from first to last record (median of {len(growth)} runs)"
    )


def _variance(evidence: Evidence) -> Finding:
    lines = evidence.lines("quantization_variance")
    slopes = {
        case: np.polyfit(np.log(part["inner_dim"]), np.log(part["measured"]), 1)[0]
        for case, part in lines.groupby("case")
    }
    first, last = lines["inner_dim"].min(), lines["inner_dim"].max()
    ours = "; ".join(f"{case}: K^{slope:.3f}" for case, slope in slopes.items())
    holds = min(slopes.values()) >= 1 - SLOPE
    return Finding(f"{ours} (K from {first:,} to {last:,})", at_scale(holds))


def _end_to_end(baseline: str, case: str):
    """Judges the least time that a case saves of ViT-H/14 over all shapes measured.

    Where the claim is that it saves none: the largest.
    """

    def finding(evidence: Evidence) -> Finding:
        frame = end_to_end_speed.query(evidence.lines("model", H14))
        frame = frame[(frame["model"] == MODEL) & (frame["baseline"] == baseline)]
        mine = frame[frame["series"] == case]
        if mine.empty:
            makes = f"python -m experiments.benchmarks.model {H14}"
            raise NoRunsError(f"{case} and {baseline} on {MODEL}: {makes}")
        ours = "; ".join(f"{row.value:.1f}% ({row.shape})" for row in mine.itertuples())
        ours += f", {bench.devices(frame)}, one measurement each"
        if case == "llm_int8":
            return Finding(ours, at_scale(mine["value"].max() <= NO_GAIN))
        holds = mine["value"].min() >= paper.END_TO_END[0]
        if baseline != "open_clip":
            return Finding(ours, at_scale(holds))
        high = frame[frame["series"] == "high"].set_index("shape")["value"]
        high = high.reindex(mine["shape"]).dropna()
        saved = [f"{value:.1f}%" for value in high]
        why = f"our model in 16 bit saves {join(saved)} of it already" if saved else ""
        return Finding(ours, at_scale(holds), why)

    return finding


def _share(evidence: Evidence) -> Finding:
    frame = quantize_share.query(evidence.lines("ops"))
    mine = frame[(frame["source"] != paper.SOURCE) & frame["dim"].isin(paper.DIMS)]
    mine = mine[mine["series"] == "int8"].sort_values("dim")
    if mine.empty:
        raise NoRunsError("python -m experiments.benchmarks.ops")
    ours, holds = [], True
    for tokens, line in mine.groupby("tokens"):
        shares = line["value"].to_list()
        ours.append(f"{shares[0]:.1f}% at {line['dim'].iloc[0]:,} to {shares[-1]:.1f}% at "
                    f"{line['dim'].iloc[-1]:,} ({tokens:,} tokens)")  # fmt: skip
        holds &= max(shares) <= paper.LARGEST_SHARE + ABOUT
        holds &= all(a >= b for a, b in zip(shares, shares[1:], strict=False))
    return Finding(f"{'; '.join(ours)}, {bench.devices(frame)}", at_scale(bool(holds)))


_LOW, _HIGH = paper.END_TO_END
_WINDOW = f"saves {_LOW:g} to {_HIGH:g}% (A100, fp16)"
CLAIMS = (
    Claim("C5", "E[abs(x_k)] grows with depth and training", "no number",
          "both ratios above 1 in every run, two seeds", _features(stopped=False)),
    Claim("C5", "zero-init layer-scale stops that", "no number",
          "less growth with depth than in any run without, two seeds", _features(stopped=True)),
    Claim("C6", "quantization noise of a dot product grows with its inner dimension K",
          "variance in proportion to K",
          f"exponent 1 or more, less {SLOPE:g}", _variance),
    Claim("C7", "SwitchBack is faster end to end, ViT-H/14, over a standard model", _WINDOW,
          f"{_LOW:g}% or more at every shape", _end_to_end("open_clip", "switchback")),
    Claim("C7", "the same over linear layers as an autograd function (algorithm 5)", _WINDOW,
          f"{_LOW:g}% or more at every shape", _end_to_end("autograd_high", "switchback")),
    Claim("C7", "quantize operations are a small share of the layer, smaller with dim",
          f"less than about {paper.LARGEST_SHARE:g}%",
          f"at most {paper.LARGEST_SHARE + ABOUT:g}%, falling", _share),
    Claim("C8", "LLM.int8() gives no speed-up, ViT-H/14", "none",
          f"at most {NO_GAIN:g}% over algorithm 5", _end_to_end("autograd_high", "llm_int8")),
)  # fmt: skip
