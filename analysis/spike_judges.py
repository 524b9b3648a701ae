"""Judges the claims about loss spikes and loss scales, as `analysis/judges.py` does the others."""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import comparison, evidence, naming, spike_marks
from analysis.comparison import counted
from analysis.evidence import HIGHEST, LARGE, SPIKES, UNDECIDED, Evidence, Finding, Sample
from analysis.load import NoRunsError
from lowprec.diagnostics.spikes import loss_spikes

TENSORS_OF_BLOCK = {"none": 12, "zero_init": 14, "kq_norm": 16}  # by intervention
TENSORS_OUTSIDE = 14  # of blocks, in a CLIP model
PRINTED_VALUES = {
    SPIKES: "loss spikes per run",
    HIGHEST: "highest loss spike of a run, in nats",
    LARGE: f"loss spikes over {spike_marks.LARGE:g} nat per run",
}


class Cause(NamedTuple):
    """A setting with which loss spikes may grow: its config key, the studies that vary it, levels.

    The levels are those that the file of the first of these studies names.
    """

    key: str
    studies: Sequence[str]
    levels: Sequence

    def counts(self, records: Evidence) -> pd.DataFrame:
        """AdamW's runs at the levels that agree in all else."""
        counts = records.spikes(self.studies)
        counts = counts[counts["optimizer.name"] == "adamw"]
        counts = counts[counts[self.key].isin(list(self.levels))]
        counts = comparison.comparable(counts, self.key)
        if counts[self.key].nunique() < 2:
            what = f"two values of {self.key} with all else equal"
            raise records.lacking(what, self.studies)
        return counts


OF_BETA2 = ("stability", "update_clipping", "rms_and_loss")
OF_BETA2 += ("spikes_vs_size", "spikes_vs_lr", "spikes_vs_batch")
CAUSES = {  # what loss spikes grow with
    "model size": Cause(
        "model.name", ("spikes_vs_size", "stability"), ("mini_b", "mini_l", "mini_h")
    ),
    "batch size": Cause("batch_size", ("spikes_vs_batch", "stability"), (256, 512, 1024)),
    "the learning rate": Cause("optimizer.lr", ("spikes_vs_lr", "stability"), (1e-3, 2e-3, 4e-3)),
    "beta2": Cause("optimizer.beta2", OF_BETA2, (0.5, 0.8, 0.9, 0.98, 0.99, 0.995, 0.999)),
}


def trend(records: Evidence, cause: str, value: str) -> Finding:
    """Judges whether loss spikes grow with a cause: Page's test over its levels, within seeds.

    Holm's correction is over those of CAUSES with two seeds at three levels or more. `value` is the
    number of spikes per run, or HIGHEST.
    """
    up, down = {}, {}
    for name, other in CAUSES.items():
        with contextlib.suppress(NoRunsError):
            counts = other.counts(records)
            by_seed = counts.pivot_table(value, "seed", other.key)
            by_seed = by_seed[_in_order(counts, other.key)].dropna()
            if min(by_seed.shape[0], by_seed.shape[1] - 1) > 1:
                up[name], down[name] = evidence.page(by_seed), evidence.page(-by_seed)
    key, counts = CAUSES[cause].key, CAUSES[cause].counts(records)
    ours, _ = _by_value(counts, key, value, _in_order(counts, key))
    if cause not in up:
        why = "one seed" if counts[key].nunique() > 2 else "a trend needs three levels"
        return Finding(f"{ours} ({_runs(counts)})", UNDECIDED, why)
    corrected, falls = evidence.holm(up)[cause], evidence.holm(down)[cause]
    of_causes = f", {corrected:.2g} by Holm for {counted(len(up), 'setting')}"
    ours += f"; Page's test p = {up[cause]:.2g}{of_causes} ({_runs(counts)})"
    holds = True if corrected < evidence.ALPHA else False if falls < evidence.ALPHA else None
    return records.decide(ours, holds, counts["seed"].nunique(), "no trend is shown")


def _in_order(counts: pd.DataFrame, varied: str) -> list:
    """The values of a setting from small to large, optimizers as in `naming.OPTIMIZERS`."""
    return sorted(counts[varied].unique(), key=naming.order(varied))


def _by_value(
    counts: pd.DataFrame, varied: str, value: str, values: Sequence
) -> tuple[str, pd.Series]:
    """Our numbers by the values of a setting in words, and the last minus the first by seed."""
    has_names = varied in naming.TABLES
    means = [counts.loc[counts[varied] == one, value].mean() for one in values]
    short = comparison.short(varied)
    names = [naming.setting(varied, v) if has_names else f"{short} {v:g}" for v in values]
    differences = evidence.difference(counts, varied, values[-1], values[0], value)
    ours = "; ".join(f"{name}: {mean:.3g}" for name, mean in zip(names, means, strict=True))
    return (
        f"{PRINTED_VALUES[value]}: {ours}; last minus first {Sample.of(differences)}",
        differences,
    )


def fewer(
    records: Evidence,
    varied: str,
    optimizers: Sequence[str] = ("adamw",),
    least_beta2: float = 0.0,
    gone: bool = False,
    value: str = SPIKES,
) -> Finding:
    """Judges whether a setting's first value has fewer spikes than its last, or (`gone`) none.

    The first of `optimizers`, or the smallest number. `value` is the number of spikes per run,
    LARGE or HIGHEST.
    """
    counts = records.spikes(OF_BETA2)
    counts = counts[counts["optimizer.name"].isin(optimizers)]
    counts = comparison.comparable(counts[counts["optimizer.beta2"] >= least_beta2], varied)
    values = [one for one in optimizers if one in set(counts[varied])] or _in_order(counts, varied)
    if len(values) < 2:
        raise records.lacking(f"two values of {varied} with all else equal", OF_BETA2)
    ours, differences = _by_value(counts, varied, value, values)
    ours += f" ({_runs(counts)})"
    by_seed = counts[counts[varied] == values[0]].groupby("seed")[value].mean()
    if not counts.loc[counts[varied] != values[0], value].any():
        return Finding(ours, UNDECIDED, "no spikes at the other values")
    if gone and Sample.of(by_seed).low > 0:
        return records.decide(f"{ours}; spikes remain", False, counts["seed"].nunique())
    unless = "fewer, but not none" if gone and by_seed.any() else ""
    return records.larger(ours, differences, unless)


def kq_norm(records: Evidence) -> Finding:
    """Judges whether the highest loss spike is lower with KQ layer norm, at each beta2.

    The runs with it are those of its study, those without it of `stability`. All but the GPU must
    agree.
    """
    varied, studies = "intervention.name", ("kq_norm", "stability")
    counts, scores = records.spikes(studies), records.outcomes(studies)
    counts = counts.assign(gpu="", recall=counts["run"].map(scores.set_index("run")["recall"]))
    pairs, by = comparison.matched(counts, varied, ("kq_norm", "none")), "optimizer.beta2"
    if set(pairs[by]) != set(counts.loc[counts["experiment"] == "kq_norm", by]):
        raise records.lacking("runs at each beta2", studies[1:])
    parts, verdicts, num = [], [], []
    for beta2, runs in pairs.groupby(by):
        sample = Sample.of(evidence.difference(runs, varied, "none", "kq_norm", HIGHEST))
        means = runs.groupby(varied)[[HIGHEST, SPIKES, LARGE, "recall"]].mean()
        means = means.loc[["kq_norm", "none"]]
        ours = (" instead of ".join(f"{mean:.3g}" for mean in means[name]) for name in means)
        highest, spikes, large, recall = ours
        parts.append(
            f"beta2 {beta2:g}: {highest} nats, lower by {sample}; loss spikes per run {spikes}, "
            f"over {spike_marks.LARGE:g} nat {large}; R@1, %, {recall}"
        )
        verdicts.append(evidence.above(sample.low, sample.high, 0.0))
        num.append(sample.num)
    holds = False if False in verdicts else None if None in verdicts else True
    ours = f"highest loss spike of a run: {'; '.join(parts)}"
    return records.decide(ours, holds, min(num), "an interval contains 0")


def follow(records: Evidence) -> Finding:
    """Judges the share of AdamW's loss spikes that follow an RMS spike of the patch embedding.

    Only runs in which RMS_t can reach the threshold count. Leads are counted from the detection and
    from the onset of the loss spike, and both shares must be large enough.
    """
    counts = records.spikes(OF_BETA2)
    counts = counts[counts["optimizer.name"] == "adamw"]
    num_left_out = (~counts["can_spike"]).sum()
    counts = counts[counts["can_spike"]]
    if counts.empty:
        raise records.lacking("AdamW whose RMS_t of the patch embedding can spike", OF_BETA2)
    spiked = counts[counts[SPIKES] > 0]
    if spiked.empty:
        return Finding(f"no loss spike in {_runs(counts)}", UNDECIDED, "no loss spikes")
    chance = np.average(spiked["chance"], weights=spiked[SPIKES])
    least, parts, verdicts = max(evidence.SURE, chance), [], []
    for name, num, total in (
        ("follow", evidence.FOLLOWING, SPIKES),
        ("from the onset", "num_by_onset", "num_onsets"),
    ):
        low, high = evidence.share_over_runs(spiked[num], spiked[total])
        num, total = spiked[num].sum(), spiked[total].sum()
        parts.append(f"{num} of {total} {name} ({num / total:.0%} [{low:.0%}, {high:.0%}])")
        is_large = num / total >= evidence.SHARE and low >= least
        verdicts.append(True if is_large else False if high < evidence.SHARE else None)
    ours = f"{', '.join(parts)}, by chance {chance:.1%}; {_same_step(counts)} ({_runs(counts)}; "
    ours += f"{num_left_out} left out because RMS_t is unknown or cannot reach the threshold)"
    holds = False if False in verdicts else None if None in verdicts else True
    why = f"an interval contains {evidence.SHARE:.0%}, or begins below {least:.0%}"
    return records.decide(ours, holds, spiked["seed"].nunique(), why)


def _same_step(counts: pd.DataFrame) -> str:
    """Loss spikes at the very step of an RMS spike, which is no cause of theirs, and large ones."""
    num = {name: int(value) for name, value in counts.select_dtypes("number").sum().items()}
    near, large = num["num_same_step"], num["num_large_following"] + num["num_large_same_step"]
    share = f"{large / num[LARGE]:.0%}" if num[LARGE] else "none"
    return (
        f"a further {near} ({num['num_same_step_by_onset']} from the onset) begin at the very step "
        f"of an RMS spike, which cannot be their cause; with these, "
        f"{(num[evidence.FOLLOWING] + near) / num[SPIKES]:.0%}; of {num[LARGE]} spikes over "
        f"{spike_marks.LARGE:g} nat, {num['num_large_following']} follow and "
        f"{num['num_large_same_step']} begin at its step (together {share})"
    )


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
    holds = evidence.above(low, high, chance)
    return records.decide(ours, holds, seeds, "the interval contains chance")


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
        return records.decide(ours, False, runs["seed"].nunique())
    if not spikes or not skips:
        return Finding(ours, UNDECIDED, "nothing was skipped" if spikes else "no loss spike")
    seeds = skipping["seed"].nunique()
    if not single:
        return records.decide(ours, None, seeds, "no single ones")
    try:
        others = _scaled(records, "dynamic")["state"] == "finished"
    except NoRunsError:
        return records.decide(ours, None, seeds, "no run with a dynamic scale to compare with")
    why = f"no contrast: {others.sum()} of {len(others)} runs with a dynamic scale end, too"
    return records.decide(ours, None if others.all() else True, seeds, why)


def _runs(runs: pd.DataFrame) -> str:
    seeds = runs["seed"].nunique()
    return f"{counted(len(runs), 'run')}, {'one seed' if seeds == 1 else f'{seeds} seeds'}"


def _scaled(records: Evidence, kind: str) -> pd.DataFrame:
    """Returns the runs with a kind of loss scaler, and counts over their steps.

    Runs with a smaller initial scale than others are left out: their gradients overflow more
    rarely. The ignored first steps do not count. `spikes`: loss spikes. `near`: the share of steps
    at most `within` steps from a loss spike. `falls`: falls of the scale, except those at most
    `within` steps after another; `falls_near`: those near a loss spike. `skips`: steps that skip a
    tensor; `single`: those that skip some of the model's tensors but not all, if none is frozen
    (`optimizer.lr_scale`).
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
        raise records.lacking(f"scaler={kind}", ("loss_scaler",))
    return pd.DataFrame(rows)
