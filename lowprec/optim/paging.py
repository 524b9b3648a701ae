"""States of an optimizer that do not fit on the GPU, in page-locked memory of the host.

A GPU reads and writes page-locked memory over the bus at the host's own address, so a step is the
same kernels with other addresses: equal to the bit, also in a CUDA graph. CUDA managed memory would
move pages of weights and activations as well, and more of it than the GPU has free can hang the GPU
for all users.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lowprec.optim import fused
from lowprec.optim.statistics import is_sharded

SPARE = 1 / 16  # of torch's memory: left for fragmentation, a CUDA graph's own pool and evaluation


def check_paged(
    params: list[Tensor], name_of: Callable[[Tensor], str], by_kernels: bool | None
) -> None:
    """ValueError names the first parameter whose state cannot be paged."""
    if by_kernels is False:
        raise ValueError("paged=True needs the kernels, which fused=False turns off")
    for p in params:
        if is_sharded(p) or p.device.type not in fused.DEVICES:
            fault = "is sharded" if is_sharded(p) else f"is on device {p.device}"
            needed = "paged states need whole parameters on a GPU"
            raise ValueError(f"paged=True: {name_of(p)} {fault}; {needed}")


def place(params: list[Tensor], states: list[dict]) -> None:
    """Moves new, loaded and copied states to the GPU, those that do not fit to locked memory.

    They wait as meta tensors, which stand for zeros, or in other host memory. A step calls it after
    the backward pass, so that `available_bytes` knows what a step needs. The largest states come
    first, so that less than the smallest paged one of the available memory stays unused.
    """
    pairs = [(p, state) for p, state in zip(params, states, strict=True) if _waits(state)]
    if not pairs:
        return
    sizes = [sum(x.nbytes for x in tensors_of(state).values()) for _, state in pairs]
    on_host = too_large(sizes, available_bytes(params[0].device))
    for i, (p, state) in enumerate(pairs):
        for kind, x in tensors_of(state).items():
            if i in on_host:
                state[kind] = page_locked(x)
            else:
                state[kind] = torch.zeros_like(x, device=p.device) if x.is_meta else x.to(p.device)


def too_large(sizes: list[int], available: int) -> set[int]:
    """Indices of the sizes that are left when the largest are taken as long as they fit."""
    left = set()
    for i in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        if sizes[i] <= available:
            available -= sizes[i]
        else:
            left.add(i)
    return left


def available_bytes(device: torch.device) -> int:
    """Bytes of a GPU that the largest step so far would leave to new states; may be negative."""
    torch.cuda.empty_cache()  # new states must not split blocks that activations need again
    free, total = torch.cuda.mem_get_info(device)
    most = torch.cuda.get_per_process_memory_fraction(device) * total
    usable = min(free + torch.cuda.memory_reserved(device), most)
    return int((1 - SPARE) * usable) - torch.cuda.max_memory_allocated(device)


def forget_peak(device: torch.device) -> None:
    """Counts the largest step from now on; an earlier run of the process may have had larger."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def wait_for_states(optimizer: torch.optim.Optimizer) -> None:
    """Waits for the GPU, which may still write paged states that the host is to read or free."""
    if optimizer.paged and torch.cuda.is_available():
        params = (p for group in optimizer.param_groups for p in group["params"])
        for device in {p.device for p in params if p.is_cuda}:  # none if moved to the host
            torch.cuda.synchronize(device)


def tensors_of(state: dict) -> dict[str, Tensor]:
    """The tensors of a state that can be paged."""
    return {kind: x for kind, x in state.items() if kind != "updates"}


def host_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's states in the host's memory."""
    tensors = (x for state in optimizer.state.values() for x in tensors_of(state).values())
    return sum(x.nbytes for x in tensors if x.is_cpu)


def page_locked(x: Tensor) -> Tensor:
    """A copy in page-locked memory; zeros for a meta tensor."""
    if not x.is_meta:
        return x.pin_memory()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, pin_memory=True).zero_()


def _waits(state: dict) -> bool:
    tensors = tensors_of(state).values()
    return any(x.is_meta or x.is_cpu and not fused.is_page_locked(x) for x in tensors)
