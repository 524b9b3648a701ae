"""Tests the spike tables, `python -m analysis.spikes` and its figure on planted spikes."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import load_runs, spike_marks, spikes
from analysis.figures import rms_and_loss
from lowprec.diagnostics.spikes import Protocol
from tests.analysis.conftest import drawn, write_rows

CONV1, PROJ = "visual.conv1.weight", "visual.proj"
C_FC = "transformer.resblocks.0.mlp.c_fc.weight"
SPIKES = {1200: 3, 1500: 8, 1800: None}  # step of the loss spike: its lead in the patch embedding


@pytest.fixture(name="plant")
def plant_fixture(make_run):
    """A function that makes a run with the spikes above; it takes make_run's keys."""

    def plant(planted=SPIKES, num_steps=2000, **keys):
        rng = np.random.default_rng(0)
        losses = 2 + 0.1 * np.sin(np.arange(num_steps))
        rms = pd.DataFrame(rng.uniform(0.8, 1.2, (num_steps, 3)), columns=[CONV1, PROJ, C_FC])
        for step, lead in planted.items():
            losses[step - 1 : step + 2] += 1.0, 1.5, 1.2
            if lead is not None:
                rms.loc[step - lead - 1, CONV1] = 5
        rms.loc[1799, PROJ] = rms.loc[1198, PROJ] = rms.loc[1195, C_FC] = 4
        keys = {"experiment": "rms_and_loss", "flush": 500} | keys
        rms.index += 1
        return make_run(
            num_steps=num_steps, losses=losses, tables={"tensors": {"rms": rms}}, **keys
        )

    return plant


@pytest.fixture(name="series")
def series_fixture(plant):
    run = plant()
    return spike_marks.read_series(load_runs(run))


def test_table_has_a_row_per_loss_spike_with_height_leads_and_tensors_before_it(series):
    table = spike_marks.spike_table(series, Protocol()).set_index("step")
    assert table.index.tolist() == list(SPIKES)
    assert table["onset"].tolist() == list(SPIKES)
    assert table["lead"].tolist() == table["onset_lead"].tolist() == [3, 8, 308]
    np.testing.assert_allclose(table["rms"].iloc[:2], 5)
    np.testing.assert_allclose(table["rho"].iloc[:2], 5 * 0.1)  # beta2 is 0.99
    assert table["tensors"].tolist() == [f"{C_FC} {CONV1} {PROJ}", CONV1, ""]
    assert table["num_tensors"].tolist() == [3, 1, 0]
    np.testing.assert_allclose(table["height"], 1.5, atol=0.15)
    np.testing.assert_allclose(table["before"], 2.0, atol=0.05)


def test_tensors_without_recorded_rms_come_from_the_events(plant, series, capsys):
    run, protocol = plant(), Protocol()
    table = pd.read_parquet(run / "tensors.parquet")
    table[["step", f"rms/{CONV1}"]].to_parquet(run / "tensors.parquet")
    spikes_at = {1196: C_FC, 1197: CONV1, 1199: PROJ, 1492: CONV1, 1800: PROJ}
    rows = [
        {"step": step, "spike": "rms", "rms": {name: 5.0 if name == CONV1 else 4.0}}
        for step, name in spikes_at.items()
    ]
    write_rows(run / "events.jsonl", rows)
    few = spike_marks.read_series(load_runs(run))
    expected = spike_marks.spike_table(series, protocol)
    pd.testing.assert_frame_equal(spike_marks.spike_table(few, protocol), expected)
    higher = spike_marks.spike_table(few, replace(protocol, rms_threshold=4.5))
    assert higher["num_tensors"].tolist() == [1, 1, 0]
    assert spikes.main(["--run", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"    1200  {C_FC} {CONV1} {PROJ}\n    1500  {CONV1}\n    1800  -\n" in out
    assert "By tensor, 1 tensor with RMS_t (each" in out
    assert "Of 2 others, only RMS spikes are recorded, as events." in out
    assert f"latest RMS spike of {CONV1} to the step" in out and "rms, rho: its largest" in out


def test_leads_to_the_onset_are_shorter_where_the_loss_rises_before_its_detection(series):
    series = replace(series, loss=series.loss.copy())
    for step, by in ((1198, 0.35), (1199, 0.4)):  # above the median, not yet an outlier
        series.loss[step - 1] = 2 + by
    protocol = Protocol(loss_sigmas=8)
    first = spike_marks.spike_table(series, protocol).iloc[0]
    assert (first["step"], first["lead"], first["onset"], first["onset_lead"]) == (1200, 3, 1198, 1)
    series.rms.loc[[1197], CONV1] = 1.0
    series.rms.loc[[1199], CONV1] = 5.0  # after the onset, before the step
    first = spike_marks.spike_table(series, protocol).iloc[0]
    assert first["lead"] == 1 and pd.isna(first["onset_lead"])
    counts = spike_marks.count_following(series, series.rms_of(CONV1), protocol)
    assert (counts["num_following"], counts["num_by_onset"]) == (2, 1)


def test_tensors_come_in_the_order_of_how_often_they_are_followed(series):
    table = spike_marks.lead_table(series, Protocol())
    assert table["tensor"].tolist() == [CONV1, C_FC, PROJ]  # one of C_FC's is worth more: fewer
    assert table.set_index("tensor")["num_following"].to_dict() == {CONV1: 2, PROJ: 1, C_FC: 1}
    assert table.set_index("tensor")["num_rms_spikes"].to_dict() == {CONV1: 2, PROJ: 2, C_FC: 1}
    assert table["num_by_onset"].tolist() == [2, 1, 1]


def test_command_prints_leads_by_step_and_onset_beside_the_paper(plant, capsys):
    assert spikes.main(["--run", str(plant())]) == 0
    out = capsys.readouterr().out
    assert f"3 loss spikes and 2 RMS spikes ({CONV1}) in 2,000 steps." in out
    assert re.search("2 of 3 loss spikes .67%. .* counted from the onset, 2 of 3", out)
    assert "28 of 30" in out and f"By chance {2 * 8 / 1800:.1%}" in out
    assert "coincide" not in out
    assert spikes.main(["--run", str(plant({1200: 0, 1500: 8, 1800: None}, seed=1))]) == 0
    assert "1 of 3 loss spikes (33%) come 1 to 8 steps after" in (out := capsys.readouterr().out)
    assert "1 coincides with an RMS spike, which therefore cannot be the cause" in out


@pytest.mark.parametrize(
    ("beta2", "decay", "reason"),
    [
        (0.8, None, "at beta2 = 0.8, RMS_t cannot exceed 2.24, and the threshold is 2.3"),
        # 1 - 2000^-0.1, and 2000^0.05
        (0.99, 0.1, "at beta2 <= 0.532376, RMS_t cannot exceed 1.46, and the threshold is 2.3"),
    ],
)
def test_command_says_when_the_threshold_cannot_be_reached(plant, capsys, beta2, decay, reason):
    run = plant(beta2=beta2, beta2_decay=decay)
    assert spikes.main(["--run", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"no possible RMS spikes ({CONV1}): {reason}" in out


def test_options_replace_thresholds_of_the_protocol(plant, capsys):
    run = str(plant())
    spikes.main(["--run", run, "--rms-threshold", "6", "--ignore-steps", "1300", "--window", "100"])
    out = capsys.readouterr().out
    assert "rms_threshold=6.0 loss_sigmas=3.2 num_deviations=2" in out
    assert "2 loss spikes and 0 RMS spikes" in out
    spikes.main(["--run", run, "--protocol", "sigma", "--loss-sigmas", "9"])
    assert "loss_sigmas=9.0 num_deviations=1 within=10 ignore_steps=0" in capsys.readouterr().out
    plant(seed=1)
    spikes.main(["--run", str(Path(run).parent), "--window", "100"])
    assert capsys.readouterr().out.count("window=100") == 2
    assert spikes.main(["--run", run, "--window", "0"]) == 2
    assert capsys.readouterr().err == "error: window=0: must be at least 2\n"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"steps": 0, "state": "running"}, "0 steps are recorded, and the first 200 are ignored"),
        ({"steps": 170, "state": "failed"}, "Nothing was examined: 170 steps are recorded"),
        ({"steps": 1510, "state": "running"}, "running: 1510 of 2000 steps\n2 loss spikes"),
        ({"steps": 1203, "state": "diverged"}, "diverged\n1 loss spike and 1 RMS spike ("),
    ],
    ids=["no step", "too short", "running", "diverged"],
)
def test_incomplete_run_is_reported_as_far_as_it_goes(plant, capsys, keys, sentence):
    assert spikes.main(["--run", str(plant(**keys))]) == 0
    assert sentence in capsys.readouterr().out


def test_a_collapse_is_named_and_where_it_ends(make_run, capsys):
    losses = 1 + np.tile([0.0, 0.01], 600)
    losses[600:] = np.log(128)
    losses[1100:] = 2.0
    spikes.main(["--window", "100", "--run", str(make_run(num_steps=1200, losses=losses))])
    recovered = "the loss was at chance level, 4.85, from step 601 on and ends at 2.\n"
    assert recovered in capsys.readouterr().out


def test_a_loss_that_another_trainer_computed_has_no_chance_level(make_run):
    losses = np.full(200, np.log(128))
    [summary] = load_runs(make_run(num_steps=200, losses=losses)).summaries.to_dict("records")
    assert spike_marks.collapse_of(summary, losses)[0] == "not learning"
    assert spike_marks.collapse_of(summary | {"data.name": "unknown"}, losses) == ("", "")


def test_a_single_outlier_is_named_where_no_loss_spikes(make_run, capsys):
    losses = 2 + 0.01 * np.sin(np.arange(300))
    losses[149] = 50
    run = str(make_run(num_steps=300, losses=losses))
    arguments = ["--run", run, "--ignore-steps", "100", "--window", "50"]
    assert spikes.main(arguments) == 0
    out = capsys.readouterr().out
    assert "1 single outlier, the highest 50 at step 150: a loss spike has 2 within 10 steps" in out
    assert spikes.main([*arguments, "--num-deviations", "1"]) == 0
    out = capsys.readouterr().out
    assert "1 loss spike and" in out and "single outlier" not in out


def test_run_with_a_locked_image_tower_still_has_loss_spikes(plant, capsys):
    run = plant()
    table = pd.read_parquet(run / "tensors.parquet")
    table[["step", f"rms/{C_FC}"]].to_parquet(run / "tensors.parquet")
    plant(seed=1)
    assert spikes.main(["--run", str(run.parent)]) == 0
    out = capsys.readouterr().out
    chosen = f"choose with --tensor, such as {C_FC}."
    text = f"3 loss spikes in 2,000 steps; {CONV1} is not recorded: {chosen}"
    assert text in out and out.count("lead, onset_lead: ") == 1
    assert out.count("By chance") == 1  # of the other run
    assert f"3 loss spikes and 2 RMS spikes ({CONV1}) in 2,000 steps." in out
    assert spikes.main(["--run", str(run), "--tensor", CONV1]) == 2


def test_the_table_of_tensors_says_how_many_it_leaves_out(plant, capsys):
    run = plant()
    table = pd.read_parquet(run / "tensors.parquet")
    for number in range(8):
        table[f"rms/more.{number}"] = 1.0
    table.to_parquet(run / "tensors.parquet")
    assert spikes.main(["--run", str(run)]) == 0
    out = capsys.readouterr().out
    assert "the 10 most followed of 11 tensors with RMS_t" in out and "as events" not in out
    assert out.partition("By tensor")[2].count("more.") == 7


def test_a_spike_without_an_rms_spike_before_it_has_a_dash_for_its_lead(plant, capsys):
    assert spikes.main(["--run", str(plant({1200: None}))]) == 0
    row = next(
        line for line in capsys.readouterr().out.splitlines() if line.split()[:2] == ["1200"] * 2
    )
    assert row.split()[6:8] == ["-", "-"]


def test_the_rule_is_stated_once_for_several_numbers_of_ignored_steps():
    rows = [vars(Protocol(ignore_steps=number)) for number in (1000, 40, 100, 40)]
    text = spike_marks.describe_protocols(pd.DataFrame(rows))
    assert text.count("Loss spikes: ") == 1
    assert "The first 40 or 100 or 1,000 steps have neither." in text
    other = spike_marks.describe_protocols(pd.DataFrame([*rows, vars(Protocol(window=50))]))
    assert other.count("Loss spikes: ") == 2


def test_one_loss_spike_has_a_chance_level_without_interval(plant, capsys):
    spikes.main(["--run", str(plant({1200: 3}))])
    assert f"By chance {8 / 1800:.1%}, p = " in capsys.readouterr().out


def test_a_run_without_losses_has_no_result_on_loss_spikes(plant, capsys):
    run = plant({1200: 3})
    rows = [{"step": step + 1, "loss": math.nan} for step in range(2000)]
    write_rows(run / "metrics.jsonl", rows)
    spikes.main(["--run", str(run)])
    out = capsys.readouterr().out
    assert "No finite loss is recorded and 1 RMS spike (" in out
    assert "0 loss spikes" not in out


def test_early_losses_and_divergence_do_not_stretch_the_loss_axis(plant):
    frame = rms_and_loss.query(load_runs(plant()))
    frame.loc[frame["step"] < 50, "loss"] = 5
    frame.loc[frame["step"] > 1990, "loss"] = [900] * 9 + [math.inf]
    loss, _ = drawn(rms_and_loss, frame)
    assert loss.get_ylim()[1] == pytest.approx(2 * 5 * 1.05)  # twice the first loss
