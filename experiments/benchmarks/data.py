"""Compares the loader with a plain webdataset pipeline, and times opening many shards.

    python -m experiments.benchmarks.data workers=2
    python -m experiments.benchmarks.data train='some/where/train-000*.tar' image_size=[224]

The plain pipeline has none of our guarantees: no shuffling, no position to resume from, an order
that depends on the number of workers, and a bad sample ends it. Both decode with the same PIL
operations, one thread per process, and their captions are new to the tokenizer, as in the first
epoch of a large set. A case counts only if both deliver the same samples over an epoch. Each
measurement is a JSON line in `runs/bench/data/<time>.jsonl` and on the console.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import webdataset
from torch.utils.data import DataLoader

from experiments.entry import run_command
from lowprec.clip.text import Tokenizer
from lowprec.config.schema import key
from lowprec.data import index
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
from lowprec.data.shards import IMAGES, SAMPLE, Shards
from lowprec.runs.environment import environment
from lowprec.runs.read import encode_row

CONTEXT_LENGTH = 32  # tokens of a caption
ROUNDS = 3  # of both loaders in turn; the median counts
AHEAD = 2  # batches that each worker of a DataLoader keeps ready
TABLE = np.zeros(100, SAMPLE)  # of each shard in the start-up measurement
MIB = 2**20


@dataclass
class BenchDataConfig:
    """What is read, and how."""

    train: str | None = key(None, "glob of a set to read whole; null: renders one for each size")
    image_size: list[int] = key([64, 224], "pixels per side of a decoded image", least=16)
    augment: list[str] = key(
        ["none", "crop_flip"], "changes to the image", choices=("none", "crop_flip")
    )
    batch_size: int = key(256, "pairs in a batch", least=1)
    num_batches: int = key(16, "batches timed at a time", least=1)
    workers: int | None = key(None, "measured beside 0; null: one less than cores", least=0)
    shards: list[int] = key([100, 10000, 100000], "sizes of the start-up measurement", least=1)
    run_dir: str = key("runs", "the lines go into its bench/data")


class DifferentSamplesError(ValueError):
    """The loaders do not deliver the same samples."""


@dataclass
class Case:
    """Opened shards and how to load them."""

    shards: Shards
    image_size: int
    augment: bool
    batch_size: int
    workers: int


def main(config: BenchDataConfig) -> None:
    """Measures reading and loading of each set, then start-up."""
    torch.set_num_threads(1)
    config = dataclasses.replace(config, workers=num_workers(config.workers))
    report = _reporter(Path(config.run_dir) / "bench" / "data")
    with tempfile.TemporaryDirectory(prefix="bench_data-") as folder:
        scratch = Path(folder)
        for size in config.image_size:
            bench_set(config, size, scratch, report)
        for count in config.shards:
            bench_start_up(count, scratch / str(count), report)


def _reporter(folder: Path) -> Callable:
    """A function that writes one measurement, with the fields of all benchmarks."""
    facts = environment()
    versions = {**facts["packages"], "webdataset": importlib.metadata.version("webdataset")}
    common = {"slug": "data", "device": facts["cpu"], "versions": versions}
    out = folder / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)

    def report(case: str, shape: str, ms: float, rate: float, ratio: tuple, **more: float) -> None:
        row = {
            **common,
            "commit": facts["commit"],
            "case": case,
            "shape": shape,
            "dtype": "uint8",
            "ms": round(ms, 3),
            "rate": round(rate, 1),
            "ratio_to": ratio[0],
            "ratio": ratio[1] and round(ratio[1], 3),
            "correct": True,  # else nothing is reported
            **more,
        }
        with open(out, "a") as file:
            file.write(encode_row(row))
        print(encode_row(row), end="", flush=True)

    return report


def bench_set(config: BenchDataConfig, size: int, scratch: Path, report: Callable) -> None:
    """Reading alone, then both loaders in one process and with workers."""
    name, pattern = (config.train, config.train) if config.train else render(config, size, scratch)
    try:
        shards = index.open_shards(pattern, str(scratch / "index"), name="train")
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    bench_reading(name, shards, report)
    workers = min(config.workers, len(shards.paths))  # each worker of webdataset needs a shard
    for augment, number in itertools.product(config.augment, sorted({0, workers})):
        shape = f"{name} to {size} px, {augment}, batch {config.batch_size}, {number} workers"
        case = Case(shards, size, augment == "crop_flip", config.batch_size, number)
        try:
            ours, theirs = compare(case, config.num_batches)
        except DifferentSamplesError as error:
            sys.exit(f"{shape}: {error}")
        for loader, rate in (("webdataset", theirs), ("lowprec", ours)):
            ms = 1000 * config.batch_size / rate
            report(loader, shape, ms, rate, ("webdataset", rate / theirs))


def render(config: BenchDataConfig, size: int, scratch: Path) -> tuple[str, str]:
    """Name and pattern of a rendered set: small images as they are, others larger and noisy."""
    stored, noise = (size, 0.0) if size < 128 else (size * 8 // 7, 12.0)
    a_shard_each = SAMPLES_PER_SHARD * (config.workers - 1) + 1
    num_train = max(config.batch_size * config.num_batches, a_shard_each)
    print(f"rendering {num_train} pictures of {stored} px", file=sys.stderr, flush=True)
    render_shapes(
        scratch / str(size), num_train=num_train, num_val=0, image_size=stored, noise=noise,
        num_processes=len(os.sched_getaffinity(0)),
    )  # fmt: skip
    return f"shapes of {stored} px, noise {noise:g}", f"{scratch}/{size}/train-*.tar"


def bench_reading(name: str, shards: Shards, report: Callable) -> None:
    """Reads one epoch in order without decoding; storage should deliver each byte once."""
    sizes = np.array([os.stat(path).st_size for path in shards.paths])
    order = SampleOrder(shards.counts, seed=0)
    for path in shards.paths:
        with open(path, "rb") as file:
            with contextlib.suppress(OSError):  # unwritten pages cannot be dropped
                os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, start = _count("io", "read_bytes"), time.perf_counter()
    samples = order.samples(0, shards.num_samples).tolist()
    for sample in samples:
        shard, row = shards.locate(sample)
        for part in ("image", "text"):
            shards.read(shard, int(row[f"{part}_offset"]), max(0, int(row[f"{part}_bytes"])))
    seconds, read = time.perf_counter() - start, _count("io", "read_bytes") - before
    if sorted(samples) != list(range(shards.num_samples)):
        sys.exit(f"{name}: an epoch does not hold each sample once; no number")
    if not read:
        print(f"{name}: this file system does not count reads", file=sys.stderr, flush=True)
    window = sizes[np.argsort(sizes)[-order.window :]].sum() / MIB
    shape = f"{name}, {len(sizes)} shards, {sizes.sum() / MIB:.1f} MiB, window {order.window}"
    ratio = read / sizes.sum() if read else None
    rate = len(samples) / seconds
    report("read an epoch", shape, 1000 * seconds, rate, ("bytes of the set", ratio),
           memory_mib=round(window, 1))  # fmt: skip


def _count(file: str, name: str) -> int:
    """A number of this process in /proc."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def bench_start_up(count: int, folder: Path, report: Callable) -> None:
    """Opens many shards in a fresh process; the tars are empty, the index files are real."""
    folder.mkdir()
    for number in range(count):
        (folder / f"train-{number:06d}.tar").touch()
    pattern = f"{folder}/train-*.tar"
    with mock.patch.object(index, "index_tar", lambda path, source: (TABLE, "0" * 64)):
        index.open_shards(pattern)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        seconds, memory_mib, samples = pool.submit(start_up, pattern).result()
    order = SampleOrder(np.full(count, len(TABLE)), seed=0)
    if samples != order.samples(0, len(samples)).tolist():
        sys.exit(f"start-up of {count} shards gives another order; no number")
    report("start-up", f"{count} shards", 1000 * seconds, count / seconds, (None, None),
           memory_mib=memory_mib)  # fmt: skip


def start_up(pattern: str) -> tuple[float, float, list[int]]:
    """Opens and orders indexed shards: seconds, peak MiB above the imports, first samples.

    Runs in its own process.
    """
    with contextlib.suppress(OSError):  # resets VmHWM, the peak, to what is in use
        Path("/proc/self/clear_refs").write_text("5")
    before_kib, start = _count("status", "VmHWM"), time.perf_counter()
    shards = index.open_shards(pattern)
    samples = SampleOrder(shards.counts, seed=0).samples(0, 1024).tolist()
    seconds, memory_kib = time.perf_counter() - start, _count("status", "VmHWM") - before_kib
    return seconds, round(memory_kib / 1024, 1), samples


def compare(case: Case, num_batches: int) -> tuple[float, float]:
    """Images per second of our loader and of webdataset, medians over rounds of `num_batches`.

    Raises DifferentSamplesError unless both deliver the same samples over an epoch.
    """
    if epoch_digests(case, our_batches) != epoch_digests(case, webdataset_batches):
        raise DifferentSamplesError(
            "the loaders deliver different samples over an epoch; no number"
        )
    rates = [
        [images_per_second(case, load, num_batches) for load in (our_batches, webdataset_batches)]
        for _ in range(ROUNDS)
    ]
    return tuple(statistics.median(column) for column in zip(*rates, strict=True))


def epoch_digests(case: Case, load: Callable) -> list[bytes]:
    """Sorted digests of an epoch's samples: tokens, label, and pixels unless they are random."""
    digests = []
    for batch in load(case, None):
        if batch.skips:
            raise DifferentSamplesError(f"a sample cannot be read, no number: {batch.skips[0]}")
        for parts in zip(batch.images, batch.tokens, batch.labels, strict=True):
            parts = [part.numpy().tobytes() for part in parts[case.augment :]]
            digests.append(hashlib.sha256(b"".join(parts)).digest())
    return sorted(digests[: case.shards.num_samples])  # ours continues into the next epoch


def images_per_second(case: Case, load: Callable, num_batches: int) -> float:
    """The rate over batches in the middle: workers are as far ahead at the end as at the start."""
    batches = load(case, 1 + 2 * AHEAD * case.workers + num_batches)
    for _ in range(1 + AHEAD * case.workers):
        next(batches)
    start = time.perf_counter()
    images = sum(len(next(batches).images) for _ in range(num_batches))
    return images / (time.perf_counter() - start)


def our_batches(case: Case, count: int | None) -> Iterator[Batch]:
    """`count` shuffled batches, or with None an epoch and the start of the next."""
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
    """Endless batches in the order of the tars, or with None an epoch, whose last are short."""
    random, tokenizer = np.random.Philox(0), Tokenizer(CONTEXT_LENGTH)

    def decode(members: dict) -> Sample:
        image = next(members[kind] for kind in IMAGES if kind in members)
        words = random.random_raw(CROP_WORDS) if case.augment else None
        pixels = decode_image(image, case.image_size, words)
        return Sample(pixels, decode_caption(members["txt"]), int(members.get("cls", -1)))

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


if __name__ == "__main__":
    run_command(main, "bench_data", BenchDataConfig)
