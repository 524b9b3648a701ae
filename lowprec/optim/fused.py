"""The optimizer's passes on a GPU: a handful of launches for all tensors, nothing read back."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from lowprec.optim.on_device import index_on
from lowprec.optim.reference import Coefficients, Tensors
from lowprec.optim.triton_adamw import _gradients_kernel, _reduce_kernel, _step_kernel

CHUNK = 2048  # elements of a program
WARPS = 8
ROWS = 1024  # parts added at a time
DEVICES = ("cuda",)
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Fused:
    """`reference.Reference` by kernels, of tensors of which none is `first_unfit`."""

    def __init__(self, tensors: Tensors, host: "Addresses"):
        kinds: dict[tuple, list[int]] = {}
        for i, (p, g) in enumerate(zip(tensors.params, tensors.grads, strict=True)):
            kinds.setdefault((p.dtype, g.dtype), []).append(i)
        device = tensors.params[0].device
        self.kinds = [_Kind(tensors, tuple(chosen), host) for chosen in kinds.values()]
        self.order = _inverse(tuple(i for chosen in kinds.values() for i in chosen), device)

    def gradients(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        """As `Reference.gradients`."""
        parts = self._in_order([kind.gradients(factor) for kind in self.kinds])
        return parts[:, :3], parts[:, 3:]

    def moments(self, c: Coefficients) -> tuple[Tensor, Tensor]:
        """As `Reference.moments`."""
        parts = self._in_order([kind.step(c, True, False) for kind in self.kinds])
        return parts[:, :2], parts[:, 2:]

    def update(self, c: Coefficients) -> Tensor:
        """As `Reference.update`."""
        return self._in_order([kind.step(c, False, True) for kind in self.kinds])

    def moments_and_update(self, c: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
        """Both at once, of a rate that does not wait for the moments."""
        parts = self._in_order([kind.step(c, True, True) for kind in self.kinds])
        return parts[:, :2], parts[:, 4:], parts[:, 2:4]

    def _in_order(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)[self.order]


class _Kind:
    """The tensors of one pair of dtypes: one launch a pass."""

    def __init__(self, tensors: Tensors, chosen: tuple[int, ...], host: "Addresses"):
        columns = (tensors.params, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs)
        columns = (*columns, tensors.compensations)
        self.device = tensors.params[0].device
        self.chosen = None if len(chosen) == len(tensors.params) else index_on(chosen, self.device)
        self.types = [TYPES[column[chosen[0]].dtype] for column in columns[:2]]
        numbers = tuple(
            0 if column[i] is None else column[i].data_ptr() for column in columns for i in chosen
        )
        self.aligned = all(number % 16 == 0 for number in numbers)
        self.addresses = host.on_device(numbers, self.device)
        self.layout = _layout(tuple(tensors.params[i].numel() for i in chosen), self.device)
        self.count = len(chosen)

    def gradients(self, factor: Tensor) -> Tensor:
        parts = torch.empty(len(self.layout.chunks), 4, device=self.device)
        if len(parts):
            _gradients_kernel[(len(parts),)](
                self.addresses, self.layout.sizes, self.layout.chunks, self.layout.starts, factor,
                parts, self.count, TYPE=self.types[1], ALIGNED=self.aligned, CHUNK=CHUNK,
                num_warps=WARPS,
            )  # fmt: skip
        return self._reduce(parts, sums=3)

    def step(self, c: Coefficients, moments: bool, update: bool) -> Tensor:
        columns = (c.apply, c.factor, c.beta1, c.beta2, c.eps)
        columns = (*columns, c.apply if c.rate is None else c.rate)
        columns = (*columns, c.apply if c.decay is None else c.decay)
        table = torch.stack([column.float() for column in columns], dim=1)
        if self.chosen is not None:
            table = table[self.chosen]
        width = 4 * moments + 2 * update
        parts = torch.empty(len(self.layout.chunks), width, device=self.device)
        if len(parts):
            _step_kernel[(len(parts),)](
                self.addresses, self.layout.sizes, self.layout.chunks, self.layout.starts, table,
                parts, self.count, P_TYPE=self.types[0], G_TYPE=self.types[1],
                ALIGNED=self.aligned, MOMENTS=moments, UPDATE=update, CHUNK=CHUNK,
                num_warps=WARPS,
            )  # fmt: skip
        return self._reduce(parts, sums=2 * moments + 2 * update)

    def _reduce(self, parts: Tensor, sums: int) -> Tensor:
        width = parts.shape[1]
        totals = torch.empty(self.count, width, device=self.device)
        _reduce_kernel[(self.count, width)](
            parts, self.layout.firsts, totals, WIDTH=width, SUMS=sums, ROWS=ROWS
        )
        return totals


@dataclass(frozen=True)
class _Layout:
    """How tensors are cut: int64, on the device.

    Of each tensor its size and its first chunk; of each chunk its tensor and its first element.
    """

    sizes: Tensor
    firsts: Tensor
    chunks: Tensor
    starts: Tensor


@lru_cache(maxsize=8)
def _layout(sizes: tuple[int, ...], device: torch.device) -> _Layout:
    size = torch.tensor(sizes, dtype=torch.int64)
    counts = (size + CHUNK - 1) // CHUNK
    firsts = torch.cat((size.new_zeros(1), counts.cumsum(0)))
    chunks = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    starts = (torch.arange(len(chunks)) - firsts[chunks]) * CHUNK
    return _Layout(*(tensor.to(device) for tensor in (size, firsts, chunks, starts)))


@lru_cache(maxsize=8)
def _inverse(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order).argsort().to(device)


class Addresses:
    """Tables of addresses on the device, copied there only when an address has changed.

    A copy that a CUDA graph captures is repeated at each replay, so its source on the host is kept
    and not written again. It is set aside beforehand: capture allows no allocation there.
    """

    def __init__(self):
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._spare: dict[int, Tensor] = {}
        self._captured: list[Tensor] = []

    def on_device(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        """int64 [len(numbers)] on the device."""
        if device.type != "cuda":
            return torch.tensor(numbers)
        size = len(numbers)
        if torch.cuda.is_current_stream_capturing():
            host = self._spare.pop(size)
            self._captured.append(host)
            host.copy_(torch.tensor(numbers))
            return host.to(device, non_blocking=True)
        if size not in self._spare:
            self._spare[size] = torch.empty(size, dtype=torch.int64, pin_memory=True)
        if numbers not in self._known:
            if len(self._known) > 8:
                self._known.clear()
            host = torch.tensor(numbers, pin_memory=True)
            self._known[numbers] = host.to(device, non_blocking=True)
        return self._known[numbers]


def first_unfit(tensors: Tensors) -> int | None:
    """The first tensor that no kernel takes; None if all lie on one GPU, dense, in dtypes of TYPES.

    A tensor's gradient and moments must lie in the parameter's order in memory.
    """
    device = tensors.params[0].device
    if device.type not in DEVICES:
        return 0
    rows = zip(*vars(tensors).values(), strict=True)
    for i, (p, *others) in enumerate(rows):
        others = [x for x in others if x is not None]
        fits = p.device == device and p.dtype in TYPES and others[0].dtype in TYPES
        if not (fits and _is_dense(p) and all(_is_alike(p, x) for x in others)):
            return i
    return None


def _is_alike(a: Tensor, b: Tensor) -> bool:
    """Whether elements lie in one order in memory; strides of dimensions of size one do not say."""
    if a.stride() == b.stride():
        return True
    pairs = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.shape == b.shape and all(size == 1 or one == other for size, one, other in pairs)


def _is_dense(x: Tensor) -> bool:
    """Whether its elements fill their memory without gaps or overlaps, in any order."""
    if x.is_contiguous():
        return True
    filled = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != filled:
                return False
            filled *= size
    return True
