"""What a replay's table and verdict say of curves that are given."""

import math

import pandas as pd
import pytest

from experiments.replay_report import height, question, table, verdict
from lowprec.diagnostics.spikes import Protocol

PAPER = Protocol()


def test_question_of_a_change_follows_from_its_keys():
    assert question("control") == "-"
    assert question("precision=fp32 scaler=none") == "numerics"
    assert question("optimizer.beta2=0.9 skip_batches=1") == "data+optimizer"
    assert question("model.patch_dropout=0.5") == "model or other"


def frame_of(values, first=1):
    steps = range(first, first + len(values))
    return pd.DataFrame({"step": steps, "loss": values, "rms": 1.0})


def test_heights_are_compared_with_the_controls_and_what_is_not_finite_is_infinitely_high():
    frames = {
        "control": frame_of([1.0, 1.1, 0.9, 5.0, 3.0]),
        "skip_batches=1": frame_of([1.0, 1.1, 0.9, 1.2, 1.4]),
        "optimizer.beta2=0.9": frame_of([2.0, 2.0, 2.0, 5.0]),
        "precision=bf16": frame_of([1.0, 1.1, 0.9, math.nan]),
        "seed=2": frame_of([1.0, math.inf]),
    }
    shown = table(frames, 4, PAPER)
    assert shown["height"].round(6).tolist() == [4.0, 0.4, 3.0, math.inf, math.inf]
    assert shown["of_control"].round(6).tolist() == [1.0, 0.1, 0.75, math.inf, math.inf]
    said = verdict({1: 1.0, 2: 1.1, 3: 0.9}, shown, 4, PAPER)
    assert "is gone under: data (skip_batches=1)." in said
    assert all(name in said.split("is there")[1] for name in ("beta2=0.9", "bf16", "seed=2"))


def test_of_a_control_that_diverged_a_finite_loss_is_the_end_of_the_spike():
    frames = {
        "control": frame_of([1.0, 1.1, 0.9, math.nan]),
        "scaler=none": frame_of([1.0, 1.1, 0.9, 9.0]),
        "seed=1": frame_of([1.0, 1.1, 0.9, math.inf]),
    }
    shown = table(frames, 4, PAPER)
    assert shown["of_control"].tolist() == [1.0, 0.0, 1.0]
    said = verdict({1: 1.0, 2: 1.1, 3: 0.9}, shown, 4, PAPER)
    assert "is gone under: numerics (scaler=none)." in said


def test_a_step_that_is_no_spike_is_called_none():
    frames = {"control": frame_of([1.0, 1.2, 0.8, 1.1, 1.0]), "seed=1": frame_of([1.0] * 5)}
    assert height(frames["control"], 4, PAPER) == pytest.approx(0.2)
    shown = table(frames, 4, PAPER)
    assert verdict({1: 1.0, 2: 1.2, 3: 0.8}, shown, 4, PAPER).startswith("No spike around step 4")
    assert "is gone" in verdict({1: 1.0, 2: 1.01, 3: 0.99}, shown, 4, PAPER)


def test_a_spike_that_a_change_moves_by_some_steps_is_still_there():
    calm = [1.0, 1.1, 0.9] * 10
    frames = {"control": frame_of([*calm, 5.0]), "early": frame_of([*calm[:-1], 5.0, 1.0])}
    frames["long before"] = frame_of([5.0, *calm])
    assert [height(frame, 31, PAPER) for frame in frames.values()] == pytest.approx([4.0, 4.0, 0.1])
