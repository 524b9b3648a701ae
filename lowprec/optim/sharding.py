"""Sums over the shards of tensors that are spread over processes."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lowprec.optim.on_device import index_on


def reducer(params: list[Tensor], called: Callable[[int], str]) -> Callable:
    """`reduce(sums [tensors, n][, maxima [tensors, n]])`: over all shards of each tensor, in place.

    Tensors that are not DTensors stay as they are. A tensor may be sharded over several dimensions
    of its mesh, as by FSDP2 and tensor parallelism together; copies are not summed. ValueError
    names (`called(i)`) a tensor that is placed in another way, or otherwise than its gradient.
    """
    rows: dict[object, list[int]] = {}
    for i, p in enumerate(params):
        if isinstance(p, DTensor) or isinstance(p.grad, DTensor):
            for dim in _sharded_dims(p, called(i)):
                rows.setdefault(p.device_mesh.get_group(dim), []).append(i)

    def reduce(sums: Tensor, maxima: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        for group, chosen in rows.items():
            for values, operation in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
                if values is not None:
                    index = index_on(tuple(chosen), values.device)
                    part = values[index].contiguous()
                    dist.all_reduce(part, operation, group=group)
                    values[index] = part
        return sums if maxima is None else (sums, maxima)

    return reduce


def _sharded_dims(p: Tensor, name: str) -> list[int]:
    """Dimensions of its mesh over which a parameter is cut; ValueError where that says too little.

    Source of placements: torch's DTensor; FSDP2 over a mesh dimension of tensor parallelism cuts
    by _StridedShard, which is no Shard.
    """
    placements, of_grad = (getattr(x, "placements", None) for x in (p, p.grad))
    if placements != of_grad:
        raise ValueError(f"{name} is placed as {placements}, its gradient as {of_grad}")
    for placement in placements:
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            raise ValueError(
                f"{name} is placed as {placement!r}: only shards and replicas are known"
            )
    return [dim for dim, x in enumerate(placements) if not isinstance(x, Replicate)]
