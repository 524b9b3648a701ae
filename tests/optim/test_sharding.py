"""Statistics and clipping of sharded parameters are those of the whole tensors."""

import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from lowprec.optim import StableAdamW

WORLD = 2
STEPS = 4


def make_model(world):
    torch.manual_seed(0)
    width = 13 if world == WORLD else 12  # tensor parallelism wants even parts
    return torch.nn.Sequential(
        torch.nn.Linear(7, width), torch.nn.Tanh(), torch.nn.Linear(width, 1, bias=False)
    )  # 13 rows in two uneven parts, and one row that one process does not hold


def take_steps(model, optimizer):
    """Statistics after each step, of a gradient that jumps; the same data in every process."""
    statistics = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 7, generator=generator) * (100.0 if step == 2 else 1.0)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        statistics.append(optimizer.statistics.clone())
    return torch.stack(statistics)


def refusals():
    """What is said of gradients and parameters that are placed in a way that is not summed."""
    mesh, said = dist.init_device_mesh("cpu", (WORLD,)), []
    for placement, of_grad in ((Shard(0), Replicate()), (Partial(), Partial())):
        p = DTensor.from_local(torch.ones(4, 6), mesh, [placement], run_check=False)
        p = torch.nn.Parameter(p)
        p.grad = DTensor.from_local(
            torch.ones(8 if of_grad == Replicate() else 4, 6), mesh, [of_grad], run_check=False
        )
        with pytest.raises(ValueError) as refused:
            StableAdamW([("head", p)]).step()
        said.append(str(refused.value))
    return said


def sharded(model, world):
    """The model cut by FSDP2; with four processes its layers also by tensor parallelism."""
    if world == WORLD:
        return fully_shard(model, mesh=dist.init_device_mesh("cpu", (WORLD,)))
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    assert any(isinstance(x, _StridedShard) for p in model.parameters() for x in p.placements)
    return model


def run_process(rank, folder, world):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world
    )
    try:
        model = sharded(make_model(world), world)
        optimizer = StableAdamW(model.named_parameters(), lr=1e-2, clip_norm=5.0)
        statistics = take_steps(model, optimizer)
        params = [p.full_tensor() for p in model.parameters()]
        said = refusals() if world == WORLD else []
        torch.save((statistics, [p.detach() for p in params], said), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # gloo's and torch's own
@pytest.mark.parametrize("world", [WORLD, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_take_the_steps_of_one(world, tmp_path):
    multiprocessing.set_forkserver_preload(["lowprec.optim"])  # torch is imported once for all
    arguments = {"args": (str(tmp_path), world), "nprocs": world}
    mp.start_processes(run_process, **arguments, start_method="forkserver")
    model = make_model(world)
    optimizer = StableAdamW(model.named_parameters(), lr=1e-2, clip_norm=5.0)
    expected = take_steps(model, optimizer)
    assert expected[2, :, 0].max() > 1.3  # it was clipped
    for rank in range(world):
        statistics, params, said = torch.load(tmp_path / f"{rank}.pt")
        if world == WORLD:
            assert "(head) is placed as (Shard(dim=0),), its gradient as (Replicate()" in said[0]
            assert "(head) is placed as Partial(sum)" in said[1]
        torch.testing.assert_close(statistics, expected, rtol=1e-5, atol=1e-8)
        for found, p in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(found, p.detach(), rtol=1e-5, atol=1e-7)
