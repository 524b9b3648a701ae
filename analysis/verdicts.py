"""What can be said of a claim of the paper, and the rules by which it is said."""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from analysis import curves, style
from analysis.evidence import Evidence, Sample

REPRODUCED, NOT, UNDECIDED = "reproduced", "not reproduced", "undecided"
OUT, NO_RUNS = "out of reach at this scale", "no runs"
OURS, PAPERS = "ours", "the paper's"  # whose a margin is


@dataclass(frozen=True)
class Finding:
    """What we found: the numbers in words, a verdict, and why where that is not plain."""

    ours: str
    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Claim:
    """One statement of a claim: the paper's number, a margin, and the judge of the evidence.

    `judge` raises NoRunsError, with what is missing, where there is nothing to judge by. `whose`
    the margin is: the paper gives one only for its accuracy in int8.
    """

    number: str
    text: str
    paper: str
    margin: str
    judge: Callable[[Evidence], Finding]
    whose: str = OURS

    @property
    def bound(self) -> str:
        """The margin, and whose it is: `ours: +-0.1 point`."""
        return f"{self.whose}: {self.margin}"


def at_scale(holds: bool, runs: pd.DataFrame | None = None) -> str:
    """`reproduced` or not; says the scale of runs that are not the paper's."""
    verdict = REPRODUCED if holds else NOT
    scale = "paper" if runs is None else runs["scale"].iloc[0]
    return verdict if scale == "paper" else f"{verdict} at {scale} scale"


def equal(ours: str, found: Sample, margin: float) -> Finding:
    """Equivalence: the whole interval lies within the margin, or the whole of it outside."""
    if found.num < 2:
        return Finding(ours, UNDECIDED, "one seed gives no interval")
    if -margin <= found.low and found.high <= margin:
        return Finding(ours, REPRODUCED)
    if found.low > margin or found.high < -margin:
        return Finding(ours, NOT)
    return Finding(ours, UNDECIDED, "the interval is wider than the margin: more seeds")


def larger(ours: str, found: Sample, runs: pd.DataFrame | None = None, unless: str = "") -> Finding:
    """A difference above 0: the whole interval, or none of it; `unless`: why that is too little."""
    holds = True if found.low > 0 and not unless else False if found.high <= 0 else None
    return decide(ours, holds, found.num, runs, unless or "the interval holds 0: more seeds")


def decide(
    ours: str, holds: bool | None, seeds: int, runs: pd.DataFrame | None = None, why: str = ""
) -> Finding:
    """Holds or not; undecided of one seed, whatever it shows, and with a reason where unknown."""
    if seeds < 2:
        return Finding(ours, UNDECIDED, "one seed")
    return Finding(ours, UNDECIDED, why) if holds is None else Finding(ours, at_scale(holds, runs))


def out_of_reach(ours: str, runs: pd.DataFrame, needed: str) -> Finding:
    """What our runs say, and why they cannot decide."""
    models = curves.join(style.MODELS.get(name, name) for name in runs["model.name"].unique())
    data = curves.join(runs["data.name"].unique())
    steps = curves.join(sorted(runs["num_steps"].astype(int).unique()))
    return Finding(ours, OUT, f"needs: {needed}; ours: {models} on {data}, {steps} steps")
