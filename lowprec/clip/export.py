"""Weights as safetensors, open_clip's .pt or its folder of a model; a .pt executes no code."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lowprec.clip import open_clip
from lowprec.nearest import runs_inside
from lowprec.runs.provenance import file_digest

FOLDER_CONFIG, FOLDER_WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


def find_weights(source: Path) -> Path:
    """The weights file of a run (newest undamaged checkpoint), a checkpoint or a model's folder.

    A file is itself. Raises FileNotFoundError if there is none.
    """
    source = Path(source)
    for file in (source, source / FOLDER_WEIGHTS):
        if file.is_file():
            return file
    for folder in (source, *sorted((source / "checkpoints").glob("step_*"), reverse=True)):
        weights, manifest = folder / "model.safetensors", folder / "manifest.json"
        if weights.is_file() and manifest.is_file():
            with contextlib.suppress(ValueError, LookupError, TypeError):  # a damaged manifest
                facts = json.loads(manifest.read_text())["files"]["model.safetensors"]
                if file_digest(weights) == facts["sha256"]:
                    return weights
            print(f"warning: {weights} is damaged; trying an older checkpoint")
    kinds = f"must be a run, a checkpoint or a file{runs_inside(source)}"
    raise FileNotFoundError(f"{source} has no weights: {kinds}")


def read_weights(source: Path) -> dict[str, Tensor]:
    """Tensors by open_clip's names, from .safetensors or open_clip's .pt; see `find_weights`.

    Nothing in a .pt file is executed; its tensors may be under "state_dict" and their names may
    start with "module.", as in open_clip's trainer. Raises ValueError for a file that is damaged or
    contains anything but weights.
    """
    path = find_weights(source)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 (torch raises all kinds for damaged files)
        reason = str(error).partition(". ")[0].partition("\n")[0] or "it is empty"
        reason = f"{type(error).__name__}: {reason}"
        raise ValueError(f"{path} cannot be read as weights: {reason}") from error
    if isinstance(state, dict):
        state = state.get("state_dict", state)
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ValueError(f"{path} contains something other than named tensors")
    return {str(name).removeprefix("module."): tensor for name, tensor in state.items()}


def load_weights(model: nn.Module, source: Path) -> None:
    """Loads weights into a model; raises ValueError with the tensors whose shapes differ."""
    state, expected = read_weights(source), model.state_dict()
    shapes = {name: [_shape(s.get(name)) for s in (state, expected)] for name in state | expected}
    differing = [f"{name} is {a}, not {b}" for name, (a, b) in sorted(shapes.items()) if a != b]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ValueError(f"{source} does not fit the model: {'; '.join(differing[:3])}{more}")
    model.load_state_dict(state)


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))


def write_weights(state: dict[str, Tensor], target: Path, **facts: str) -> None:
    """Writes tensors as `.safetensors`, or as `.pt` with the layout of open_clip's trainer.

    `facts` are the metadata of a `.safetensors`. Raises ValueError for another suffix.
    """
    target = Path(target)
    if target.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"{target}: the suffix of a file of weights is .safetensors or .pt")
    if target.suffix == ".safetensors":
        state = {name: tensor.contiguous() for name, tensor in state.items()}
        return _write_safetensors(state, target, **facts)
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": state}, target)


def _write_safetensors(state: dict[str, Tensor], path: Path, **facts: str) -> None:
    """Writes tensors with mode 0644; `facts` and the format are the file's metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(state, temporary, metadata={"format": "pt", **facts})
        temporary.chmod(0o644)  # safetensors lets only the owner read it
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_folder(
    state: dict[str, Tensor], model: dict[str, Any], folder: Path, **facts: str
) -> None:
    """Writes a model that `open_clip.create_model_and_transforms("local-dir:FOLDER")` loads.

    `model` is its config, of `lowprec.clip.model.model_config`. open_clip's preprocessing resizes
    the shorter side and crops the center, as the evaluation does up to rounding.
    """
    preprocessing = {
        "mean": open_clip.OPENAI_DATASET_MEAN,
        "std": open_clip.OPENAI_DATASET_STD,
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }
    write_weights(state, folder / FOLDER_WEIGHTS, **facts)
    config = {"model_cfg": model, "preprocess_cfg": preprocessing}
    (folder / FOLDER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
