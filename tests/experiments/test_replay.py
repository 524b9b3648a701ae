"""Replays: the control is the run, a variant differs by its change alone, the verdict follows."""

import json
import math
import re
import shutil
import sys
from dataclasses import asdict

import pandas as pd
import pytest
import torch
import yaml

from experiments.replay import ReplayConfig, ReplayedConfig, command, main, suspects
from experiments.replay_report import Replay, table, verdict
from experiments.replay_steps import Replayer
from lowprec.config.check import ConfigError, RunError, check
from lowprec.config.compose import compose_command
from lowprec.diagnostics.spikes import Protocol
from lowprec.runs.read import encode_row, read_rows
from lowprec.train import build as building

SETTINGS = {
    "fp32": {},
    "dropout": {"model.patch_dropout": 0.5, "schedule.name": "constant"},
    "fixed": {"precision.autocast": "fp16", "scaler.name": "fixed", "precision.recipe": "llm_int8"},
    "dynamic": {"precision.autocast": "fp16", "scaler.name": "dynamic"},
    "pure": {"precision.autocast": "pure_bf16", "optimizer.beta2_decay": 0.6},
}


@pytest.fixture(scope="module")
def plain_run(tiny_config, run_once, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    run_once(tiny_config(folder, {"keep_checkpoints": 3}), folder)
    config = folder / "config.yaml"  # with the training machine's cache, where no folder can be
    text = config.read_text()
    assert '"cache": null' in text
    config.write_text(text.replace('"cache": null', f'"cache": "{config}/cache"'))
    return folder


@pytest.fixture
def run(make_config, run_once, plain_run, tmp_path):
    """`run(changes)`: a run of 12 steps with checkpoints at 4, 8 and 12."""

    def make(changes=None, **options):
        folder = tmp_path / "run"
        if not changes and not options:
            return shutil.copytree(plain_run, folder)
        run_once(make_config({"keep_checkpoints": 3, **(changes or {})}), folder, **options)
        return folder

    return make


def replayed(folder, step, *changes, steps=2, tolerance=0.0, change_from=(), perturbed=0):
    config = ReplayConfig(str(folder), step, steps, tolerance, list(change_from), perturbed)
    main(config, list(changes))
    [path] = [p for p in (folder / "replays").glob("*.csv") if not p.stem.endswith("_table")]
    return pd.read_csv(path)


def losses(frame, change):
    rows = frame[frame["change"] == change]
    return dict(zip(rows["step"], rows["loss"], strict=True))


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_control_is_the_run_to_the_bit_and_the_run_is_left_alone(run, setting, capsys):
    folder = run(SETTINGS[setting])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = ["or", "precision=fp32", "scaler=none"] * (setting == "dynamic")
    frame = replayed(folder, 10, "optimizer.beta2_decay=0.9", *other)
    assert list(losses(frame, " ".join(other[1:]))) == [9, 10, 11, 12] * (setting == "dynamic")
    recorded = {row["step"]: row["loss"] for row in read_rows(folder / "metrics.jsonl")}
    control = losses(frame, "control")
    assert losses(frame, "recorded") == control == {step: recorded[step] for step in range(9, 13)}
    other = losses(frame, "optimizer.beta2_decay=0.9")
    assert other[9] == control[9] and other[11] != control[11]
    assert re.search("4 recorded losses exactly.*of_control: rel", capsys.readouterr().out, re.S)
    assert (frame[frame["change"] == "control"]["rms"] > 0).all()
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert before.items() <= after.items()
    assert {path.parent for path in set(after) - set(before)} == {folder / "replays"}


def test_changes_act_from_the_step_named_and_perturbed_replays_show_chance(run):
    folder = run()
    frame = replayed(folder, 10, "optimizer.lr=0.1", change_from=[10], perturbed=2)
    control, changed = (losses(frame, name) for name in ("control", "optimizer.lr=0.1"))
    assert list(changed) == list(losses(frame, "unchanged")) == [10, 11, 12]
    assert changed[10] == control[10] and abs(changed[11] - control[11]) > 1e-2
    for seed in (1, 2):
        perturbed = frame[frame["perturbation"] == seed].set_index("step")[["loss", "rms"]]
        gaps = (perturbed - frame[frame["change"] == "control"].set_index("step")).abs().stack()
        assert list(perturbed.index) == [10, 11, 12] and 0 < gaps.max() < 1e-3
    for start in (4, 11):
        with pytest.raises(RunError, match=f"change_from={start}: a step from 5 to 10 is expected"):
            replayed(folder, 10, change_from=[start], steps=4)


def test_replays_that_share_a_model_equal_those_that_build_their_own(run, monkeypatch):
    folder = run(SETTINGS["dropout"])
    changes = "optimizer.beta2=0.5 or skip_batches=9 or optimizer=stable_adamw".split()
    shared = replayed(folder, 10, *changes, change_from=[7, 10], steps=1, perturbed=1)
    assert shared["change"].value_counts()["unchanged"] == 5 + 2
    built, plain = [], Replayer._build

    def alone(self, config):
        self.close()
        self.settings = None
        built.append(plain(self, config))
        return built[-1]

    monkeypatch.setattr(Replayer, "_build", alone)
    apart = replayed(folder, 10, *changes, change_from=[7, 10], steps=1, perturbed=1)
    pd.testing.assert_frame_equal(shared, apart)
    assert len(built) == 1 + 5 * 2
    [path] = (folder / "replays").glob("*_table.csv")
    rows = pd.read_csv(path)
    assert rows["exact"].all() and set(rows["lead"][1:]) == {0, 3}


def test_a_control_that_does_not_reproduce_ends_the_replay(run):
    folder = run()
    rows = read_rows(folder / "metrics.jsonl")
    rows[10]["loss"] += 0.125
    (folder / "metrics.jsonl").write_text("".join(map(encode_row, rows)))
    with pytest.raises(RunError, match=r"does not reproduce .* 0.125, at step 11 \(bound: .*=0.01"):
        replayed(folder, 10, "skip_batches=1", tolerance=0.01)
    assert not (folder / "replays").exists()
    assert len(replayed(folder, 10, "skip_batches=1", tolerance=0.2)) > 0


def test_a_skipped_batch_is_replaced_by_the_next(run, monkeypatch):
    folder, seen, plain = run(), [], building.build

    def listening(*arguments):
        built = plain(*arguments)
        loss = built.task.loss
        built.task.loss = lambda batch: seen.append(batch.samples.tolist()) or loss(batch)
        return built

    monkeypatch.setattr(building, "build", listening)
    frame = replayed(folder, 10, "skip_batches=1")
    of_run, without = seen[:4], seen[4:]
    assert without == [of_run[0], of_run[2], of_run[3]]  # the run has no batch 13
    assert list(losses(frame, "skip_batches=1")) == [9, 10, 11]
    seen.clear()
    main(ReplayConfig(str(folder), 10, 2, perturbed=0), ["skip_batches=2"])
    assert seen[4:] == of_run[2:]  # those of 9 and 10 left out
    seen.clear()
    main(ReplayConfig(str(folder), 10, 2, change_from=[10], perturbed=0), ["skip_batches=9"])
    assert seen[7:] == of_run[2:]  # not those after step 10


@pytest.fixture
def spoiling(monkeypatch):
    """A function: from now on, models are built with `factor_of(built)(batch)` on their loss."""
    plain = building.build

    def spoil(factor_of):
        def spoiled(config, data):
            built = plain(config, data)
            loss, factor = built.task.loss, factor_of(built)

            def shaken(batch):
                value, scale = loss(batch)
                return value * factor(batch), scale

            built.task.loss = shaken
            return built

        monkeypatch.setattr(building, "build", spoiled)
        return lambda built: vars(built).update(vars(spoiled(built.config, built.data)))

    return spoil


def test_a_replay_from_a_snapshot_finds_the_batch_behind_a_planted_spike(run, spoiling, capsys):
    def factor_of(built):
        guilty = next(built.batches_from(14)).samples
        return lambda batch: 50.0 if torch.equal(batch.samples, guilty) else 1.0

    spikes = {"ignore_steps": 4, "window": 6, "num_deviations": 1, "within": 1}
    keys = {f"diagnostics.spikes.{name}": value for name, value in spikes.items()}
    keys |= {"diagnostics.recorder.enabled": True, "diagnostics.recorder.steps": 6}
    folder = run({**keys, "num_steps": 28, "save_every": 28}, spoil=spoiling(factor_of))
    rows = read_rows(folder / "events.jsonl")
    assert next(row["step"] for row in rows if row.get("spike") == "loss") == 14
    main(ReplayConfig(str(folder), 14, 3, perturbed=0), [])
    printed = capsys.readouterr().out
    assert "snapshots/step_000000000: steps 1 to 17 are replayed" in printed
    gone, stays = [line for line in printed.splitlines() if line.startswith("The spike ")]
    assert "gone" in gone and "skip_batches=8" in gone
    assert "stays" in stays and "optimizer=stable_adamw" in stays
    names = sorted(path.name for path in (folder / "replays").iterdir())
    assert names == ["step_14.csv", "step_14_table.csv"]


def test_a_replay_ends_where_the_run_diverged(run, spoiling):
    def factor_of(built):
        optimizer = built.state.optimizer
        return lambda batch: math.nan if int(optimizer.steps[0]) >= 9 else 1.0

    frame = replayed(run(spoil=spoiling(factor_of)), 10, "optimizer.beta2=0.5", steps=5)
    assert list(losses(frame, "control")) == [*range(5, 11)]


def test_impossible_replays_are_refused(run):
    folder = run()
    for step, changes, message in (
        (40, [], "has recorded steps 1 to 12"),
        (10, ["num_steps=5"], "num_steps=5: num_steps >= 12 is expected"),
        (4, [], "step 2 or earlier.*are those of 4.*for step 6 and later.*enabled=true"),
    ):
        with pytest.raises(RunError, match=message):
            replayed(folder, step, *changes)
    for words in ("optimizer.beta3=1", "scaler=fixed", "experiment=loss_curves_mini"):
        with pytest.raises(ConfigError, match=words.partition("=")[0]):
            replayed(folder, 10, words)
    for key in ("name", "evaluation", "logger.name", "model.init_from"):
        with pytest.raises(ConfigError, match=f"{key} changes nothing in a replay"):
            replayed(folder, 10, f"++{key}=x")
    file = folder / "config.yaml"
    for group, key, value in (
        ("optimizer", "on_warning", {"action": "clip"}),
        ("data", "scaled_decoding", True),
    ):
        raw = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump(raw | {group: raw[group] | {key: value}}))
        with pytest.raises(RunError, match=f"cannot be replayed: it set .*{group}.{key}"):
            replayed(folder, 10)
        file.write_text(yaml.safe_dump(raw))


def test_a_stream_is_replayed_with_the_workers_it_had(run, squares):
    keys = {"data.name": "stream", "data.train": str(squares / "train-*.tar")}
    provenance = {"layout": {"world_size": 1, "workers": 2}}
    folder = run({**keys, "num_workers": 2}, provenance=provenance)
    config = json.loads((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(json.dumps(config | {"num_workers": None}))
    frame = replayed(folder, 10, "optimizer.beta2=0.5")
    assert losses(frame, "control") == losses(frame, "recorded")


def test_without_changes_data_optimizer_and_numerics_are_suspects(make_config):
    suspected = []
    for changes in (
        {"precision.recipe": "switchback"},
        {"optimizer.name": "stable_adamw", "optimizer.clip_threshold": 1.0},
    ):
        trained = asdict(make_config(changes))
        for variant in suspects(trained):
            [one] = compose_command(variant, "replay", ReplayedConfig, base=trained)
            assert one.config != check(trained, ReplayedConfig)
        suspected.append([" ".join(variant) for variant in suspects(trained)])
    assert suspected == [
        ["skip_batches=8", "optimizer=stable_adamw", "precision=fp32 scaler=none"],
        ["skip_batches=8", "optimizer.beta2_decay=null optimizer.beta2=0.9"],
    ]


def test_the_command_line_separates_its_keys_from_the_changes(run, monkeypatch, capsys):
    folder = run()
    words = [f"run={folder}", "step=10", "steps=2", "change_from=9,10", "perturbed=1"]
    words += ["skip_batches=1", "or", "optimizer=stable_adamw"]
    words += ["precision=fp16", "scaler=dynamic,fixed"]  # which the run did not have
    monkeypatch.setattr(sys, "argv", ["replay", *words])
    command()
    output = capsys.readouterr().out
    assert "10 replays: 2 unchanged; 2 perturbed, 2 with skip_batches=1, 2 with opt" in output
    rows = [line.split() for line in output.splitlines()]
    exact = {row[1]: row[-1] for row in rows if row[:1] == ["10"] and len(row) > 9}
    assert exact["control"] == exact["unchanged"] == "True" and exact["perturbed"] == "-"
    for scaler in ("dynamic", "fixed"):
        assert re.search(rf"optimizer=stable_adamw precision=fp16 scaler={scaler} +10 ", output)
    assert re.search(r"\n +10 +skip_batches=1 +9 ", output)
    assert len(list((folder / "replays").glob("*_table.csv"))) == 1


def compared(*curves, step=4, first=1):
    """The table of a control and of variants v1, v2, ... whose losses begin at step `first`."""
    names = ["control", *(f"v{number}" for number in range(1, len(curves)))]
    frames = {
        Replay(name, first): pd.DataFrame(
            {"step": range(first, first + len(curve)), "loss": curve, "rms": 1.0}
        )
        for name, curve in zip(names, curves, strict=True)
    }
    recorded = frames[Replay("control", first)].set_index("step")["loss"]
    return table(frames, step, Protocol(), recorded)


CALM = [1.0, 1.1, 0.9]


def test_a_replay_that_starts_at_the_spike_has_the_controls_losses_before_it():
    control = pd.DataFrame({"step": [1, 2, 3, 4], "loss": [*CALM, 5.0], "rms": 1.0})
    late = control.iloc[3:]
    frames = {
        Replay("control", 1): control,
        Replay("perturbed", 4, 1): late,
        Replay("other", 4): late.assign(loss=1.2),
        Replay("unchanged", 4): late.assign(loss=5.1),
    }
    rows = table(frames, 4, Protocol(), control.set_index("step")["loss"])
    assert rows["exact"].tolist() == [True, False, False, False]
    assert rows["lead"].tolist() == [3, 0, 0, 0]
    rows = rows[rows["change"] != "unchanged"]
    assert rows["of_control"].round(6).tolist() == [1.0, 1.0, 0.05]
    text = verdict(pd.Series(CALM, index=[1, 2, 3]), rows, 4, Protocol())
    assert "stays in 1 of 1 replays." in text and "is gone with: other." in text


@pytest.mark.parametrize(
    ("curves", "heights", "of_control"),
    [
        (  # a non-finite loss is infinitely high
            [[*CALM, 5.0], [*CALM, 1.2, 1.4], [2.0, 2.0, 2.0, 5.0], [*CALM, math.nan]],
            [4.0, 0.4, 3.0, math.inf],
            [1.0, 0.1, 0.75, math.inf],
        ),
        (  # any finite loss is lower than that of a control that diverged
            [[*CALM, math.nan], [*CALM, 9.0], [*CALM, math.inf]],
            [math.inf, 8.0, math.inf],
            [1.0, 0.0, 1.0],
        ),
    ],
)
def test_heights_are_compared_with_the_control(curves, heights, of_control):
    rows = compared(*curves)
    assert rows["height"].round(6).tolist() == heights
    assert rows["of_control"].round(6).tolist() == of_control
    lines = verdict(pd.Series(CALM, index=[1, 2, 3]), rows, 4, Protocol()).splitlines()
    assert lines[0] == "The spike is gone with: v1."
    assert lines[1].count("v") == len(curves) - 2


def test_a_rise_within_the_noise_is_no_spike():
    rows = compared([1.0, 1.2, 0.8, 1.1, 1.0], [1.0] * 5)
    for before, start in (([1.0, 1.2, 0.8], "No spike"), ([1.0, 1.01, 0.99], "The spike is gone")):
        assert verdict(pd.Series(before, index=[1, 2, 3]), rows, 4, Protocol()).startswith(start)


def test_a_spike_that_moves_or_a_replay_that_begins_late_is_judged_by_its_steps():
    calm = CALM * 10
    curves = ([*calm, 5.0], [*calm[:-1], 5.0, 1.0], [5.0, *calm])  # the last: long before
    for first in (1, 31):
        rows = compared(*curves, step=30 + first, first=first)
        assert rows["height"].tolist() == pytest.approx([4.0, 4.0, 0.1])


@pytest.mark.parametrize("key", ["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2"])
def test_a_launcher_is_refused(monkeypatch, capsys, key):
    monkeypatch.setattr(sys, "argv", ["replay", "-m", "run=x", "step=10", key])
    with pytest.raises(SystemExit, match="2"):
        command()
    assert f"{key}: a replay runs in this process" in capsys.readouterr().err
