"""Reads and writes weights as safetensors or open_clip's .pt; a .pt file executes no code."""

import contextlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from lowprec.nn.inference import load_state
from lowprec.runs.provenance import file_digest


def find_weights(source: Path) -> Path:
    """The weights file of a run (newest undamaged checkpoint) or a checkpoint; a file is itself.

    Raises FileNotFoundError if there is none.
    """
    source = Path(source)
    if source.is_file():
        return source
    for folder in (source, *sorted((source / "checkpoints").glob("step_*"), reverse=True)):
        weights, manifest = folder / "model.safetensors", folder / "manifest.json"
        if weights.is_file() and manifest.is_file():
            with contextlib.suppress(ValueError, LookupError, TypeError):  # a damaged manifest
                facts = json.loads(manifest.read_text())["files"]["model.safetensors"]
                if file_digest(weights) == facts["sha256"]:
                    return weights
            print(f"warning: {weights} is damaged; trying an older checkpoint")
    raise FileNotFoundError(f"{source} has no weights: must be a run, a checkpoint or a file")


def read_weights(source: Path) -> dict[str, Tensor]:
    """Tensors by open_clip's names, from .safetensors or open_clip's .pt; see `find_weights`.

    Folds the norm of a stable embedding into its rows. Nothing in a .pt file is executed; its
    tensors may be under "state_dict" and their names may start with "module.", as in open_clip's
    trainer. Raises ValueError for a file that is damaged or contains anything but weights.
    """
    path = find_weights(source)
    try:
        if path.suffix == ".safetensors":
            return fold(load_file(path))
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


def fold(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Folds a StableEmbedding's norm into its rows: the same function under open_clip's names."""
    folded = dict(state)
    for name in state:
        if f".{name}".endswith(".token_embedding.norm.weight"):
            owner = name.removesuffix(".norm.weight")
            gain, bias = folded.pop(name).float(), folded.pop(f"{owner}.norm.bias").float()
            rows = state[f"{owner}.weight"]
            normed = F.layer_norm(rows.float(), gain.shape, gain, bias)
            folded[f"{owner}.weight"] = normed.to(rows.dtype)
    return folded


def load_weights(model: nn.Module, source: Path) -> None:
    """Loads weights into a model; raises ValueError with the tensors whose shapes differ."""
    load_state(model, read_weights(source), source)


def write_weights(state: dict[str, Tensor], target: Path) -> None:
    """Writes tensors as `.safetensors`, or as `.pt` with the layout of open_clip's trainer.

    Raises ValueError for another suffix.
    """
    target = Path(target)
    if target.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"{target}: weights must be written as .safetensors or .pt")
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".pt":
        torch.save({"state_dict": state}, target)
    else:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, target)
