"""How many seeds the deviation by rounding alone asks for."""

import numpy as np
import pytest
from scipy import stats

from analysis.figures import scores


@pytest.mark.parametrize(("deviation", "margin"), [(0.7, 0.5), (2.0, 0.5), (0.1, 0.5)])
def test_the_number_of_seeds_gives_the_power(deviation, margin):
    num = scores.seeds_needed(deviation, margin)
    draws = np.random.default_rng(0).normal(0, deviation, (20000, num))
    half = stats.t.ppf(0.95, num - 1) * draws.std(axis=1, ddof=1) / np.sqrt(num)
    power = np.mean(np.abs(draws.mean(axis=1)) + half < margin)
    assert power == pytest.approx(0.8, abs=0.03) or (num <= 3 and power > 0.8)
