"""Weights to and from open_clip's checkpoints: safetensors, or .pt read as weights only."""

import hashlib
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lowprec.clip.stable_embedding import fold


def find_weights(source: Path) -> Path:
    """The weights of a run (of its newest checkpoint whose digest holds), a checkpoint, a file."""
    source = Path(source)
    if source.is_file():
        return source
    for folder in (source, *sorted((source / "checkpoints").glob("step_*"), reverse=True)):
        weights, manifest = folder / "model.safetensors", folder / "manifest.json"
        if weights.is_file() and manifest.is_file():
            if _digest(weights) == _promised_digest(manifest, weights.name):
                return weights
            print(f"warning: {weights} is damaged; trying an older checkpoint")
    raise FileNotFoundError(f"{source} holds no weights: a run, a checkpoint or a file is expected")


def _promised_digest(manifest: Path, name: str) -> str | None:
    """What a manifest says of a file; None where the manifest is damaged."""
    try:
        return json.loads(manifest.read_text())["files"][name]["sha256"]
    except (ValueError, LookupError, TypeError):
        return None


def weights_digest(source: Path) -> str:
    """sha256 of the weights file."""
    return _digest(find_weights(source))


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_weights(source: Path) -> dict[str, Tensor]:
    """Tensors by open_clip's names, from safetensors or a .pt file of open_clip.

    The norm of a stable embedding is worked into its rows.

    A .pt file is read with `weights_only=True`, without fallback: nothing in it is executed.
    Its tensors may lie under "state_dict" (open_clip's trainer) and behind "module." (DDP).
    ValueError names a file that is damaged or holds anything but weights.
    """
    path = find_weights(source)
    try:
        if path.suffix == ".safetensors":
            return fold(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 (of damaged bytes, torch raises whatever comes)
        raise ValueError(f"{path} cannot be read as weights: {_reason(error)}") from error
    if isinstance(state, dict):
        state = state.get("state_dict", state)
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ValueError(f"{path} holds something else than tensors by name")
    return {str(name).removeprefix("module."): tensor for name, tensor in state.items()}


def _reason(error: Exception) -> str:
    """What torch says in its first sentence, and what a refused pickle would have called."""
    text = str(error)
    called = re.search(r"GLOBAL (\S+) (?:was not|whose)", text)
    sentence = text.partition(". ")[0].partition("\n")[0]
    end = f": it would call {called.group(1)}" if called else ""
    return f"{type(error).__name__}: {sentence or 'it is empty'}{end}"


def load_weights(model: nn.Module, source: Path) -> None:
    """Loads weights into a model; ValueError names the tensors that do not fit."""
    found, wanted = read_weights(source), model.state_dict()
    differing = [
        f"{name} is {shape(found.get(name))}, not {shape(wanted.get(name))}"
        for name in sorted({*found, *wanted})
        if shape(found.get(name)) != shape(wanted.get(name))
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ValueError(f"{source} does not fit the model: {'; '.join(differing[:3])}{more}")
    model.load_state_dict(found)


def shape(tensor: Tensor | None) -> tuple[int, ...] | str:
    """A tensor's shape, or "absent"."""
    return "absent" if tensor is None else tuple(tensor.shape)


def write_weights(state: dict[str, Tensor], target: Path) -> None:
    """Writes tensors as `.safetensors`, or as `.pt` in the layout of open_clip's trainer."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, target)
    elif target.suffix == ".pt":
        torch.save({"state_dict": state}, target)
    else:
        raise ValueError(f"{target}: weights are written as .safetensors or .pt")
