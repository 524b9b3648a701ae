"""The noise floor: how far apart runs end that differ in rounding alone, beside seeds.

Not in the paper. Runs: `experiment=rounding`, and those of BASELINES that differ from them in the
seed, the last digits of the learning rate and compilation alone.
"""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from analysis import comparison, curves, style
from analysis.comparison import counted
from analysis.evidence import MARGINS
from analysis.figures.formats import MEASURES, draw_measures
from analysis.load import Runs

LOSS_MARGIN = 1.0  # % of the validation loss: the claims' until 2026-11-26
EXPERIMENT, BASELINES = "rounding", ("accuracy_vs_size",)
ROUNDING, SEEDS = "rounding alone", "seeds"
COLUMNS = ("arm", *curves.OF_A_RUN, "compile", *MEASURES)
POWER = 0.8


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """The study's rows, and those of other studies with the same settings."""
    rates = [float(f"{rate:.6g}") for rate in heads.get("optimizer.lr", [])]
    rounded = heads.assign(**({"optimizer.lr": rates} if rates else {}))
    return heads.loc[comparison.with_baselines(rounded, EXPERIMENT, "compile").index]


def query(runs: Runs) -> pd.DataFrame:
    """One row per run with both measures at its last step, or NaN, and the `arm` it belongs to.

    A run of BASELINES with the study's seed has a row in each arm.
    """
    is_selected = runs.summaries["run"].isin(select(runs.runs)["run"])
    runs = runs.where(is_selected)
    heads = curves.with_scores(runs, curves.named_heads(runs))
    own = heads["experiment"] == EXPERIMENT
    same = own | heads["seed"].isin(heads.loc[own, "seed"])
    arms = [heads[same].assign(arm=ROUNDING), heads[~own].assign(arm=SEEDS)]
    frame = pd.concat(arms, ignore_index=True)[list(COLUMNS)]
    return frame[frame[list(MEASURES)].notna().any(axis=1)]


def deviation(frame: pd.DataFrame, arm: str, measure: str) -> float:
    """The standard deviation of a measure over the runs of an arm; NaN for fewer than two."""
    return frame.loc[frame["arm"] == arm, measure].std(ddof=1)


def seeds_needed(deviation: float, margin: float) -> int:
    """Pairs of runs that show the equality of equal methods within a margin, with POWER.

    By two one-sided tests at 5%, if the differences of pairs have this standard deviation.
    """
    nums = np.arange(2, 10 * (deviation / margin) ** 2 + 20)
    most = stats.t.ppf(0.95, nums - 1)
    power = 2 * stats.t.cdf(margin * np.sqrt(nums) / deviation - most, nums - 1) - 1
    return int(nums[power >= POWER][0])


def plot(frame: pd.DataFrame, ax: Axes, measure: str = "recall") -> Axes:
    """One panel: a point for each run and a bar for the mean of each arm; open: not compiled."""
    arms = [arm for arm in (ROUNDING, SEEDS) if (frame["arm"] == arm).any()]
    for place, arm in enumerate(arms):
        runs = frame[frame["arm"] == arm]
        at = pd.Series(place + np.linspace(-0.2, 0.2, len(runs) + 2)[1:-1], runs.index)
        head, values = runs.iloc[0], runs[measure]
        color = style.color(head["precision"], head["optimizer"])
        ax.hlines(values.mean(), place - 0.25, place + 0.25, color=color, lw=2)
        for is_compiled, part in runs.groupby("compile"):
            fill = color if is_compiled else "white"
            ax.plot(at[part.index], part[measure], "o", color=color, mfc=fill, ms=4)
    ax.set_xticks(range(len(arms)), arms)
    ax.set(xlim=(-0.5, len(arms) - 0.5), ylabel=MEASURES[measure])
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each measure."""
    draw_measures(frame, figure, 0, plot)


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs, their standard deviations, and the seeds that equality takes."""
    runs = frame.drop_duplicates("run")
    text = (
        f"Mean R@1 of both directions and validation loss at the last step of "
        f"{curves.of_runs(runs)} ({curves.methods(runs)}). Left of each panel: one seed, with "
        "learning rates that differ in the last digits, or without compilation (open). Right: "
        "seeds. Bars: means."
    )
    points = sorted(MARGINS.values())
    for arm, part in frame.groupby("arm"):
        recall = deviation(frame, arm, "recall")
        loss = 100 * deviation(frame, arm, "validation_loss") / part["validation_loss"].mean()
        text += (
            f" Standard deviation over {arm} ({counted(len(part), 'run')}): {recall:.2g} points of "
            f"R@1 and {loss:.2g}% of the loss."
        )
        if recall > 0 and loss > 0:
            pairs = [seeds_needed(math.sqrt(2) * recall, margin) for margin in points]
            pairs.append(seeds_needed(math.sqrt(2) * loss, LOSS_MARGIN))
            text += (
                f" Equal methods, compared in pairs of such runs, are shown to be equal within "
                f"{curves.join(points)} points and {LOSS_MARGIN:g}% of the loss with {POWER:.0%} "
                f"power by {curves.join(pairs)} pairs."
            )
    return text + curves.caption_end(runs, crosses=False)
