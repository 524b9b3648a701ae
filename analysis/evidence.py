"""Evidence for claims: runs and benchmark lines, intervals over seeds, and rules for verdicts."""

import contextlib
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
from lowprec.runs.read import ENDED

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
        """The mean and interval of one value per seed."""
        values = values.to_numpy(float)
        half = math.nan
        if len(values) > 1:
            half = float(stats.sem(values) * stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
        mean = float(values.mean())
        return cls(mean, mean - half, mean + half, len(values))

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
    """The runs and benchmark lines at or below some folders; a copied run counts once."""

    def __init__(self, roots: list[Path | str]):
        self.roots = roots
        tables = [pd.DataFrame(columns=["run", "path", "experiment", "state", "scale"])]
        for root in roots:
            with contextlib.suppress(NoRunsError):  # it may hold benchmark lines alone
                tables.append(load_runs(root).summaries)
        summaries = pd.concat(tables[1:] or tables, ignore_index=True)
        names = summaries["path"].map(lambda path: Path(path).name)
        copies = pd.DataFrame({"name": names, "data": summaries.get("data.digest")}).duplicated()
        summaries = summaries[~copies]
        twice = summaries["run"].duplicated(keep=False)
        self._summaries = summaries.assign(run=summaries["run"].mask(twice, summaries["path"]))

    def __len__(self) -> int:
        """Number of runs."""
        return len(self._summaries)

    def runs(self, *experiments: str) -> Runs:
        """The runs of some experiments that ended, at the largest scale that has any."""
        table = self._summaries
        table = table[table["experiment"].isin(experiments) & table["state"].isin(ENDED)]
        for scale in SCALES:
            if (table["scale"] == scale).any():
                return Runs(table[table["scale"] == scale])
        raise lacking("", experiments[0])

    def outcomes(self, *experiments: str) -> pd.DataFrame:
        """`Runs.runs` with `accuracy` in % at the last step and `loss`, the mean of the last 2%."""
        runs = self.runs(*experiments)
        table = runs.runs
        accuracy = 100 * curves.last_accuracy(runs).astype(float)
        steps = runs.metrics["run"].map(table.set_index("run")["num_steps"])
        ends = runs.metrics[runs.metrics["step"] > 0.98 * steps]
        losses = ends.astype({"loss": float}).groupby("run")["loss"].mean()
        return table.assign(accuracy=table["run"].map(accuracy), loss=table["run"].map(losses))

    def spikes(self, *experiments: str) -> pd.DataFrame:
        """`Runs.runs` with `lag_coincidence` for the patch embedding, by each run's protocol.

        Runs that agree in every setting and the seed, as when two studies share one, count once.
        """
        runs = self.runs(*experiments)
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
                reason = f"{str(error).rpartition('to make some: ')[2]} {keys}".strip()
        if not tables:
            raise NoRunsError(reason)
        return pd.concat(tables, ignore_index=True)


def lacking(what: str, experiment: str) -> NoRunsError:
    """The error for missing evidence: what is missing, and the commands that make it."""
    small = command(experiment, "mini")
    text = f"{what}{': ' if what else ''}{command(experiment, 'paper')} {SHARDS}"
    return NoRunsError(text + (f" or, small, {small}" if small.endswith("_mini") else ""))


def share_interval(num: int, total: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of `num` in `total`."""
    low, high = stats.binomtest(num, total).proportion_ci(LEVEL, method="wilson")
    return float(low), float(high)


def paired(runs: pd.DataFrame, varied: str, one: object, other: object, value: str) -> dict:
    """By model: the Sample of `value` at `varied` = one minus that at other, paired by seed.

    Pairs agree in every other setting. If a model has several settings, the one with the most seeds
    counts. Runs without a value have no pair.
    """
    runs = comparison.matched(runs[runs[value].notna()], varied, (one, other))
    samples = {}
    for model, group in runs.groupby("model.name"):
        settings = comparison.signature(group, varied, seed=False)
        usual = group["seed"].groupby(settings).nunique().idxmax()
        samples[model] = difference(group[settings == usual], varied, one, other, value)
    return dict(sorted(samples.items(), key=lambda pair: style.rank(pair[0], style.MODELS)))


def difference(runs: pd.DataFrame, varied: str, one: object, other: object, value: str) -> Sample:
    """`value` of the runs with `varied` = one minus that of their matches with other, by seed."""
    runs = comparison.matched(runs, varied, (one, other))
    sides = [runs[runs[varied] == name].groupby("seed")[value].mean() for name in (one, other)]
    return Sample.of(sides[0] - sides[1])


def at_scale(holds: bool, runs: pd.DataFrame | None = None) -> str:
    """`reproduced` or not, with the scale of runs that are smaller than the paper's."""
    verdict = REPRODUCED if holds else NOT
    scale = "paper" if runs is None else runs["scale"].iloc[0]
    return verdict if scale == "paper" else f"{verdict} at {scale} scale"


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


def all_or_none(holds: pd.Series) -> bool | None:
    """True if all hold, False if none does, else None."""
    return True if holds.all() else None if holds.any() else False


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
    holds = above(sample.low, sample.high, 0)
    if holds and unless:
        holds = None
    return decide(ours, holds, sample.num, runs, unless or "the interval contains 0: more seeds")


def out_of_reach(ours: str, runs: pd.DataFrame, needed: str) -> Finding:
    """A finding that states what our runs show and why they cannot decide."""
    models = curves.join(map(style.model, runs["model.name"].unique()))
    data = curves.join(runs["data.name"].unique())
    steps = curves.join(sorted(runs["num_steps"].astype(int).unique()))
    return Finding(ours, OUT, f"needs: {needed}; ours: {models} on {data}, {steps} steps")
