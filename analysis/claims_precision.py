"""Claims C1 to C4 of the paper, on accuracy in low precision, judged by runs."""

import math

import pandas as pd

from analysis import paper, style
from analysis.evidence import Evidence, Sample, lacking, outcomes, paired, sample
from analysis.verdicts import PAPERS, Claim, Finding, decide, equal, larger, out_of_reach

STUDY = "accuracy_vs_size"
MODEL, LARGE = "vit_h14", ("vit_l14", "vit_h14")
MATCHES = 0.1  # points of accuracy: the paper's own margin for int8
TRAINS = 0.05  # of the loss of bf16
FIXED = ("model.name", "data.digest", "num_steps", "batch_size", "optimizer.lr", "seed")
COLLAPSED = 0.5  # of bf16's accuracy: less counts as diverged


def _accuracy(evidence: Evidence) -> pd.DataFrame:
    runs = outcomes(evidence.runs(STUDY, "loss_curves"))
    if runs["accuracy"].isna().all():
        raise lacking("runs with evaluation=zero_shot", STUDY)
    return runs


def _versus(precision: str, judge, base: str = "bf16", study: str = STUDY):
    """Judges the accuracy of one precision minus another's, of ViT-H/14 or of what there is."""

    def finding(evidence: Evidence) -> Finding:
        runs = _accuracy(evidence)
        found = paired(runs, "precision.label", precision, base, "accuracy")
        if not found:
            raise lacking(f"{precision} and {base} with equal settings and seed", study)
        ours = "; ".join(f"{style.MODELS.get(m, m)} {s.text()}" for m, s in _by_size(found))
        if runs["scale"].iloc[0] != "paper" or MODEL not in found:
            return out_of_reach(
                ours, runs[runs["model.name"].isin(found)], "ViT-H/14 at paper scale"
            )
        return judge(ours, found[MODEL])

    return finding


def _by_size(found: dict[str, Sample]) -> list[tuple[str, Sample]]:
    return sorted(found.items(), key=lambda pair: style.rank(pair[0], style.MODELS))


def _more_at_larger(evidence: Evidence) -> Finding:
    runs = _accuracy(evidence)
    found = _by_size(paired(runs, "precision.label", "llm_int8", "bf16", "accuracy"))
    if not found:
        raise lacking("llm_int8 and bf16 with equal settings and seed", STUDY)
    ours = "; ".join(f"{style.MODELS.get(m, m)} {s.text()}" for m, s in found)
    models = [model for model, _ in found]
    if runs["scale"].iloc[0] != "paper" or not {"vit_b32", MODEL} <= set(models):
        return out_of_reach(ours, runs, "ViT-B/32 and ViT-H/14 at paper scale")
    small, large = dict(found)["vit_b32"], dict(found)[MODEL]
    return larger(ours, _minus(small, large))


def _minus(one: Sample, other: Sample) -> Sample:
    """The difference of two means of independent seeds."""
    half = math.hypot(one.high - one.mean, other.high - other.mean)
    mean = one.mean - other.mean
    return Sample(mean, mean - half, mean + half, min(one.num, other.num))


def _diverges(evidence: Evidence) -> Finding:
    runs = _accuracy(evidence)
    fp8 = runs[runs["precision.label"] == "fp8_tensorwise"]
    if fp8.empty:
        raise lacking("fp8_tensorwise", STUDY)
    base = runs[runs["precision.label"] == "bf16"].groupby("model.name")["accuracy"].mean()
    low = fp8["accuracy"] < COLLAPSED * fp8["model.name"].map(base)
    diverged = (fp8["state"] == "diverged") | low
    parts = diverged.groupby(fp8["model.name"]).agg(["sum", "count"])
    order = sorted(parts.index, key=lambda name: style.rank(name, style.MODELS))
    ours = "; ".join(
        f"{style.MODELS.get(m, m)}: {parts['sum'][m]} of {parts['count'][m]} runs diverged"
        for m in order
    )
    large = [model for model in order if model in LARGE]
    if runs["scale"].iloc[0] != "paper" or not large:
        return out_of_reach(ours, runs, "ViT-L/14 or ViT-H/14 at paper scale")
    is_large = fp8["model.name"].isin(large)
    seeds = fp8[is_large].groupby("model.name")["seed"].nunique().min()
    holds = True if diverged[is_large].all() else None if diverged[is_large].any() else False
    return decide(ours, holds, seeds, runs, "some diverged, some did not")


def _fixes(wanted: str, helps: bool):
    """Judges one change to fp8 tensor-wise training by whether it trains as bf16 does."""

    def finding(evidence: Evidence) -> Finding:
        runs = outcomes(evidence.runs("fp8_fixes"))
        is_fp8 = runs["precision.label"] == "fp8_tensorwise"
        change = runs["intervention.name"].where(
            runs["optimizer.name"] != "adamw_clip", "gradient clipping"
        )
        groups = {
            "bf16": runs[~is_fp8],
            "plain": runs[is_fp8 & (change == "none")],
            "changed": runs[is_fp8 & (change == wanted)],
        }
        empty = [name for name, group in groups.items() if group.empty]
        if empty:
            raise lacking(wanted if empty == ["changed"] else ", ".join(empty), "fp8_fixes")
        groups = _of_equal_settings(groups)
        seeds = groups["bf16"].groupby(list(FIXED[:-1]))["seed"].nunique().min()
        trains = {name: _trains(group, groups["bf16"]) for name, group in groups.items()}
        ours = "; ".join(f"{name if name != 'changed' else wanted}: {_ends(group)}"
                         for name, group in groups.items())  # fmt: skip
        if trains["plain"] and seeds > 1:
            return out_of_reach(ours, runs, "fp8 that fails without a change; here it trains")
        trains["bf16"] = trains["bf16"] or None  # where it fails nothing can be held beside it
        unknown = [name for name in groups if trains[name] is None]
        holds = None if unknown else trains["changed"] == helps
        why = f"{', '.join(unknown)}: seeds differ by more than the margin, or diverge"
        return decide(f"{ours} ({seeds} seeds)", holds, seeds, runs, why)

    return finding


def _of_equal_settings(groups: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Of each group the runs whose model, data, length and seed are there in all groups."""
    keys = {name: group[list(FIXED)].apply(tuple, axis=1) for name, group in groups.items()}
    shared = set.intersection(*map(set, keys.values()))
    if not shared:
        raise lacking("bf16, plain and changed fp8 of equal settings and seed", "fp8_fixes")
    return {name: group[keys[name].isin(shared)] for name, group in groups.items()}


def _trains(group: pd.DataFrame, base: pd.DataFrame) -> bool | None:
    """Whether the interval of the last loss lies within the margin over bf16's; None: neither."""
    diverged = group["state"] == "diverged"
    if diverged.any():
        return False if diverged.all() else None
    ends = [part.groupby("seed")["loss"].mean() for part in (group, base)]
    excess = sample(ends[0] / ends[1] - 1)
    return True if excess.high <= TRAINS else False if excess.low > TRAINS else None


def _ends(group: pd.DataFrame) -> str:
    num = int((group["state"] == "diverged").sum())
    return f"{num} of {len(group)} diverged" if num else f"last loss {group['loss'].mean():.3g}"


def _papers(precision: str) -> str:
    """The paper's accuracy of a precision minus bf16's, by model."""
    parts = []
    for model, value in paper.ACCURACY_BY_SIZE[precision].items():
        base = paper.ACCURACY_BY_SIZE["bf16"][model]
        shown = "diverged" if value is None else f"{value - base:+.1f}"
        parts.append(f"{style.MODELS[model]} {shown}")
    return "; ".join(parts) + " (read from draft plots, +-0.2)"


_H = {name: values[MODEL] for name, values in paper.ACCURACY_BY_SIZE.items()}
CLAIMS = (
    Claim("C1", "SwitchBack int8 matches bf16's zero-shot accuracy, ViT-H/14",
          f"within {MATCHES:g} point; {_papers('switchback')}", f"+-{MATCHES:g} point",
          _versus("switchback", lambda ours, s: equal(ours, s, MATCHES)), PAPERS),
    Claim("C1", "SwitchBack int8 beats LLM.int8() training, ViT-H/14",
          f"{_H['switchback'] - _H['llm_int8']:+.1f} points (read from draft plots, +-0.2)",
          "interval above 0", _versus("switchback", larger, "llm_int8")),
    Claim("C2", "LLM.int8() training loses accuracy, more at larger models", _papers("llm_int8"),
          "interval of B's difference minus H's above 0", _more_at_larger),
    Claim("C3", "fp8 tensor-wise diverges for large models", _papers("fp8_tensorwise"),
          "every run of L and H, two seeds", _diverges),
    Claim("C3", "SwitchBack fp8 matches bf16's accuracy, ViT-H/14", "about equal",
          f"+-{MATCHES:g} point", _versus("fp8_switchback", lambda o, s: equal(o, s, MATCHES),
                                          study="loss_curves")),  # whose mini has it, too
    Claim("C4", "fp8 tensor-wise trains with zero-init layer-scale", "ViT-L/14 trains as bf16",
          f"interval of the last loss at most {TRAINS:.0%} over bf16's",
          _fixes("zero_init", helps=True)),
    Claim("C4", "gradient clipping does not rescue it", "ViT-L/14 diverges",
          "as above", _fixes("gradient clipping", helps=False)),
    Claim("C4", "KQ layer norm does not rescue it", "ViT-L/14 diverges",
          "as above", _fixes("kq_norm", helps=False)),
)  # fmt: skip
