"""A run notes its spikes while it trains, the same after a stop as without one."""

import json

from lowprec.train.signals import StopRequest

SPIKES = {
    "diagnostics.spikes.ignore_steps": 4,
    "diagnostics.spikes.window": 6,
    "diagnostics.spikes.num_deviations": 1,
    "num_steps": 20,
    "log_every": 3,
    "save_every": 20,
}


def events(run):
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def shake(built):
    """The loss of step 14 is 50 times as large."""
    plain, optimizer = built.task.loss, built.state.optimizer

    def loss(batch):
        value, scale = plain(batch)
        return value * (50.0 if optimizer.steps[0] == 13 else 1.0), scale

    built.task.loss = loss


def test_a_planted_spike_is_an_event_and_a_line(make_config, run_once, tmp_path, capsys):
    run_once(make_config(SPIKES), tmp_path / "run", spoil=shake)
    found = events(tmp_path / "run")
    losses = [event for event in found if event.get("spike") == "loss"]
    assert [event["step"] for event in losses] == [14] and losses[0]["loss"] > 20
    assert "loss spike at step 14" in capsys.readouterr().out
    of_tensors = [event for event in found if event.get("spike") == "rms" and event["step"] == 14]
    assert of_tensors and max(of_tensors[0]["rms"].values()) > 2.3


def test_a_stopped_run_notes_what_the_undisturbed_one_does(make_config, run_once, tmp_path):
    config = make_config(SPIKES)
    run_once(config, tmp_path / "whole", spoil=shake)
    request = StopRequest()

    def shake_and_stop(built):
        shake(built)
        plain = built.batches_from

        def batches_from(first):
            for number, batch in enumerate(plain(first), first):
                request.number = 15 if number == 11 else request.number
                yield batch

        built.batches_from = batches_from

    run_once(config, tmp_path / "cut", spoil=shake_and_stop, stop=request)
    run_once(config, tmp_path / "cut", spoil=shake)
    whole, cut = (
        [event for event in events(tmp_path / name) if "spike" in event]
        for name in ("whole", "cut")
    )
    assert whole == cut and len(whole) >= 2


def test_no_protocol_finds_nothing(make_config, run_once, tmp_path):
    changes = {"num_steps": 20, "diagnostics.spikes.protocol": "none"}
    run_once(make_config(changes), tmp_path / "run", spoil=shake)
    assert not [event for event in events(tmp_path / "run") if "spike" in event]
