"""The model of several processes: replicated (DDP) or sharded (FSDP2), and what a rank drops."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from lowprec.config.schema import Config
from lowprec.train.world import World


def replicate(model: nn.Module, config: Config) -> nn.Module:
    """The model behind DDP, which averages gradients over ranks while they are computed.

    With `accumulate` parts the graph is not static: DDP cannot leave out the averaging of a part.
    """
    device = next(model.parameters()).device
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=config.distributed.static_graph and config.accumulate == 1,
    )


def shard(model: nn.Module, blocks: list[nn.Module], world: World) -> None:
    """Shards the parameters of a model over ranks, in place, gathered block by block.

    They are gathered in their own dtype, and autocast rounds them as it does in one process: the
    numbers are the same. Gradients are summed in float32. The logit scale, which has no dimension
    to shard, stays whole in every rank; `ContrastiveTask` averages its gradient.
    """
    mesh = torch.distributed.init_device_mesh(next(model.parameters()).device.type, (world.size,))
    rule = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for block in blocks:
        fully_shard(block, **rule)
    fully_shard(model, **rule, ignored_params={model.logit_scale})
    for method in ("encode_image", "encode_text"):  # evaluation calls these
        register_fsdp_forward_method(model, method)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a model keeps running statistics of its batches."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


class SharedPatchDropout(nn.Module):
    """Patch dropout of a part of a batch: drops of each image what it drops in the whole batch.

    The draw is the whole batch's, and every part takes its rows: in rank `rank` of `size`, one
    forward after the other over its part. So it depends neither on the ranks nor on `accumulate`,
    and the random state of all ranks stays that of one process.
    """

    def __init__(self, probability: float, batch_size: int, rank: int, size: int):
        super().__init__()
        self.probability = probability
        self.batch_size = batch_size
        self.begin, self.end = (r * batch_size // size for r in (rank, rank + 1))
        self.next = self.begin
        self.drawn: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 1 + patches, width] -> [batch, 1 + kept, width] in training, else the same."""
        if not self.training:
            return x
        batch, tokens, width = x.shape
        if self.next == self.begin:
            self.drawn = torch.rand(self.batch_size, tokens - 1, device=x.device)
        rows = self.drawn[self.next : self.next + batch]
        self.next = self.begin if self.next + batch == self.end else self.next + batch
        num_kept = max(1, int((tokens - 1) * (1 - self.probability)))
        order = rows.topk(num_kept, dim=1).indices
        kept = x[:, 1:].gather(1, order[:, :, None].expand(-1, -1, width))
        return torch.cat((x[:, :1], kept), dim=1)
