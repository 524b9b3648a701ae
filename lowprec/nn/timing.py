"""Times calls, such as the forward and backward of a layer."""

import math
import os
import statistics
import timeit
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

CACHE_BYTES = 256 * 2**20  # more than the second-level cache of any GPU holds


class Step(NamedTuple):
    """Forward and backward of a module, as a call without arguments."""

    module: nn.Module
    x: Tensor
    g: Tensor

    def __call__(self) -> tuple[Tensor, ...]:
        """The output and the gradients of x and the parameters, of those that need one."""
        output = self.module(self.x)
        inputs = [t for t in (self.x, *self.module.parameters()) if t.requires_grad]
        return (output.detach(), *torch.autograd.grad(output, inputs, self.g))


def median_ms(
    call: Callable, device: torch.device, repeats: int, *, graph: bool = False, cold: bool = False
) -> float:
    """Median milliseconds of a call after a warm-up.

    They are measured with CUDA events, or with the host clock on a CPU.

    On a GPU, `graph` times the call as a CUDA graph, and `cold` empties the cache before each call.
    Emptying also hides the host's launches, so `cold` is only meaningful with `graph`.
    """
    call = _graphed(call) if graph and device.type == "cuda" else call
    for _ in range(max(3, repeats // 5)):
        call()
    if device.type != "cuda":
        seconds = timeit.repeat(call, number=1, repeat=repeats)
        return 1000 * statistics.median(seconds)
    flushed = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device) if cold else None
    events = []
    for _ in range(repeats):
        if cold:
            flushed.zero_()
        events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        events[-1][0].record()
        call()
        events[-1][1].record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events)


def kernel_ms(call: Callable, device: torch.device) -> float:
    """Milliseconds of a call's kernels on a GPU, without the gaps between them.

    NaN under another profiler, and where CUPTI is not available.
    """
    if torch.autograd._profiler_enabled():
        return math.nan
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # else CUDA 12 may crash in later CUDA graphs
    activities = [torch.profiler.ProfilerActivity.CUDA]
    # acc_events: otherwise torch warns
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize(device)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1000 or math.nan


def _graphed(call: Callable) -> Callable:
    """Captures a call as a CUDA graph; the returned function replays it on the same tensors."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
