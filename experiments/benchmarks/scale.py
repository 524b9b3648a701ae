"""Times a training step on 1, 2, ... GPUs of this machine, with and without communication.

    python -m experiments.benchmarks scale model=vit_b32 batch_size=512 num_steps=20 compile=true

Takes the keys of `train`; `batch_size` is per process here (weak scaling), and `num_steps`
is the number of timed steps. Each number of processes runs with `ddp` and `fsdp2`, as under
torchrun: first one process, then the largest number. `ratio` is to one process: 1 is perfect.
`communication` is the share of a step that averaging gradients adds to the backward pass (FSDP2
gathers parameters in both of its timings). `memory_gib` is the peak of the rank that needs most. As
in training, steps are CUDA graphs where possible. A case counts only if its loss is finite and the
same in all ranks. Lines go to `runs/bench/scale/<time>.jsonl`.
"""

import contextlib
import dataclasses
import math
from functools import partial

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from experiments.benchmarks.measure import Lines, random_batch
from lowprec.config.schema import Config
from lowprec.data.loader import Batch
from lowprec.nn.timing import median_ms
from lowprec.optim.schedules import set_learning_rate
from lowprec.runs.identity import label
from lowprec.train.build import build, pick_device
from lowprec.train.distributed import DistributedRanks, Ranks
from lowprec.train.ranks import place
from lowprec.train.step import GraphedStep, TrainStep, can_capture

WARMUP = 5


def main(config: Config) -> None:
    """Measures each case in fresh processes; without a GPU on up to two."""
    device = pick_device(config.device)
    most = torch.cuda.device_count() if device.type == "cuda" else 2
    lines = Lines(config.run_dir, "scale", device)
    rates: dict[str, float] = {}
    shape, dtype = shape_of(config), config.precision.autocast
    sizes = {most, *(2**i for i in range(most.bit_length()) if 2**i <= most)}
    for size in sorted(sizes, key=lambda size: (size > 1, -size)):
        for kind in ("ddp", "fsdp2") if size > 1 else ("none",):
            case = f"{kind} x {size}" if size > 1 else "one process"
            with lines.measurement(case, shape, dtype, processes=size) as row:
                numbers = measure(config, kind, size)
                communication = numbers.pop("communication_ms") / numbers["ms"]
                rates[case] = 1000 * size * config.batch_size / numbers["ms"]
                row.update(rate=rates[case], **numbers, communication=round(communication, 4))
                if "one process" in rates:
                    ratio = rates[case] / size / rates["one process"]
                    row.update(ratio_to="one process", ratio=ratio)
    lines.exit_if_failed()


def shape_of(config: Config) -> str:
    """Names the run, its batch per process and the settings that change the time of a step."""
    settings = {
        "eager": not config.compile,
        "checkpointing": config.checkpointing,
        f"patch dropout {config.model.patch_dropout:g}": config.model.patch_dropout > 0,
        f"{config.accumulate} micro-batches": config.accumulate > 1,
    }
    settings = [name for name, is_set in settings.items() if is_set]
    return ", ".join([label(config), f"batch {config.batch_size} a process", *settings])


def measure(config: Config, kind: str, size: int) -> dict:
    """Returns the measurements of a case's processes; raises RuntimeError with an error of one.

    A signal ends the benchmark.
    """
    distributed = dataclasses.replace(config.distributed, name=kind)
    batch_size = config.batch_size * size
    config = dataclasses.replace(config, distributed=distributed, batch_size=batch_size)
    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id="scale",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        return elastic_launch(launcher, work)(config)[0]
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from error
    except ChildFailedError as error:
        message = error.get_first_failure()[1].message  # of a signal, or with a traceback
        text = message if isinstance(message, str) else message["message"]
        raise RuntimeError(text) from error


class Backward(TrainStep):
    """A step without its update."""

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the loss."""
        loss, _ = self.task.backward(batch.to(self.frozen.device), self.scaler.scale)
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss}


@record  # keeps an error for the process that launches
def work(config: Config) -> dict:
    """Times steps with and without communication in one process of a case."""
    size, world = place()[1], Ranks()
    captures = can_capture(config, pick_device(config.device))
    if size > 1:
        timeout_s = config.distributed.timeout_s
        world = DistributedRanks(config.device, timeout_s, captures=captures)
    built = build(config, None, world)
    batch = random_batch(built.task.model, config.batch_size // size, built.device)
    built.task.model.train()

    def slowest(kind: type[TrainStep]) -> tuple[float, list[float]]:
        """The milliseconds of a step in the slowest rank, and the ranks' losses after a warm-up."""
        step = kind(built.task, built.state.optimizer, built.state.scaler)
        with contextlib.ExitStack() as stack:
            if captures:
                step = stack.enter_context(contextlib.closing(GraphedStep(step, batch)))
            set_learning_rate(built.state.optimizer, config.optimizer.lr)
            for _ in range(WARMUP):
                loss = step(batch)["loss"]
            time_steps = partial(median_ms, partial(step, batch), built.device, config.num_steps)
            return max(world.each(time_steps)), world.each(loss.item)

    ms, losses = slowest(TrainStep)
    if len(set(losses)) > 1 or not math.isfinite(losses[0]):
        raise ValueError(f"losses by rank: {losses}")
    peak = max(world.each(torch.cuda.max_memory_allocated))
    synchronized, _ = slowest(Backward)
    built.task.parallel = built.task.model  # DDP's no_sync does not go with a static graph
    built.task.synchronizing(False)
    built.task.synchronizing = contextlib.nullcontext  # nor after the last micro-batch
    silent, _ = slowest(Backward)
    world.close()
    return {
        "ms": ms,
        "communication_ms": synchronized - silent,
        "loss": round(losses[0], 5),
        "memory_gib": round(peak / 2**30, 3) or None,
    }
