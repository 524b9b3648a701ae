"""Runs that differ in rounding alone, beside the seeds of another study."""

import numpy as np
import pytest
from scipy import stats

from analysis.figures import rounding, scores
from analysis.measures import RECALL, VALIDATION_LOSS
from tests.analysis.conftest import drawn


@pytest.fixture
def plant(make_run):
    """A function that makes a run with a recall in % at its end."""

    def plant(recall, experiment="rounding", lr=2e-3, **keys):
        columns = dict.fromkeys(RECALL, np.full(20, recall / 100))
        columns[VALIDATION_LOSS] = np.full(20, 1 / recall)
        make_run(num_steps=20, columns=columns, experiment=experiment, lr=lr, **keys)

    return plant


def test_seeds_come_from_runs_with_the_same_settings(plant, query):
    for k, recall in enumerate((71.0, 72.0, 73.0)):
        plant(recall, lr=2e-3 * (1 + 2e-7 * k), compile=True)
    plant(74.0)
    for seed, recall in enumerate((70.0, 60.0, 80.0)):
        plant(recall, "accuracy_vs_size", seed=seed, compile=True)
    plant(10.0, "accuracy_vs_size", lr=2.01e-3, compile=True)
    for seed, recall in enumerate((11.0, 13.0)):
        plant(recall, "accuracy_vs_size", recipe="switchback", seed=seed, compile=True)
    plant(10.0, "accuracy_vs_size", model="mini_b", compile=True)
    frame = query(rounding)
    arms = frame.groupby("arm")["recall"].apply(lambda values: sorted(values.round(6)))
    assert arms[scores.ROUNDING] == [70, 71, 72, 73, 74] and arms[scores.SEEDS] == [60, 70, 80]
    assert arms[scores.OTHERS] == [69, 71]  # moved to the mean of the seeds
    assert scores.deviation(frame, scores.SEEDS, "recall") == pytest.approx(10)
    assert scores.deviation(frame, scores.OTHERS, "recall") == pytest.approx(2**0.5)
    for ax in drawn(rounding, frame):
        [one] = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
        assert len(one.get_xdata()) == 1  # not compiled
    caption = rounding.caption(frame)
    assert "over seeds (3 runs): 10 points of R@1" in caption
    assert "over rounding alone (5 runs): 1.6 points of R@1 and 2.2% of the loss" in caption
    few, more = (f"{scores.seeds_needed(5**0.5, margin):,}" for margin in (0.5, 0.1))
    assert f"power by {more}, {few} and" in caption  # the differences have a variance of 2 * 2.5


@pytest.mark.parametrize(("deviation", "margin"), [(0.7, 0.5), (2.0, 0.5), (0.1, 0.5)])
def test_the_number_of_seeds_gives_the_power(deviation, margin):
    num = scores.seeds_needed(deviation, margin)
    draws = np.random.default_rng(0).normal(0, deviation, (20000, num))
    half = stats.t.ppf(0.95, num - 1) * draws.std(axis=1, ddof=1) / np.sqrt(num)
    power = np.mean(np.abs(draws.mean(axis=1)) + half < margin)
    assert power == pytest.approx(0.8, abs=0.03) or (num <= 3 and power > 0.8)
