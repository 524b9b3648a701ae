"""Everything that a step changes, to files and back, without pickle."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from lowprec.optim.stable_adamw import StableAdamW

MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used; the message names it and says why."""


@dataclass
class TrainState:
    """Model, optimizer, loss scaler, count of skipped steps in a row."""

    model: nn.Module
    optimizer: StableAdamW
    scaler: object
    skips: int = 0

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of model, optimizer and rng .safetensors and of state.json."""
        model = {name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}
        yield "model.safetensors", save(model)
        moments = {}
        for name, parameter in self._named_parameters():
            for key in MOMENTS:
                zero = torch.zeros_like(parameter, dtype=torch.float32)
                moments[f"{key}/{name}"] = self.optimizer.state[parameter].get(key, zero)
        for i, group in enumerate(self.optimizer.param_groups):
            moments[f"step/{i}"] = torch.as_tensor(group.get("step", 0.0)).float()
        yield "optimizer.safetensors", save(moments)
        rng = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng["cuda"] = torch.cuda.get_rng_state()
        yield "rng.safetensors", save(rng)
        state = {"scaler": self.scaler.state_dict(), "skips": self.skips}
        yield "state.json", json.dumps(state).encode()

    def load(self, folder: Path) -> None:
        """Reads what `files` gave; CheckpointError where a name or a shape differs."""
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

    def num_bytes(self) -> int:
        """Bytes of a checkpoint, but for a few thousand."""
        model = sum(tensor.nbytes for tensor in self.model.state_dict().values())
        return model + sum(4 * len(MOMENTS) * p.numel() for _, p in self._named_parameters())

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
