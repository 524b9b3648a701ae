import math
from dataclasses import replace

import numpy as np
import pytest

from lowprec.config.check import allows
from lowprec.diagnostics.spikes import (
    PROTOCOLS,
    Collapse,
    Detector,
    Protocol,
    Spike,
    lag_coincidence,
    largest_rms,
    leads,
    loss_bounds,
    loss_spikes,
    onsets,
    relative_rms,
    rms_spikes,
)

PAPER, SIGMA = PROTOCOLS["paper"], PROTOCOLS["sigma"]
SHORT = Protocol(ignore_steps=30, window=20)
NUM_STEPS = 5000


def noise(seed=0, num_steps=NUM_STEPS):
    return np.random.default_rng(seed).normal(2, 0.1, num_steps)


def steps(marks):
    return (np.flatnonzero(marks) + 1).tolist()


def ripple(at, by=1.0):
    """A loss without chance deviations, lifted at some steps."""
    loss = 2 + 0.1 * np.sin(np.arange(NUM_STEPS))
    loss[np.array(at, int) - 1] += by
    return loss


def detected(loss, rms, protocol, skipped=(), cuts=None):
    """What a detector reports, without the skipped steps, fed one by one or in pieces."""
    detector = Detector(protocol, rms.shape[1])
    recorded = np.array([i for i in range(len(loss)) if i + 1 not in skipped], int)
    pieces = np.split(recorded, np.arange(1, len(recorded)) if cuts is None else cuts)
    return [spike for i in pieces for spike in detector.feed(i + 1, loss[i], rms[i])]


def bumps():
    loss = noise()
    for step in (1200, 1900, 1935, 2600, 4000, 4970):
        loss[step - 1 : step + 14] += 0.8 * np.exp(-np.arange(15) / 5)
    return loss


def lifted(*stretches):
    """Noise, lifted by an amount from one step to before another."""
    loss = noise()
    for first, end, by in stretches:
        loss[first - 1 : end - 1] += by
    return loss


def constant(change):
    """A constant that changes at two steps."""
    loss = np.full(3000, np.float32(6.9314718)).astype(float)
    loss[[1999, 2003]] = change
    return loss


LAST_BIT = np.nextafter(np.float32(6.9314718), np.float32(7))
THREE = replace(PAPER, num_deviations=3)
LOSSES = {  # a loss, a protocol, the steps of its spikes
    "bumps": (bumps(), PAPER, [1200, 1900, 1935, 2600, 4000, 4970]),
    "one outlier": (ripple([2000]), PAPER, []),
    "two within 10 steps": (ripple([2000, 2010]), PAPER, [2000]),
    "two 11 steps apart": (ripple([2000, 2011]), PAPER, []),
    "three": (ripple([2000, 2005, 2010]), THREE, [2000]),
    "a chain": (ripple([*range(2000, 2100, 9), 2110, 2111]), PAPER, [2000, 2110]),
    "ignored steps": (ripple([500, 501, 1000, 1001, 1002]), PAPER, [1001]),
    "after a huge one": (lifted((2000, 2005, 50), (2030, 2033, 0.9)), PAPER, [2000, 2030]),
    "stays high": (lifted((2000, NUM_STEPS, 5), (2300, 2303, 3)), PAPER, [2000, 2300]),
    "not finite": (lifted((2000, 2003, math.inf), (2500, 2503, math.nan)), PAPER, []),
    "half the window": (lifted((1800, 1900, math.nan), (2000, 2002, 2)), PAPER, [2000]),
    "less than half": (lifted((1800, 1901, math.nan), (2000, 2002, 2)), PAPER, []),
    "a constant's last bit": (constant(LAST_BIT), PAPER, []),
    "a constant's last bit, sigma": (constant(LAST_BIT), SIGMA, []),
    "a constant that changes": (constant(6.932), PAPER, [2000]),
    "empty": (np.array([]), PAPER, []),
}


@pytest.mark.parametrize("loss, protocol, expected", LOSSES.values(), ids=LOSSES)
def test_loss_spikes_begin_where_they_were_planted(loss, protocol, expected):
    assert steps(loss_spikes(loss, protocol)) == expected
    spikes = detected(loss, np.ones((len(loss), 1)), protocol, cuts=np.arange(1, len(loss), 9))
    assert [spike.step for spike in spikes] == expected


def test_rms_spikes_count_once_in_their_tensors():
    rms = np.random.default_rng(0).normal(1, 0.2, (NUM_STEPS, 4)).clip(0, 2.2)
    rms[1499:1503, 0] = 9
    rms[2999, 0], rms[2999, 2] = PAPER.rms_threshold, 2.29
    rms[3999:4020, 2] = math.inf
    rms[[999, 1000, 1999, 2009, 2019, 2030], 3] = 3  # chained by steps of ten
    marks = rms_spikes(rms, PAPER)
    expected = [[1500, 3000], [], [4000], [1001, 2000, 2031]]
    assert [steps(column) for column in marks.T] == expected
    np.testing.assert_array_equal(rms_spikes(rms[:, 0], PAPER), marks[:, 0])


def test_bound_follows_its_definition_with_outliers_cut_to_their_bound():
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
    np.testing.assert_allclose(loss_bounds(loss, protocol)[0], expected, rtol=1e-12)


def test_protocol_sigma_needs_one_loss_six_deviations_above_the_last_128():
    loss = noise(num_steps=300)
    window = loss[199 - 128 : 199]
    loss[199] = window.mean() + 6.01 * window.std()
    assert steps(loss_spikes(loss, SIGMA)) == [200]
    loss[199] = window.mean() + 5.99 * window.std()
    assert steps(loss_spikes(loss, SIGMA)) == []


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("rms_threshold", 0.0, "a finite number above 0"),
        ("loss_sigmas", math.inf, "a finite number above 0"),
        ("ignore_steps", -1, "at least 0"),
        ("window", 4097, "at most 4096"),
        ("max_lead", 0, "at least 1"),
    ],
)
def test_a_protocol_out_of_bounds_is_refused(name, value, allowed):
    with pytest.raises(ValueError, match=f"^{name}={value}: must be {allowed}$"):
        replace(PAPER, **{name: value})
    if name != "max_lead":
        assert not allows(f"diagnostics.spikes.{name}", value)


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
def test_detector_reports_exactly_the_spikes_of_the_whole_series(seed):
    rng = np.random.default_rng(seed)
    protocol, loss, rms, skipped = random_series(rng)
    spikes = detected(loss, rms, protocol, skipped)
    cuts = np.sort(rng.integers(0, len(loss), 8))
    assert detected(loss, rms, protocol, skipped, cuts) == spikes
    whole_loss, whole_rms = loss.copy(), rms.copy()
    rows = np.array(sorted(s for s in skipped if s <= len(loss)), int) - 1
    whole_loss[rows] = whole_rms[rows] = math.nan
    expected = [Spike(s, None, loss[s - 1]) for s in steps(loss_spikes(whole_loss, protocol))]
    for i, column in enumerate(rms_spikes(whole_rms, protocol).T):
        expected += [Spike(s, i, float(rms[s - 1, i])) for s in steps(column)]
    assert sorted(spikes, key=str) == sorted(expected, key=str)


def test_loss_spike_is_known_at_its_second_outlier_and_steps_must_increase():
    loss = ripple([2000, 2004])
    detector = Detector(PAPER, 1)
    reports = {i + 1: detector.feed([i + 1], [x]) for i, x in enumerate(loss)}
    expected = {2004: [Spike(2000, None, loss[1999])]}
    assert {step: spikes for step, spikes in reports.items() if spikes} == expected
    with pytest.raises(ValueError, match="step 5000 after step 5000"):
        detector.feed([5000], [2.0])


@pytest.mark.parametrize("gap", [1, 19, 20, 21, 10**12])
def test_a_gap_counts_as_unrecorded_steps_at_any_length(gap):
    loss, protocol = noise(num_steps=80), replace(SHORT, num_deviations=1, ignore_steps=0)
    loss[60] += 5
    detector = Detector(protocol)
    found = detector.feed(np.arange(1, 41), loss[:40])
    found += detector.feed(np.arange(40, 80) + gap, loss[40:])
    filled = np.concatenate([loss[:40], np.full(min(gap, 30) - 1, math.nan), loss[40:]])
    expected = [
        s + gap - min(gap, 30) if s > 40 else s for s in steps(loss_spikes(filled, protocol))
    ]
    assert [spike.step for spike in found] == expected and 60 + gap in expected


def marks_at(at):
    marks = np.zeros(NUM_STEPS, dtype=bool)
    marks[np.array(at, int) - 1] = True
    return marks


def test_lead_counts_from_the_latest_rms_spike_strictly_before():
    lead = leads(np.array([5, 20, 30]), np.array([10, 19, 30]))
    np.testing.assert_array_equal(lead, [math.nan, 1, 11])
    assert np.isnan(leads(np.array([5]), np.array([], int))).all()


def test_loss_spikes_one_to_eight_steps_after_an_rms_spike_follow_it():
    loss = marks_at([1500, 2000, 2500, 3000, 3500, 4000])
    rms = marks_at([1499, 1992, 2491, 3000, 3501, 3995])
    result = lag_coincidence(loss, rms, PAPER)
    assert (result.num_loss_spikes, result.num_rms_spikes, result.num_following) == (6, 6, 3)
    assert result.share == 0.5
    assert result.chance == pytest.approx(6 * 8 / 4000)
    assert result.p_value < 0.02  # by chance 0.07 spikes follow


def test_chance_is_the_mean_over_all_circular_shifts():
    rng = np.random.default_rng(0)
    protocol = replace(PAPER, ignore_steps=100)
    loss, rms = rng.random(300) < 0.05, rng.random(300) < 0.05
    result = lag_coincidence(loss, rms, protocol)
    counts = []
    for shift in range(200):
        shifted = np.roll(rms[100:], shift)
        near = [
            shifted[(step - np.arange(1, 9)) % 200].any() for step in np.flatnonzero(loss[100:])
        ]
        counts.append(sum(near))
    num_loss = loss[100:].sum()
    assert result.chance == pytest.approx(np.mean(counts) / num_loss)
    assert result.p_value == np.mean(np.array(counts) >= result.num_following)
    low, high = result.low * num_loss, result.high * num_loss
    assert np.mean([low <= count <= high for count in counts]) >= 0.95
    assert np.mean([low < count < high for count in counts]) < 0.95


def test_coincidence_without_spikes_of_either_kind():
    none, some = marks_at([]), marks_at([2000])
    result = lag_coincidence(none, some, PAPER)
    assert result[:3] == (0, 1, 0) and all(math.isnan(number) for number in result[3:])
    assert lag_coincidence(some, none, PAPER) == (1, 0, 0, 0, 0, 0, 0, 1)
    assert lag_coincidence(none[:500], none[:500], PAPER).num_loss_spikes == 0


def rising(onset, peak=2.0, rise=6, num_steps=400, seed=0):
    """A noisy loss that rises from `onset` on over `rise` steps and falls back."""
    loss = 2 + 0.02 * np.random.default_rng(seed).standard_normal(num_steps)
    loss[onset - 1 : onset - 1 + rise] += peak * np.arange(1, rise + 1) / rise
    loss[onset - 1 + rise : onset + 9 + rise] += peak * np.exp(-np.arange(10) / 3)
    return loss


def onset_of(loss, protocol=SHORT):
    """Onset of each spike that is detected in a loss, and the detected steps."""
    at = np.flatnonzero(loss_spikes(loss, protocol)) + 1
    return onsets(loss, at).tolist(), at.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_onset_is_where_a_planted_rise_begins(seed):
    slow = rising(300, peak=0.3, rise=6, seed=seed)  # the first step is 2.5 deviations high
    early, at = onset_of(slow)
    assert 299 <= early[0] <= 301 and at[0] >= early[0]
    assert onset_of(rising(300, peak=3.0, seed=seed)) == ([300], [300])


def test_a_step_is_not_in_the_window_before_its_onset():
    loss = np.full(60, np.nan)
    loss[16:40], loss[40:42] = 1.0, 9.0  # 24 steps before step 41, 25 before step 42
    assert onsets(loss, np.array([42])).tolist() == [42]
    loss[15] = 1.0
    assert onsets(loss, np.array([42])).tolist() == [41]


def test_onsets_of_plateaus_of_neighbors_at_the_start_and_at_gaps():
    plateau = rising(300, peak=0)
    plateau[299:] += 1.0
    assert onset_of(plateau) == ([300], [300])
    flat = np.full(400, 2.0)
    flat[299:] += 1.0
    assert onset_of(flat) == ([300], [300])
    at_start = rising(20, num_steps=100)
    assert onsets(at_start, np.array([1, 22])).tolist() == [1, 22]  # fewer than 25 steps before
    separate = rising(300)
    separate[329:333] += 2.0
    assert onset_of(separate)[0] == [300, 330]
    joined = rising(300, peak=0)
    joined[299:320] += 1.0
    joined[314:318] += 2.0
    assert onsets(joined, np.array([300, 315])).tolist() == [300, 300]
    gap = rising(300, rise=10)
    gap[302] = math.nan
    assert onsets(gap, np.array([303, 306])).tolist() == [303, 304]
    assert onsets(gap, np.array([], int)).shape == (0,)


def test_largest_rms_bounds_the_threshold_and_rho_is_at_most_one():
    assert largest_rms(0.99) == pytest.approx(10)
    assert largest_rms(0.81) < PAPER.rms_threshold < largest_rms(0.812)
    g = np.random.default_rng(0).standard_t(1, 2000)
    for beta2 in (0.5, 0.9, 0.999):
        u, rms = g[0] ** 2, []
        for t, x in enumerate(g, 1):
            b = beta2 * (1 - beta2 ** (t - 1)) / (1 - beta2**t)
            u = b * u + (1 - b) * x**2
            rms.append(abs(x) / np.sqrt(u))
        rho = relative_rms(np.array(rms), beta2)
        assert 0.9 < rho.max() <= 1 + 1e-12
    each = relative_rms(np.ones((2, 3)), np.array([0.0, 0.75]))
    np.testing.assert_allclose(each, [[1, 1, 1], [0.5, 0.5, 0.5]])


def test_a_loss_that_stays_at_chance_after_warm_up_is_a_collapse_once():
    losses = [math.log(64)] * 60 + [2.0] + [math.log(64) * 1.019] * 80 + [math.log(64) * 1.03] * 60
    collapse = Collapse(64, warmup_steps=20, num_steps=141)
    messages = {
        step: text for step, loss in enumerate(losses, 1) if (text := collapse.feed(step, loss))
    }
    assert messages == {111: "the loss has been at chance level, 4.16, since step 62"}
    assert not any(collapse.feed(300 + i, math.nan) for i in range(60))


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([1.0] * 20, "has not left chance level, 4.16"),
        ([0.91] * 10 + [1.0] * 20, "has not left chance level, 4.16"),
        ([0.89] * 10 + [1.004] * 20, "has been at chance level, 4.16, since step 21"),
        ([0.5] * 10 + [1.015] * 5 + [1.0] * 20, "has been at chance level, 4.16, since step 21"),
        ([0.5] * 11 + [1.0] * 19, None),
        ([1.0] * 25 + [0.97], None),  # it learned at last
        ([1.01, 0.99] * 14, None),  # a healthy start
        ([1.0] * 55, None),  # reported before
    ],
)
def test_a_short_run_that_ends_at_chance_is_a_collapse_if_it_had_learned(losses, told):
    collapse, losses = Collapse(64, 10, 10 + len(losses)), [1.0] * 10 + losses
    texts = [collapse.feed(n, loss * math.log(64)) for n, loss in enumerate(losses, 1)]
    assert texts[-1] == (f"the loss {told}" if told else "")
    assert collapse.verdict == ("collapsed" if min(losses) < 0.9 else "not_learning")
