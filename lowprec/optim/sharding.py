"""Sums over the shards of tensors that are spread over processes."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def reducer(params: list[Tensor]) -> Callable:
    """`reduce(sums [tensors, n][, maxima [tensors, n]])`: over all shards of each tensor, in place.

    Tensors that are not DTensors stay as they are. Source of placements: torch's DTensor; FSDP2
    shards over one mesh dimension and may replicate over another, which is not summed.
    """
    rows: dict[object, list[int]] = {}
    for i, p in enumerate(params):
        if isinstance(p, DTensor):
            for dim, placement in enumerate(p.placements):
                if isinstance(placement, Shard):
                    rows.setdefault(p.device_mesh.get_group(dim), []).append(i)

    def reduce(sums: Tensor, maxima: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        for group, chosen in rows.items():
            for values, operation in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
                if values is not None:
                    index = torch.tensor(chosen, device=values.device)
                    part = values[index].contiguous()
                    dist.all_reduce(part, operation, group=group)
                    values[index] = part
        return sums if maxima is None else (sums, maxima)

    return reduce
