"""Checkpoints: damage is named and an older one taken; no state of another shape is loaded."""

import errno
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowprec.runs.attempts import CheckpointError
from lowprec.train.checkpoint import list_checkpoints, newest_checkpoint, save_checkpoint, verify


@pytest.fixture(scope="module")
def trained(tiny_config, run_once, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    _, built = run_once(tiny_config(folder, {}), folder)
    return folder, built


@pytest.fixture
def finished(trained, tmp_path):
    """A copy of a run with checkpoints at 8 and 12, and its objects."""
    folder, built = trained
    return shutil.copytree(folder, tmp_path / "run"), built


def test_shards_of_an_earlier_version_are_named(finished):
    run, built = finished
    folder = list_checkpoints(run)[-1]
    (folder / "exp_avg.safetensors").rename(folder / "exp_avg.00000-of-00001.safetensors")
    with pytest.raises(CheckpointError, match="was written in shards, by an earlier version"):
        built.state.load(folder)


def flipped(data, dice):
    """The data with one bit changed."""
    data, bit = bytearray(data), dice.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def test_a_missing_or_damaged_file_is_named_and_the_older_checkpoint_taken(finished, capsys):
    run, _ = finished
    newest, dice = list_checkpoints(run)[-1], random.Random(0)
    files = sorted(newest.iterdir())
    for victim in files:
        data = victim.read_bytes()
        cuts = [data[:size] for size in (0, 1, 7, 8, len(data) // 3, len(data) - 1)]
        flips = [flipped(data, dice) for _ in range(1 + 100 // len(files))]
        for number, damaged in enumerate([None, *cuts, *flips]):
            victim.unlink() if damaged is None else victim.write_bytes(damaged)
            assert newest_checkpoint(run)[1]["step"] == 8, (victim.name, number)
            assert str(victim) in capsys.readouterr().out, (victim.name, number)
            victim.write_bytes(data)
    assert newest_checkpoint(run)[1]["step"] == 12  # reading leaves the run unchanged
    victim.unlink()
    assert newest_checkpoint(run, set_aside=True)[1]["step"] == 8
    assert [p.name for p in list_checkpoints(run)] == ["step_000000008"]


def test_a_checkpoint_under_another_steps_name_is_damaged(finished, capsys):
    run, _ = finished
    older, newest = list_checkpoints(run)
    shutil.rmtree(newest)
    shutil.copytree(older, newest)
    assert newest_checkpoint(run)[1]["step"] == 8
    assert f"{newest} holds step 8" in capsys.readouterr().out


@pytest.mark.parametrize("intact", [True, False])
def test_a_save_that_finds_its_name_taken_keeps_only_an_intact_checkpoint(finished, intact):
    run, built = finished
    newest = list_checkpoints(run)[-1]
    weights = (newest / "model.safetensors").read_bytes()
    if not intact:
        (newest / "model.safetensors").write_bytes(b"x")
    before = newest.stat().st_ino
    save_checkpoint(newest.parent, 12, built.state, {}, keep=2, provenance={})
    assert (newest.stat().st_ino == before) == intact
    assert verify(newest)["step"] == 12
    assert (newest / "model.safetensors").read_bytes() == weights


def test_no_intact_checkpoint_is_an_error_never_step_0(finished):
    run, _ = finished
    for path in list_checkpoints(run):
        (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        newest_checkpoint(run)


def test_optimizer_state_of_another_shape_is_refused_and_nothing_loaded(finished):
    run, built = finished
    folder = list_checkpoints(run)[-1]
    before = built.task.model.logit_scale.item()
    for file, name, value in (
        ("model", "logit_scale", torch.tensor(9.0)),
        ("exp_avg_sq", "visual.proj", torch.zeros(3, 3)),
    ):
        tensors = load_file(folder / f"{file}.safetensors")
        save_file({**tensors, name: value}, folder / f"{file}.safetensors")
    with pytest.raises(
        CheckpointError, match=r"exp_avg_sq\.safetensors .*visual\.proj is \(3, 3\)"
    ):
        built.state.load(folder)
    moments = load_file(folder / "exp_avg.safetensors")
    for tensors, reason in (
        ({}, r"is absent in the checkpoint and \(.* in this run .* tensors differ"),
        (
            {**moments, "a": torch.zeros(3)},
            r"a is \(3,\) torch.float32 in the checkpoint and absent",
        ),
    ):
        save_file(tensors, folder / "exp_avg.safetensors")
        with pytest.raises(CheckpointError, match=reason):
            built.state.load(folder)
    assert built.task.model.logit_scale.item() == before


def test_checkpoint_of_another_format_says_so(finished):
    run, _ = finished
    file = list_checkpoints(run)[-1] / "manifest.json"
    manifest = json.loads(file.read_text()) | {"format": 1}
    del manifest["sha256"]
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({"sha256": digest, **manifest}))
    with pytest.raises(CheckpointError, match="format 1"):
        newest_checkpoint(run, set_aside=True)
    assert file.exists()  # another version's checkpoint is not damaged


def test_a_checkpoint_that_cannot_be_read_is_not_set_aside(finished, monkeypatch):
    run, _ = finished

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(CheckpointError, match="step_000000012.*Input/output"):
        newest_checkpoint(run, set_aside=True)
    assert len(list_checkpoints(run)) == 2
