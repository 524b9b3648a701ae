"""The jobs that `ranks.py` runs in forked ranks, by name."""

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from experiments import train as entry
from lowprec import evaluate
from lowprec.config.check import check
from lowprec.data.open import open_data
from lowprec.optim.loss_scaling import FixedScaler
from lowprec.train import build as building
from lowprec.train import watchdog
from lowprec.train.distributed import DistributedRanks, Ranks
from lowprec.train.metrics import MetricsBuffer
from lowprec.train.state import whole
from lowprec.train.step import TrainStep
from lowprec.train.task import ContrastiveTask


def gradients(folder: Path, rank: int, size: int, *, configs: dict[str, dict]) -> None:
    """Saves loss, logit scale and gradients of step 1 for each config."""

    device = next(iter(configs.values()))["device"]
    world = DistributedRanks(device, 60) if size > 1 else Ranks()
    for name, raw in configs.items():
        config = check(raw)
        built = building.build(config, open_data(config), world)
        built.task.model.train()
        factor = 64.0 if "scaled" in name else 1.0
        scaler = FixedScaler(factor, built.device)
        batch = next(built.batches_from(1)).to(built.device)
        loss, scale = built.task.backward(batch, scaler.scale)
        found = {n: whole(p.grad) / factor for n, p in built.task.model.named_parameters()}
        found |= {n: b for n, b in built.task.model.named_buffers() if "running" in n}
        found |= {"loss": loss, "scale": scale, "next draw": torch.rand(3)}
        torch.save({n: t.cpu().clone() for n, t in found.items()}, folder / f"{name}.{rank}.pt")
    world.close()


def evaluation(folder: Path, rank: int, size: int, *, configs: dict[str, dict], batch: int):
    """Saves each config's untrained scores, digests of their inputs, and the sizes encoded."""

    metrics, seen = {name: getattr(evaluate, name) for name in ("top_k_accuracy", "recall_at")}, []

    def recorded(metric, *given):
        """`given`: three tensors and k."""
        seen.extend(hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in given[:3])
        return metric(*given)

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
        found = {"scores": scores, "digests": seen, "encoded": encoded}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
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

    watchdog.SILENT_S = 3.0
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
    """At some steps this rank's loss, or a gradient, is NaN; or its disk is full at their saves."""

    backward, write, calls = ContrastiveTask.backward, os.write, iter(range(1, 10**6))

    def spoiled_backward(task, *arguments):
        if next(calls) not in steps:
            return backward(task, *arguments)
        if what == "loss":
            loss_fn = task.loss_fn
            with mock.patch.object(task, "loss_fn", lambda **given: loss_fn(**given) * math.nan):
                return backward(task, *arguments)
        conv = task.model.visual.conv1  # the first layer: no other tensor's gradient follows
        hook = conv.register_full_backward_pre_hook(lambda _, grads: (grads[0] * math.nan,))
        found = backward(task, *arguments)
        hook.remove()
        return found

    def spoiled_write(descriptor, data):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if any(f".tmp.step_{step:09d}" in path for step in steps):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    if what == "disk":
        spoiled = mock.patch.object(os, "write", spoiled_write)
    else:
        spoiled = mock.patch.object(ContrastiveTask, "backward", spoiled_backward)
    with spoiled:
        yield


JOBS = {"gradients": gradients, "evaluation": evaluation, "train": train}
