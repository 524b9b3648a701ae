"""The non-finite rule, and the spikes that a run records while it trains."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from analysis import spikes
from lowprec.runs.read import read_rows
from lowprec.train.metrics import non_finite_rule

NAMES = ["a", "b"]
SPIKES = {
    "diagnostics.spikes.ignore_steps": 4,
    "diagnostics.spikes.window": 6,
    "diagnostics.spikes.num_deviations": 1,
    "num_steps": 20,
    "log_every": 3,
    "save_every": 20,
}


def rows(*losses):
    return [{"step": i, "loss": loss} for i, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("losses", "bad_steps", "scaler", "skips", "expected"),
    [
        ((1, 1, 1), (), "none", 0, (3, False, 0)),
        ((1, math.nan, 1), (), "none", 0, (2, True, 0)),
        ((1, math.inf, 1), (), "fixed", 0, (2, True, 0)),
        ((1, 1, 1), (2,), "none", 0, (2, True, 1)),
        ((1, 1, 1), (2,), "dynamic", 0, (3, False, 0)),
        ((1, 1, 1), (2, 3), "dynamic", 0, (3, False, 2)),
        ((1, 1, 1), (1,), "fixed", 2, (1, True, 3)),
        ((1, 1, 1), (1, 3), "fixed", 1, (3, False, 1)),
    ],
)
def test_non_finite_rule(losses, bad_steps, scaler, skips, expected):
    norms = np.ones((len(losses), 2))
    for step in bad_steps:
        norms[step - 1, 1] = math.inf
    last, reason, skips = non_finite_rule(
        rows(*losses), norms, NAMES, scaler=scaler, max_skips=3, skips=skips
    )
    assert (last, reason is not None, skips) == expected
    assert not bad_steps or reason is None or "(b)" in reason


def spikes_of(run):
    return [event for event in read_rows(run / "events.jsonl") if "spike" in event]


def test_a_planted_spike_survives_a_stop(make_config, run_once, shaken, tmp_path, capsys):
    config = make_config(SPIKES)
    run_once(config, tmp_path / "whole", spoil=shaken({14}))
    assert "loss spike at step 14" in capsys.readouterr().out
    run_once(config, tmp_path / "cut", spoil=shaken({14}), stop_at=11)
    run_once(config, tmp_path / "cut", spoil=shaken({14}))
    assert spikes_of(tmp_path / "whole") == spikes_of(tmp_path / "cut")
    events = [event for event in spikes_of(tmp_path / "whole") if event["step"] == 14]
    by_kind = {event["spike"]: event for event in events}
    assert by_kind["loss"]["loss"] > 20 and max(by_kind["rms"]["rms"].values()) > 2.3


def test_a_short_run_has_spikes_by_default(make_config, run_once, shaken, tmp_path, capsys):
    config = make_config({"num_steps": 125, "log_every": 125, "save_every": 125})
    run_once(config, tmp_path / "run", spoil=shaken((8, 9, 120, 121)))
    losses = [event["step"] for event in spikes_of(tmp_path / "run") if event["spike"] == "loss"]
    assert losses == [120]  # the first 12 steps, a tenth, are ignored
    (tmp_path / "run/config.yaml").write_text(json.dumps(asdict(config)))
    spikes.main(["--run", str(tmp_path / "run")])
    out = capsys.readouterr().out
    assert "1 loss spike and" in out
    assert "The first 12 steps, the warmup, are ignored." in out


@pytest.mark.parametrize(
    ("num_steps", "learned", "verdict"), [(32, 0.1, "not_learning"), (17, -1.0, "collapsed")]
)
def test_a_loss_at_chance_level_is_an_event(
    make_config, run_once, tmp_path, capsys, monkeypatch, num_steps, learned, verdict
):
    monkeypatch.setattr("lowprec.diagnostics.spikes.LEARNED", learned)
    monkeypatch.setattr("lowprec.diagnostics.spikes.COLLAPSED", 20)
    monkeypatch.setattr("lowprec.diagnostics.spikes.LAST_STEPS", 8)
    changes = {"optimizer.lr": 0.5, "schedule.warmup_steps": 1, "save_every": 20}
    config = make_config({"num_steps": num_steps, **changes})
    run_once(config, tmp_path / "whole")
    [event] = [row for row in read_rows(tmp_path / "whole/events.jsonl") if verdict in row]
    assert "chance level, 2.77" in event[verdict]
    assert f"warning: {event[verdict]}" in capsys.readouterr().out
    run_once(config, tmp_path / "cut", stop_at=15)
    run_once(config, tmp_path / "cut")
    assert event in read_rows(tmp_path / "cut/events.jsonl")
