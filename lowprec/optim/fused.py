"""A step over all tensors of a GPU: a handful of launches, nothing read back to the host."""

import functools
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from lowprec.optim.adamw_update import Hyperparameters, Tensors, clipped_lr, decay_factor
from lowprec.optim.eight_bit import BLOCK, code_books
from lowprec.optim.statistics import GradientSums, MomentSums, ShardReduction, StepSums, index_on
from lowprec.optim.triton_adamw import (
    _gradients_kernel,
    _moments_kernel,
    _reduce_kernel,
    _step_kernel,
)

CHUNK = 2048  # elements per program
WARPS = 8
ROWS = 1024  # partial sums added at a time
DEVICES = ("cuda",)
NEEDED = (
    "kernels need dense float32, bfloat16 or float16 tensors of one GPU, with gradients and a "
    "state of the same shape and order in memory"
)
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class FusedStep:
    """`adamw_update.PlainStep` by Triton kernels, for tensors that `first_unfit` accepts.

    A clipped step takes three passes over memory (gradients; moments; parameters), because the rate
    depends on the new moments of the whole tensor. Without clipping the last two are one pass.
    """

    def __init__(self, tensors: Tensors, shards: ShardReduction, addresses: "AddressTables"):
        dtypes: dict[tuple, list[int]] = {}
        for i, (p, g, v, *_) in enumerate(zip(*tensors, strict=True)):
            dtypes.setdefault((p.dtype, g.dtype, v.dtype), []).append(i)
        device = tensors.params[0].device
        self.shards = shards
        self.launchers = [
            _Launcher(tensors, tuple(rows), addresses, kind) for kind, rows in dtypes.items()
        ]
        self.order = _inverse(tuple(i for rows in dtypes.values() for i in rows), device)

    def point_to(self, tensors: Tensors) -> None:
        """Takes other tensors of the same layouts from now on."""
        for launcher in self.launchers:
            launcher.point_to(tensors)

    def gradients(self, factor: Tensor) -> GradientSums:
        """See `PlainStep.gradients`."""
        totals = self._in_order([launcher.gradients(factor) for launcher in self.launchers])
        return GradientSums(*self.shards.reduce(totals, GradientSums.num_sums).unbind(1))

    def observe(self, values: Tensor) -> MomentSums:
        """See `PlainStep.observe`."""
        totals = self._in_order([launcher.observe(values.float()) for launcher in self.launchers])
        return MomentSums(*self.shards.reduce(totals, MomentSums.num_sums).unbind(1))

    def update(
        self, h: Hyperparameters, factor: Tensor, sizes: Tensor, is_clipped: bool
    ) -> tuple[Tensor, StepSums]:
        """See `PlainStep.update`."""
        factor = factor.expand_as(h.apply)
        common = (h.apply, factor, h.beta1_hat, h.beta2_hat, h.eps)
        if is_clipped:
            totals = self._step((*common, h.apply, h.apply), moments=True)  # the rate is not read
            ratio_squares, u_sum, neg_u_min, u_max = self.shards.reduce(totals, 2).unbind(1)
            rms = (ratio_squares / sizes).sqrt()
            eta = clipped_lr(h, rms)
            totals = self._step((*common, eta, decay_factor(h, eta)), update=True)
            update_squares, param_squares = self.shards.reduce(totals, 2).unbind(1)
        else:
            decay = 1 - h.lr * h.weight_decay
            totals = self._step((*common, h.lr, decay), moments=True, update=True)
            totals = self.shards.reduce(totals, 4).unbind(1)
            ratio_squares, u_sum, update_squares, param_squares, neg_u_min, u_max = totals
            rms = (ratio_squares / sizes).sqrt()
        return rms, StepSums(u_sum, update_squares, param_squares, neg_u_min, u_max)

    def _step(
        self, values: tuple[Tensor, ...], moments: bool = False, update: bool = False
    ) -> Tensor:
        """Totals [tensors, n] of one pass, with `values` [tensors] in the kernel's order."""
        table = torch.stack([value.float() for value in values], dim=1)
        return self._in_order([each.step(table, moments, update) for each in self.launchers])

    def _in_order(self, totals: list[Tensor]) -> Tensor:
        return totals[0] if len(totals) == 1 else torch.cat(totals)[self.order]


class _Launcher:
    """Launches the kernels for tensors with the same dtypes of parameter, gradient and moments."""

    def __init__(
        self, tensors: Tensors, rows: tuple[int, ...], addresses: "AddressTables", kind: tuple
    ):
        params, grads = tensors.params, tensors.grads
        self.device, self.picked = params[0].device, rows
        self.rows = None if len(rows) == len(params) else index_on(rows, self.device)
        self.param_type, self.grad_type = TYPES[params[rows[0]].dtype], TYPES[grads[rows[0]].dtype]
        self.is_8bit = tensors.exp_avgs[rows[0]].dtype == torch.uint8
        self.layout = _layout(tuple(params[i].numel() for i in rows), self.device)
        self.count = len(rows)
        self.tables, self.kind = addresses, kind
        self.point_to(tensors)

    def point_to(self, tensors: Tensors) -> None:
        """See `FusedStep.point_to`."""
        pointers: list[int] = []
        for column in tensors:
            column = column if self.rows is None else [column[i] for i in self.picked]
            has_any = column[0] is not None  # all of a kind or none
            pointers += [x.data_ptr() for x in column] if has_any else [0] * self.count
        if self.is_8bit:
            pointers += [code_books(self.device).data_ptr()] * self.count
        self.aligned = functools.reduce(operator.or_, pointers) % 16 == 0
        self.addresses = self.tables.on_device(tuple(pointers), self.device, self.kind)

    def gradients(self, factor: Tensor) -> Tensor:
        """Totals [tensors, 4] in the order of GradientSums."""
        return self._launch(_gradients_kernel, factor, 3, 1, TYPE=self.grad_type)

    def observe(self, values: Tensor) -> Tensor:
        """Totals [tensors, 3] in the order of MomentSums; `values` [all tensors, 4]."""
        values = values.contiguous() if self.rows is None else values[self.rows]
        return self._launch(_moments_kernel, values, 3, 0, TYPE=self.grad_type)

    def step(self, values: Tensor, moments: bool, update: bool) -> Tensor:
        """Totals of a pass over moments, parameters or both; `values` [all tensors, 7].

        8-bit moments are written by the pass over the parameters, which computes them again: the
        update is by moments that are not rounded yet, as in a single pass.
        """
        if self.is_8bit and not moments:
            return self.step(values, moments=True, update=True)[:, 2:4]
        if self.rows is not None:
            values = values[self.rows]
        types = {"P_TYPE": self.param_type, "G_TYPE": self.grad_type}
        num_sums = 2 * moments + 2 * update
        passes = {"MOMENTS": moments, "UPDATE": update, "EIGHT_BIT": self.is_8bit}
        return self._launch(_step_kernel, values, num_sums, 2 * moments, **types, **passes)

    def _launch(
        self, kernel: JITFunction, values: Tensor, num_sums: int, num_maxima: int, **constants
    ) -> Tensor:
        """Totals [tensors, num_sums + num_maxima] over the chunks of each tensor."""
        layout, width = self.layout, num_sums + num_maxima
        options = {"dtype": torch.float32, "device": self.device}
        parts = torch.empty(len(layout.chunks), width, **options)
        if len(parts):
            kernel[(len(parts),)](
                self.addresses, layout.sizes, layout.chunks, layout.starts, values, parts,
                self.count, ALIGNED=self.aligned, CHUNK=CHUNK, num_warps=WARPS, **constants,
            )  # fmt: skip
        totals = torch.empty(self.count, width, **options)
        _reduce_kernel[(self.count, width)](
            parts, layout.firsts, totals, WIDTH=width, SUMS=num_sums, ROWS=ROWS
        )
        return totals


class _Layout(NamedTuple):
    """How tensors are cut into chunks: int64, on the device."""

    sizes: Tensor  # [tensors]: elements
    firsts: Tensor  # [tensors + 1]: the first chunk of each tensor, and the number of chunks
    chunks: Tensor  # [chunks]: the tensor of each chunk
    starts: Tensor  # [chunks]: the first element of each chunk within its tensor


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


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph captures the current stream of a device, which is the current one."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class AddressTables:
    """Tables of addresses on the device, copied there only when an address has changed.

    A CUDA graph that captures a copy repeats it at each replay, so the source on the host is kept
    and never written again. It is allocated beforehand, because capture allows no allocation.
    """

    def __init__(self):
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._spare: dict[tuple, Tensor] = {}
        self._captured: list[Tensor] = []

    def on_device(self, pointers: Sequence[int], device: torch.device, kind: tuple) -> Tensor:
        """int64 [len(pointers)] on the device; a step has one table of each kind.

        Raises RuntimeError in a capture of the first step, or of a second one.
        """
        if device.type != "cuda":
            return torch.tensor(pointers)
        size = len(pointers)
        if is_capturing(device):
            host = self._spare.pop((kind, size), None)
            if host is None:
                raise RuntimeError("a captured step needs an equal one before, outside the capture")
            self._captured.append(host)
            host.copy_(torch.tensor(pointers))
            return host.to(device, non_blocking=True)
        if (kind, size) not in self._spare:
            self._spare[kind, size] = torch.empty(size, dtype=torch.int64, pin_memory=True)
        if pointers not in self._known:
            if len(self._known) > 8:
                self._known.clear()
            host = torch.tensor(pointers, pin_memory=True)
            self._known[pointers] = host.to(device, non_blocking=True)
        return self._known[pointers]


def first_unfit(tensors: Tensors) -> int | None:
    """Index of the first tensor that no kernel takes, or None.

    Kernels take dense tensors in the dtypes of TYPES, all on one GPU; a state may be in page-locked
    memory. Gradient, moments and, for 16 bits, a compensation must have the parameter's shape and
    order in memory and a state's dtypes.
    """
    device = tensors.params[0].device
    if device.type not in DEVICES:
        return 0
    rows = enumerate(zip(*tensors, strict=True))
    return next((i for i, row in rows if not _fits(device, *row)), None)


def _fits(
    device: torch.device, p: Tensor, grad: Tensor, v: Tensor, u: Tensor, lost: Tensor | None,
    v_scale: Tensor | None, u_scale: Tensor | None,
) -> bool:  # fmt: skip
    """Whether kernels on a device take a parameter, its gradient and its state."""
    dtype, shape = p.dtype, p.shape
    kind = torch.float32 if v_scale is None else torch.uint8
    if dtype not in TYPES or grad.dtype not in TYPES or v.dtype != kind or u.dtype != kind:
        return False
    like_p = (p, grad, v, u) if lost is None else (p, grad, v, u, lost)
    if dtype != (torch.float32 if lost is None else lost.dtype):
        return False
    is_contiguous = p.is_contiguous()
    for x in like_p:
        if x.shape != shape:
            return False
        if x.device != device and (x is p or x is grad or not is_page_locked(x)):
            return False
        if not (x.is_contiguous() if is_contiguous else _has_order_of(p, x)):
            return False
    for scale in () if v_scale is None else (v_scale, u_scale):
        if scale.shape != (-(-p.numel() // BLOCK),):
            return False
        if scale.device != device and not is_page_locked(scale):
            return False
    return is_contiguous or _is_dense(p)


def is_page_locked(x: Tensor) -> bool:
    """Whether a tensor is in memory of the host that a GPU reads and writes at the same address."""
    return x.is_cpu and x.is_pinned()


def _has_order_of(a: Tensor, b: Tensor) -> bool:
    """Whether elements of equal shapes have the same order in memory; sizes of 1 do not matter."""
    triples = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in triples)


def _is_dense(x: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order."""
    return x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride()
