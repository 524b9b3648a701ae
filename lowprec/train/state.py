"""Everything that a step changes, written to safetensors files and read back, without pickle.

The files hold whole tensors, also of a sharded run (FSDP2): any number of ranks can read them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from lowprec.optim.muon import MuonAdamW
from lowprec.optim.stable_adamw import StableAdamW
from lowprec.optim.statistics import local
from lowprec.runs.attempts import CheckpointError
from lowprec.train.distributed import ONE_PROCESS, Ranks

NUMBERS = ("skips",)  # of TrainState, in state.json
NOT_MOMENTS = {"model", "rng", "clipping"}  # other files with tensors
SUFFIX = ".safetensors"


@dataclass
class TrainState:
    """Model, optimizer, loss scaler and the number of consecutive skipped steps.

    Rank 0 writes it. Under FSDP2, all ranks gather the tensors first.
    """

    model: nn.Module
    optimizer: StableAdamW | MuonAdamW
    scaler: object
    skips: int = 0
    world: Ranks = ONE_PROCESS

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors of the state but the random ones, in place, by file and name.

        They are the model's, the optimizer's moments and what ZClip or SkipStep remembers.
        """
        policy = self.optimizer.clip_norm
        clipping = policy.state_dict() if isinstance(policy, nn.Module) else {}
        model = self.model.state_dict()
        return {"model": model, **self.optimizer.tensors(), "clipping": clipping}

    def files(self) -> dict[str, bytes]:
        """The checkpoint files by name; none in ranks other than 0.

        All ranks of a sharded state call it together: they gather one tensor at a time for rank 0.
        """
        is_sharded, first = isinstance(self.model, FSDPModule), self.world.is_first
        if not is_sharded and not first:
            return {}
        files = {}
        for kind, tensors in self._tensors().items():
            gathered = ((name, whole(tensor)) for name, tensor in tensors.items())
            own = {  # copies: the library refuses tensors that share memory
                name: x.detach().contiguous().to("cpu", copy=True) for name, x in gathered if first
            }
            if own:
                files[kind + SUFFIX] = save(own)
        if first:
            rng = {"cpu": torch.get_rng_state()}
            if torch.cuda.is_available():
                rng["cuda"] = torch.cuda.get_rng_state()
            state = {"scaler": self.scaler.state_dict(), "steps": self.optimizer.steps}
            state |= {name: getattr(self, name) for name in NUMBERS}
            files |= {f"rng{SUFFIX}": save(rng), "state.json": json.dumps(state).encode()}
        return files

    def load(self, folder: Path, *, model_only: bool = False) -> None:
        """Loads what `files` returned; CheckpointError if a tensor's name or shape differs.

        Weights may have another dtype, moments may not. ZClip or SkipStep begins anew if the saved
        run did not use it. `model_only`: leaves the optimizer, of which nothing need be saved, the
        count of skips and a scaler of another kind alone.
        """
        own = self._tensors()
        if model_only:
            own = {"model": own["model"]}
        else:
            _refuse_other_optimizer(folder, own)
        saved = {kind: _read(folder / f"{kind}{SUFFIX}") for kind in own}
        if not model_only and saved["clipping"].keys() != own["clipping"].keys():
            del own["clipping"]
        for kind, tensors in own.items():
            _check_same(saved[kind], tensors, folder / f"{kind}{SUFFIX}")
        state = json.loads((folder / "state.json").read_text())
        for kind, tensors in own.items():
            for name, tensor in tensors.items():
                local(tensor).copy_(_share(saved[kind][name], tensor))
        if not model_only or set(state["scaler"]) == set(self.scaler.state_dict()):
            self.scaler.load_state_dict(state["scaler"])
        _set_random_state(folder)
        if not model_only:
            self.optimizer.steps = state["steps"]
        for name in () if model_only else NUMBERS:
            setattr(self, name, state.get(name, getattr(self, name)))  # old runs lack new ones


def is_of_optimizer(name: str) -> bool:
    """Whether a checkpoint's file holds moments."""
    return name.endswith(SUFFIX) and name.partition(".")[0] not in NOT_MOMENTS


def _set_random_state(folder: Path) -> None:
    rng = load_file(folder / "rng.safetensors")
    torch.set_rng_state(rng["cpu"])
    if torch.cuda.is_available() and "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])


def _refuse_other_optimizer(folder: Path, like: dict[str, dict]) -> None:
    """CheckpointError if a checkpoint's optimizer has other kinds of tensors than this run's."""
    names = [path.name for path in folder.iterdir() if is_of_optimizer(path.name)]
    if any("-of-" in name for name in names):
        raise CheckpointError(f"{folder} was written in shards, by an earlier version of lowprec")
    files = {name.partition(".")[0] for name in names}
    kinds = {key for key, tensors in like.items() if tensors and is_of_optimizer(key + SUFFIX)}
    if files != kinds:
        raise CheckpointError(
            f"{folder} is another optimizer's: it has {', '.join(sorted(files))}, and this run's "
            f"optimizer has {', '.join(sorted(kinds))}"
        )


def _check_same(saved: dict[str, Tensor], expected: dict, path: Path) -> None:
    def described(tensors: dict[str, Tensor]) -> dict[str, str]:
        is_model = path.stem == "model"
        return {
            n: f"{tuple(t.shape)}{'' if is_model else f' {t.dtype}'}" for n, t in tensors.items()
        }

    shapes, needed = described(saved), described(expected)
    differing = [name for name in {**shapes, **needed} if shapes.get(name) != needed.get(name)]
    if differing:
        name = sorted(differing)[0]
        raise CheckpointError(
            f"{path} does not fit the model: {name} is {shapes.get(name, 'absent')} in the "
            f"checkpoint and {needed.get(name, 'absent')} in this run ({len(differing)} tensors "
            "differ)"
        )


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor on its device (all ranks call it, in one order); others as is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file; none without it."""
    return load_file(path) if path.exists() else {}


def _share(tensor: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of a whole tensor that is sharded as `like`."""
    if not isinstance(like, DTensor):
        return tensor
    place = (like.device_mesh, like.placements)
    return distribute_tensor(tensor.to(like.device), *place, src_data_rank=None).to_local()
