"""What the judges of claims need: runs and benchmark lines of some folders, intervals, findings."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from analysis import comparison, curves, spike_marks, style
from analysis.bench import load_lines
from analysis.load import NoRunsError, Runs, command, load_runs
from lowprec.diagnostics.spikes import lag_coincidence, loss_spikes, rms_spikes

REPRODUCED, NOT, UNDECIDED = "reproduced", "not reproduced", "undecided"
OUT, NO_RUNS = "out of reach at this scale", "no runs"
SCALES = ("paper", "mini", "demo")  # the first that has runs is judged
LEVEL = 0.95
SHARDS = "data.train=... data.val=..."  # every command at paper scale needs them


class Finding(NamedTuple):
    """Our numbers in words, a verdict, and the reason where it is not plain."""

    ours: str
    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Sample:
    """A mean over seeds and its 95% interval (Student's t); the ends are NaN for one seed."""

    mean: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: pd.Series) -> "Sample":
        """The mean and interval of one value a seed."""
        values = values.to_numpy(float)
        low = high = math.nan
        if len(values) > 1:
            half = stats.sem(values) * stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)
            low, high = values.mean() - half, values.mean() + half
        return cls(float(values.mean()), float(low), float(high), len(values))

    def __sub__(self, other: "Sample") -> "Sample":
        """The difference of the means of independent seeds."""
        half = math.hypot(self.high - self.mean, other.high - other.mean)
        mean = self.mean - other.mean
        return Sample(mean, mean - half, mean + half, min(self.num, other.num))

    def __str__(self) -> str:
        """`+0.12 [-0.30, +0.54], 3 seeds`."""
        if self.num == 1:
            return f"{self.mean:+.2f}, one seed"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}], {self.num} seeds"


class Evidence:
    """The runs and benchmark lines at or below some folders."""

    def __init__(self, roots: list[Path | str]):
        self.roots = roots
        heads = []
        for root in roots:
            try:
                heads.append(load_runs(root).summaries)
            except NoRunsError:
                continue  # it may hold lines alone
        self._heads = pd.concat(heads, ignore_index=True) if heads else pd.DataFrame()
        if heads:
            names = self._heads["path"].map(lambda path: Path(path).name)
            copies = names.to_frame().assign(data=self._heads["data.digest"]).duplicated()
            self._heads = self._heads[~copies].copy()  # a copy tells nothing new
            twice = self._heads["run"].duplicated(keep=False)
            self._heads.loc[twice, "run"] = self._heads.loc[twice, "path"].astype(str)

    def __len__(self) -> int:
        """The number of runs, copies not counted."""
        return len(self._heads)

    def runs(self, *experiments: str, needed: str = "paper") -> Runs:
        """The runs of some experiments that ended, at the largest scale that has any.

        `needed`: the scale whose command the NoRunsError names, if there are none.
        """
        heads = self._heads
        if len(heads):
            heads = heads[heads["experiment"].isin(experiments)]
            heads = heads[heads["state"].isin(("finished", "diverged"))]
            for scale in SCALES:
                if (heads["scale"] == scale).any():
                    return Runs(heads[heads["scale"] == scale])
        raise lacking("", experiments[0], needed)

    def outcomes(self, *experiments: str, needed: str = "paper") -> pd.DataFrame:
        """Summaries with `accuracy` in % at the last step, and `loss`, the mean of the last 2%."""
        runs = self.runs(*experiments, needed=needed)
        heads = runs.runs
        last = 100 * curves.last_accuracy(runs).astype(float)
        steps = runs.metrics["run"].map(heads.set_index("run")["num_steps"])
        ends = runs.metrics[runs.metrics["step"] > 0.98 * steps]
        losses = ends.astype({"loss": float}).groupby("run")["loss"].mean()
        return heads.assign(accuracy=heads["run"].map(last), loss=heads["run"].map(losses))

    def spikes(self, *experiments: str) -> pd.DataFrame:
        """Summaries with `lag_coincidence` of the patch embedding, by each run's protocol.

        Runs that agree in every setting and the seed, as when two studies share one, count once.
        """
        runs = self.runs(*experiments, needed="mini")
        rows = []
        for head in comparison.distinct(runs.runs).to_dict("records"):
            protocol = spike_marks.protocol_of_run(head)
            alone = runs.only(head["run"])
            series = spike_marks.read_series(alone, head["run"], spike_marks.TENSOR)
            rms = series.rms_of(spike_marks.TENSOR)
            spikes = loss_spikes(series.loss, protocol), rms_spikes(rms, protocol)
            counts = lag_coincidence(*spikes, protocol)._asdict()
            rows.append({**head, **counts, "has_rms": bool(np.isfinite(rms).any())})
        return pd.DataFrame(rows)

    def lines(self, slug: str, keys: str = "") -> pd.DataFrame:
        """The benchmark's lines below all folders; NoRunsError names the command with its keys."""
        tables, reason = [], ""
        for root in self.roots:
            try:
                tables.append(load_lines(root, slug))
            except NoRunsError as error:
                _, absent, reason = str(error).rpartition("to make some: ")
                reason += f" {keys}" if absent and keys else ""
        if not tables:
            raise NoRunsError(reason)
        return pd.concat(tables, ignore_index=True)


def lacking(what: str, experiment: str, scale: str = "paper") -> NoRunsError:
    """The error of a judge without evidence: what is missing, and the command that makes it."""
    makes, small = command(experiment, scale), command(experiment, "mini")
    if scale == "paper":
        makes += f" {SHARDS}" + (f" or, small, {small}" if small.endswith("_mini") else "")
    return NoRunsError(f"{what}{': ' if what else ''}{makes}")


def share_interval(num: int, total: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of `num` in `total`."""
    low, high = stats.binomtest(num, total).proportion_ci(LEVEL, method="wilson")
    return float(low), float(high)


def paired(runs: pd.DataFrame, varied: str, one: object, other: object, value: str) -> dict:
    """By model: the Sample of `value` at `varied` = one minus that at other, paired by seed.

    Pairs agree in the whole comparison key. Where a model has several settings the one with the
    most seeds counts. Runs without a value have no pair.
    """
    runs = comparison.matched(runs[runs[value].notna()], varied, (one, other))
    samples = {}
    for model, group in runs.groupby("model.name"):
        settings = comparison.signature(group, varied, seed=False)
        seeds = group["seed"].groupby(settings).nunique()
        usual = group[settings == seeds.idxmax()]
        samples[model] = difference(usual, varied, one, other, value)
    return dict(sorted(samples.items(), key=lambda pair: style.rank(pair[0], style.MODELS)))


def difference(runs: pd.DataFrame, varied: str, one: object, other: object, value: str) -> Sample:
    """`value` of the runs with `varied` = one minus that of their matches with other, by seed."""
    runs = comparison.matched(runs, varied, (one, other))
    sides = [runs[runs[varied] == name].groupby("seed")[value].mean() for name in (one, other)]
    return Sample.of(sides[0] - sides[1])


def comparable(runs: pd.DataFrame, varied: str) -> pd.DataFrame:
    """The runs of those settings that were run with the same, most values of the varied one."""
    runs = comparison.one_variant(runs, varied)
    values = runs[varied].groupby(comparison.signature(runs, varied)).agg(frozenset).to_list()
    most = max(values, key=lambda some: (len(some), values.count(some)), default=frozenset())
    return comparison.replicated(comparison.matched(runs, varied, most))


def at_scale(holds: bool, runs: pd.DataFrame | None = None) -> str:
    """`reproduced` or not; names the scale of runs that are not at the paper's."""
    verdict = REPRODUCED if holds else NOT
    scale = "paper" if runs is None else runs["scale"].iloc[0]
    return verdict if scale == "paper" else f"{verdict} at {scale} scale"


def decide(
    ours: str, holds: bool | None, seeds: int, runs: pd.DataFrame | None = None, why: str = ""
) -> Finding:
    """Holds or not; undecided for one seed whatever it shows, and with `why` where unknown."""
    if seeds < 2:
        return Finding(ours, UNDECIDED, "one seed")
    return Finding(ours, UNDECIDED, why) if holds is None else Finding(ours, at_scale(holds, runs))


def equal(ours: str, sample: Sample, margin: float) -> Finding:
    """Equivalence: the whole interval lies within the margin, or the whole of it outside."""
    within = -margin <= sample.low and sample.high <= margin
    outside = sample.low > margin or sample.high < -margin
    holds = True if within else False if outside else None
    return decide(ours, holds, sample.num, why="the interval is wider than the margin: more seeds")


def larger(
    ours: str, sample: Sample, runs: pd.DataFrame | None = None, unless: str = ""
) -> Finding:
    """A difference above 0: the whole interval, or none of it; `unless`: why that is too little."""
    holds = True if sample.low > 0 and not unless else False if sample.high <= 0 else None
    return decide(ours, holds, sample.num, runs, unless or "the interval holds 0: more seeds")


def out_of_reach(ours: str, runs: pd.DataFrame, needed: str) -> Finding:
    """What our runs show, and why they cannot decide."""
    models = curves.join(style.MODELS.get(name, name) for name in runs["model.name"].unique())
    data = curves.join(runs["data.name"].unique())
    steps = curves.join(sorted(runs["num_steps"].astype(int).unique()))
    return Finding(ours, OUT, f"needs: {needed}; ours: {models} on {data}, {steps} steps")
