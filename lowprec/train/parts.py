"""Tensors of a checkpoint, whole or in a part a rank, read into whatever the reader is made of.

`exp_avg.safetensors` holds whole tensors; a sharded run writes `exp_avg.00000-of-00002.safetensors`
and so on: of a sharded tensor each holds the rank's rows, and rank 0's the tensors that are not
sharded. So a checkpoint of any number of ranks is read by any other.
"""

import contextlib
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

SUFFIX = ".safetensors"


def file_name(key: str, part: tuple[int, int] | None) -> str:
    """The file of a kind of tensors; `part`: rank and number of ranks, None: all in one."""
    return key + SUFFIX if part is None else f"{key}.{part[0]:05d}-of-{part[1]:05d}{SUFFIX}"


def local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor that this process holds; of others themselves."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor made whole, on its device: all ranks call it, in one order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def read_like(folder: Path, key: str, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of a kind, sharded as its namesake in `like` is.

    One without a namesake, or of another shape, comes whole; without a file there is none.
    """
    files = sorted([*folder.glob(f"{key}{SUFFIX}"), *folder.glob(f"{key}.*-of-*{SUFFIX}")])
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        names = [set(file.keys()) for file in opened]
        held = {
            name: [file for file, has in zip(opened, names, strict=True) if name in has]
            for name in sorted(set().union(*names))
        }
        return {name: _read(name, parts, like.get(name)) for name, parts in held.items()}


def _read(name: str, parts: list, like: Tensor | None) -> Tensor:
    slices = [part.get_slice(name) for part in parts]
    shapes = [part.get_shape() for part in slices]
    shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if shapes[0] else ()
    if not isinstance(like, DTensor) or tuple(like.shape) != shape:
        found = [part.get_tensor(name) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found)
    first, count = _rows(like)
    begin, rows = 0, []
    for part, (height, *_) in zip(slices, shapes, strict=True):
        low, high = max(first - begin, 0), min(first + count - begin, height)
        if low < high:
            rows.append(part[low:high])
        begin += height
    found = torch.cat(rows) if rows else slices[0][:0]
    return DTensor.from_local(
        found.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _rows(tensor: DTensor) -> tuple[int, int]:
    """First row and number of rows of this process, as FSDP2 cuts them: equal, the last shorter."""
    height, size = tensor.shape[0], tensor.device_mesh.size()
    each = -(-height // size)
    first = min(tensor.device_mesh.get_local_rank() * each, height)
    return first, min(each, height - first)
