import math
from dataclasses import replace

import numpy as np
import pytest

from lowprec.diagnostics.spikes import (
    PROTOCOLS,
    Detector,
    Protocol,
    Spike,
    loss_bounds,
    loss_spikes,
    rms_spikes,
)

PAPER = PROTOCOLS["paper"]
SHORT = Protocol(ignore_steps=30, window=20)
NUM_STEPS = 5000


def noise(seed=0, num_steps=NUM_STEPS):
    return np.random.default_rng(seed).normal(2, 0.1, num_steps)


def steps(marks):
    return (np.flatnonzero(marks) + 1).tolist()


def lifted(at, by=1.0, flat=False, num_steps=NUM_STEPS):
    """Noise, or a flat ripple without a chance deviation, with the loss lifted at some steps."""
    loss = 2 + 0.1 * np.sin(np.arange(num_steps)) if flat else noise(num_steps=num_steps)
    loss[np.array(at, int) - 1] += by
    return loss


def detected(loss, rms, protocol, skipped=(), detector=None, start=0):
    """What a detector says of the steps from `start` on, leaving out the skipped."""
    detector = detector or Detector(protocol, rms.shape[1])
    found = []
    for i in range(start, len(loss)):
        if i + 1 not in skipped:
            found += detector.feed(i + 1, loss[i], rms[i])
    return found


def test_planted_loss_spikes_are_found_at_their_first_step_and_no_others():
    planted = [1200, 1900, 1935, 2600, 4000, 4970]
    loss = noise()
    for step in planted:
        loss[step - 1 : step + 14] += 0.8 * np.exp(-np.arange(15) / 5)
    assert steps(loss_spikes(loss, PAPER)) == planted


def test_planted_rms_spikes_are_found_in_their_tensors():
    rms = np.random.default_rng(0).normal(1, 0.2, (NUM_STEPS, 3)).clip(0, 2.2)
    rms[1499:1503, 0] = 9
    rms[2999, 0] = 2.3
    rms[2999, 2] = 2.29
    rms[3999:4020, 2] = math.inf
    found = rms_spikes(rms, PAPER)
    assert [steps(column) for column in found.T] == [[1500, 3000], [], [4000]]
    np.testing.assert_array_equal(rms_spikes(rms[:, 0], PAPER), found[:, 0])


# spikes in 20,000 steps of noise, over a million. Measured: 0.18 of independent losses, 1.2 where
# neighbors correlate by 0.5; 15 if one deviation were enough; of the protocol sigma 0
@pytest.mark.parametrize(
    ("protocol", "correlation", "most"),
    [(PAPER, 0.0, 0.5), (PAPER, 0.5, 2.5), (PROTOCOLS["sigma"], 0.0, 0.05)],
    ids=["paper", "paper, correlated", "sigma"],
)
def test_false_alarms_on_noise_are_rare(protocol, correlation, most):
    rate = 0
    for seed in range(50):
        loss = noise(seed, 20_000)
        if correlation:
            loss = 2 + np.convolve(loss - 2, correlation ** np.arange(30))[: len(loss)]
        rate += loss_spikes(loss, protocol).sum() / 50
    assert rate <= most


def test_a_deviation_alone_is_no_spike_and_two_within_ten_steps_are_one():
    assert steps(loss_spikes(lifted([2000], flat=True), PAPER)) == []
    assert steps(loss_spikes(lifted([2000, 2010], flat=True), PAPER)) == [2000]
    assert steps(loss_spikes(lifted([2000, 2011], flat=True), PAPER)) == []
    three = replace(PAPER, num_deviations=3)
    assert steps(loss_spikes(lifted([2000, 2005, 2010], flat=True), three)) == [2000]
    assert steps(loss_spikes(lifted([2000, 2005, 2011], flat=True), three)) == []


def test_spikes_within_ten_steps_of_one_another_count_once_at_the_earliest():
    chain = [*range(2000, 2100, 9), 2110, 2111]
    assert steps(loss_spikes(lifted(chain, flat=True), PAPER)) == [2000, 2110]
    rms = np.ones(NUM_STEPS)
    rms[[1999, 2009, 2019, 2030]] = 3
    assert steps(rms_spikes(rms, PAPER)) == [2000, 2031]


def test_the_first_thousand_steps_have_no_spike():
    loss = lifted([500, 501, 1000, 1001, 1002], flat=True)
    assert steps(loss_spikes(loss, PAPER)) == [1001]
    assert steps(loss_spikes(loss, replace(PAPER, ignore_steps=999))) == [1000]
    rms = np.where(loss > 2.5, 3.0, 1.0)
    assert steps(rms_spikes(rms, PAPER)) == [1001]


def test_a_huge_spike_hides_no_small_one_that_follows_it():
    loss = lifted(range(2000, 2005), by=50)
    loss[2029:2032] += 0.9
    assert steps(loss_spikes(loss, PAPER)) == [2000, 2030]


def test_a_loss_that_stays_high_is_one_spike_and_normal_again_within_a_window():
    loss = noise()
    loss[1999:] += 5
    loss[2299:2302] += 3
    assert steps(loss_spikes(loss, PAPER)) == [2000, 2300]


def test_the_bound_is_mean_and_deviation_of_the_window_with_deviating_losses_cut_to_their_bound():
    protocol, loss = replace(SHORT, window=30), noise(num_steps=300)
    loss[120:125] += 3
    loss[[40, 130]] = math.nan, -math.inf
    past, expected = [math.nan] * 30, []
    for value in loss:
        window = np.array(past[-30:])
        window = window[~np.isnan(window)]
        bound = window.mean() + 3.2 * window.std() if len(window) >= 15 else math.nan
        expected.append(bound)
        past.append(bound if value > bound else value if math.isfinite(value) else math.nan)
    np.testing.assert_allclose(loss_bounds(loss, protocol), expected, rtol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_no_deviation_and_changes_no_other(bad):
    loss = lifted([2000, 2003], flat=True)
    loss[[1899, 2000, 2001]] = bad
    assert steps(loss_spikes(loss, PAPER)) == [2000]
    loss = lifted([2000], flat=True)
    loss[2000:] = bad
    assert steps(loss_spikes(loss, PAPER)) == []


def test_there_is_no_bound_while_less_than_half_the_window_is_recorded():
    loss = lifted([2000, 2001], flat=True)
    loss[1799:1899] = math.nan
    assert steps(loss_spikes(loss, PAPER)) == [2000]
    loss[1899] = math.nan
    assert np.isnan(loss_bounds(loss, PAPER)[1999])
    assert steps(loss_spikes(loss, PAPER)) == []


def test_protocol_sigma_wants_one_loss_six_deviations_above_the_last_128():
    loss = noise(num_steps=300)
    window = loss[199 - 128 : 199]
    loss[199] = window.mean() + 6.01 * window.std()
    assert steps(loss_spikes(loss, PROTOCOLS["sigma"])) == [200]
    loss[199] = window.mean() + 5.99 * window.std()
    assert steps(loss_spikes(loss, PROTOCOLS["sigma"])) == []


def random_series(rng):
    """A protocol, heavy-tailed loss and RMS_t with gaps, and steps that have no row at all."""
    protocol = Protocol(
        loss_sigmas=rng.choice([1.0, 2.0, 3.2]),
        num_deviations=int(rng.integers(1, 4)),
        within=int(rng.integers(1, 12)),
        ignore_steps=int(rng.integers(0, 60)),
        window=int(rng.integers(2, 40)),
    )
    num_steps = int(rng.integers(1, 400))
    loss = rng.standard_t(2, num_steps) + rng.choice([0, 5]) * (np.arange(num_steps) > 200)
    rms = np.abs(rng.standard_t(2, (num_steps, 3))).astype(np.float32)
    for values in (loss, rms):
        values[rng.random(values.shape) < 0.05] = math.nan
    loss[rng.random(num_steps) < 0.02] = math.inf
    skipped = set((np.flatnonzero(rng.random(num_steps) < 0.05) + 1).tolist())
    gap = int(rng.integers(1, 300))
    skipped |= set(range(gap, gap + int(rng.integers(0, 60))))
    return protocol, loss, rms, skipped


@pytest.mark.parametrize("seed", range(100))
def test_the_detector_finds_exactly_the_spikes_of_the_whole_series(seed):
    protocol, loss, rms, skipped = random_series(np.random.default_rng(seed))
    found = detected(loss, rms, protocol, skipped)
    whole_loss, whole_rms = loss.copy(), rms.copy()
    rows = np.array(sorted(s for s in skipped if s <= len(loss)), int) - 1
    whole_loss[rows] = whole_rms[rows] = math.nan
    expected = [Spike(s, None, loss[s - 1]) for s in steps(loss_spikes(whole_loss, protocol))]
    for i, column in enumerate(rms_spikes(whole_rms, protocol).T):
        expected += [Spike(s, i, float(rms[s - 1, i])) for s in steps(column)]
    assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("seed", range(10))
def test_a_detector_fed_the_past_again_goes_on_as_if_never_stopped(seed):
    protocol, loss, rms, skipped = random_series(np.random.default_rng(seed))
    whole = detected(loss, rms, protocol, skipped)
    half = len(loss) // 2
    before = detected(loss[:half], rms, protocol, skipped)
    again = Detector(protocol, 3)
    assert detected(loss[:half], rms, protocol, skipped, again) == before
    assert before + detected(loss, rms, protocol, skipped, again, half) == whole


def test_a_loss_spike_is_known_at_its_second_deviation_and_steps_only_go_up():
    loss = lifted([2000, 2004], flat=True)
    detector = Detector(PAPER, 1)
    found = {i + 1: detector.feed(i + 1, x) for i, x in enumerate(loss)}
    assert {step: f for step, f in found.items() if f} == {2004: [Spike(2000, None, loss[1999])]}
    with pytest.raises(ValueError, match="step 5000 after step 5000"):
        detector.feed(5000, 2.0)


def test_a_series_without_steps_has_no_spike():
    assert loss_spikes(np.array([]), PAPER).shape == (0,)
    assert rms_spikes(np.ones((0, 2)), PAPER).shape == (0, 2)


def test_a_standing_loss_that_moves_by_its_last_bit_is_no_spike():
    loss = np.full(3000, np.float32(6.9314718)).astype(float)
    for step in (2000, 2004):
        loss[step - 1] = np.nextafter(np.float32(6.9314718), np.float32(7))
    for name in ("paper", "sigma"):
        assert not loss_spikes(loss, PROTOCOLS[name]).any()
        assert not detected(loss, np.ones((3000, 1)), PROTOCOLS[name])
    loss[1999] = loss[2003] = 6.932
    assert steps(loss_spikes(loss, PAPER)) == [2000]


def test_an_rms_equal_to_the_threshold_is_a_spike():
    rms = np.ones((2000, 1))
    rms[1499] = PAPER.rms_threshold
    assert steps(rms_spikes(rms[:, 0], PAPER)) == [1500]
    assert [spike.step for spike in detected(noise()[:2000], rms, PAPER)] == [1500]
