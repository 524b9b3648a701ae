"""Checkpoints: one directory a step, complete when it has its final name, never overwritten.

Files are written to a temporary directory and synced, the manifest with their digests last; the
rename is the commit. Loading verifies every digest. No pickle anywhere.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lowprec.optim.stable_adamw import StableAdamW

MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names it and says why."""


@dataclass
class TrainState:
    """Everything that a step changes."""

    model: nn.Module
    optimizer: StableAdamW
    scaler: object
    skips: int = 0  # skipped steps in a row

    def save(self, folder: Path) -> None:
        """Writes model.safetensors, optimizer.safetensors, rng.safetensors and state.json."""
        save_file({k: v.contiguous() for k, v in self.model.state_dict().items()},
                  folder / "model.safetensors")  # fmt: skip
        moments = {}
        for name, parameter in self._named_parameters():
            for key in MOMENTS:
                zero = torch.zeros_like(parameter, dtype=torch.float32)
                moments[f"{key}/{name}"] = self.optimizer.state[parameter].get(key, zero)
        for i, group in enumerate(self.optimizer.param_groups):
            moments[f"step/{i}"] = torch.as_tensor(group.get("step", 0.0)).float()
        save_file(moments, folder / "optimizer.safetensors")
        rng = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng["cuda"] = torch.cuda.get_rng_state()
        save_file(rng, folder / "rng.safetensors")
        state = {"scaler": self.scaler.state_dict(), "skips": self.skips}
        (folder / "state.json").write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote; CheckpointError where a name or a shape differs."""
        model = load_file(folder / "model.safetensors")
        _check_same(model, self.model.state_dict(), folder / "model.safetensors")
        self.model.load_state_dict(model)
        moments = load_file(folder / "optimizer.safetensors")
        named, groups = dict(self._named_parameters()), self.optimizer.param_groups
        expected = {f"{key}/{name}": p for key in MOMENTS for name, p in named.items()}
        expected |= {f"step/{i}": torch.zeros(()) for i in range(len(groups))}
        _check_same(moments, expected, folder / "optimizer.safetensors")
        steps = [moments.pop(f"step/{i}") for i in range(len(groups))]
        for key, value in moments.items():
            kind, _, name = key.partition("/")
            parameter = named[name]
            self.optimizer.state[parameter][kind] = value.to(parameter.device)
        for group, step in zip(self.optimizer.param_groups, steps, strict=True):
            group["step"] = step.to(group["params"][0].device)
        rng = load_file(folder / "rng.safetensors")
        torch.set_rng_state(rng["cpu"])
        if torch.cuda.is_available() and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"])
        state = json.loads((folder / "state.json").read_text())
        self.scaler.load_state_dict(state["scaler"])
        self.skips = state["skips"]

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return list(zip(self.optimizer.names, parameters, strict=True))


def _check_same(found: dict[str, Tensor], expected: dict, path: Path) -> None:
    shapes = {name: tuple(t.shape) for name, t in found.items()}
    wanted = {name: None if t is None else tuple(t.shape) for name, t in expected.items()}
    differing = [name for name in {**shapes, **wanted} if shapes.get(name) != wanted.get(name)]
    if differing:
        name = sorted(differing)[0]
        raise CheckpointError(
            f"{path} does not fit the model: {name} is {shapes.get(name)}, not {wanted.get(name)}"
            f" ({len(differing)} tensors differ)"
        )


def save_checkpoint(run: Path, step: int, state: TrainState, offsets: dict, keep: int) -> Path:
    """Commits `checkpoints/step_<step>` with the record's offsets, then drops all but `keep`."""
    folder = run / "checkpoints"
    final = folder / f"step_{step:09d}"
    if final.exists():
        return final
    temporary = folder / f".tmp.{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    state.save(temporary)
    files = {}
    for path in sorted(temporary.iterdir()):
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        _sync(path)
    manifest = {"format": 1, "step": step, "offsets": offsets, "files": files}
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
    _sync(temporary / "manifest.json")
    _sync(temporary)
    temporary.rename(final)
    _sync(folder)
    for old in list_checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(run: Path) -> list[Path]:
    """Committed checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step_*"))


def newest_checkpoint(run: Path) -> tuple[Path, dict] | None:
    """The newest checkpoint whose digests hold and its manifest; None if the run has none.

    A damaged one is named on the console, set aside as `.damaged.step_*`, and the next older taken.
    If none is whole, CheckpointError: a run with checkpoints never starts again from step 0.
    """
    faults = [f"{path} is damaged" for path in (run / "checkpoints").glob(".damaged.*")]
    for path in reversed(list_checkpoints(run)):
        try:
            return path, verify(path)
        except CheckpointError as error:
            faults.append(str(error))
            path.rename(path.with_name(f".damaged.{path.name}"))
            print(f"warning: {error}; it is set aside and an older checkpoint tried")
    if faults:
        raise CheckpointError(f"{run} has no whole checkpoint: {'; '.join(faults)}")
    return None


def verify(path: Path) -> dict:
    """The manifest of a checkpoint whose files all match it; CheckpointError naming the file."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}/manifest.json cannot be read ({error})") from error
    for name, facts in manifest["files"].items():
        file = path / name
        if not file.exists() or _sha256(file) != facts["sha256"]:
            raise CheckpointError(f"{file} is damaged or missing")
    return manifest


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
