"""The figure of what warnings are worth, on planted warnings and spikes of known shares."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis import load_runs, predictors, spike_marks
from analysis.figures import early_warnings, spike_warnings
from lowprec.config.schema import DiagnosticsConfig, SpikeConfig
from lowprec.diagnostics.spikes import Protocol
from tests.analysis.conftest import drawn, spiking, write_rows

CONV1 = "visual.conv1.weight"
WATCHED = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=50, window=50))
STEPS, NUM_STEPS = 400, 350  # all, and those that are not ignored
NAMES = ["num_warnings", "num_followed", "num_spikes", "num_warned"]


@pytest.fixture(name="plant")
def plant_fixture(make_run):
    """A function: a run of AdamW with loss spikes at steps and RMS_t of the patch embedding."""

    def plant(rms_at, spikes=(200, 300), **keys):
        losses = spiking(STEPS, spikes)
        rms = pd.DataFrame({CONV1: np.ones(STEPS)}, np.arange(1, STEPS + 1))
        for step, value in rms_at.items():
            rms.loc[step] = value
        keys = {"num_steps": STEPS, "diagnostics": WATCHED, "experiment": "stability"} | keys
        return make_run(losses=losses, tables={"tensors": {"rms": rms}}, **keys)

    return plant


def at(frame, score, threshold, counted_from="detection"):
    """COUNTS by horizon at one threshold."""
    is_it = np.isclose(frame["threshold"], threshold, rtol=0.02) & (frame["score"] == score)
    return frame[is_it & (frame["counted_from"] == counted_from)].set_index("horizon")


def test_planted_warnings_have_the_known_precision_and_recall(plant, query):
    rms_at = {40: 5}  # ignored
    rms_at |= dict.fromkeys((120, 125, 133), 5)  # a burst, each within 10 steps of the last: one
    rms_at |= {195: 5, 272: 5, 296: 5, 300: 5}  # 5, 28 and 4 steps before; 300 is in 296's burst
    rms_at |= {310: 5, 350: 5}  # so is 310, 10 steps after 300; 350 is one more
    plant(rms_at)
    frame = query(spike_warnings)
    expected = {1: [5, 0, 2, 0], 4: [5, 1, 2, 1], 8: [5, 2, 2, 2], 32: [5, 3, 2, 2]}
    for horizon, counts in expected.items():
        row = at(frame, "rms", 2.3).loc[horizon]
        assert row[NAMES].tolist() == counts
        # of 350 steps, each of 2 spikes has `horizon` before it, each of 5 warnings after it
        assert row["followed_by_chance"] == pytest.approx(5 * 2 * horizon / NUM_STEPS)
        overlap = max(horizon - 24, 0)  # of the warnings at 272 and 296
        assert row["warned_by_chance"] == pytest.approx(2 * (5 * horizon - overlap) / NUM_STEPS)
    counts = at(frame, "rms", 2.3).loc[8, list(early_warnings.COUNTS)].to_numpy(float)
    precision, _, recall, chance_recall, lead, f1 = early_warnings.shares_of(counts)
    assert precision == 0.4 and recall == 1 and f1 == pytest.approx(0.8 / 1.4)
    assert lead == (5 + 4) / 2
    assert chance_recall == pytest.approx(5 * 8 / NUM_STEPS)


def test_counts_agree_with_the_coincidence_of_spikes_and_its_shifts(make_run, query, tmp_path):
    rng = np.random.default_rng(0)
    losses = 2 + 0.05 * np.sin(np.arange(STEPS) / 6) + 0.002 * rng.standard_normal(STEPS)
    losses[48:53] += 1  # begins before the steps that count, detected after
    losses[149:164] = 2.09  # a raised stretch with two spikes, which share its onset
    losses[[149, 150, 162, 163]] = 2.5
    for step in rng.integers(200, STEPS - 3, 9):
        losses[step - 1 : step + 3] += 0.5 * np.arange(4)
    rms = pd.DataFrame({CONV1: rng.exponential(1, STEPS)}, np.arange(1, STEPS + 1))
    keys = {"num_steps": STEPS, "diagnostics": WATCHED, "experiment": "stability"}
    make_run(losses=losses, tables={"tensors": {"rms": rms}}, **keys)
    series = spike_marks.read_series(load_runs(tmp_path), CONV1)
    protocol = Protocol(ignore_steps=50, window=50)
    expected = spike_marks.count_following(series, series.rms_of(CONV1), protocol)
    assert expected["num_onsets"] == expected["num_loss_spikes"] - 2
    frame = query(spike_warnings)
    rows = {by: at(frame, "rms", 2.3, by).loc[8] for by in ("detection", "onset")}
    assert rows["detection"]["num_warnings"] == expected["num_rms_spikes"]
    by_chance = expected["chance"] * expected["num_loss_spikes"]
    assert rows["detection"]["warned_by_chance"] == pytest.approx(by_chance)
    names = {"detection": ("num_loss_spikes", "num_following")}
    names |= {"onset": ("num_onsets", "num_by_onset")}
    for by, columns in names.items():
        counts = rows[by][["num_spikes", "num_warned"]].tolist()
        assert counts == [expected[name] for name in columns] and counts[1] > 0


def test_deviations_and_their_sum_are_those_of_the_steps_before():
    values = np.array([1.0, 3, 4, np.inf, 2, 2, 2, 2, 9])
    found = early_warnings.deviations(values, 3)
    # (4 - 2) / 1; then those of (3, 4), (4, 2), (2, 2), and three equal ones
    expected = [np.nan, np.nan, 2, np.inf, -3, -1, np.nan, np.nan, np.nan]
    np.testing.assert_allclose(found, expected)
    sums = early_warnings.cumulative_sum(np.array([np.nan, 2, np.inf, 0.3, -3, 1]))
    np.testing.assert_allclose(sums, [0, 1.5, 1.5, 1.3, 0, 0.5])


def test_few_runs_have_every_resample_by_its_chance_and_many_some_at_random():
    pair, three = early_warnings.resamples([2, 3])
    draws, nums = np.unique(np.hstack([pair, three]), axis=0, return_counts=True)
    assert len(draws) == 3 * 10
    chances = stats.multinomial.pmf(draws[:, :2], 2, [1 / 2] * 2)
    chances *= stats.multinomial.pmf(draws[:, 2:], 3, [1 / 3] * 3)
    np.testing.assert_allclose(nums / nums.sum(), chances)
    for draw in early_warnings.resamples([5, 5]):
        assert draw.shape == (1000, 5) and (draw.sum(axis=1) == 5).all()


def test_ends_of_an_interval_are_the_first_samples_that_enough_do_not_exceed():
    for num, ends in ((6, [0, 0]), (7, [-1, 1])):  # of 256, 2.5% are 6.4
        samples = np.repeat([-1.0, 0.0, 1.0], [num, 256 - 2 * num, num])
        assert early_warnings.interval(samples).tolist() == ends


def measure(run, peaks):
    """Writes what `experiments.predictors` measures at even steps; `peaks`: score, step, value."""
    rows = {}
    for step in range(2, STEPS + 1, 2):
        noise = 1 + 0.01 * np.sin(step)
        kinds = ("gradient_kurtosis", "activation_kurtosis/a", "activation_kurtosis/b")
        rows[step] = {"step": step, "curvature": 0.1 * noise} | dict.fromkeys(kinds, noise)
    for score, step, value in peaks:
        rows[step][score] = value
    replaced = {"step": STEPS, "curvature": 9.0}  # by a later attempt
    write_rows(run / "predictors.jsonl", [replaced, *rows.values()])


def test_scores_measured_at_some_steps_warn_there_alone(plant, query):
    a_row = [("curvature", step, 2.0) for step in (190, 192, 194)]  # sustained from 194 on
    peaks = [*a_row, ("curvature", 296, 1.5), ("curvature", 350, 1.2)]
    peaks += [("gradient_kurtosis", 198, 9.0), ("gradient_kurtosis", 100, "nan")]
    peaks += [("activation_kurtosis/a", 292, 9.0), ("activation_kurtosis/b", 194, 9.0)]
    measure(plant({195: 5, 296: 5}), peaks)
    frame = query(spike_warnings)
    for score, threshold, counts in (
        ("curvature", 1.0, [3, 1, 2, 1, 4]),  # that at 190 is 10 steps before the spike
        ("sustained", 1.0, [1, 1, 2, 1, 6]),
        ("sustained", 2.15, [0, 0, 2, 0, 0]),
        ("gradient_kurtosis", 8.6, [1, 1, 2, 1, 2]),
        ("activation_kurtosis", 8.6, [2, 2, 2, 2, 14]),
        ("rms_at_measured", 2.3, [1, 1, 2, 1, 4]),
        ("rms", 2.3, [2, 2, 2, 2, 9]),
    ):
        row = at(frame, score, threshold).loc[8]
        assert row[[*NAMES, "sum_of_leads"]].tolist() == counts, score


def test_the_table_has_the_thresholds_of_other_beta2_and_those_of_the_paper(plant, query, capsys):
    for beta2, seed in ((0.98, 0), (0.98, 1), (0.99, 0), (0.99, 1)):
        run = plant({195: 5, 296: 5}, beta2=beta2, seed=seed, experiment="early_warnings")
        measure(run, [("curvature", 196, 0.5), ("curvature", 296, 1.5), ("curvature", 350, 0.3)])
    root = run.parents[1]
    assert predictors.main(["--runs", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {cells[1].strip(): cells[2:-1] for line in lines if len(cells := line.split("|")) > 3}
    cells = {name: [cell.strip() for cell in rows[name]] for name in rows}
    assert list(cells)[2:11] == list(predictors.NAMES.values())
    by_chance = [f"{2 * 8 / NUM_STEPS:.1%}"] * 2
    whole = ["100% ({})", "100% ({})"]
    expected = [text.format(chance) for text, chance in zip(whole, by_chance, strict=True)]
    assert cells[predictors.NAMES["rms"]] == [*expected, "4.5", "1.00", "1.00", "-", "-"]
    curvature = cells[predictors.NAMES["curvature"]]
    none, one = "0.00 (0.00 to 0.00)", "1.00 (1.00 to 1.00)"
    at_measured = "-0.33 (-0.33 to -0.33)"  # RMS_t has a warning at 296, none at 195: 2/3 minus 1
    assert curvature == [*expected, "4.0", "1.00", "1.00", none, at_measured]
    assert cells[predictors.NAMES["sustained"]][-2:] == [one, "0.67 (0.67 to 0.67)"]  # minus 0
    has_control = [name for name in cells if cells[name][-1] not in ("-", "---")]
    assert has_control[1:] == [predictors.NAMES[score] for score in predictors.MEASURED]
    own = cells[f"{predictors.NAMES['curvature']}, at the threshold 2 / lr"]
    assert own[:4] == ["100% (4.6%)", "50% (2.3%)", "4.0", "0.67"]
    assert lines[-1] == "4 runs, 8 loss spikes, horizon 8 steps"


def test_one_beta2_has_no_table(plant, capsys):
    run = plant({195: 5})
    assert predictors.main(["--runs", str(run.parents[1])]) == 2
    assert "at least two beta2" in capsys.readouterr().err


def test_runs_without_a_loss_spike_have_no_table(plant, capsys):
    for beta2 in (0.98, 0.99):
        run = plant({195: 5}, (), beta2=beta2)
    assert predictors.main(["--runs", str(run.parents[1])]) == 2
    printed = capsys.readouterr()
    assert "no loss spike to predict in 2 runs" in printed.err and not printed.out


def test_seeds_without_an_ended_run_at_every_beta2_are_left_out_and_named(plant, capsys):
    for beta2, seed, state in (
        *((0.98, 0, "finished"), (0.99, 0, "diverged"), (0.995, 0, "finished")),
        *((0.98, 1, "finished"), (0.99, 1, "finished"), (0.995, 1, "running")),
        (0.98, 2, "finished"),
    ):
        spikes = (200, 300) if seed == 0 else (150, 250)  # which no RMS spike precedes
        run = plant({195: 5, 296: 5}, spikes, beta2=beta2, seed=seed, state=state)
    assert predictors.main(["--runs", str(run.parents[1])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("| 4.5 | 1.00 | 1.00 | - | - |")
    differences = [line.split(" | ")[-2] for line in lines[3:6]]  # one run has no interval
    assert not any("(" in text for text in differences)
    assert lines[-4:] == [
        "3 runs, 6 loss spikes, horizon 8 steps",
        "left out: 1 run that did not end or recorded no RMS_t",
        "left out: 2 runs of seed 1, which has not ended at every beta2",
        "left out: 1 run of seed 2, which has not ended at every beta2",
    ]


def test_runs_without_a_whole_seed_have_no_table(plant, capsys):
    plant({195: 5}, beta2=0.98, seed=0)
    run = plant({195: 5}, beta2=0.99, seed=1)
    assert predictors.main(["--runs", str(run.parents[1])]) == 2
    assert "no seed has an ended run at every beta2 of the runs: 0.98, 0.99" in (
        capsys.readouterr().err
    )


def test_measured_and_unmeasured_runs_are_not_compared_and_are_drawn_alike(plant, query, capsys):
    lines = []
    for seed, is_measured in ((0, False), (1, True)):
        for beta2 in (0.98, 0.99):
            run = plant({195: 5, 296: 5}, beta2=beta2, seed=seed)
            if is_measured:
                measure(run, [])
        [ax, _] = drawn(spike_warnings, query(spike_warnings))
        lines.append([line.get_ydata().tolist() for line in ax.get_lines()])
    np.testing.assert_equal(*lines)
    assert len(lines[0]) == 4
    assert predictors.main(["--runs", str(run.parents[1])]) == 2
    assert "2 of 4 runs measured curvature" in capsys.readouterr().err
