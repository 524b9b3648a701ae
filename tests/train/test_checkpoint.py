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
from lowprec.train.checkpoint import (
    list_checkpoints,
    newest_checkpoint,
    save_checkpoint,
    verify,
)
from lowprec.train.distributed import Ranks


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of one run, and its objects once it has been made."""
    return tmp_path_factory.mktemp("made") / "run", []


@pytest.fixture
def finished(make_config, run_once, tmp_path, made):
    """A copy of the run, and its objects."""
    folder, objects = made
    if not objects:
        objects += run_once(make_config({"save_every": 4}), folder)
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run", objects[1]


@pytest.mark.parametrize(
    ("file", "damage"), [("model", "flip"), ("exp_avg", "cut"), ("rng", "remove")]
)
def test_a_damaged_checkpoint_is_named_and_the_older_taken(finished, file, damage, capsys):
    run, _ = finished
    victim = list_checkpoints(run)[-1] / f"{file}.safetensors"
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif damage == "cut":
        victim.write_bytes(data[:-1])
    else:
        victim.unlink()
    assert newest_checkpoint(run)[1]["step"] == 8  # reading leaves the run unchanged
    path, manifest = newest_checkpoint(run, set_aside=True)
    assert manifest["step"] == 8
    assert capsys.readouterr().out.count(str(victim)) == 2
    assert [p.name for p in list_checkpoints(run)] == ["step_000000008"]


def test_export_takes_the_newest_whole_checkpoint(finished):
    from lowprec.clip.export import find_weights

    run, _ = finished
    newest = list_checkpoints(run)[-1]
    assert find_weights(run).parent == newest
    (newest / "model.safetensors").write_bytes(b"x" * 100)
    assert find_weights(run).parent == list_checkpoints(run)[0]


def test_missing_optimizer_state_is_refused(finished):
    run, built = finished
    folder = list_checkpoints(run)[-1]
    save_file({}, folder / "exp_avg.safetensors")
    with pytest.raises(CheckpointError, match="tensors differ"):
        built.state.load(folder)


def test_no_intact_checkpoint_is_an_error_never_step_0(finished):
    run, _ = finished
    for path in list_checkpoints(run):
        (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        newest_checkpoint(run)


def test_a_half_written_checkpoint_is_not_one(finished):
    run, _ = finished
    newest = list_checkpoints(run)[-1]
    newest.rename(newest.with_name(f".tmp.{newest.name}"))
    assert newest_checkpoint(run)[1]["step"] == 8


def test_state_of_another_shape_is_refused_by_name(finished, make_config):
    from lowprec.data.open import open_data
    from lowprec.train.build import build

    run, _ = finished
    other = make_config({"model.vision_width": 128})
    built = build(other, open_data(other))
    with pytest.raises(CheckpointError, match=r"class_embedding.*64.*128"):
        built.state.load(list_checkpoints(run)[-1])


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
    assert built.task.model.logit_scale.item() == before


def test_manifest_lists_every_file(finished):
    run, _ = finished
    folder = list_checkpoints(run)[-1]
    listed = set(verify(folder)["files"]) | {"manifest.json"}
    assert listed == {path.name for path in folder.iterdir()}
    copy = run / "copy"
    shutil.copytree(folder, copy)
    assert verify(copy)["step"] == 12


def test_100_bit_flips_are_all_found_and_named(finished, capsys):
    run, _ = finished
    newest = list_checkpoints(run)[-1]
    files, generator = sorted(newest.iterdir()), random.Random(0)
    for trial in range(100):
        victim = files[trial % len(files)]
        data = bytearray(victim.read_bytes())
        bit = generator.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        victim.write_bytes(data)
        assert newest_checkpoint(run)[1]["step"] == 8, (victim.name, bit)
        assert str(victim) in capsys.readouterr().out, (victim.name, bit)
        data[bit // 8] ^= 1 << bit % 8
        victim.write_bytes(data)
    assert newest_checkpoint(run)[1]["step"] == 12


def test_a_truncated_file_is_found_wherever_it_is_cut(finished):
    run, _ = finished
    newest = list_checkpoints(run)[-1]
    for victim in newest.iterdir():
        data = victim.read_bytes()
        for cut in (0, 1, 7, 8, len(data) // 3, len(data) - 1):
            victim.write_bytes(data[:cut])
            assert newest_checkpoint(run)[1]["step"] == 8, (victim.name, cut)
        victim.write_bytes(data)


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


def test_a_step_that_is_damaged_twice_is_set_aside_twice(finished):
    run, _ = finished
    for _ in range(2):
        path = list_checkpoints(run)[-1]
        shutil.copytree(path, run / "copy", dirs_exist_ok=True)
        (path / "model.safetensors").write_bytes(b"x")
        assert newest_checkpoint(run, set_aside=True)[1]["step"] == 8
        shutil.copytree(run / "copy", path)


def test_a_checkpoint_that_cannot_be_read_is_not_set_aside(finished, monkeypatch):
    run, _ = finished

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(CheckpointError, match="step_000000012.*Input/output"):
        newest_checkpoint(run, set_aside=True)
    assert len(list_checkpoints(run)) == 2


def test_ranks_gather_a_state_together_and_only_write_by_themselves(tmp_path):
    class Alone(Ranks):
        writing = False

        def each(self, make):
            self.writing = True
            return [make()]

    class State:
        def files(self):
            assert not world.writing, "a rank that fails would leave the others waiting"
            return {"a": [b"1"]}

    world = Alone()
    kept = {"keep": 1, "provenance": {}, "world": world}
    saved = save_checkpoint(tmp_path, 1, State(), {}, **kept)
    assert world.writing and verify(saved)["files"]["a"]["bytes"] == 1
