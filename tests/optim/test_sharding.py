"""Statistics and clipping of sharded parameters are those of the whole tensors."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from lowprec.optim import StableAdamW

WORLD = 2
STEPS = 4


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 1, bias=False)
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


def run_process(rank, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD
    )
    try:
        model = make_model()
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (WORLD,)))
        optimizer = StableAdamW(model.named_parameters(), lr=1e-2, clip_norm=5.0)
        statistics = take_steps(model, optimizer)
        params = [p.full_tensor() for p in model.parameters()]
        torch.save((statistics, [p.detach() for p in params]), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # gloo's and torch's own
def test_two_processes_take_the_steps_of_one(tmp_path):
    mp.spawn(run_process, args=(str(tmp_path),), nprocs=WORLD)
    model = make_model()
    optimizer = StableAdamW(model.named_parameters(), lr=1e-2, clip_norm=5.0)
    expected = take_steps(model, optimizer)
    assert expected[2, :, 0].max() > 1.4  # it was clipped
    for rank in range(WORLD):
        statistics, params = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(statistics, expected, rtol=1e-5, atol=1e-8)
        for found, p in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(found, p.detach(), rtol=1e-5, atol=1e-7)
