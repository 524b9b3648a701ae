"""What some folders hold to judge a claim by: runs, benchmark lines, differences, intervals."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import curves, spike_marks
from analysis.bench import load_lines
from analysis.load import NoRunsError, Runs, command, load_runs
from lowprec.diagnostics.spikes import lag_coincidence, loss_spikes, rms_spikes

SCALES = ("paper", "mini", "demo")  # the first that has runs is judged
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # by degrees of freedom
SETTINGS = (  # in which runs that are compared must be equal
    *("scale", "model.name", "data.digest", "data.train", "num_steps", "batch_size"),
    *("precision.label", "optimizer.name", "optimizer.lr", "optimizer.beta2"),
    *("optimizer.beta2_decay", "intervention.name", "seed"),
)
SAME = (  # in which runs over which spikes are compared must be equal
    *("model.name", "batch_size", "optimizer.lr", "optimizer.beta2", "num_steps", "seed"),
    *("data.digest", "precision.label"),
    *("optimizer.name", "optimizer.beta2_decay", "scaler.name", "intervention.name"),
)
SHARDS = "data.train=... data.val=..."  # every command at paper scale needs them


class Sample(NamedTuple):
    """A mean over seeds and its 95% interval (t); `low` and `high` are NaN of one seed."""

    mean: float
    low: float
    high: float
    num: int

    def text(self, unit: str = "") -> str:
        """`+0.12 [-0.30, +0.54], 3 seeds`."""
        if self.num == 1:
            return f"{self.mean:+.2f}{unit}, one seed"
        return f"{self.mean:+.2f}{unit} [{self.low:+.2f}, {self.high:+.2f}], {self.num} seeds"


def sample(values: pd.Series) -> Sample:
    """Mean and interval of one value a seed."""
    values = values.to_numpy(float)
    mean, num = float(values.mean()), len(values)
    if num < 2:
        return Sample(mean, math.nan, math.nan, num)
    half = T95[min(num - 2, len(T95) - 1)] * values.std(ddof=1) / math.sqrt(num)
    return Sample(mean, mean - half, mean + half, num)


def wilson(num: int, total: int) -> tuple[float, float]:
    """95% interval of a share of `num` in `total`."""
    z, share = 1.96, num / total
    middle = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2)) / (1 + z**2 / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired(runs: pd.DataFrame, column: str, one: str, other: str, value: str) -> dict[str, Sample]:
    """By model: `value` of the runs with `column` = one minus that of the runs with other.

    Pairs agree in all other SETTINGS. Where a model has several settings the one with most seeds
    counts. Runs without a value have no pair.
    """
    keys = [key for key in SETTINGS if key != column]
    sides = [
        runs[runs[column] == name].groupby(keys, dropna=False)[value].mean()
        for name in (one, other)
    ]
    pairs = (sides[0] - sides[1]).dropna().rename("difference").reset_index()
    found = {}
    for model, group in pairs.groupby("model.name"):
        settings = [key for key in keys if key != "seed"]
        largest = max((part for _, part in group.groupby(settings, dropna=False)), key=len)
        found[model] = sample(largest["difference"])
    return found


def matched(runs: pd.DataFrame, column: str, values: Collection) -> pd.DataFrame:
    """The runs with these values of a column whose other settings (SAME) all of them have."""
    part = runs[runs[column].isin(list(values))]
    keys = [key for key in SAME if key != column]
    there = part.groupby(keys, dropna=False)[column].transform("nunique")
    return part[there == len(values)]


def replicated(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs whose settings have two seeds or more; all of them where none has."""
    keys = [key for key in SAME if key != "seed"]
    seeds = runs.groupby(keys, dropna=False)["seed"].transform("nunique")
    return runs[seeds > 1] if (seeds > 1).any() else runs


def by_seed(runs: pd.DataFrame, column: str, one: object, other: object, value: str) -> Sample:
    """`value` of the runs with `column` = one minus that of their matches with other, by seed."""
    runs = matched(runs, column, (one, other))
    sides = [runs[runs[column] == v].groupby("seed")[value].mean() for v in (one, other)]
    return sample(sides[0] - sides[1])


def lacking(what: str, experiment: str, scale: str = "paper") -> NoRunsError:
    """The error of a judge without evidence: what is missing, and the commands that make it."""
    makes, small = command(experiment, scale), command(experiment, "mini")
    if scale == "paper":
        makes += f" {SHARDS}" + (f" or, small, {small}" if small.endswith("_mini") else "")
    return NoRunsError(f"{what}{': ' if what else ''}{makes}")


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
        """How many runs."""
        return len(self._heads)

    def runs(self, *experiments: str, needed: str = "paper") -> Runs:
        """The runs of some experiments that ended, of the largest scale that has any.

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

    def lines(self, slug: str, keys: str = "") -> pd.DataFrame:
        """The benchmark's lines below all folders; NoRunsError names the command with its keys."""
        found, reason = [], ""
        for root in self.roots:
            try:
                found.append(load_lines(root, slug))
            except NoRunsError as error:
                _, absent, reason = str(error).rpartition("to make some: ")
                reason += f" {keys}" if absent and keys else ""
        if not found:
            raise NoRunsError(reason)
        return pd.concat(found, ignore_index=True)


def outcomes(runs: Runs) -> pd.DataFrame:
    """Heads with `accuracy` in % at the last step, and `loss`: the mean of its last 2% of steps."""
    heads = runs.runs
    last = 100 * curves.last_accuracy(runs).astype(float)
    ends = {}
    for run, rows in runs.metrics.groupby("run"):
        steps = heads.loc[heads["run"] == run, "num_steps"].iloc[0]
        ends[run] = rows.loc[rows["step"] > 0.98 * steps, "loss"].astype(float).mean()
    return heads.assign(accuracy=heads["run"].map(last), loss=heads["run"].map(ends))


def spike_counts(runs: Runs) -> pd.DataFrame:
    """Heads with the counts of `following` of the patch embedding, by each run's own protocol.

    A run that several studies share counts once.
    """
    rows = []
    for head in runs.runs.to_dict("records"):
        protocol = spike_marks.protocol_of_run(head)
        alone = runs.only(head["run"])
        series = spike_marks.read_series(alone, head["run"], spike_marks.TENSOR)
        rms = series.rms_of(spike_marks.TENSOR)
        found = lag_coincidence(
            loss_spikes(series.loss, protocol), rms_spikes(rms, protocol), protocol
        )
        has_rms = bool(np.isfinite(rms).any())
        rows.append({**head, **found._asdict(), "has_rms": has_rms})
    return pd.DataFrame(rows).drop_duplicates(list(SAME))
