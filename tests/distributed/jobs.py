"""The jobs that `ranks.py` runs in forked ranks, by name."""

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from experiments import train as entry
from lowprec import evaluate
from lowprec.config.check import check
from lowprec.data.open import open_data
from lowprec.diagnostics import watch
from lowprec.diagnostics.spikes import PROTOCOLS
from lowprec.formats import INT8, round_to_format
from lowprec.optim import StableAdamW
from lowprec.optim.loss_scaling import FixedScaler
from lowprec.train import build as building
from lowprec.train import state, watchdog
from lowprec.train.distributed import DistributedRanks, Ranks
from lowprec.train.metrics import MetricsBuffer
from lowprec.train.state import whole
from lowprec.train.step import GraphedStep, TrainStep
from lowprec.train.task import ContrastiveTask
from tests.train.crash import attempt


def gradients(folder: Path, rank: int, size: int, *, configs: dict[str, dict]) -> None:
    """Saves loss, logit scale and gradients of step 1 for each config.

    With FSDP2, also the numbers of groups of parameters, of those that it gathers once, and of
    parameters that are whole after a backward pass without averaging.
    """

    device = next(iter(configs.values()))["device"]
    world = DistributedRanks(device, 60) if size > 1 else Ranks()
    for name, raw in configs.items():
        config = check(raw)
        built = building.build(config, open_data(config), world)
        built.task.model.train()
        factor = 64.0 if "scaled" in name else 1.0
        scaler = FixedScaler(factor, built.device)
        batch = next(built.batches_from(1)).to(built.device)
        gather = param_group.foreach_all_gather
        with mock.patch.object(param_group, "foreach_all_gather", wraps=gather) as gathers:
            loss, scale = built.task.backward(batch, scaler.scale)
        firsts = Counter(call.args[0][0]._param_fqn for call in gathers.call_args_list)
        groups = sum(isinstance(m, FSDPModule) for m in built.task.model.modules())
        named = built.task.model.named_parameters()
        saved = {n: whole(p.grad) / factor for n, p in named if p.requires_grad}
        saved |= {n: b.clone() for n, b in built.task.model.named_buffers() if "running" in n}
        saved |= {"loss": loss, "scale": scale, "next draw": torch.rand(3)}
        with built.task.synchronizing(False):  # as `benchmarks scale` does
            built.task.backward(batch, scaler.scale)
        num_whole = sum(not isinstance(p, DTensor) for p in built.task.model.parameters())
        saved["groups"] = torch.tensor([groups, list(firsts.values()).count(1), num_whole])
        torch.save({n: t.cpu().clone() for n, t in saved.items()}, folder / f"{name}.{rank}.pt")
    world.close()


def stochastic_rounding(folder: Path, rank: int, size: int) -> None:
    """Saves 0 and 1 as rounded from 0.3, compiled and not, and the next random number."""
    world = DistributedRanks("cpu", 60) if size > 1 else Ranks()
    x, rounded = torch.full((20_000,), 0.3), []
    compiled = torch.compile(round_to_format, backend="eager", fullgraph=True)
    for function in (round_to_format, compiled):
        torch.manual_seed(0)
        rounded.append(function(x, INT8, stochastic=True))
    torch.save([*rounded, torch.rand(3)], folder / f"{rank}.pt")
    world.close()


def evaluation(folder: Path, rank: int, size: int, *, configs: dict[str, dict], batch: int):
    """Saves each config's untrained scores, digests of their inputs, and the sizes encoded."""

    metrics, seen = {name: getattr(evaluate, name) for name in ("top_k_accuracy", "recall_at")}, []

    def recorded(metric, *inputs):
        """`inputs`: three tensors and k."""
        seen.extend(hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in inputs[:3])
        return metric(*inputs)

    for name, metric in metrics.items():
        setattr(evaluate, name, functools.partial(recorded, metric))
    building.EVALUATION_BATCH = batch
    world = DistributedRanks("cpu", 60) if size > 1 else Ranks()
    for name, raw in configs.items():
        config, encoded = check(raw), []
        seen.clear()
        built = building.build(config, open_data(config), world)
        built.task.normalize.register_forward_hook(lambda *a, n=encoded: n.append(len(a[2])))
        scores = built.evaluation()(built.task.model)
        results = {"scores": scores, "digests": seen, "encoded": encoded}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(results))
    world.close()


def replays(folder: Path, rank: int, size: int, *, raw: dict) -> None:
    """Saves what an evaluation and a block probe find after replays, and find in a new model."""
    world, config, found = DistributedRanks("cpu", 60), check(raw), []

    def scores(built: building.Built) -> tuple[torch.Tensor, dict]:
        batch = next(built.batches_from(1))
        return built.task.probe(batch), built.evaluation()(built.task.model)

    def change(built: building.Built) -> None:
        for p in shards[built.task]:
            state.local(p.detach()).mul_(1.25)

    replayed, fresh = (building.build(config, open_data(config), world) for _ in range(2))
    # after a forward pass, model.parameters() are what it has gathered
    shards = {built.task: [*built.task.model.parameters()] for built in (replayed, fresh)}
    step = mock.MagicMock(task=replayed.task, frozen=torch.tensor(False))
    with mock.patch.object(torch, "cuda"):
        graphed = GraphedStep(step, mock.MagicMock())
    graphed.graph.replay = functools.partial(change, replayed)
    for _ in range(2):
        with mock.patch.object(torch, "cuda"):
            graphed(mock.MagicMock())
        change(fresh)
        found.append(scores(replayed))
    torch.save((found[-1], scores(fresh)), folder / f"{rank}.pt")
    world.close()


def train(
    folder: Path,
    rank: int,
    size: int,
    *,
    configs: list[dict],
    hang: dict | None = None,
    spoils: list[dict] | None = None,
) -> None:
    """Runs each config as the command line does.

    `hang`: the rank and step that sleeps, also while it waits for data ("stall"), or fails;
    `spoils`: arguments of `spoiling` per config.
    """

    watchdog.WAIT_S = 2.0
    if hang and hang["rank"] == rank:
        owner, name = (MetricsBuffer, "wait_for") if hang.get("stall") else (TrainStep, "__call__")
        call, calls = getattr(owner, name), iter(range(1, 10**6))

        def sleeping(*arguments):
            if next(calls) == hang["step"]:
                if hang.get("fail"):
                    raise MemoryError("as told")
                time.sleep(100)
            return call(*arguments)

        setattr(owner, name, sleeping)
    for raw, spoil in zip(configs, spoils or [{}] * len(configs), strict=True):
        is_here = bool(spoil) and rank == min(spoil["rank"], size - 1)
        with spoiling(**spoil) if is_here else contextlib.nullcontext():
            entry.main(check(raw))


@contextlib.contextmanager
def spoiling(what: str, steps: list[int], rank: int) -> Iterator[None]:
    """At some steps this rank's loss, or a gradient, is NaN; or its disk is full at their saves.

    Or its memory is full at the first save.
    """

    backward, write, calls = ContrastiveTask.backward, os.write, iter(range(1, 10**6))

    def spoiled_backward(task, *arguments):
        if next(calls) not in steps:
            return backward(task, *arguments)
        if what == "loss":
            loss_fn = task.loss_fn
            with mock.patch.object(task, "loss_fn", lambda **inputs: loss_fn(**inputs) * math.nan):
                return backward(task, *arguments)
        conv = task.model.visual.conv1  # the first layer: no other tensor's gradient follows
        hook = conv.register_full_backward_pre_hook(lambda _, grads: (grads[0] * math.nan,))
        result = backward(task, *arguments)
        hook.remove()
        return result

    def spoiled_write(descriptor, data):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if any(f".tmp.step_{step:09d}" in path for step in steps):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    if what == "disk":
        spoiled = mock.patch.object(os, "write", spoiled_write)
    elif what == "memory":
        spoiled = mock.patch.object(state, "save", side_effect=MemoryError("as told"))
    else:
        spoiled = mock.patch.object(ContrastiveTask, "backward", spoiled_backward)
    with spoiled:
        yield


def sharded_steps(folder: Path, rank: int, size: int, *, width: int) -> None:
    """Saves an optimizer's statistics and parameters, and what it refuses.

    Two processes use FSDP2, four also tensor parallelism.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 1, bias=False))
    if size > 1:
        dist.init_process_group("gloo")
        names = ("data", "tensor")[: size // 2]
        mesh = dist.init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
        if size == 4:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
        placements = [x for p in model.parameters() for x in p.placements]
        assert any(isinstance(x, _StridedShard) for x in placements) == (size == 4)
    optimizer = StableAdamW(model.named_parameters(), lr=1e-2, clip_norm=5.0)
    statistics = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 7, generator=generator) * (100.0 if step == 2 else 1.0)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        statistics.append(optimizer.statistics.clone())
    params = [whole(p.detach()).clone() for p in model.parameters()]
    refused = refusals(mesh) if size == 2 else []
    torch.save((torch.stack(statistics), params, refused), folder / f"{rank}.pt")
    if size > 1:
        dist.destroy_process_group()


def watched(folder: Path, rank: int, size: int, *, kind: str) -> None:
    """Saves what `watch` records of torch's AdamW in a loop with planted spikes, and its events.

    `kind`: "ddp" or "fsdp2" for several processes, which have equal parts of each batch.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 1, bias=False))
    if size > 1:
        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (size,))
        sharded = partial(fully_shard, mesh=mesh)
        model = sharded(model) if kind == "fsdp2" else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2, betas=(0.9, 0.99))
    protocol = replace(PROTOCOLS["paper"], ignore_steps=10, window=20)
    group = dist.group.WORLD if size > 1 else None
    monitor = watch(model, optimizer, flush=8, protocol=protocol, group=group)
    for step in range(1, 61):
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
        loss = (model(x.chunk(size)[rank]) - 1.0).square().mean()
        loss = loss + (5.0 if step in (43, 44) else 0.0)
        monitor.loss(loss)
        (loss * (30.0 if step == 40 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save((monitor.names, monitor.rows(), monitor.spikes), folder / f"{rank}.pt")
    if size > 1:
        dist.destroy_process_group()


def refusals(mesh: dist.DeviceMesh) -> list[str]:
    """What an optimizer says of placements that cannot be summed."""
    messages = []
    for placement, of_grad in ((Shard(0), Replicate()), (Partial(), Partial())):
        p = DTensor.from_local(torch.ones(4, 6), mesh, [placement], run_check=False)
        p = nn.Parameter(p)
        rows = 8 if of_grad == Replicate() else 4
        p.grad = DTensor.from_local(torch.ones(rows, 6), mesh, [of_grad], run_check=False)
        with pytest.raises(ValueError) as refused:
            StableAdamW([("head", p)]).step()
        messages.append(str(refused.value))
    return messages


JOBS = {
    "gradients": gradients,
    "stochastic_rounding": stochastic_rounding,
    "evaluation": evaluation,
    "replays": replays,
    "train": train,
    "sharded_steps": sharded_steps,
    "attempt": attempt,
    "watched": watched,
}
