"""Evidence for claims: runs and benchmark lines, intervals over seeds, and rules for verdicts."""

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from analysis import comparison, measures, naming, spike_marks
from analysis.bench import load_lines
from analysis.load import EXPERIMENTS, NoRunsError, Runs, command, load_all, planned
from lowprec.runs.read import ENDED

REPRODUCED, NOT, UNDECIDED, NO_RUNS = "reproduced", "not reproduced", "undecided", "no runs"
NO_VERDICT = "no verdict"  # a check that the paper's claim does not hang on
MINI, TRUE_SIZE, TIMES = "mini", "true_size", ""  # scales of runs; benchmark lines have none
AT = {MINI: " at mini scale", TRUE_SIZE: " at true size", TIMES: ""}  # ends of a verdict
LEVEL, TWO_ONE_SIDED = 0.95, 0.9  # of intervals; the second for equivalence
ALPHA = 0.05  # of tests, after Holm's correction
UPPER, MOST_SEEDS = 0.8, 1000  # of `num_seeds`
SPIKES, FOLLOWING, HIGHEST = "num_loss_spikes", "num_following", "highest"
# what a planned run is known by
KNOWN_BY = ("model.name", "batch_size", "num_steps", "optimizer.name", "optimizer.lr")
LARGE = "num_large"  # loss spikes over `spike_marks.LARGE` nats

# The margins of the verdicts, which `Claim.margin` words.
MARGIN = 0.5  # points of mean R@1, by PROTOCOL.md
SLOPE = 0.05  # of the exponent of the inner dimension
NO_GAIN = 2.0  # % of time saved: less is no speed-up
SHARE = 0.8  # of loss spikes that follow: less is not the paper's 28 of 30
SURE = 0.5  # what the interval of that share must lie above; that of 28 of 30 begins at 79%

_with_products = partial(measures.with_recipe, name="precision.label", label="precision.label")


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
    """The runs and benchmark lines at or below some folders; a copied run counts once.

    Runs are those of one `scale`, mini by default, that ended; `at` is the evidence of another one.
    A method raises NoRunsError, which names the command, if there are none.
    """

    def __init__(self, roots: list[Path | str]):
        self.roots, self.scale = roots, MINI
        self.files, self.known = {}, {}  # read once: by path, and by studies and scale or by path
        tables = [load_all(root).summaries for root in roots]
        summaries = pd.concat([t for t in tables if len(t)] or tables, ignore_index=True)
        names = summaries["path"].map(lambda path: Path(path).name)
        copies = pd.DataFrame({"name": names, "data": summaries.get("data.digest")}).duplicated()
        summaries = summaries[~copies]
        twice = summaries["run"].duplicated(keep=False)
        self.summaries = summaries.assign(run=summaries["run"].mask(twice, summaries["path"]))

    def at(self, scale: str) -> "Evidence":
        """The evidence of runs at a scale."""
        other = copy.copy(self)
        other.scale = scale
        return other

    def runs(self, studies: Sequence[str]) -> Runs:
        """The runs of some studies."""
        if (key := (studies, self.scale)) not in self.known:
            table = self.summaries[self.summaries["state"].isin(ENDED)]
            part = table[table["experiment"].isin(studies) & (table["scale"] == self.scale)]
            if part.empty:
                raise self.lacking("", studies)
            self.known[key] = Runs(part, files=self.files)
        return self.known[key]

    def outcomes(self, studies: Sequence[str]) -> pd.DataFrame:
        """`measures.with_scores`, and `log_loss`, the logarithm of the validation loss.

        The scores of a diverged run are 0, and its `log_loss` is infinite. The `precision.label` of
        a custom recipe names its products.
        """
        runs = self.runs(studies)
        table = measures.with_scores(runs, _with_products(runs.runs))
        diverged = table["state"] == "diverged"
        table.loc[diverged, ["accuracy", "recall"]] = 0.0
        return table.assign(log_loss=np.log(table["validation_loss"]).mask(diverged, math.inf))

    def need_all(self, study: str, varied: str, values: Collection) -> None:
        """Raises NoRunsError unless each run that a study's file names has ended.

        Only runs with some values of a setting count, as `outcomes` names them, and seeds that the
        file has for all of these values. A run is known by that setting, those in which the study's
        runs differ, and KNOWN_BY. Raises ValueError if the file names no run with a value.
        """
        at = self.summaries
        is_its = (at["experiment"] == study) & (at["scale"] == self.scale)
        ended = at[is_its & at["state"].isin(ENDED)]
        if ended.empty:
            raise self.lacking("", (study,))
        plan, ended = map(_with_products, (planned(f"{study}_{self.scale}"), ended))
        if absent := set(values) - set(plan[varied]):
            names = ", ".join(sorted(map(str, absent)))
            there = ", ".join(sorted(set(plan[varied].map(str))))
            raise ValueError(f"{study}_{self.scale} has {varied} {there}, not {names}")
        num_levels = plan.map(comparison.written).nunique()
        columns = [name for name in plan if num_levels[name] > 1 or name in (*KNOWN_BY, varied)]
        plan = plan[plan[varied].isin(list(values))]
        plan = plan[plan.groupby("seed")[varied].transform("nunique") == len(values)]
        tables = (table.reindex(columns=columns).map(comparison.written) for table in (plan, ended))
        runs, there = (set(table.itertuples(index=False, name=None)) for table in tables)
        if missing := len(runs - there):
            raise self.lacking(f"{missing} of {len(runs)} runs", (study,))

    def differences(
        self, varied: str, one: object, other: object, value: str, studies: Sequence[str],
        only: dict | None = None,
    ) -> dict[str, pd.Series]:  # fmt: skip
        """`differences` of outcomes; `only` maps columns to the values that runs must have."""
        runs = self.outcomes(studies)
        for column, needed in (only or {}).items():
            runs = runs[runs[column] == needed]
        if by_model := differences(runs, varied, one, other, value):
            return by_model
        raise self.lacking(f"{one} and {other} with equal settings, seeds and a score", studies)

    def spikes(self, studies: Sequence[str]) -> pd.DataFrame:
        """`Runs.runs` with `count_spikes`, by each run's protocol.

        Runs that agree in every setting and the seed, as when two studies share one, count once.
        """
        runs, rows = self.runs(studies), []
        for head in comparison.distinct(runs.runs).to_dict("records"):
            if head["path"] not in self.known:
                self.known[head["path"]] = count_spikes(runs.only(head["run"]), head)
            rows.append({**head, **self.known[head["path"]]})
        return pd.DataFrame(rows)

    def lines(self, slug: str, keys: str = "") -> pd.DataFrame:
        """The benchmark's lines below all folders; the error names the command with its keys."""
        tables, reason = [], ""
        for root in self.roots:
            try:
                tables.append(load_lines(root, slug))
            except NoRunsError as error:
                reason = f"{str(error).rpartition('to make some: ')[2]} {keys}".strip()
        if not tables:
            raise NoRunsError(reason)
        return pd.concat(tables, ignore_index=True)

    def lacking(self, what: str, studies: Sequence[str]) -> NoRunsError:
        """The error for missing evidence: what is missing, and the command that makes it."""
        files = {name: EXPERIMENTS / f"{name}_{self.scale}.yaml" for name in studies}
        name = next((name for name, file in files.items() if file.exists()), studies[0])
        return NoRunsError(f"{what}{': ' if what else ''}{command(name, self.scale)}")

    def verdict(self, holds: bool | None) -> str:
        """`reproduced at mini scale`; undecided for None."""
        return UNDECIDED if holds is None else (REPRODUCED if holds else NOT) + AT[self.scale]

    def decide(self, ours: str, holds: bool | None, seeds: int, why: str = "") -> Finding:
        """A finding: undecided with one seed, and with the reason `why` if `holds` is None."""
        if seeds < 2:
            return Finding(ours, UNDECIDED, "one seed")
        return Finding(ours, self.verdict(holds), why if holds is None else "")

    def larger(self, ours: str, values: pd.Series, unless: str = "") -> Finding:
        """A mean above 0: the whole interval, or none of it; `unless`: why that is too little."""
        sample = Sample.of(values)
        holds = above(sample.low, sample.high, 0.0)
        needed = seeds_needed(values, sample.mean, (1 - LEVEL) / 2)
        why = unless or f"the interval contains 0; {needed}"
        return self.decide(ours, None if holds and unless else holds, sample.num, why)

    def equal(self, ours: str, values: pd.Series) -> Finding:
        """Equivalence (two one-sided tests): the 90% interval within the margin, or outside."""
        sample = Sample.of(values, TWO_ONE_SIDED)
        holds = True if -MARGIN <= sample.low and sample.high <= MARGIN else None
        holds = False if sample.low > MARGIN or sample.high < -MARGIN else holds
        needed = seeds_needed(values, MARGIN - abs(sample.mean), (1 - TWO_ONE_SIDED) / 2)
        why = f"the interval extends beyond its margin; {needed}"
        return self.decide(ours, holds, sample.num, why)


def count_spikes(run: Runs, head: dict) -> dict[str, float]:
    """Counts of a run's loss spikes: `count_following` for the patch embedding, and more.

    `can_spike`: RMS_t is recorded and can reach the threshold; `highest`: the height of the highest
    loss spike, 0 without one; LARGE: the number of large ones. `num_same_step`,
    `num_large_following`, `num_large_same_step`: spikes at the step of an RMS spike, and large
    ones, also `by_onset`.
    """
    protocol = spike_marks.protocol_of_run(head)
    series = spike_marks.read_series(run, spike_marks.TENSOR)
    rms = series.rms_of(spike_marks.TENSOR)
    heights = spike_marks.spike_table(series, protocol)["height"]
    counts = {
        **spike_marks.count_following(series, rms, protocol),
        HIGHEST: heights.max() if len(heights) else 0.0,
        LARGE: (heights > spike_marks.LARGE).sum(),
        "can_spike": bool(
            np.isfinite(rms).any() and not spike_marks.why_unreachable(series.beta2, protocol)
        ),
    }
    for side, ending in (("step", ""), ("onset", "_by_onset")):
        near = spike_marks.signed_leads(series, protocol, side)
        large = near[near["is_large"]]
        counts[f"num_same_step{ending}"] = (near["lead"] == 0).sum()
        counts[f"num_large_same_step{ending}"] = (large["lead"] == 0).sum()
        counts[f"num_large_following{ending}"] = (large["lead"] > 0).sum()
    return counts


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
    for model in sorted(set(runs["model.name"]), key=naming.order("model.name")):
        group = runs[runs["model.name"] == model]
        settings = comparison.signature(group, varied, seed=False)
        usual = group["seed"].groupby(settings).nunique().idxmax()
        by_model[model] = difference(group[settings == usual], varied, one, other, value).dropna()
    return by_model


def num_seeds(values: pd.Series, room: float, level: float) -> int | None:
    """The seeds at which a one-sided t test decides, if the mean stays as it is; None: too many.

    `values` has one element per seed; `room` is the distance from their mean to what it is compared
    with. The least n with t(1 - level, n - 1) s / sqrt(n) < abs(room), where s is the one-sided
    UPPER confidence limit of the standard deviation, because the observed one is often too small
    (Browne, Statistics in Medicine 14, 1995): sd sqrt((num - 1) / chi2(1 - UPPER, num - 1)).
    """
    if (num := len(values)) < 2:
        return None
    limit = values.std() * math.sqrt((num - 1) / stats.chi2.ppf(1 - UPPER, num - 1))
    for n in range(num + 1, MOST_SEEDS + 1):
        if stats.t.ppf(1 - level, n - 1) * limit / math.sqrt(n) < abs(room):
            return n
    return None


def seeds_needed(values: pd.Series, room: float, level: float) -> str:
    """`14 seeds would decide it if the difference stays as it is`, by `num_seeds`."""
    num = num_seeds(values, room, level)
    needed = f"{num} seeds would decide it" if num else f"not by {MOST_SEEDS:,} seeds"
    return f"{needed} if the difference stays as it is"


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


def above(low: float, high: float, bar: float) -> bool | None:
    """Whether a whole interval lies above `bar` (True), none of it (False), or neither (None)."""
    return True if low > bar else False if high <= bar else None
