"""A model over the processes of a run: recomputed, compiled, replicated or sharded."""

import os

import torch
from torch import Tensor

from lowprec.clip.model import PatchDropout, blocks, compile_blocks
from lowprec.clip.zero_shot import build_classifier
from lowprec.config.check import ConfigError
from lowprec.config.preflight import sync_bn_fault
from lowprec.config.schema import Config
from lowprec.train.distributed import Ranks, has_batch_norm, replicate, shard

CLASSES = 50  # whose prompts go through the model at once, as open_clip has it


def share_of_cores(processes: int) -> int:
    """Workers of one of so many processes on this machine: its cores less one, at most 16."""
    return max(1, min(16, len(os.sched_getaffinity(0)) // processes - 1))


def classifier_over(
    world: Ranks, model: torch.nn.Module, *, classnames: list[str], **options: object
) -> Tensor:
    """`build_classifier` of all classes: the ranks take turns, each with as many as the others."""
    parts = [classnames[i : i + CLASSES] for i in range(0, len(classnames), CLASSES)]
    own = []
    for n in range(world.rank, -(-len(parts) // world.size) * world.size, world.size):
        world.heartbeat(None, "evaluating")  # beyond the last: any, for FSDP2 needs all ranks
        own.append(build_classifier(model, classnames=parts[n % len(parts)], **options))
    found = world.each(lambda: [part.cpu() for part in own])
    every = [part for turn in zip(*found, strict=True) for part in turn][: len(parts)]
    return torch.cat(every, dim=1).to(own[0].device)


def spread(model: torch.nn.Module, config: Config, world: Ranks) -> torch.nn.Module:
    """Recomputation, compiled blocks and ranks, in this order; returns what averages gradients."""
    several = world.size > 1 or config.accumulate > 1
    if config.accumulate > 1 and has_batch_norm(model):
        raise ConfigError([f"accumulate={config.accumulate}: batch norm needs its whole batch"])
    if config.model.patch_dropout and several:
        model.visual.patch_dropout = PatchDropout(
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
    if has_batch_norm(model) and not config.distributed.sync_bn:
        raise ConfigError([sync_bn_fault(config)])
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
