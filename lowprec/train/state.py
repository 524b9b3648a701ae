"""Everything that a step changes, to files and back, without pickle."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lowprec.optim.eight_bit import EightBitAdamW
from lowprec.optim.reference import wide_dtype
from lowprec.optim.stable_adamw import StableAdamW
from lowprec.train.pack import pack
from lowprec.train.parts import file_name, local, read_like, whole
from lowprec.train.world import ALONE, World

MOMENTS = ("exp_avg", "exp_avg_sq", "compensation")  # the last of 16-bit parameters alone


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used; the message names it and says why."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was written; an older one may be whole."""


@dataclass
class TrainState:
    """Model, optimizer, loss scaler, count of skipped steps in a row.

    A replicated state is rank 0's to write. Of a sharded one (FSDP2) every rank writes its part of
    the moments, and rank 0 the rest, the model whole: who evaluates or exports it needs no ranks.
    """

    model: nn.Module
    optimizer: StableAdamW | EightBitAdamW
    scaler: object
    skips: int = 0
    world: World = ALONE

    @property
    def part(self) -> tuple[int, int] | None:
        """This rank and the number of ranks, if the state is sharded."""
        return (self.world.rank, self.world.size) if isinstance(self.model, FSDPModule) else None

    def files(self) -> dict[str, list]:
        """Content of each file of a checkpoint that is this rank's to write, as chunks of bytes.

        Of a sharded state all ranks call it: they gather the model, tensor by tensor, for rank 0.
        """
        if self.part is None and not self.world.is_first:
            return {}
        model = {}
        for name, tensor in self.model.state_dict().items():
            gathered = whole(tensor)
            if self.world.is_first:
                model[name] = gathered.cpu() if self.part else gathered
        if isinstance(self.optimizer, EightBitAdamW):
            moments = self.optimizer.states()
        else:
            moments = {
                key: {name: self._moment(p, key) for name, p in self._parameters_with(key).items()}
                for key in MOMENTS
            }
            moments = {key: self._own_part(named) for key, named in moments.items()}
        moments = {
            file_name(key, self.part): pack(found) for key, found in moments.items() if found
        }
        if not self.world.is_first:
            return moments
        rng = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng["cuda"] = torch.cuda.get_rng_state()
        state = {
            "scaler": self.scaler.state_dict(),
            "skips": self.skips,
            "steps": self.optimizer.steps,
        }
        return {
            "model.safetensors": pack(model),
            **moments,
            "rng.safetensors": pack(rng),
            "state.json": [json.dumps(state).encode()],
        }

    def load(self, folder: Path, *, fresh: bool = False) -> None:
        """Reads what `files` gave; CheckpointError where a name or a shape differs.

        `fresh`: for the first step of another run: without the random state, the skips and, unless
        it is the same kind, the scaler.
        """
        model = read_like(folder, "model", self.model.state_dict())
        _check_same(model, self.model.state_dict(), folder / "model.safetensors")
        moments = {}
        for key, named in self._expected().items():
            path = folder / f"{key}.safetensors"
            moments[key] = read_like(folder, key, named)
            _check_same(moments[key], named, path)
        state = json.loads((folder / "state.json").read_text())
        if isinstance(self.optimizer, EightBitAdamW):
            self._load_eight_bit(moments, folder)
        else:
            self._load_moments(moments)
        self.optimizer.steps = state["steps"]
        if self.part is None:
            self.model.load_state_dict(model)
        else:
            for name, tensor in self.model.state_dict().items():
                local(tensor).copy_(local(model[name]))
        if not fresh or set(state["scaler"]) == set(self.scaler.state_dict()):
            self.scaler.load_state_dict(state["scaler"])
        if fresh:
            return
        rng = load_file(folder / "rng.safetensors")
        torch.set_rng_state(rng["cpu"])
        if torch.cuda.is_available() and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"])
        self.skips = state["skips"]

    def num_bytes(self) -> int:
        """Bytes of a checkpoint, but for a few thousand."""
        model = sum(tensor.nbytes for tensor in self.model.state_dict().values())
        if isinstance(self.optimizer, EightBitAdamW):
            states = self.optimizer.states().values()
            return model + sum(tensor.nbytes for named in states for tensor in named.values())
        kept = (p for key in MOMENTS for p in self._parameters_with(key).values())
        return model + sum(4 * p.numel() for p in kept)

    def _expected(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of the shapes that the optimizer's files have, by file and name."""
        if isinstance(self.optimizer, EightBitAdamW):
            return self.optimizer.states()
        return {key: self._parameters_with(key) for key in MOMENTS}

    def _load_moments(self, moments: dict[str, dict[str, Tensor]]) -> None:
        for key, found in moments.items():
            for name, parameter in self._parameters_with(key).items():
                self.optimizer.state[parameter][key] = found[name].to(parameter.device)

    def _load_eight_bit(self, moments: dict[str, dict[str, Tensor]], folder: Path) -> None:
        """Fills the library's own tensors, which a managed memory may hold."""
        pairs = [
            (key, tensor, moments[key][name])
            for key, named in self.optimizer.states().items()
            for name, tensor in named.items()
        ]
        for key, tensor, found in pairs:
            means_another = key.endswith("_levels") and not torch.equal(tensor.cpu(), found)
            if means_another or tensor.dtype != found.dtype:
                raise CheckpointError(
                    f"{folder / key}.safetensors: its moments are coded in another way than the "
                    "optimizer's; resume with the library's version that the run began with"
                )
        for _, tensor, found in pairs:
            tensor.copy_(found)

    def _parameters_with(self, key: str) -> dict[str, nn.Parameter]:
        """The parameters of which the optimizer keeps this, by name."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        named = dict(zip(self.optimizer.names, parameters, strict=True))
        if key != "compensation":
            return named
        return {name: p for name, p in named.items() if p.dtype != wide_dtype(p)}

    def _own_part(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """What of the tensors is this rank's to write: its rows; rank 0 has the unsharded ones."""
        own = {
            name: local(t) for name, t in named.items() if t is not local(t) or self.world.is_first
        }
        return {name: tensor for name, tensor in own.items() if tensor.numel()}

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        dtype = parameter.dtype if key == "compensation" else wide_dtype(parameter)
        zero = torch.zeros_like(parameter, dtype=dtype)
        return self.optimizer.state[parameter].get(key, zero)


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
