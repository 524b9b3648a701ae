"""Figures around spikes on planted ones: what no committed record shows.

Golden CSVs and the committed pictures hold the rest.
"""

import numpy as np
import pandas as pd
import pytest

from analysis import load_runs, naming, spike_marks
from analysis.figures import (
    kq_norm,
    lead_histogram,
    rms_and_loss,
    spike_heights,
    spike_warnings,
    spikes,
    spikes_vs_lr,
    tensors_before_spikes,
)
from analysis.load import NoRunsError
from analysis.measures import RECALL
from analysis.spike_marks import at_main_rate
from lowprec.clip.model import build_model
from lowprec.config.schema import DiagnosticsConfig, InterventionConfig, ModelConfig, SpikeConfig
from lowprec.diagnostics.spikes import Protocol
from tests.analysis.conftest import drawn, spiking, write_rows

CONV1 = "visual.conv1.weight"
SPIKES = {400: 3, 500: 8, 600: 50, 700: None}  # step of a loss spike: lead of the patch embedding
STEPS = 800
WATCHED = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=200, window=100))


@pytest.fixture(name="plant")
def plant_fixture(make_run):
    """A function that makes a run with the spikes above, as the record writer leaves it."""

    def plant(planted=SPIKES, **keys):
        losses = spiking(STEPS, planted, 1.3)
        rms = pd.DataFrame({CONV1: np.ones(STEPS)}, np.arange(1, STEPS + 1))
        rms.loc[[step - lead for step, lead in planted.items() if lead is not None]] = 5
        keys = {"num_steps": STEPS, "diagnostics": WATCHED, "flush": 100} | keys
        return make_run(losses=losses, tables={"tensors": {"rms": rms}}, **keys)

    return plant


def test_leads_count_each_spike_once_and_tell_before_at_and_after(plant, query):
    root = plant({400: 3, 500: 8, 600: 0, 650: -2, 700: None, 750: -20}, experiment="stability")
    series = spike_marks.read_series(load_runs(root))
    table = spike_marks.signed_leads(series, Protocol(ignore_steps=200, window=100))
    np.testing.assert_array_equal(table["lead"], [3, 8, 0, -2, np.nan, np.nan])
    assert table["is_large"].tolist() == [True] * 6
    plant({400: 3}, beta2=0.5, experiment="stability")  # RMS_t cannot reach the threshold
    frame = query(lead_histogram)
    assert frame["run"].nunique() == 1
    for name, part in frame.groupby("counted_from"):
        counts = part.set_index("lead")["num_spikes"]
        assert counts.sum() == 6 and counts[[3, 8, 0, -2]].tolist() == [1] * 4, name
    detected = frame[frame["counted_from"] == "detection"].set_index("lead")
    chance = 6 * 5 / (STEPS - 200)  # loss spikes x RMS spikes / steps
    assert detected["by_chance"].dropna().tolist() == pytest.approx([chance] * 17)
    left, _ = drawn(lead_histogram, frame)
    share = "33% of loss spikes are detected, and 33% begin, 1 to 8 steps after an RMS spike"
    assert lead_histogram.title(frame) == share
    assert "Only runs in which RMS_t can reach its threshold." in lead_histogram.caption(frame)
    heights = [bar.get_height() for bar in left.patches]
    assert sum(heights) == 2 * 4  # all and, over them, those over 1 nat; two have no lead


@pytest.mark.parametrize("figure", [spike_heights, spike_warnings, tensors_before_spikes])
def test_a_control_at_another_rate_is_drawn_alone_but_not_pooled_with_its_study(
    plant, query, figure
):
    def runs(**keys):
        run = plant(experiment="stability", **keys)
        write_rows(run / "events.jsonl", [{"step": 397, "spike": "rms", "rms": {CONV1: 5.0}}])
        return set(query(figure)["run"]), run.name

    drawn_alone, control = runs(lr=4e-3)
    assert drawn_alone == {control}
    _, at_other_scale = runs(lr=4e-3, scale="mini", batch_size=256)
    runs(lr=2e-3)
    pooled, _ = runs(lr=2e-3, seed=1)
    assert len(pooled) == 3 and at_other_scale in pooled and control not in pooled


def test_warnings_of_runs_without_spikes_are_not_drawn(plant, query):
    for beta2 in (0.98, 0.99):
        plant({}, beta2=beta2, experiment="stability")
    with pytest.raises(NoRunsError, match="no run has what is drawn: loss spikes"):
        drawn(spike_warnings, query(spike_warnings))
    with pytest.raises(NoRunsError, match="no loss spike follows an RMS spike of any tensor"):
        drawn(tensors_before_spikes, query(tensors_before_spikes))


def test_only_a_rate_with_fewer_runs_of_its_model_and_optimizer_is_a_control():
    rows = [
        *[("stability", "mini_l", "adamw", lr) for lr in (2e-3, 2e-3, 1e-3)],
        *[("stability", "mini_l", "stable_adamw", lr) for lr in (1e-3, 4e-3)],  # a sweep
        ("stability", "mini_b", "adamw", 1e-3),
        *[("kq_norm", "mini_l", "adamw", lr) for lr in (1e-3, 1e-3, 4e-3)],
        (None, "mini_l", "adamw", np.nan),  # damaged
    ]
    columns = ["experiment", "model.name", "optimizer.name", "optimizer.lr"]
    heads = pd.DataFrame(rows, columns=columns).assign(scale="mini")
    assert [*at_main_rate(heads).index] == [i for i in range(len(rows)) if i != 2]
    assert at_main_rate(heads.drop(columns="optimizer.lr")).equals(heads.drop(columns=columns[3]))


def test_the_highest_spikes_are_those_of_runs_that_differ_in_kq_norm_and_gpu(plant, query):
    with_it = {"experiment": "kq_norm", "intervention": InterventionConfig("kq_norm")}
    plant({400: 3, 600: 3}, beta2=0.98, gpu="H200", **with_it)
    plant({}, beta2=0.99, gpu="H200", **with_it)
    for beta2 in (0.98, 0.99, 0.999):
        plant({500: 3}, beta2=beta2, gpu="H100", experiment="stability", seed=1)
    plant({500: 3}, beta2=0.99, gpu="H100", experiment="stability", lr=4e-3)
    frame = query(kq_norm)
    rows = frame.set_index(["beta2", "intervention"])["highest"].sort_index()
    assert [*rows.index] == [(b, i) for b in (0.98, 0.99) for i in ("kq_norm", "none")]
    assert rows[0.99, "kq_norm"] == 0 and rows.drop((0.99, "kq_norm")).between(1.2, 1.4).all()


def test_loss_spikes_have_triangles_over_their_peaks_and_are_counted(plant, query):
    plant({400: 3, 600: 3}, beta2=0.99, experiment="spikes_vs_lr")
    frame = query(spikes_vs_lr)
    [ax] = drawn(spikes_vs_lr, frame)
    marks = [line for line in ax.lines if line.get_marker() == "v"]
    [steps, peaks] = np.transpose([line.get_xydata()[0] for line in marks])
    assert steps.tolist() == frame.loc[frame["height"].notna(), "step"].tolist()
    assert (peaks > 3).all() and {line.get_mfc() for line in marks} == {"black"}
    assert ax.get_title().endswith("2 spikes, 2 over 1 nat ▼")


def test_a_protocol_of_a_config_is_that_of_its_name_with_what_is_given():
    head = dict.fromkeys((f"diagnostics.spikes.{name}" for name in spike_marks.THRESHOLDS), None)
    head |= {"diagnostics.spikes.protocol": "paper"}
    assert spike_marks.protocol_of_run(head) == Protocol()
    thresholds = {"diagnostics.spikes.window": np.float64(50), "diagnostics.spikes.loss_sigmas": 4}
    assert spike_marks.protocol_of_run(head | thresholds) == Protocol(window=50, loss_sigmas=4)
    none = head | {"diagnostics.spikes.protocol": "none"}
    assert spike_marks.protocol_of_run(none) == Protocol()


def test_a_beta2_without_loss_spikes_says_so(plant, query):
    for beta2, bumps in ((0.8, {}), (0.99, {400: 3}), (0.999, {})):
        columns = dict.fromkeys(RECALL, np.full(STEPS, 0.3))
        plant(bumps, beta2=beta2, columns=columns, experiment="stability")
    left, right = drawn(spike_heights, query(spike_heights))
    at = [(text.get_text(), text.get_position()[0]) for text in left.texts]
    assert at == [("none", 0), ("none", 2)] and left.get_xlim()[1] > 2
    assert "none" not in [text.get_text() for text in right.texts]


@pytest.mark.parametrize(("gap", "is_open"), [(400, True), (799, True), (798, False), (801, False)])
def test_runs_evaluated_right_after_a_reset_are_open_points(
    plant, query, monkeypatch, gap, is_open
):
    monkeypatch.setitem(spikes.RESETS, "stable_spam", gap)
    for name in ("adamw", "stable_spam"):
        columns = dict.fromkeys(RECALL, np.full(STEPS, 0.3))
        plant({}, optimizer=name, columns=columns, experiment="optimizers")
    frame = query(spike_heights)
    assert frame["after_reset"].tolist() == [False, is_open]
    [*_, right] = drawn(spike_heights, frame)
    opened = [line.get_xydata() for line in right.lines if line.get_mfc() == "white"]
    expected = [[pytest.approx(30), 1]] if is_open else []  # the second row
    assert [[x, round(y)] for points in opened for x, y in points] == expected


@pytest.mark.parametrize("intervention", ["zero_init", "kq_norm"])
def test_tensors_of_clip_have_distinct_names_in_words(intervention):
    model = build_model(ModelConfig(name="nano"), intervention)
    names = {naming.tensor(name): name for name, _ in model.named_parameters()}
    assert len(names) == len([*model.parameters()])
    assert not any(set("._") & set(name) for name in names)
    assert names["vision block 0, layer norm 2, bias"].endswith("resblocks.0.ln_2.bias")


def test_with_one_beta2_optimizers_have_rows_from_the_highest_recall_on(plant, query):
    for name, recall, planted in (("adamw", 0.3, SPIKES), ("muon", 0.8, {}), ("adagc", 0.5, {})):
        columns = dict.fromkeys(RECALL, np.full(STEPS, recall))
        plant(planted, optimizer=name, columns=columns, experiment="optimizers")
    left, right = drawn(spike_heights, query(spike_heights))
    assert [text.get_text() for text in left.get_yticklabels()] == ["Muon", "AdaGC", "AdamW"]
    assert not any(text.get_visible() for text in right.get_yticklabels())  # named once
    assert [text.get_position()[1] for text in left.texts] == [0, 1]  # "none"
    heights = [line for line in left.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert [[round(y) for y in line.get_ydata()] for line in heights] == [[2] * 4]  # AdamW's


def test_one_seed_of_each_setting_is_drawn_the_smallest_that_most_have(plant, query):
    seeds = {0.9: (0, 1, 2), 0.99: (1, 2), 0.995: (2, 3), 0.999: (1,), 0.5: (4, 5)}
    for beta2, of_setting in seeds.items():
        for seed in of_setting:
            plant(beta2=beta2, seed=seed)
    plant(beta2=0.8, seed=1, state="running")
    plant(beta2=0.8, seed=3)
    frame = query(rms_and_loss)
    drawn_seeds = frame.drop_duplicates("run").set_index("beta2")["seed"].to_dict()
    assert drawn_seeds == {0.9: 1, 0.99: 1, 0.995: 2, 0.999: 1, 0.5: 4, 0.8: 3}
