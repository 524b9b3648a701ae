"""Weights that try to run something, or are damaged: refused in a sentence that names the file."""

import io
import os
import pickle
import tarfile

import pytest
import torch
from safetensors.torch import save_file

from experiments import export
from lowprec.clip.export import read_weights
from lowprec.config.check import ConfigError, RunError
from lowprec.train.build import build

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


def torch_tar(path, bad):
    """The layout of torch before version 0.1.10."""
    with tarfile.open(path, "w") as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            data = pickle.dumps(bad)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def legacy(path, data):
    torch.save(data, path, _use_new_zipfile_serialization=False)


WEIGHTS = {  # file name: a function that writes it from (path, payload)
    "zip.pt": lambda path, bad: torch.save(bad, path),
    "zip_nested.pt": lambda path, bad: torch.save({"state_dict": {"w": [{"x": bad}]}}, path),
    "zip_beside.pt": lambda p, bad: torch.save({"state_dict": {"w": torch.ones(2)}, "o": bad}, p),
    "legacy.pt": lambda path, bad: legacy(path, {"state_dict": bad}),
    "tar.pt": torch_tar,
    "protocol0.pt": lambda path, bad: path.write_bytes(pickle.dumps(bad, 0)),
    "pickle.safetensors": lambda path, bad: path.write_bytes(pickle.dumps(bad)),
    "zip.safetensors": lambda path, bad: torch.save({"state_dict": bad}, path),
}


@pytest.mark.parametrize("call", [os.system, eval, open], ids=lambda call: call.__name__)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_with_code_are_refused_by_name(tmp_path, payload, canary, name, call):
    WEIGHTS[name](tmp_path / name, payload(canary, call))
    with pytest.raises(ValueError) as error:
        read_weights(tmp_path / name)
    assert str(error.value).startswith(f"{tmp_path / name} cannot be read as weights: ")
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


DAMAGED = {
    "empty.pt": b"",
    "deep.pt": b"\x80\x02" + b"(" * 10**5 + b".",
    "long_header.safetensors": (2**62).to_bytes(8, "little") + b"{}",
    "not_json.safetensors": (9).to_bytes(8, "little") + b"{{{{{{{{{",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_weights_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(DAMAGED[name])
    with pytest.raises(ValueError, match=f"{name} cannot be read as weights: [^\n]+$"):
        read_weights(tmp_path / name)


@pytest.mark.parametrize("content", [[1], {"w": 3}, {"state_dict": {"w": "text"}}, torch.ones(2)])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt contains something other than named tensors"):
        read_weights(tmp_path / "other.pt")


@pytest.mark.parametrize("name", ["zip_nested.pt", "legacy.pt", "pickle.safetensors"])
def test_init_from_and_export_refuse_code(tmp_path, payload, canary, make_config, name):
    WEIGHTS[name](tmp_path / name, payload(canary))
    with pytest.raises(ConfigError, match=rf"model\.init_from: .*{name} cannot be read"):
        build(make_config({"model.init_from": str(tmp_path / name)}), data=None)
    with pytest.raises(RunError, match=f"source=.*{name} cannot be exported: [^\n]+$"):
        export.main(export.ExportConfig(str(tmp_path / name), str(tmp_path / "out.pt")))
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"files": 3}', '{"files": {}}'])
def test_weights_under_a_damaged_manifest_are_not_taken(tmp_path, manifest):
    folder = tmp_path / "checkpoints" / "step_000000001"
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(FileNotFoundError, match="has no weights"):
        read_weights(tmp_path)
