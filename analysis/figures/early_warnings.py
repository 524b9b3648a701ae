"""What a warning is worth: how many warnings a loss spike follows, and how many spikes have one.

A warning begins where a score reaches a threshold. The scores are RMS_t of the patch embedding,
rho = RMS_t sqrt(1 - beta2), the deviation of the gradient norm from its running mean, and the
cumulative sum (CUSUM; Page, 1954) of these deviations; and, in runs of `experiments.predictors`,
curvature and kurtosis. Not in the paper.
"""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from analysis import measures, spike_marks, style
from analysis.cli import ChoiceError
from analysis.grammar import Panels
from analysis.load import NoRunsError, Runs
from lowprec.diagnostics.spikes import Protocol, leads, relative_rms, rms_spikes

HORIZONS = (1, 2, 4, 8, 16, 32)  # steps
THRESHOLDS = {  # in steps of 12% to 21%
    "rms": 2.3 * 10 ** (np.arange(-7, 23) / 20),  # about 1 to 30, with the paper's 2.3
    "rho": 10 ** (np.arange(-29, 1) / 20),  # about 0.03 to 1
    "deviation": 10 ** (np.arange(30) / 15),  # 1 to 86 standard deviations
    "cusum": 10 ** (np.arange(30) / 12),  # 1 to 261
}
SCORES = tuple(THRESHOLDS)
THRESHOLDS |= {  # of scores that experiments.predictors measures at some steps
    "curvature": 10 ** (np.arange(-36, 9) / 12),  # 0.001 to 4.6, with the 1 of arXiv:2506.04805
    "sustained": 10 ** (np.arange(-36, 9) / 12),
    "gradient_kurtosis": THRESHOLDS["deviation"],
    "activation_kurtosis": THRESHOLDS["deviation"],
    "rms_at_measured": THRESHOLDS["rms"],
}
IN_A_ROW = 3  # measurements of a sustained curvature
LOOKS = {  # score: (in print, color, dashes, as some lines lie upon others)
    "rms": ("RMS_t", style.RMS, "-"),
    "rho": ("rho: RMS_t / its maximum", "#D55E00", "-"),
    "deviation": ("gradient norm", "#666666", "-"),
    "cusum": ("CUSUM of the gradient norm", "#AA4499", (0, (4, 2))),
}
SLACK = 0.5  # standard deviations that CUSUM allows in each step: half of the shift to be found
NUM_SAMPLES, LEVEL = 1000, 0.95  # of intervals
COUNTS = ("num_warnings", "num_followed", "followed_by_chance")
COUNTS += ("num_spikes", "num_warned", "warned_by_chance", "sum_of_leads")
CELL = ("counted_from", "score", "horizon")


def warnings(runs: Runs) -> pd.DataFrame:
    """One row per run, score, threshold, horizon, and side from which spikes are counted.

    A warning is a step at which the score reaches the threshold and did not in the protocol's
    `within` steps before, as for RMS spikes: a burst of such steps is one warning. `num_followed`
    counts warnings that a loss spike follows by 1 to `horizon` steps, `num_warned` loss spikes that
    come 1 to `horizon` steps after a warning, and `sum_of_leads` the steps of these from the latest
    warning. Loss spikes are counted from their detection or from their onset, where spikes that
    share one count once. `followed_by_chance` and `warned_by_chance` are the means of these counts
    over all circular shifts of the warnings along the steps that are not ignored.
    """
    columns = (*spike_marks.OF_A_RUN, *CELL, "threshold", *COUNTS)
    return spike_marks.by_run(runs, columns, _of_run)


def _of_run(series: spike_marks.Series, protocol: Protocol) -> pd.DataFrame:
    rms, num_steps = series.rms_of(spike_marks.TENSOR), len(series.loss) - protocol.ignore_steps
    marks, onset = spike_marks.marks_and_onsets(series, protocol)
    spikes_from = {"detection": np.flatnonzero(marks) + 1, "onset": np.unique(onset)}
    deviation = deviations(series.grad_norm, protocol.window)
    scores = {"rms": rms, "rho": relative_rms(rms, series.beta2)}
    scores |= {"deviation": deviation, "cusum": cumulative_sum(deviation)}
    scores |= measured_scores(series, rms, protocol.window)
    rows = []
    for score, values in scores.items():
        at_one = replace(protocol, rms_threshold=1.0)
        marks = rms_spikes(values[:, None] / THRESHOLDS[score], at_one)
        for threshold, column in zip(THRESHOLDS[score], marks.T, strict=True):
            at = np.flatnonzero(column) + 1
            for counted_from, spikes in spikes_from.items():
                counts = count(at, spikes[spikes > protocol.ignore_steps], num_steps)
                rows += [(counted_from, score, *row[:1], threshold, *row[1:]) for row in counts]
    return pd.DataFrame(rows, columns=[*CELL, "threshold", *COUNTS])


def measured_scores(
    series: spike_marks.Series, rms: np.ndarray, window: int
) -> dict[str, np.ndarray]:
    """[steps] each: scores by what `experiments.predictors` measured; none if it did not.

    NaN at steps that were not measured. The kurtosis of activations is the largest over blocks;
    `rms_at_measured` is RMS_t at the measured steps alone.
    """
    if "curvature" not in series.predictors:
        return {}
    curvature = series.predictors["curvature"]
    sustained = curvature.dropna().rolling(IN_A_ROW).min().reindex(curvature.index)
    blocks = series.predictors.filter(like="activation_kurtosis/")
    by_block = [deviations(column.to_numpy(), window) for _, column in blocks.items()]
    gradient = deviations(series.predictors["gradient_kurtosis"].to_numpy(), window)
    return {
        "curvature": curvature.to_numpy(),
        "sustained": sustained.to_numpy(),
        "gradient_kurtosis": gradient,
        "activation_kurtosis": np.fmax.reduce(by_block),
        "rms_at_measured": np.where(curvature.notna(), rms, np.nan),
    }


def deviations(values: np.ndarray, window: int) -> np.ndarray:
    """[steps]: how many standard deviations each value is above the mean of the `window` before it.

    NaN for the first two steps, where a value is NaN, and where all before it are equal; inf where
    a value is. A window leaves out values that are not finite.
    """
    before = pd.Series(np.where(np.isfinite(values), values, np.nan)).shift(1)
    before = before.rolling(window, min_periods=2)
    spread = before.std(ddof=0).to_numpy()
    return (values - before.mean().to_numpy()) / np.where(spread > 0, spread, np.nan)


def cumulative_sum(deviation: np.ndarray) -> np.ndarray:
    """[steps]: max(0, the sum before + deviation - SLACK); one that is not finite adds 0."""
    total, sums = 0.0, []
    for excess in np.where(np.isfinite(deviation), deviation - SLACK, 0.0):
        total = max(0.0, total + excess)
        sums.append(total)
    return np.array(sums)


def count(warnings: np.ndarray, spikes: np.ndarray, num_steps: int) -> list[tuple]:
    """Returns a row per horizon: the horizon and COUNTS, for sorted steps in a run of `num_steps`.

    Shifted by chance, a warning is followed wherever one of the `horizon` steps after it has a
    spike, so the expected number is the number of warnings times the share of such steps.
    """
    horizons = np.array(HORIZONS)
    to_spike = leads(-warnings, -spikes[::-1])  # steps to the next spike, NaN if there is none
    since_warning = leads(spikes, warnings)
    num_followed = (to_spike[:, None] <= horizons).sum(axis=0)
    is_warned = since_warning[:, None] <= horizons
    leads_of_warned = np.where(is_warned, since_warning[:, None], 0).sum(axis=0)
    followed_by_chance = len(warnings) * _share_near(spikes, num_steps)
    warned_by_chance = len(spikes) * _share_near(warnings, num_steps)
    of_warnings = np.full(len(horizons), len(warnings)), num_followed, followed_by_chance
    of_spikes = np.full(len(horizons), len(spikes)), is_warned.sum(axis=0), warned_by_chance
    return list(zip(HORIZONS, *of_warnings, *of_spikes, leads_of_warned, strict=True))


def _share_near(steps: np.ndarray, num_steps: int) -> np.ndarray:
    """[horizons]: the share of all steps, in a circle, that are 1 to `horizon` from one of some."""
    gaps = np.diff(steps, append=steps[:1] + num_steps)
    return np.minimum(gaps[:, None], HORIZONS).sum(axis=0) / num_steps


def shares_of(counts: np.ndarray) -> np.ndarray:
    """[..., 6]: precision, chance, recall, chance, mean lead in steps, F1 of COUNTS [..., 7].

    NaN for 0 of 0.
    """
    with np.errstate(invalid="ignore"):
        of_warnings = counts[..., 1:3] / counts[..., :1]
        of_spikes = counts[..., 4:6] / counts[..., 3:4]
        lead = counts[..., 6:] / counts[..., 4:5]
        precision, recall = of_warnings[..., :1], of_spikes[..., :1]
        # no hit makes both shares 0, and F1 too
        f1 = 2 * precision * recall / np.where(precision > 0, precision + recall, 1)
    return np.concatenate([of_warnings, of_spikes, lead, f1], axis=-1)


def transferred(frame: pd.DataFrame) -> dict[tuple, np.ndarray]:
    """For each CELL, the shares of `shares_of` [1 + samples, 6] with thresholds of other beta2.

    For each beta2, the threshold is the one with the largest F1 in the runs of all other beta2;
    warnings and spikes are then pooled. Row 0 is for the runs, the others for `resamples` of them
    within each beta2, for which thresholds are chosen again. Empty if there is one beta2.
    ChoiceError if a score is that of some runs only.
    """
    num_runs, scored = frame["run"].nunique(), frame.groupby("score", sort=False)["run"].nunique()
    if len(partly := scored[scored < num_runs]):
        raise ChoiceError(
            f"{partly.iloc[0]} of {num_runs} runs measured {partly.index[0]}: choose runs that all "
            "did or none did (--experiment NAME)"
        )
    beta2 = frame.drop_duplicates("run").sort_values("run")["beta2"].to_numpy()
    groups = [np.flatnonzero(beta2 == value) for value in np.unique(beta2)]
    if len(groups) < 2:
        return {}
    draws = resamples([len(group) for group in groups])
    weights = [np.vstack([np.ones(draw.shape[1]), draw]) for draw in draws]
    shares = {}
    for cell, part in frame.groupby(list(CELL)):
        counts = part.sort_values(["run", "threshold"])[list(COUNTS)].to_numpy(float)
        counts = counts.reshape(len(beta2), -1, len(COUNTS))  # runs, thresholds, counts
        pairs = zip(weights, groups, strict=True)
        own = np.stack([np.tensordot(weight, counts[group], 1) for weight, group in pairs])
        others = shares_of(own.sum(axis=0) - own)[..., -1]
        best = np.nan_to_num(others).argmax(axis=-1)[..., None, None]
        shares[cell] = shares_of(np.take_along_axis(own, best, axis=2)[:, :, 0].sum(axis=0))
    return shares


def resamples(sizes: list[int]) -> list[np.ndarray]:
    """For each group, [samples, size]: how often a sample draws each of its runs.

    A sample draws from each group as many runs as that has, with replacement. Every ordered draw,
    all of which are equally likely, is there once if these are at most NUM_SAMPLES; else that many
    are drawn at random.
    """
    if math.prod(size**size for size in sizes) > NUM_SAMPLES:
        rng = np.random.default_rng(0)
        return [rng.multinomial(size, np.full(size, 1 / size), NUM_SAMPLES) for size in sizes]
    draws = [
        [np.bincount(draw, minlength=size) for draw in product(range(size), repeat=size)]
        for size in sizes
    ]
    return [np.stack(of_group) for of_group in zip(*product(*draws), strict=True)]


def interval(samples: np.ndarray) -> np.ndarray:
    """[2, ...]: the central 95% of equally likely samples [samples, ...].

    The ends are samples: the smallest ones that at least 2.5% and 97.5% of samples do not exceed.
    """
    ends = (1 - LEVEL) / 2, (1 + LEVEL) / 2
    return np.nanquantile(samples, ends, axis=0, method="inverted_cdf")


def plot(frame: pd.DataFrame, ax: Axes, column: int, name: str) -> None:
    """Column `column` of `shares_of` by horizon, and the range of the column after it (chance).

    RMS_t has the only band of intervals. Precision and recall have one y axis.
    """
    shares, chance, tops = transferred(frame[frame["score"].isin(SCORES)]), [], [0.1]
    if not (shares and frame["num_spikes"].any()):
        raise NoRunsError("no run has what is drawn: loss spikes, at two values of beta2")
    for score, (label, color, dashes) in LOOKS.items():
        lines = np.stack([shares["detection", score, horizon] for horizon in HORIZONS], axis=1)
        tops.append(np.fmax.reduce(lines[0, :, [0, 2]], axis=None))
        look = {"color": color, "lw": 1.2, "ls": dashes, "label": label}
        if score == "rms":
            ends = interval(lines[1:, :, [0, 2]])
            tops.append(np.fmax.reduce(ends, axis=None))
            ax.fill_between(HORIZONS, *ends[..., column // 2], color=color, alpha=0.15, lw=0)
        ax.plot(HORIZONS, lines[0, :, column], marker="o", ms=2.5, **look)
        chance.append(lines[0, :, column + 1])
    low, high = np.min(chance, axis=0), np.max(chance, axis=0)
    ax.fill_between(HORIZONS, low, high, color="0.8", lw=0)
    ax.annotate("by chance", (HORIZONS[3], high[3]), (0, 1), textcoords="offset points",
                ha="right", fontsize=7, color=style.OTHER, visible=column > 0)  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_xticks(HORIZONS, [f"{horizon}" for horizon in HORIZONS])
    ax.set(xlabel="horizon (steps)", ylabel=name, ylim=(0, 1.03 * np.fmax.reduce(tops)))
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def worth(frame: pd.DataFrame) -> str:
    """The title of `spike_warnings`: both shares of RMS_t at a horizon of 8 steps."""
    shares = transferred(frame[frame["score"].isin(SCORES)])
    if not shares:
        return ""
    precision, _, recall, *_ = shares["detection", "rms", 8][0]
    return (
        f"RMS_t warns of {recall:.0%} of the loss spikes up to 8 steps ahead; "
        f"{1 - precision:.0%} of its warnings have no spike"
    )


FIGURES = {
    "spike_warnings": Panels(
        studies=("stability",),
        where=lambda heads: spike_marks.of_adamw(spike_marks.at_main_rate(heads)),
        table=warnings,
        plots=(
            partial(plot, column=0, name="warnings that a spike follows\nwithin the horizon"),
            partial(plot, column=2, name="spikes with a warning\nwithin the horizon before"),
        ),
        title=worth,
        shows=lambda frame: measures.repeated(frame, "beta2"),
        what="warnings of loss spikes",
        text="A warning begins where a score reaches a threshold: RMS_t or rho of the patch "
        "embedding, the deviation of the gradient norm from its running mean in standard "
        "deviations, or the CUSUM of these deviations. A burst is one warning, as for RMS spikes, "
        "so low thresholds give few. Left: precision, the share of warnings that a loss spike "
        "follows within the horizon. Right: recall, the share of loss spikes with a warning "
        "within the horizon before. Gray: by chance. Spikes are counted from detection. Each "
        "beta2 has the threshold with the largest F1 in the runs of the other beta2; the band is "
        f"a {LEVEL:.0%} interval from resampling runs within each beta2.",
    )
}
