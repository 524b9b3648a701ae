"""Times a training step on 1, 2, ... GPUs of this machine, with and without communication.

    python -m experiments.benchmarks.scale model=vit_b32 batch_size=256 distributed.name=ddp

Takes the keys of `train`; `batch_size` is that of one process here (weak scaling), and `num_steps`
how many steps are timed. Cases: each number of processes with `ddp` and `fsdp2`, started by
torchrun. `ratio` is to one process: 1 is perfect. `communication`: the share of a step that
averaging gradients adds to the backward pass, what computation does not hide (FSDP2's gathering of
parameters stays in both). A case counts only if its loss is finite and the same in all ranks. One
JSON line a case goes to `runs/bench/scale/<time>.jsonl`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from experiments.benchmarks.report import reporter
from experiments.entry import run_command
from lowprec.config.schema import Config
from lowprec.runs.identity import label, to_dict

KINDS = ("ddp", "fsdp2")
WARMUP = 5
LIMIT_S = 600  # of a case


def main(config: Config) -> None:
    """Measures every case, each in fresh processes."""
    most = num_devices(config)
    report = reporter(config.run_dir, "scale")
    alone, failed = None, []
    sizes = [2**i for i in range(most.bit_length()) if 2**i <= most]
    for size in sorted({*sizes, most}):
        for kind in KINDS if size > 1 else ("none",):
            case = f"{kind} x {size}" if size > 1 else "one process"
            about = {
                "shape": f"{label(config)}, batch {config.batch_size} a process",
                "dtype": config.precision.autocast, "processes": size, "case": case,
            }  # fmt: skip
            found = measure(config, kind, size)
            if "reason" in found:
                report(**about, correct=None, reason=found["reason"])
                failed.append(case)
                continue
            rate = 1000 * size * config.batch_size / found["ms"]
            alone = alone or rate
            report(
                **about, ms=found["ms"], rate=rate, ratio=rate / size / alone,
                ratio_to="one process", correct=True, loss=found["loss"],
                communication=round(found["communication_ms"] / found["ms"], 4),
                memory_gib=found["memory_gib"],
            )  # fmt: skip
    if failed:
        sys.exit(f"no number for {', '.join(failed)}; their lines say why")


def num_devices(config: Config) -> int:
    """GPUs of this machine, or two processes where there is none."""
    import torch

    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    return torch.cuda.device_count() if on_gpu else 2


def measure(config: Config, kind: str, size: int) -> dict:
    """What a case's processes found, or the `reason` why not."""
    plain = to_dict(config)
    plain["distributed"]["name"] = kind
    plain["batch_size"] = config.batch_size * size
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(size), "-m", "experiments.benchmarks.scale"]
    environment = {**os.environ, "LOWPREC_BENCH_SCALE": json.dumps(plain)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"not done in {LIMIT_S} s"}
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"ms"')]
    if ended.returncode or not lines:
        text = [line for line in ended.stderr.splitlines() if "Error" in line]
        return {"reason": (text or ["no output"])[0][:300]}
    return json.loads(lines[-1])


def work(plain: dict) -> None:
    """One process of a case: times steps with and without communication; rank 0 prints."""
    import torch

    from experiments.benchmarks.report import median_ms
    from experiments.benchmarks.step import random_batch
    from lowprec.config.check import check
    from lowprec.optim.schedules import set_learning_rate
    from lowprec.config.place import place
    from lowprec.train.build import build
    from lowprec.train.distributed import Ranks, join
    from lowprec.train.step import TrainStep

    config, size = check(plain), place()[1]
    world = join(config.device, config.distributed.timeout_s) if size > 1 else Ranks()
    built = build(config, None, world)
    batch = random_batch(built, config.batch_size // size)
    step = TrainStep(built.task, built.state.optimizer, built.state.scaler)
    set_learning_rate(built.state.optimizer, config.optimizer.lr)
    built.task.model.train()
    for _ in range(WARMUP):
        loss = step(batch)["loss"]
    losses = world.each(loss.item)
    if len(set(losses)) > 1 or not loss.isfinite():
        raise ValueError(f"losses by rank: {losses}")

    def slowest(call: Callable) -> float:
        return max(world.each(lambda: median_ms(call, built.device, config.num_steps)))

    def backward() -> None:
        built.task.backward(batch.to(built.device), built.state.scaler.scale)
        built.state.optimizer.zero_grad(set_to_none=True)

    ms, synchronized = slowest(lambda: step(batch)), slowest(backward)
    built.task.parallel = built.task.model  # DDP's own way does not go with a static graph
    with built.task.synchronizing(False):
        silent = slowest(backward)
    on_gpu = built.device.type == "cuda"
    found = {"ms": ms, "communication_ms": synchronized - silent, "loss": round(losses[0], 5)}
    found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    if world.is_first:
        print(json.dumps(found), flush=True)
    world.close()


if __name__ == "__main__":
    if "LOWPREC_BENCH_SCALE" in os.environ:
        work(json.loads(os.environ["LOWPREC_BENCH_SCALE"]))
    else:
        run_command(main, "train")
