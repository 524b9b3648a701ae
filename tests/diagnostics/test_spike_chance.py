"""How often loss spikes follow RMS spikes, and by chance."""

import math
from dataclasses import replace

import numpy as np
import pytest

from lowprec.diagnostics.spikes import PROTOCOLS, lag_coincidence, leads

PAPER = PROTOCOLS["paper"]
NUM_STEPS = 5000


def marks_at(at):
    marks = np.zeros(NUM_STEPS, dtype=bool)
    marks[np.array(at, int) - 1] = True
    return marks


def test_the_lead_is_counted_from_the_latest_rms_spike_strictly_before():
    found = leads(np.array([5, 20, 30]), np.array([10, 19, 30]))
    np.testing.assert_array_equal(found, [math.nan, 1, 11])
    assert np.isnan(leads(np.array([5]), np.array([], int))).all()


def test_loss_spikes_one_to_eight_steps_after_an_rms_spike_follow_it():
    loss = marks_at([1500, 2000, 2500, 3000, 3500, 4000])
    rms = marks_at([1499, 1992, 2491, 3000, 3501, 3995])
    found = lag_coincidence(loss, rms, PAPER)
    assert (found.num_loss_spikes, found.num_rms_spikes, found.num_following) == (6, 6, 3)
    assert found.share == 0.5
    assert found.chance == pytest.approx(6 * 8 / 4000)
    assert found.p_value < 0.02  # by chance 0.07 spikes follow


@pytest.mark.parametrize("max_shift", [None, 20])
def test_chance_is_that_of_every_circular_shift(max_shift):
    rng = np.random.default_rng(0)
    protocol = replace(PAPER, ignore_steps=100)
    loss, rms = rng.random(300) < 0.05, rng.random(300) < 0.05
    found = lag_coincidence(loss, rms, protocol, max_shift)
    shifts = range(200) if max_shift is None else range(-20, 21)
    counts = []
    for shift in shifts:
        shifted = np.roll(rms[100:], shift)
        near = [
            shifted[(step - np.arange(1, 9)) % 200].any() for step in np.flatnonzero(loss[100:])
        ]
        counts.append(sum(near))
    num_loss = loss[100:].sum()
    assert found.chance == pytest.approx(np.mean(counts) / num_loss)
    assert found.p_value == np.mean(np.array(counts) >= found.num_following)
    low, high = found.low * num_loss, found.high * num_loss
    assert np.mean([low <= count <= high for count in counts]) >= 0.95
    assert np.mean([low < count < high for count in counts]) < 0.95


def test_p_values_of_independent_spikes_are_uniform_and_the_interval_covers():
    rng = np.random.default_rng(0)
    protocol = replace(PAPER, ignore_steps=0)
    found = [
        lag_coincidence(rng.random(1500) < 0.02, rng.random(1500) < 0.03, protocol)
        for _ in range(600)
    ]
    p_values = np.array([f.p_value for f in found])
    for level in (0.01, 0.05, 0.2, 0.5, 0.8):
        rate, error = (p_values <= level).mean(), math.sqrt(level * (1 - level) / len(p_values))
        assert level - 0.12 < rate < level + 3 * error  # below: a count of about 30 is coarse
    covered = np.mean([f.low <= f.share <= f.high for f in found])
    assert covered > 0.93
    shares, chances = ([getattr(f, name) for f in found] for name in ("share", "chance"))
    assert np.mean(shares) == pytest.approx(np.mean(chances), abs=0.01)


def test_small_shifts_see_through_spikes_that_only_share_a_phase_of_training():
    rng = np.random.default_rng(1)
    protocol = replace(PAPER, ignore_steps=0)
    low = {None: 0, 500: 0}
    for _ in range(100):
        phase = (np.arange(20_000) > 8000) & (np.arange(20_000) < 12_000)
        loss, rms = ((rng.random(20_000) < rate) & phase for rate in (0.005, 0.01))
        for shift in low:
            low[shift] += lag_coincidence(loss, rms, protocol, shift).p_value < 0.05
    assert low[None] > 15 and low[500] <= 12


def test_without_spikes_of_either_kind_there_is_an_answer():
    none, some = marks_at([]), marks_at([2000])
    found = lag_coincidence(none, some, PAPER)
    assert found[:3] == (0, 1, 0) and all(math.isnan(number) for number in found[3:])
    assert lag_coincidence(some, none, PAPER) == (1, 0, 0, 0, 0, 0, 0, 1)
    assert lag_coincidence(none[:500], none[:500], PAPER).num_loss_spikes == 0
