"""Statistics of all tensors, from sums over their elements and shards."""

import math
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowprec.config.schema import STATISTICS

ORDINARY = {Tensor, torch.nn.Parameter}


class GradientSums(NamedTuple):
    """Sums over the elements of gradients: [tensors] each, or 0-d for one tensor."""

    squares: Tensor
    num_inf: Tensor
    num_nan: Tensor
    abs_max: Tensor  # unspecified if an element is NaN

    num_sums = 3  # the fields before it are sums, the others maxima

    @classmethod
    def of(cls, grad: Tensor) -> "GradientSums":
        """Sums over one gradient, which may hold infinite and NaN elements."""
        norm = torch.linalg.vector_norm(grad)
        least, largest = _extremes(grad)
        abs_max = torch.maximum(-least, largest)
        num_inf, num_nan = (torch.count_nonzero(x) for x in (grad.isinf(), grad.isnan()))
        return cls(norm.square(), num_inf, num_nan, abs_max)


class StepSums(NamedTuple):
    """Sums over u, the update and the updated parameter: [tensors] each, or 0-d for one tensor."""

    u_sum: Tensor
    update_squares: Tensor
    param_squares: Tensor
    neg_u_min: Tensor  # largest -u
    u_max: Tensor

    num_sums = 3

    @classmethod
    def of(cls, u: Tensor, update: Tensor, param: Tensor) -> "StepSums":
        """Sums over one tensor after its update."""
        squares = (torch.linalg.vector_norm(x.float()).square() for x in (update, param))
        least, largest = _extremes(u)
        return cls(u.sum(), *squares, -least, largest)


class MomentSums(NamedTuple):
    """Sums over the gradient and over what Adam's moments make of it, which stay as they are.

    [tensors] each, or 0-d for one tensor. With debiased moments v and u, the squares of the
    gradient g, of g / max(sqrt(u), eps), whose mean is the square of RMS_t, and of the update
    lr v / (sqrt(u) + eps), which is without weight decay.
    """

    grad_squares: Tensor
    ratio_squares: Tensor
    update_squares: Tensor

    num_sums = 3

    @classmethod
    def of(cls, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, values: Tensor) -> "MomentSums":
        """Sums over one tensor, with the moments as torch's Adam keeps them, which are biased.

        `values` [4]: lr, eps, and the factors that debias v and u, 1 / (1 - beta^t).
        """
        lr, eps, debias_v, debias_u = values
        root_u = (exp_avg_sq.to(values.dtype) * debias_u).sqrt()
        grad = grad.to(values.dtype)
        ratio = grad / root_u.clamp(min=eps)
        update = lr * debias_v * exp_avg.to(values.dtype) / root_u.add_(eps)
        return cls(*(torch.linalg.vector_norm(x).square() for x in (grad, ratio, update)))


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest element; for an empty shard, infinities that no other shard exceeds."""
    if x.numel():
        return x.aminmax()
    return x.new_full((), torch.inf), x.new_full((), -torch.inf)


def statistics_table(
    rms: Tensor, grad_norms: Tensor, sizes: Tensor, gradients: GradientSums, step: StepSums
) -> Tensor:
    """float32 [tensors, len(STATISTICS)]; `sizes` [tensors] counts the elements."""
    values = {
        "rms": rms,
        "grad_norm": grad_norms,
        "update_norm": step.update_squares.sqrt(),
        "grad_abs_max": torch.where(gradients.num_nan > 0, math.nan, gradients.abs_max),
        "grad_inf": gradients.num_inf,
        "grad_nan": gradients.num_nan,
        "param_norm": step.param_squares.sqrt(),
        "u_min": -step.neg_u_min,
        "u_mean": step.u_sum / sizes,
        "u_max": step.u_max,
    }
    return torch.stack([values[name] for name in STATISTICS], dim=1).float()


def expand_rows(table: Tensor, rows: tuple[int, ...], count: int) -> Tensor:
    """A table with `count` rows: these at the given places; the others have no gradient.

    [rows, n] with the first n of STATISTICS.
    """
    if len(rows) == count:
        return table
    others = no_statistics(count, table.device)[:, : table.shape[1]]
    return others.index_copy_(0, index_on(rows, table.device), table)


def no_statistics(count: int, device: torch.device) -> Tensor:
    """A table for tensors without a gradient: rms NaN, all else 0."""
    table = torch.zeros(count, len(STATISTICS), dtype=torch.float32, device=device)
    table[:, STATISTICS.index("rms")].fill_(math.nan)
    return table


class ShardReduction:
    """Sums and maxima over the shards of tensors that several processes hold in parts.

    Other tensors stay as they are. A DTensor may be sharded over several dimensions of its mesh, as
    by FSDP2 and tensor parallelism together; replicas are not summed. ValueError names a tensor
    (`name_of(i)`) with another placement, one that differs from its gradient's, or of
    FullyShardedDataParallel. All processes must call each method in the same order.
    """

    def __init__(self, params: list[Tensor], name_of: Callable[[int], str]):
        self.rows: dict[dist.ProcessGroup, list[int]] = {}
        for i, p in enumerate(params):
            if hasattr(p, "_fsdp_flattened"):
                raise ValueError(f"{name_of(i)} is sharded by FSDP1: use fully_shard (FSDP2)")
            if is_sharded(p) or is_sharded(p.grad):
                for dim in _sharded_dims(p, name_of(i)):
                    self.rows.setdefault(p.device_mesh.get_group(dim), []).append(i)

    def reduce(self, table: Tensor, num_sums: int) -> Tensor:
        """Sums the first columns of [tensors, n] in place and takes the others' maxima."""
        sums, maxima = table[:, :num_sums], table[:, num_sums:]
        for group, rows in self.rows.items():
            index = index_on(tuple(rows), table.device)
            for columns, operation in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
                if columns.shape[1]:
                    part = columns[index].contiguous()
                    dist.all_reduce(part, operation, group=group)
                    columns[index] = part
        return table

    def totals(self, kind: type, rows: list[NamedTuple]) -> NamedTuple:
        """Float32 sums [tensors] of one kind, from those of each tensor."""
        values = torch.stack([value.float() for row in rows for value in row])
        return kind(*self.reduce(values.view(len(rows), -1), kind.num_sums).unbind(1))

    def sum_one(self, i: int, value: Tensor) -> Tensor:
        """The sum of one tensor's value over its shards, in place."""
        for group, rows in self.rows.items():
            if i in rows:
                dist.all_reduce(value, group=group)
        return value


def _sharded_dims(p: Tensor, name: str) -> list[int]:
    """Dimensions of its mesh along which a parameter is sharded.

    FSDP2 over a mesh that tensor parallelism has sharded gives _StridedShard, which is no Shard.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements, of_grad = (getattr(x, "placements", None) for x in (p, p.grad))
    if placements != of_grad:
        raise ValueError(f"{name} is placed as {placements}, its gradient as {of_grad}")
    for placement in placements:
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            raise ValueError(f"{name} is placed as {placement!r}; supported: shards and replicas")
    return [dim for dim, x in enumerate(placements) if not isinstance(x, Replicate)]


def is_sharded(x: Tensor | None) -> bool:
    """Whether a tensor is a DTensor; their module, which takes a second to load, may not be."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor | None) -> Tensor | None:
    """The part of a sharded tensor that this process holds; any other tensor itself."""
    return x.to_local() if is_sharded(x) else x


def all_local(tensors: list[Tensor]) -> list[Tensor]:
    """`local` of each tensor; a list of ordinary ones is returned as it is."""
    return tensors if {*map(type, tensors)} <= ORDINARY else [local(x) for x in tensors]


@lru_cache(maxsize=64)
def index_on(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [len(rows)] on the device, copied there once, since a copy makes the host wait."""
    return torch.tensor(rows, dtype=torch.int64).to(device)
