"""A model and its loss over the processes of a run: recomputed, compiled, replicated or sharded."""

import os

import torch

from lowprec.clip.model import blocks, compile_blocks, contrastive_loss
from lowprec.config import Config
from lowprec.train.parallel import SharedPatchDropout, has_batch_norm, replicate, shard
from lowprec.train.world import World
from lowprec.validate import ConfigError


def share_of_cores(processes: int) -> int:
    """Workers of one of so many processes on this machine: its cores less one, at most 16."""
    return max(1, min(16, len(os.sched_getaffinity(0)) // processes - 1))


def loss_over(world: World, local: bool) -> torch.nn.Module:
    """The loss of a rank's part of a batch against the whole of it."""
    loss = contrastive_loss()
    loss.rank, loss.world_size = world.rank, world.size
    loss.local_loss, loss.gather_with_grad = local, True
    return loss


def spread(model: torch.nn.Module, config: Config, world: World) -> torch.nn.Module:
    """Recomputation, compiled blocks and ranks, in this order; returns what averages gradients."""
    several = world.size > 1 or config.accumulate > 1
    if config.accumulate > 1 and has_batch_norm(model):
        raise ConfigError([f"accumulate={config.accumulate}: batch norm needs its whole batch"])
    if config.model.patch_dropout and several:
        model.visual.patch_dropout = SharedPatchDropout(
            config.model.patch_dropout, config.batch_size, world.rank, world.size
        )
    if config.checkpointing:
        model.set_grad_checkpointing(True)
    if config.compile:
        if not blocks(model):
            raise ConfigError([f"compile=true: {config.model.name} has no blocks of open_clip's"])
        torch.compiler.reset()  # its limit of versions counts over the runs of a process
        compile_blocks(model)
    if world.size == 1:
        return model
    if config.distributed.sync_bn:
        if not has_batch_norm(model):
            raise ConfigError([f"distributed.sync_bn=true: {config.model.name} has no batch norm"])
        if next(model.parameters()).device.type == "cpu":
            raise ConfigError(["distributed.sync_bn=true needs GPUs"])
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.distributed.name == "ddp":
        return replicate(model, config)
    shard(model, blocks(model), world)
    return model
