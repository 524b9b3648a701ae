"""Checkpoints: damage is named and the older one taken; nothing foreign is loaded or executed."""

import shutil

import pytest
import torch

from lowprec.train.checkpoint import list_checkpoints, newest_checkpoint, verify
from lowprec.train.state import CheckpointError


@pytest.fixture
def finished(make_config, run_once, tmp_path):
    config = make_config({"save_every": 4})
    _, built = run_once(config, tmp_path / "run")
    return tmp_path / "run", built


@pytest.mark.parametrize("file", ["model", "optimizer", "rng"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
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
    assert newest_checkpoint(run)[1]["step"] == 8  # a reader leaves the run as it is
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
    from safetensors.torch import save_file

    run, built = finished
    folder = list_checkpoints(run)[-1]
    save_file({"step/0": torch.zeros(())}, folder / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match="tensors differ"):
        built.state.load(folder)


def test_no_whole_checkpoint_is_an_error_never_step_0(finished):
    run, _ = finished
    for path in list_checkpoints(run):
        (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        newest_checkpoint(run)


def test_a_half_written_checkpoint_is_not_one(finished):
    run, _ = finished
    newest = list_checkpoints(run)[-1]
    newest.rename(newest.with_name(f".tmp.{newest.name}"))
    assert newest_checkpoint(run)[1]["step"] == 8


def test_state_of_another_shape_is_refused_by_name(finished, make_config):
    from experiments.build import build
    from experiments.open_data import open_data

    run, _ = finished
    other = make_config({"model.vision_width": 128})
    built = build(other, open_data(other))
    with pytest.raises(CheckpointError, match=r"class_embedding is \(64,\), not \(128,\)"):
        built.state.load(list_checkpoints(run)[-1])


def test_optimizer_state_of_another_shape_is_refused(finished):
    from safetensors.torch import load_file, save_file

    run, built = finished
    folder = list_checkpoints(run)[-1]
    moments = load_file(folder / "optimizer.safetensors")
    moments["exp_avg/visual.proj"] = torch.zeros(3, 3)
    save_file(moments, folder / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match="exp_avg/visual.proj"):
        built.state.load(folder)


def test_manifest_lists_every_file(finished):
    run, _ = finished
    folder = list_checkpoints(run)[-1]
    listed = set(verify(folder)["files"]) | {"manifest.json"}
    assert listed == {path.name for path in folder.iterdir()}
    copy = run / "copy"
    shutil.copytree(folder, copy)
    assert verify(copy)["step"] == 12
