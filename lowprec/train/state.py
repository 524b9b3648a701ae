"""Everything that a step changes, written to safetensors files and read back, without pickle.

`exp_avg.safetensors` holds whole tensors. A sharded run (FSDP2) writes one file per rank,
`exp_avg.00000-of-00002.safetensors`, with the rank's rows of each sharded tensor; rank 0's also
holds the tensors that are not sharded. Any number of ranks can read the files of any other number.
"""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lowprec.optim.libraries import LibraryOptimizer
from lowprec.optim.stable_adamw import StableAdamW
from lowprec.optim.statistics import local
from lowprec.runs.attempts import CheckpointError
from lowprec.train.distributed import ONE_PROCESS, Ranks

NUMBERS = ("skips",)  # of TrainState, in state.json
NOT_MOMENTS = {"model", "rng", "clipping"}  # other files with tensors
SUFFIX = ".safetensors"
DTYPES = {  # the format's name of each dtype; source: the safetensors README
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass
class TrainState:
    """Model, optimizer, loss scaler and the number of consecutive skipped steps.

    Rank 0 writes a replicated state. Under FSDP2 every rank writes its shard of the moments, and
    rank 0 the rest with the whole model: evaluation and export need no ranks.
    """

    model: nn.Module
    optimizer: StableAdamW | LibraryOptimizer
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

    def files(self) -> dict[str, list]:
        """The checkpoint files that this rank writes: name -> chunks of bytes.

        All ranks of a sharded state call it together: they gather the model for rank 0, one tensor
        at a time.
        """
        sharded, first = isinstance(self.model, FSDPModule), self.world.is_first
        if not sharded and not first:
            return {}
        kinds = self._tensors()
        if sharded:  # every rank gathers each tensor, and rank 0 keeps it
            gathered = ((name, whole(tensor)) for name, tensor in kinds["model"].items())
            kinds["model"] = {name: tensor.cpu() for name, tensor in gathered if first}
        kinds["rng"] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            kinds["rng"]["cuda"] = torch.cuda.get_rng_state()
        files = {}
        for kind, tensors in kinds.items():
            part = f".{self.world.rank:05d}-of-{self.world.size:05d}"
            suffix = part + SUFFIX if sharded and kind not in NOT_MOMENTS else SUFFIX
            if own := {name: local(x) for name, x in tensors.items() if self._writes(x)}:
                files[kind + suffix] = pack(own)
        if first:
            state = {"scaler": self.scaler.state_dict(), "steps": self.optimizer.steps}
            state |= {name: getattr(self, name) for name in NUMBERS}
            files["state.json"] = [json.dumps(state).encode()]
        return files

    def _writes(self, tensor: Tensor) -> bool:
        """Whether this rank writes a tensor: its rows of a sharded one; rank 0 the others."""
        return local(tensor).numel() > 0 if isinstance(tensor, DTensor) else self.world.is_first

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
        saved = {kind: _read_like(folder, kind, tensors) for kind, tensors in own.items()}
        if not model_only and saved["clipping"].keys() != own["clipping"].keys():
            del own["clipping"]
        for kind, tensors in own.items():
            _check_same(saved[kind], tensors, folder / f"{kind}{SUFFIX}")
        state = json.loads((folder / "state.json").read_text())
        for kind, tensors in own.items():
            for name, tensor in tensors.items():
                local(tensor).copy_(local(saved[kind][name]))
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
    files = {path.name.partition(".")[0] for path in folder.iterdir() if is_of_optimizer(path.name)}
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


def pack(tensors: dict[str, Tensor]) -> list[bytes | memoryview]:
    """Header and data of a safetensors file of tensors on any device.

    All tensors are copied into one buffer, page-locked if any is on a GPU: the library's own
    `save` takes longer than writing to the disk does.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # which aligns all of them
    header, end = {}, 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=on_gpu)
    for name in names:
        tensor, (start, stop) = tensors[name].detach(), header[name]["data_offsets"]
        target = buffer[start:stop].view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, memoryview(buffer.numpy())]


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor on its device (all ranks call it, in one order); others as is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _read_like(folder: Path, key: str, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reads all tensors of a kind, each sharded like its namesake in `like`.

    A tensor without a namesake or with another shape is read whole; no files give no tensors.
    """
    files = sorted([*folder.glob(f"{key}{SUFFIX}"), *folder.glob(f"{key}.*-of-*{SUFFIX}")])
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        holders: dict[str, list] = {}
        for file in opened:
            for name in file.keys():  # noqa: SIM118 (a safe_open is not iterable)
                holders.setdefault(name, []).append(file)
        return {name: _read(name, shards, like.get(name)) for name, shards in holders.items()}


def _read(name: str, shards: list, like: Tensor | None) -> Tensor:
    slices = [shard.get_slice(name) for shard in shards]
    shapes = [part.get_shape() for part in slices]
    shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if shapes[0] else ()
    if not isinstance(like, DTensor) or tuple(like.shape) != shape:
        tensors = [shard.get_tensor(name) for shard in shards]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    first, count = _rows(like)
    begin, rows = 0, []
    for part, (height, *_) in zip(slices, shapes, strict=True):
        low, high = max(first - begin, 0), min(first + count - begin, height)
        if low < high:
            rows.append(part[low:high])
        begin += height
    own = torch.cat(rows) if rows else slices[0][:0]
    return DTensor.from_local(
        own.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _rows(tensor: DTensor) -> tuple[int, int]:
    """First row and number of rows in this rank: FSDP2 cuts equal shards, the last ones shorter."""
    height, size = tensor.shape[0], tensor.device_mesh.size()
    per_rank = -(-height // size)
    first = min(tensor.device_mesh.get_local_rank() * per_rank, height)
    return first, min(per_rank, height - first)
