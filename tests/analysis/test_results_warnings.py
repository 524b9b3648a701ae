"""What the page of results says of warnings before spikes agrees with the committed records."""

import math

import numpy as np
import pandas as pd
import pytest

from analysis import load_runs, predictors
from analysis.figures import FIGURES, early_warnings
from lowprec.diagnostics.spikes import NEAR_CHANCE
from tests.analysis.results import RESULTS, rows_of, words_of

HORIZON = 8  # steps, the paper's


@pytest.mark.slow
def test_what_warnings_are_worth_is_that_of_the_records():
    own, *rest = (
        FIGURES["spike_warnings"].query(load_runs(RESULTS / study))
        for study in ("stability_mini", "stability_control", "optimizers_mini")
        + tuple(f"spikes_vs_{name}_mini" for name in ("lr", "batch", "size"))
    )
    others = pd.concat(rest)
    others = others[~others["run"].isin(own["run"])]
    sums = own.groupby([*early_warnings.CELL, "threshold"])[list(early_warnings.COUNTS)].sum()
    f1 = pd.Series(early_warnings.shares_of(sums.to_numpy(float))[:, -1], sums.index)
    rows, lower = rows_of("| score | warnings that a spike follows"), []
    for score, cells, (_, *expected) in zip(
        early_warnings.SCORES, rows, predictors.worth(own), strict=True
    ):
        best = f1["detection", score, HORIZON].idxmax()
        keys = {"counted_from": "detection", "score": score, "horizon": HORIZON}
        at = (others[list(keys)] == pd.Series(keys)).all(axis=1) & (others["threshold"] == best)
        counts = others.loc[at, list(early_warnings.COUNTS)].to_numpy(float).sum(axis=0)
        elsewhere = early_warnings.shares_of(counts[None])[0, -1]
        assert cells[1:] == [*expected[:-2], f"{elsewhere:.2f}"], score
        lower.append(expected[-2])
    page = words_of("spikes")
    assert "the others is lower by {}, {} and {}".format(*lower[1:]) in page
    num_runs, num_spikes = others["run"].nunique(), counts[3]
    assert f"{num_runs} other runs of AdamW with {num_spikes:.0f} spikes" in page


@pytest.mark.slow
def test_scores_of_early_warnings_are_worth_what_the_records_say():
    runs, text = load_runs(RESULTS / "early_warnings_mini"), words_of("spikes")
    frame = FIGURES["spike_warnings"].query(runs)
    rows = rows_of("| score in `early_warnings_mini` |")
    assert rows == predictors.worth(frame)
    num_spikes = frame.drop_duplicates("run")["num_spikes"].sum()
    assert f"There are {num_spikes:.0f} loss spikes in {len(runs.runs)} runs." in text
    f1 = {
        (side, score): np.nan_to_num(shares[:, -1])
        for (side, score, horizon), shares in early_warnings.transferred(frame).items()
        if horizon == HORIZON
    }
    kurtosis, control = "activation_kurtosis", "rms_at_measured"
    worse = {"curvature", "gradient_kurtosis", kurtosis, control}
    for side, reference, scores, expected in (
        ("detection", "rms", early_warnings.THRESHOLDS, worse),
        ("detection", control, predictors.MEASURED, {kurtosis}),
        ("onset", "rms", early_warnings.THRESHOLDS, {kurtosis}),
        ("onset", control, predictors.MEASURED, {kurtosis}),
    ):
        scores = [score for score in scores if score != reference]
        differences = [f1[side, reference] - f1[side, score] for score in scores]
        lows, highs = np.transpose([early_warnings.interval(each[1:]) for each in differences])
        assert {score for score, low in zip(scores, lows, strict=True) if low > 0} == expected
        assert min(highs) > 0  # none is better
    beta2 = runs.runs["optimizer.beta2"].value_counts()
    draws = np.hstack(early_warnings.resamples(beta2.tolist()))
    num_draws = len(np.unique(draws, axis=0))
    given = f"{num_spikes:.0f} spikes, {len(runs.runs)} runs, {num_draws} different resamples"
    nums = [sum("(" in cells[column] for cells in rows) for column in (-2, -1)]
    assert given in text and nums == [8, 4]
    assert "eight comparisons (12 with the last column), uncorrected" in text
    [own] = [cells for cells in rows if cells[0].startswith("curvature along the gradient, at")]
    assert own[2].startswith(f"{8 / num_spikes:.0%} (")
    share = own[1].partition(" ")[0]
    assert f"warns of 8 of {num_spikes:.0f} spikes, and {share} of its warnings are right" in text


def since_chance(loss, chance):
    """The first step from which the loss stays within NEAR_CHANCE of chance level."""
    return loss.index[abs(loss - chance) > NEAR_CHANCE * chance].max() + 1


@pytest.mark.slow
def test_collapse_and_cost_of_early_warnings_are_those_of_the_records():
    runs, text = load_runs(RESULTS / "early_warnings_mini"), words_of("spikes")
    assert all(runs.metrics.groupby("run")["loss"].min() < 1)
    chance = math.log(1024)
    ends = runs.metrics[runs.metrics["step"] > 950].groupby("run")["loss"].mean()
    heads = runs.runs.set_index("run").loc[ends[abs(ends - chance) < 0.01].index]
    assert set(heads["seed"]) == {0} and sorted(heads["optimizer.beta2"]) == [0.995, 0.999]
    by_run = runs.metrics.set_index("step").groupby("run")["loss"]
    curves = {heads.loc[run, "optimizer.beta2"]: loss for run, loss in by_run if run in heads.index}
    stays = {b: since_chance(loss.loc[:900], chance) for b, loss in curves.items()}
    since = f"from steps {stays[0.995]} and {stays[0.999]} on"
    assert f"{since}, they are at chance level ({chance:.2f})" in text
    collapsed = runs.events.dropna(subset="collapsed")["collapsed"]
    assert collapsed.str.endswith("since step 501").any() and "record says 501" in text
    loss = curves[0.995]
    rise = loss.loc[937:947].max() - loss.loc[837:936].median()
    assert f"a rise of {rise:.1f} nats at step 937" in text
    own = runs.timing.groupby("run")["step_ms"].median().median()
    others = load_runs(RESULTS / "kq_norm_mini").timing  # those that shared a GPU are slower
    plain = others.groupby("run")["step_ms"].median().min()
    every = f"each the mean of {runs.runs['log_every'].unique().item()} steps, is {own:.0f} ms"
    assert every in text and f"{plain:.0f} ms in a run of `kq_norm_mini` without it" in text
    assert f"as much time as {2 * (own - plain) / plain:.0f} steps" in text
