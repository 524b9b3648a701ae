"""Compares the loader with a plain webdataset pipeline.

    python -m experiments.benchmarks data workers=2
    python -m experiments.benchmarks data train='some/where/train-000*.tar' image_size=[224]

The plain pipeline has none of our guarantees: it has no shuffling and no position to resume from,
its order depends on the number of workers, and a bad sample ends it. Both decode with the same PIL
operations, one thread per process, and their captions are new to the tokenizer, as in the first
epoch of a large set. A case counts only if both deliver the same samples over an epoch. Lines go to
`runs/bench/data/<time>.jsonl` and to the console.
"""

import hashlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import webdataset
from torch.utils.data import DataLoader

from experiments.benchmarks.configs import DataConfig
from experiments.benchmarks.measure import Lines, Wrong
from lowprec.clip.text import Tokenizer
from lowprec.data.index import open_shards
from lowprec.data.loader import (
    CROP_WORDS,
    Batch,
    Batches,
    Sample,
    collate,
    decode_caption,
    decode_image,
    iterate,
)
from lowprec.data.open import num_workers
from lowprec.data.order import SampleOrder
from lowprec.data.shapes import SAMPLES_PER_SHARD, render_shapes
from lowprec.data.shards import Shards
from lowprec.data.tar import IMAGES

CONTEXT_LENGTH = 32  # tokens of a caption
ROUNDS = 3  # of both loaders in turn; the median counts
AHEAD = 2  # batches that each worker of a DataLoader keeps ready


@dataclass
class Case:
    """Opened shards and how to load them."""

    shards: Shards
    image_size: int
    augment: bool
    batch_size: int
    workers: int


def main(config: DataConfig) -> None:
    """Measures loading of each set; exits with 1 if something was wrong."""
    torch.set_num_threads(1)
    lines = Lines(config.run_dir, "data", torch.device("cpu"), ("webdataset",))
    with tempfile.TemporaryDirectory(prefix="benchmark-data-") as folder:
        for size in config.image_size:
            bench_set(config, size, Path(folder), lines)
    lines.exit_if_failed()


def bench_set(config: DataConfig, size: int, scratch: Path, lines: Lines) -> None:
    """Compares both loaders, in one process and with workers."""
    workers = num_workers(config.workers)
    name = pattern = config.train
    if name is None:
        name, pattern = render(config, size, workers, scratch)
    try:
        shards = open_shards(pattern, str(scratch / "index"), name="train")
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    workers = min(workers, len(shards.paths))  # each worker of webdataset needs a shard
    for augment, number in itertools.product(config.augment, sorted({0, workers})):
        shape = f"{name} to {size} px, {augment}, batch {config.batch_size}, {number} workers"
        case = Case(shards, size, augment == "crop_flip", config.batch_size, number)
        with lines.measurement("lowprec", shape, "uint8") as row:
            ours, plain = compare(case, config.num_batches)
            ms = 1000 * config.batch_size / plain
            lines.write("webdataset", shape, "uint8", ms, plain, "webdataset", 1.0)
            row.update(ms=1000 * config.batch_size / ours, rate=ours)
            row.update(ratio_to="webdataset", ratio=ours / plain)


def render(config: DataConfig, size: int, workers: int, scratch: Path) -> tuple[str, str]:
    """Renders a set, small images as they are read, others larger; its name and pattern."""
    stored = size if size < 128 else size * 8 // 7
    one_shard_per_worker = SAMPLES_PER_SHARD * (workers - 1) + 1
    render_shapes(
        scratch / str(size),
        num_train=max(config.batch_size * config.num_batches, one_shard_per_worker),
        num_val=0,
        image_size=stored,
        num_processes=len(os.sched_getaffinity(0)),
    )
    return f"shapes of {stored} px", f"{scratch}/{size}/train-*.tar"


def compare(case: Case, num_batches: int) -> tuple[float, float]:
    """Returns images per second of our loader and of webdataset, medians over rounds.

    Raises Wrong unless both deliver the same samples over an epoch.
    """
    if epoch_digests(case, our_batches) != epoch_digests(case, webdataset_batches):
        raise Wrong("the loaders deliver different samples over an epoch")
    rates = [
        [images_per_second(case, load, num_batches) for load in (our_batches, webdataset_batches)]
        for _ in range(ROUNDS)
    ]
    return tuple(statistics.median(column) for column in zip(*rates, strict=True))


def epoch_digests(case: Case, load: Callable) -> list[bytes]:
    """Returns sorted digests of an epoch's samples: tokens, label, and pixels unless random."""
    digests = []
    for batch in load(case, None):
        if batch.skips:
            raise Wrong(f"a sample cannot be read: {batch.skips[0]}")
        for parts in zip(batch.images, batch.tokens, batch.labels, strict=True):
            parts = [part.numpy().tobytes() for part in parts[case.augment :]]
            digests.append(hashlib.sha256(b"".join(parts)).digest())
    return sorted(digests[: case.shards.num_samples])  # ours continues into the next epoch


def images_per_second(case: Case, load: Callable, num_batches: int) -> float:
    """Times batches in the middle: workers are as far ahead at the end as at the start."""
    batches = load(case, 1 + 2 * AHEAD * case.workers + num_batches)
    for _ in range(1 + AHEAD * case.workers):
        next(batches)
    start = time.perf_counter()
    images = sum(len(next(batches).images) for _ in range(num_batches))
    return images / (time.perf_counter() - start)


def our_batches(case: Case, count: int | None) -> Iterator[Batch]:
    """Yields `count` shuffled batches, or with None an epoch and the start of the next."""
    batches = Batches(
        case.shards,
        SampleOrder(case.shards.counts, seed=0),
        batch_size=case.batch_size,
        num_batches=count or -(-case.shards.num_samples // case.batch_size),
        image_size=case.image_size,
        tokenizer=Tokenizer(CONTEXT_LENGTH),
        augment=case.augment,
    )
    return iterate(batches, workers=case.workers)


def webdataset_batches(case: Case, count: int | None) -> Iterator[Batch]:
    """Yields batches in the order of the tars without end, or with None over one epoch."""
    random, tokenizer = np.random.Philox(0), Tokenizer(CONTEXT_LENGTH)

    def decode(members: dict) -> Sample:
        image = next(members[kind] for kind in IMAGES if kind in members)
        words = random.random_raw(CROP_WORDS) if case.augment else None
        pixels = decode_image(image, case.image_size, words)
        return Sample(
            pixels, tokenizer([decode_caption(members["txt"])]), int(members.get("cls", -1))
        )

    def to_batch(samples: list[Sample]) -> Batch:
        return collate(samples, [], case.image_size, tokenizer)

    dataset = webdataset.WebDataset(case.shards.paths, shardshuffle=False).map(decode)
    dataset = dataset.batched(case.batch_size, collation_fn=to_batch)
    return iter(
        DataLoader(
            dataset.repeat() if count else dataset,
            batch_size=None,
            num_workers=case.workers,
            multiprocessing_context="fork" if case.workers else None,
            prefetch_factor=AHEAD if case.workers else None,
        )
    )
