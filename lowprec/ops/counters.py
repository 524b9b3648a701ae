"""Counters on GPUs, from which the programs of a kernel take numbers until none is left."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

CAPTURED = 2**16  # counters for captured launches, each of 16 bytes
_unused: dict[int, Iterator[Tensor]] = {}  # these, by GPU


def next_counter(like: Tensor) -> Tensor:
    """A 0, int32 [1], on the device of `like` for a launch on the current stream.

    The kernel must leave it at 0. No launch that may run at the same time counts with it: launches
    on one stream run one after another and share a counter. A graph may be replayed beside them, so
    each captured launch keeps its own; once these are used up, graphs clear theirs, which takes a
    kernel each.
    """
    device = like.get_device()
    if device < 0:
        return like.new_zeros(1, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        own = next(_unused.get(device, iter(())), None)
        return torch.zeros(1, dtype=torch.int32, device=like.device) if own is None else own
    if device not in _unused:
        counters = torch.zeros(CAPTURED, 4, dtype=torch.int32, device=like.device)
        torch.cuda.synchronize(device)  # graphs do not wait for this stream
        _unused[device] = map(lambda row: counters[row, :1], range(CAPTURED))
    return _of_stream(device, torch._C._cuda_getCurrentRawStream(device))


@functools.cache
def _of_stream(device: int, stream: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
