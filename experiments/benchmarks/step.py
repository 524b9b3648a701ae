"""Times whole training steps of our loop by recipe, and of open_clip's own loop.

    python -m experiments.make_shapes out=data/shapes-224 image_size=224 num_train=32000 num_val=0
    python -m experiments.benchmarks step model=vit_h14 model.patch_dropout=0.5 batch_size=256 \
        compile=true log_every=5 data=shards data.augment=crop_flip \
        evaluation=none 'data.train=data/shapes-224/train-*.tar'

Takes the keys of `train`. Ours is the loop of `experiments.train`: its loader, optimizer with
statistics and record. open_clip's is `open_clip_train.train.train_one_epoch` on its webdataset
pipeline with `torch.optim.AdamW(fused=True)`, eager and, under compile=true, with compiled blocks.
`ms` is the median of `windows_ms`, each the mean over `log_every` steps; a first window, with
compilation, does not count. `data_wait` is the share of the time in which a loop waited for data;
with `preloaded`, both loops take one batch from memory. A case counts only if the losses of its
first steps, on a random batch, equal open_clip's within a tolerance. GPU memory is allocated in
expandable segments. Lines go to `runs/bench/step/<time>.jsonl`; exits with 1 if one of ours was
wrong or failed.
"""

import contextlib
import dataclasses
import glob
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.benchmarks.configs import RECIPES, StepConfig
from experiments.benchmarks.measure import Lines, Wrong, random_batch
from experiments.benchmarks.model import build_task, free, run_cases
from lowprec.clip import open_clip
from lowprec.clip.model import Normalize, image_size
from lowprec.clip.text import Tokenizer
from lowprec.data.open import num_workers, open_data
from lowprec.optim.schedules import param_groups
from lowprec.runs.read import read_rows
from lowprec.runs.record import Record
from lowprec.train.build import build, pick_device
from lowprec.train.loop import Progress, train

# isort: split
from open_clip_train import data as open_clip_data  # after lowprec.clip, see there
from open_clip_train.params import parse_args
from open_clip_train.scheduler import cosine_lr
from open_clip_train.train import train_one_epoch

REPEATS = 3  # windows that count
CHECKED = 3  # steps on a random batch whose losses are compared
TOLERANCE = 2e-2  # relative, of these losses: 8-bit products
PRECISIONS = {"bf16": "amp_bf16", "fp32": "fp32"}  # precision.autocast: open_clip's name
ENDLESS = 10**9  # steps and samples of open_clip's epoch
# webdataset 1.0 marks the end of a shard, which open_clip does not expect
open_clip_data.tar_file_expander = partial(open_clip_data.tar_file_expander, eof_value=None)


class Enough(Exception):
    """All windows are measured."""


class Windows(Progress):
    """Collects the timing of a loop's windows and ends it after the last one."""

    def __init__(self):
        self.rows: list[dict] = []

    def flushed(self, row: dict) -> None:
        """Takes the timing of a window; raises Enough."""
        self.rows.append(row)
        if len(self.rows) > REPEATS:
            raise Enough


class Measured(NamedTuple):
    """Losses of the first steps, and the numbers of a line."""

    losses: list[float]
    numbers: dict


def main(config: StepConfig) -> None:
    """Measures the cases of one config; exits with 1 if one of ours was wrong or failed."""
    device = pick_device(config.device)
    if device.type == "cuda":
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # fragments less
    config.evaluation.name = "none"

    def facts(case: str) -> dict:
        optimizer = config.optimizer.name if case in RECIPES else "torch.optim.AdamW, fused"
        batches = "in memory" if config.preloaded else "loaded"
        if case in RECIPES and not config.preloaded:
            batches += ", data.fast_decoding" * config.data.fast_decoding
            batches += ", data.cache" * (config.data.cache is not None)
        return {"batches": batches, "optimizer": optimizer}

    lines = Lines(config.run_dir, "step", device)
    run_cases(config, lines, lambda case: measure(config, case), check, facts)


def check(result: Measured, expected: Measured) -> dict:
    """Raises Wrong if the losses of the first steps differ; returns the last of them."""
    pairs = zip(result.losses, expected.losses, strict=True)
    gap = max(abs(a / b - 1) for a, b in pairs)
    if not gap < TOLERANCE:  # NaN too
        raise Wrong(f"the loss differs from open_clip's by {gap:.2%} in the first steps")
    return {"loss": round(result.losses[-1], 5)}


def measure(config: StepConfig, case: str) -> Measured:
    """Trains a new model until all windows are measured."""
    free()
    windows = Windows()
    losses = (train_ours if case in RECIPES else train_open_clip)(config, case, windows)
    times = [round(row["step_ms"], 3) for row in windows.rows[1:]]
    memory = windows.rows[-1]["memory_gib"]
    numbers = {
        "ms": statistics.median(times),
        "windows_ms": times,
        "data_wait": max(row["data_wait"] for row in windows.rows[1:]),
        "memory_gib": None if memory is None else round(memory, 2),
    }
    return Measured(losses, numbers)


def checked_first(checked: Any, batches: Iterator) -> Iterator:
    """Yields the random batch of the check, then those of the loader, which has begun to read."""
    first = next(batches)
    yield from itertools.repeat(checked, CHECKED)
    yield first
    yield from batches


def train_ours(config: StepConfig, case: str, windows: Windows) -> list[float]:
    """Runs our training loop; returns the checked losses."""
    threshold = config.precision.outlier_threshold if case == "llm_int8" else 0.0
    precision = dataclasses.replace(config.precision, recipe=case, outlier_threshold=threshold)
    config = dataclasses.replace(config, precision=precision)
    with pick_device(config.device):  # a large model is initialized there much faster
        built = build(config, None if config.preloaded else open_data(config))
    batch = random_batch(built.task.model, config.batch_size, built.device)
    loaded = itertools.repeat(batch) if config.preloaded else built.batches_from(1)
    built.batches_from = lambda first: checked_first(batch, loaded)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(Record(Path(folder) / "run")) as record:
            with contextlib.suppress(Enough), contextlib.redirect_stdout(None):
                train(built, record, progress=windows)
            rows = read_rows(record.run / "metrics.jsonl")
    return [row["loss"] for row in rows[:CHECKED]]


def train_open_clip(config: StepConfig, case: str, windows: Windows) -> list[float]:
    """Runs open_clip's training loop; returns the checked losses."""
    device = pick_device(config.device)
    model = build_task(config, case, device)[0].model
    rule = config.optimizer
    optimizer = torch.optim.AdamW(
        param_groups(model, rule.weight_decay),
        lr=rule.lr,
        betas=(rule.beta1, rule.beta2),
        eps=rule.eps,
        fused=True,
    )
    loop = OpenClipLoop(config, model, optimizer, windows)
    with contextlib.suppress(Enough):
        train_one_epoch(
            model,
            {"train": SimpleNamespace(dataloader=loop, set_epoch=lambda epoch: None)},
            loop.loss,
            0,
            optimizer,
            None,
            loop.begin_step,
            None,
            loop.args,
        )
    return [loss.item() for loss in loop.losses]


class OpenClipLoop:
    """The batches, loss and scheduler that open_clip's training loop takes."""

    num_batches = num_samples = ENDLESS

    def __init__(
        self,
        config: StepConfig,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        windows: Windows,
    ):
        self.config, self.model, self.optimizer, self.windows = config, model, optimizer, windows
        self.device = pick_device(config.device)
        self.losses: list[Tensor] = []
        self.loss_fn = open_clip.loss.ClipLoss(cache_labels=True)
        self.begin, self.waited = time.perf_counter(), 0.0
        rate = config.optimizer.lr
        self.set_rate = cosine_lr(optimizer, rate, config.warmup_steps, config.num_steps)
        options = {
            "train-data": "::".join(sorted(glob.glob(config.data.train))),
            "train-num-samples": ENDLESS,
            "batch-size": config.batch_size,
            "log-every-n-steps": config.log_every,
            "precision": PRECISIONS[config.precision.autocast],
            "workers": num_workers(config.num_workers),
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        self.args = parse_args([*flags, "--dataset-resampled"])
        alone = {"rank": 0, "local_rank": 0, "world_size": 1, "distill": False, "wandb": False}
        vars(self.args).update(alone, device=self.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batch = random_batch(self.model, self.config.batch_size, self.device)
        pixels = Normalize()(batch.images)
        checked = (pixels.pin_memory() if self.device.type == "cuda" else pixels), batch.tokens
        batches = itertools.repeat(checked) if self.config.preloaded else self.loaded()
        batches = checked_first(checked, batches)
        while True:
            begin = time.perf_counter()
            batch = next(batches)
            self.waited += time.perf_counter() - begin
            yield batch

    def loaded(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Reads data.train through open_clip's webdataset pipeline and transform."""
        augments = self.config.data.augment == "crop_flip"
        transform = open_clip.image_transform(image_size(self.model), is_train=augments)
        tokenizer = Tokenizer(self.model.context_length, self.model.vocab_size)
        read = open_clip_data.get_wds_dataset
        return iter(read(self.args, transform, True, tokenizer=tokenizer).dataloader)

    def loss(self, **features: Any) -> dict[str, Tensor]:
        """Returns open_clip's loss, and keeps those of the first steps."""
        losses = self.loss_fn(**features)
        self.losses += [loss.detach() for loss in losses.values() if len(self.losses) < CHECKED]
        return losses

    def begin_step(self, step: int) -> None:
        """Sets the learning rate of a step, counted from 0, and ends a window."""
        interval = self.config.log_every
        if step and step % interval == 0:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            now = time.perf_counter()
            seconds, on_gpu = now - self.begin, self.device.type == "cuda"
            row = {"step_ms": 1000 * seconds / interval, "data_wait": self.waited / seconds}
            row["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
            self.begin, self.waited = now, 0.0
            self.windows.flushed(row)
        self.set_rate(step)
