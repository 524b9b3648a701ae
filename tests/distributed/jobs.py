"""What the ranks of an order do, by name: see ranks.py. torch is imported in the forked rank."""

import contextlib
import errno
import functools
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path


def gradients(folder: Path, rank: int, size: int, *, configs: dict[str, dict]) -> None:
    """Leaves loss, logit scale and gradients of step 1 for each config."""
    import torch

    from lowprec.config.check import check
    from lowprec.data.open import open_data
    from lowprec.optim.loss_scaling import FixedScaler
    from lowprec.train.build import build
    from lowprec.train.distributed import Ranks, join
    from lowprec.train.state import whole

    device = next(iter(configs.values()))["device"]
    world = join(device, 60) if size > 1 else Ranks()
    for name, raw in configs.items():
        config = check(raw)
        built = build(config, open_data(config), world)
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
    """Leaves what each config's untrained model scores, from which features; what it encoded."""
    import hashlib

    from lowprec import evaluate as room
    from lowprec.config.check import check
    from lowprec.data.open import open_data
    from lowprec.train import build as building
    from lowprec.train.distributed import Ranks, join

    metrics, seen = {name: getattr(room, name) for name in ("top_k_accuracy", "recall_at")}, []

    def noted(metric, *given):
        """`given`: three tensors and k."""
        seen.extend(hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in given[:3])
        return metric(*given)

    for name, metric in metrics.items():
        setattr(room, name, functools.partial(noted, metric))
    building.EVALUATION_BATCH, building.CLASSES = batch, 1
    world = join("cpu", 60) if size > 1 else Ranks()
    for name, raw in configs.items():
        config, encoded = check(raw), []
        seen.clear()
        built = building.build(config, open_data(config), world)
        built.task.normalize.register_forward_hook(lambda *a, n=encoded: n.append(len(a[2])))
        scores = built.evaluation()(built.task.model)
        found = {"scores": scores, "digests": seen, "encoded": encoded}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
    world.close()


def gathered(folder: Path, rank: int, size: int, *, config: dict) -> None:
    """Leaves how many gathered tensors of a sharded state there were at a time, and its files."""
    import weakref

    from lowprec.config.check import check
    from lowprec.data.open import open_data
    from lowprec.train import state
    from lowprec.train.build import build
    from lowprec.train.distributed import join

    world = join("cpu", 60)
    config = check(config)
    whole, made, alive = state.whole, [], []

    def counted(tensor):
        found = whole(tensor)
        if found is not tensor:
            made.append(weakref.ref(found))
        alive.append(sum(one() is not None for one in made))
        return found

    state.whole = counted
    files = build(config, open_data(config), world).state.files()
    (folder / f"{rank}.json").write_text(json.dumps({"most": max(alive), "files": list(files)}))
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

    `hang`: where one sleeps or fails; `spoils`: for each config what `spoiling` takes, or {}.
    """
    from experiments import train as entry
    from lowprec.config.check import check
    from lowprec.train import watchdog
    from lowprec.train.step import TrainStep

    watchdog.SILENT_S = 3.0
    if hang and hang["rank"] == rank:
        call, calls = TrainStep.__call__, iter(range(1, 10**6))

        def sleeping(*arguments):
            if next(calls) == hang["step"]:
                if hang.get("fail"):
                    raise MemoryError("as told")
                time.sleep(100)
            return call(*arguments)

        TrainStep.__call__ = sleeping
    for raw, spoil in zip(configs, spoils or [{}] * len(configs), strict=True):
        is_here = bool(spoil) and rank == min(spoil["rank"], size - 1)
        with spoiling(**spoil) if is_here else contextlib.nullcontext():
            entry.main(check(raw))


@contextlib.contextmanager
def spoiling(what: str, steps: list[int], rank: int) -> Iterator[None]:
    """At some steps this rank's loss, or a gradient, is NaN; or its disk is full at their saves."""
    from unittest import mock

    from lowprec.train.task import ContrastiveTask

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


JOBS = {"gradients": gradients, "evaluation": evaluation, "gathered": gathered, "train": train}
