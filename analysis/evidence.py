"""Evidence for claims: runs and benchmark lines, intervals over seeds, and rules for verdicts."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from analysis import comparison, measures, naming, spike_marks
from analysis.bench import load_lines
from analysis.load import EXPERIMENTS, NoRunsError, Runs, command, load_all
from lowprec.diagnostics.spikes import Protocol
from lowprec.runs.read import ENDED

REPRODUCED, NOT, UNDECIDED, NO_RUNS = "reproduced", "not reproduced", "undecided", "no runs"
NO_VERDICT = "no verdict"  # a check that the paper's claim does not hang on
SCALE = "mini"  # of the runs that are judged, unless a claim names another
LEVEL, TWO_ONE_SIDED = 0.95, 0.9  # of intervals; the second for equivalence
ALPHA = 0.05  # of tests for trends, after Holm's correction
WINDOWS = (50, 200)  # steps of the running mean, besides the run's own
SPIKES, FOLLOWING, HIGHEST = "num_loss_spikes", "num_following", "highest"
LARGE = "num_large"  # loss spikes over `spike_marks.LARGE` nats

# The margins of the verdicts, which `Claim.margin` words.
MARGIN = 0.5  # points of mean R@1, by PROTOCOL.md
SLOPE = 0.05  # of the exponent of the inner dimension
NO_GAIN = 2.0  # % of time saved: less is no speed-up
ABOUT = 2.0  # points of a share that the paper gives as "about", until 2026-11-26
SHARE = 0.8  # of loss spikes that follow: less is not the paper's 28 of 30
SURE = 0.5  # what the interval of that share must lie above; that of 28 of 30 begins at 79%


class Finding(NamedTuple):
    """Our numbers in words, a verdict, and the reason where it is not plain."""

    ours: str
    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Sample:
    """A mean over seeds and its interval (Student's t); the ends are NaN for one seed."""

    mean: float
    low: float
    high: float
    num: int
    sign: str = "+"  # before positive numbers, in print

    @classmethod
    def of(cls, values: pd.Series, level: float = LEVEL, sign: str = "+") -> "Sample":
        """The mean and interval of one value per seed; with an infinite value, no interval."""
        values, half = values.to_numpy(float), math.nan
        if len(values) > 1 and np.isfinite(values).all():
            half = float(stats.sem(values) * stats.t.ppf((1 + level) / 2, len(values) - 1))
        mean = float(values.mean())
        return cls(mean, mean - half, mean + half, len(values), sign)

    def __str__(self) -> str:
        """`+0.12 [-0.30, +0.54], 3 seeds`."""
        mean, low, high = (f"{x:{self.sign}.2f}" for x in (self.mean, self.low, self.high))
        return f"{mean}, one seed" if self.num == 1 else f"{mean} [{low}, {high}], {self.num} seeds"


class Evidence:
    """The runs and benchmark lines at or below some folders; a copied run counts once."""

    def __init__(self, roots: list[Path | str]):
        self.roots, self.files, self.counts = roots, {}, {}  # read and counted once, by path
        tables = [load_all(root).summaries for root in roots]
        tables = [table for table in tables if len(table)] or tables
        summaries = pd.concat(tables, ignore_index=True)
        names = summaries["path"].map(lambda path: Path(path).name)
        copies = pd.DataFrame({"name": names, "data": summaries.get("data.digest")}).duplicated()
        summaries = summaries[~copies]
        twice = summaries["run"].duplicated(keep=False)
        self.summaries = summaries.assign(run=summaries["run"].mask(twice, summaries["path"]))
        self.runs = functools.cache(self._runs)  # runs(studies, scale): read once
        self.spikes = functools.cache(self._spikes)

    def _runs(self, studies: Sequence[str], scale: str = SCALE) -> Runs:
        """The runs of some studies that ended, at a scale."""
        table = self.summaries[self.summaries["state"].isin(ENDED)]
        part = table[table["experiment"].isin(studies) & (table["scale"] == scale)]
        if part.empty:
            raise lacking("", studies, scale)
        return Runs(part, files=self.files)

    def outcomes(self, studies: Sequence[str], scale: str = SCALE) -> pd.DataFrame:
        """`Runs.runs` with `accuracy`, `recall`, `validation_loss`, `log_loss` and `loss`.

        `accuracy` is zero-shot top-1, `recall` the mean R@1 of both directions, both in % at the
        last step and 0 if the run diverged; `validation_loss` is that at the last step, or NaN,
        and `log_loss` its logarithm, infinite if the run diverged; `loss` is the mean training loss
        of the last 2%. The `precision.label` of a custom recipe names its products.
        """
        runs = self.runs(studies, scale)
        table, losses = measures.with_scores(runs, runs.runs), runs.metrics
        diverged = table["state"] == "diverged"
        table.loc[diverged, ["accuracy", "recall"]] = 0.0
        table["log_loss"] = np.log(table["validation_loss"]).mask(diverged, math.inf)
        narrow = comparison.narrow_products(table)
        table["precision.label"] = narrow.where(narrow != "", table["precision.label"])
        ends = losses["step"] > 0.98 * losses["run"].map(table.set_index("run")["num_steps"])
        losses = losses[ends].astype({"loss": float}).groupby("run")["loss"].mean()
        return table.assign(loss=table["run"].map(losses))

    def _spikes(self, studies: Sequence[str]) -> pd.DataFrame:
        """`Runs.runs` with `count_following` for the patch embedding, by each run's protocol.

        `can_spike`: RMS_t is recorded and can reach the threshold; `highest`: the height of the
        highest loss spike, 0 without one; LARGE: the number of large ones; columns that end in one
        of WINDOWS: by that window. `num_same_step`, `num_large_following`, `num_large_same_step`:
        spikes at the step of an RMS spike, and large ones, also `by_onset`. Runs that agree in
        every setting and the seed, as when two studies share one, count once.
        """
        runs = self.runs(studies)
        rows = []
        for head in comparison.distinct(runs.runs).to_dict("records"):
            if head["path"] not in self.counts:
                self.counts[head["path"]] = _count_spikes(runs.only(head["run"]), head)
            rows.append({**head, **self.counts[head["path"]]})
        return pd.DataFrame(rows)

    def lines(self, slug: str, keys: str = "") -> pd.DataFrame:
        """The benchmark's lines below all folders; NoRunsError names the command with its keys."""
        tables, reason = [], ""
        for root in self.roots:
            try:
                tables.append(load_lines(root, slug))
            except NoRunsError as error:
                reason = f"{str(error).rpartition('to make some: ')[2]} {keys}".strip()
        if not tables:
            raise NoRunsError(reason)
        return pd.concat(tables, ignore_index=True)


def _count_spikes(run: Runs, head: dict) -> dict[str, float]:
    """What `Evidence.spikes` adds to the row `head` of a run."""
    protocol = spike_marks.protocol_of_run(head)
    series = spike_marks.read_series(run, spike_marks.TENSOR)
    rms = series.rms_of(spike_marks.TENSOR)
    can_spike = np.isfinite(rms).any() and series.reaches(protocol)
    counts = spike_marks.count_following(series, rms, protocol)
    counts |= _heights(series, protocol)
    for side, ending in (("step", ""), ("onset", "_by_onset")):
        near = spike_marks.signed_leads(series, protocol, side)
        large = near[near["is_large"]]
        counts[f"num_same_step{ending}"] = (near["lead"] == 0).sum()
        counts[f"num_large_same_step{ending}"] = (large["lead"] == 0).sum()
        counts[f"num_large_following{ending}"] = (large["lead"] > 0).sum()
    for window in WINDOWS:
        windowed = replace(protocol, window=window)
        other = spike_marks.count_following(series, rms, windowed) | _heights(series, windowed)
        counts |= {f"{name} {window}": other[name] for name in (SPIKES, FOLLOWING, HIGHEST, LARGE)}
    return {**counts, "can_spike": bool(can_spike)}


def _heights(series: spike_marks.Series, protocol: Protocol) -> dict[str, float]:
    """HIGHEST and LARGE of a run."""
    heights = spike_marks.spike_table(series, protocol)["height"]
    return {
        HIGHEST: heights.max() if len(heights) else 0.0,
        LARGE: (heights > spike_marks.LARGE).sum(),
    }


def lacking(what: str, studies: Sequence[str], scale: str = SCALE) -> NoRunsError:
    """The error for missing evidence: what is missing, and the command that makes it."""
    existing = [name for name in studies if (EXPERIMENTS / f"{name}_{scale}.yaml").exists()]
    makes = command((existing or studies)[0], scale)
    return NoRunsError(f"{what}{': ' if what else ''}{makes}")


def share_interval(num: int, total: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of `num` in `total`."""
    low, high = stats.binomtest(num, total).proportion_ci(LEVEL, method="wilson")
    return float(low), float(high)


def share_over_runs(nums: pd.Series, totals: pd.Series) -> tuple[float, float]:
    """95% interval of a share of events, one element per run: resamples runs, at least Wilson's."""
    picks = np.random.default_rng(0).integers(len(nums), size=(4000, len(nums)))
    shares = nums.to_numpy()[picks].sum(axis=1) / totals.to_numpy()[picks].sum(axis=1)
    low, high = share_interval(int(nums.sum()), int(totals.sum()))
    tail = (1 - LEVEL) / 2
    return min(low, np.quantile(shares, tail)), max(high, np.quantile(shares, 1 - tail))


def difference(
    runs: pd.DataFrame, varied: str, one: object, other: object, value: str
) -> pd.Series:
    """By seed: `value` of the runs with `varied` = one minus that of their matches with other."""
    runs = comparison.matched(runs, varied, (one, other))
    sides = [runs[runs[varied] == name].groupby("seed")[value].mean() for name in (one, other)]
    return sides[0] - sides[1]


def differences(
    runs: pd.DataFrame, varied: str, one: object, other: object, value: str
) -> dict[str, pd.Series]:
    """`difference` by model, small to large, for models with runs that form pairs.

    Pairs agree in every other setting. If a model has several settings, the one with the most seeds
    counts. Runs without a value have no pair, and two infinite values no difference.
    """
    runs = comparison.matched(runs[runs[value].notna()], varied, (one, other))
    by_model = {}
    for model in sorted(set(runs["model.name"]), key=lambda name: naming.rank(name, naming.MODELS)):
        group = runs[runs["model.name"] == model]
        settings = comparison.signature(group, varied, seed=False)
        usual = group["seed"].groupby(settings).nunique().idxmax()
        by_model[model] = difference(group[settings == usual], varied, one, other, value).dropna()
    return by_model


def page(by_seed: pd.DataFrame) -> float:
    """One-sided p-value of Page's trend test: whether values grow along the columns, within rows.

    Equal values get mean ranks; scipy's null distribution has none, so its p-value is then larger.
    """
    return float(stats.page_trend_test(by_seed.to_numpy(float)).pvalue)


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """p-values corrected for the number of tests by Holm's method."""
    corrected, largest = {}, 0.0
    for i, name in enumerate(sorted(p_values, key=p_values.get)):
        largest = max(largest, min(1.0, (len(p_values) - i) * p_values[name]))
        corrected[name] = largest
    return corrected


def at_scale(holds: bool, runs: pd.DataFrame | None = None) -> str:
    """`reproduced` or not, with the scale of the runs, if there are any."""
    scale = None if runs is None else runs["scale"].iloc[0]
    at = {None: "", "true_size": " at true size"}.get(scale, f" at {scale} scale")
    return (REPRODUCED if holds else NOT) + at


def decide(
    ours: str, holds: bool | None, seeds: int, runs: pd.DataFrame | None = None, why: str = ""
) -> Finding:
    """A verdict: undecided with one seed, and with the reason `why` if `holds` is None."""
    if seeds < 2:
        return Finding(ours, UNDECIDED, "one seed")
    return Finding(ours, UNDECIDED, why) if holds is None else Finding(ours, at_scale(holds, runs))


def above(low: float, high: float, bar: float) -> bool | None:
    """Whether a whole interval lies above `bar` (True), none of it (False), or neither (None)."""
    return True if low > bar else False if high <= bar else None


def equal(
    ours: str, values: pd.Series, runs: pd.DataFrame, losses: pd.Series | None = None
) -> Finding:
    """Equivalence (two one-sided tests): every 90% interval within its margin, or one outside.

    `values`: differences of accuracy in points, by seed. `losses`: differences of the validation
    loss in %, of the seeds that have it, which are given but not judged.
    """
    sample = Sample.of(values, TWO_ONE_SIDED)
    ours = f"{ours}; 90%: {sample}"
    if losses is not None and len(losses):
        ours += f"; validation loss, %: {Sample.of(losses, TWO_ONE_SIDED)}"
    holds = _within(sample, MARGIN)
    why = "an interval extends beyond its margin; more seeds are needed"
    return decide(ours, holds, sample.num, runs, why)


def _within(sample: Sample, margin: float) -> bool | None:
    """Whether a whole interval lies within +-margin (True), none of it (False), or neither."""
    if -margin <= sample.low and sample.high <= margin:
        return True
    return False if sample.low > margin or sample.high < -margin else None


def larger(ours: str, values: pd.Series, runs: pd.DataFrame, unless: str = "") -> Finding:
    """A mean above 0: the whole interval, or none of it; `unless`: why that is too little."""
    sample = Sample.of(values)
    holds = above(sample.low, sample.high, 0.0)
    if holds and unless:
        holds = None
    why = unless or "the interval contains 0; more seeds are needed"
    return decide(ours, holds, sample.num, runs, why)
