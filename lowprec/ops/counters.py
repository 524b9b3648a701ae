"""Counters on GPUs, from which the programs of a kernel take numbers until none is left."""

import functools
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

COUNTERS = 2**16  # made at a time, 16 bytes each
_unused: dict[int, Iterator[Tensor]] = {}  # by GPU


def next_counter(like: Tensor) -> Tensor:
    """A 0, int32 [1], on the device of `like` for a launch on the current stream.

    The kernel must leave it at 0. No launch that may run at the same time counts with it: launches
    on one stream run one after another and share a counter. A graph may be replayed beside them, so
    each captured launch keeps its own; where none is left, the graph clears one, by another kernel.
    """
    device = like.get_device()
    if device < 0:
        return like.new_zeros(1, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        counter = _take(device)
        return torch.zeros(1, dtype=torch.int32, device=like.device) if counter is None else counter
    return _of_stream(device, torch._C._cuda_getCurrentRawStream(device))


@functools.cache
def _of_stream(device: int, stream: int) -> Tensor:
    counter = _take(device)
    if counter is None:
        # a thread of its own does not allocate in a memory pool that this one uses, as in the
        # warm-up of torch.compile(mode="reduce-overhead"), which frees what it does not know
        thread = threading.Thread(target=_make_counters, args=(device,))
        thread.start()
        thread.join()
        counter = _take(device)
    return counter


def _take(device: int) -> Tensor | None:
    return next(_unused.get(device, iter(())), None)


def _make_counters(device: int) -> None:
    with torch.cuda.device(device):
        counters = torch.zeros(COUNTERS, 4, dtype=torch.int32, device="cuda")
        torch.cuda.current_stream().synchronize()  # other streams do not wait for this one
    _unused[device] = map(lambda row: counters[row, :1], range(COUNTERS))
