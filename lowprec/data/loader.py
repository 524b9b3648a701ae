"""Batches by step: read by offset, decoded in worker processes, uint8 until the device.

A batch is a pure function of its step, so a worker needs no state and a resume only a number.
"""

import atexit
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lowprec.data.images import BAD_IMAGE, CROP_WORDS, decode_image
from lowprec.data.order import AUGMENTATION, REPLACEMENT, SampleOrder, random_words
from lowprec.data.shards import Shards
from lowprec.data.tar import IMAGES

STOPPING = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2}
REPLACEMENTS = 100  # tries at a readable sample for one position
# A byte that forked workers share: 1 when this process is at its end. No lock: a handler reads it.
_CLOSING = mmap.mmap(-1, 1)
# Runs before multiprocessing's own handler, which waits for the workers.
atexit.register(_CLOSING.__setitem__, 0, 1)


@dataclass
class Batch:
    """images uint8 [batch, 3, size, size]; tokens int64 [batch, context]; labels int64 [batch].

    samples: int64 [batch], global sample numbers; skips: a row a sample that could not be read.
    """

    images: Tensor
    tokens: Tensor
    labels: Tensor
    samples: Tensor
    skips: list[dict] = field(default_factory=list)

    def pin_memory(self) -> "Batch":
        """The same in page-locked memory (called by DataLoader)."""
        pinned = (t.pin_memory() for t in (self.images, self.tokens, self.labels))
        return Batch(*pinned, self.samples, self.skips)

    def to(self, device: torch.device) -> "Batch":
        """The same on a device; from page-locked memory the copy does not block."""
        moved = (t.to(device, non_blocking=True) for t in (self.images, self.tokens, self.labels))
        return Batch(*moved, self.samples, self.skips)


class Batches(Dataset):
    """`batches[step - 1]` is a rank's part of the Batch of a step; sequential if `order` is None.

    batch_size: samples of a step over all ranks; rank r of `world_size` gets the r-th equal part,
    so that a step's samples depend neither on the ranks nor on who decodes them. A sample that
    cannot be read or decoded is listed in the batch's `skips`, and replaced by one that depends on
    its position only; in sequential reading it is left out. `augment`: random crop and flip, a
    function of (seed, epoch, sample).
    """

    def __init__(
        self,
        shards: Shards,
        order: SampleOrder | None,
        *,
        batch_size: int,
        num_batches: int,
        image_size: int,
        tokenizer: Callable[[list[str]], Tensor],
        seed: int = 0,
        augment: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ):
        if batch_size % world_size:
            raise ValueError(f"batch_size={batch_size} is not a multiple of {world_size} ranks")
        self.shards = shards
        self.order = order
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.image_size = image_size
        self.tokenizer = tokenizer
        self.seed = seed
        self.augment = augment
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, number: int) -> Batch:
        size = self.batch_size // self.world_size
        first = number * self.batch_size + self.rank * size
        if self.order is None:
            samples = range(first, min(first + size, self.shards.num_samples))
        else:
            samples = self.order.samples(first, size).tolist()
        found, skips = [], []
        for position, sample in enumerate(samples, first):
            found += self._read_or_replace(position, sample, skips)
        return collate(found, skips, self.image_size, self.tokenizer)

    def _read_or_replace(self, position: int, sample: int, skips: list[dict]) -> list["Sample"]:
        """The sample, or the first readable one of those that the position's words name."""
        for attempt in range(REPLACEMENTS):
            try:
                return [self.read(sample, position)]
            except BAD_IMAGE as error:
                skips.append(
                    {
                        "position": position,
                        "shard": os.path.basename(self.shards.names[self.shards.locate(sample)[0]]),
                        "key": self.key(sample),
                        "reason": f"{type(error).__name__}: {error}"[:200],
                    }
                )
                if self.order is None:
                    return []
                substitutes = random_words(self.seed, REPLACEMENT, position, 0, REPLACEMENTS)
                sample = int(substitutes[attempt] % np.uint64(self.shards.num_samples))
        raise ValueError(
            f"no readable sample for position {position} in {REPLACEMENTS} tries; the last: "
            f"{skips[-1]['shard']} {skips[-1]['key']}: {skips[-1]['reason']}"
        )

    def read(self, sample: int, position: int = 0) -> "Sample":
        """Sample of a global number, augmented for a position; raises one of BAD_IMAGE."""
        shard, row = self.shards.locate(sample)
        if row["image_bytes"] < 0:
            raise ValueError(f"no image ({', '.join(IMAGES)}) beside it")
        if row["text_bytes"] < 0:
            raise ValueError("no caption (txt) beside it")
        data = self.shards.read(shard, int(row["image_offset"]), int(row["image_bytes"]))
        text = self.shards.read(shard, int(row["text_offset"]), int(row["text_bytes"]))
        words = None
        if self.augment:
            epoch = position // self.shards.num_samples
            words = random_words(self.seed, AUGMENTATION, epoch, sample, CROP_WORDS)
        pixels = decode_image(data, self.image_size, words)
        return Sample(pixels, decode_caption(text), int(row["label"]), sample)

    def key(self, sample: int) -> str:
        """Name of a sample's image (or only) member, read from the header before it."""
        shard, row = self.shards.locate(sample)
        header = self.shards.read(shard, int(row["image_offset"]) - 512, 100)
        return header.split(b"\0")[0].decode("utf-8", "replace")


@dataclass
class Sample:
    """pixels uint8 [3, size, size]; caption; label (-1: none); its number (-1: not indexed)."""

    pixels: np.ndarray
    caption: str
    label: int = -1
    number: int = -1


def decode_caption(data: bytes) -> str:
    """A caption without white space around it; ValueError if it is not UTF-8 or empty."""
    caption = data.decode("utf-8").strip()
    if not caption:
        raise ValueError("the caption is empty")
    return caption


def collate(
    samples: list[Sample],
    skips: list[dict],
    image_size: int,
    tokenizer: Callable[[list[str]], Tensor],
) -> Batch:
    """A Batch of decoded samples, which may be none."""
    images = np.empty((len(samples), 3, image_size, image_size), dtype=np.uint8)
    for i, sample in enumerate(samples):
        images[i] = sample.pixels
    return Batch(
        torch.from_numpy(images),
        tokenizer([sample.caption for sample in samples]),
        torch.tensor([sample.label for sample in samples], dtype=torch.int64),
        torch.tensor([sample.number for sample in samples], dtype=torch.int64),
        skips,
    )


def num_workers(requested: int | None) -> int:
    """The number asked for, or one less than the cores of this process, at most 16."""
    if requested is not None:
        return requested
    return max(1, min(16, len(os.sched_getaffinity(0)) - 1))


def ignore_signals(worker: int) -> None:
    """A signal to the whole process group is the training process's business, not a worker's.

    At its end that process sends SIGTERM itself, and waits for ever for a worker that ignores it.
    """
    for number in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if _CLOSING[0] else None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def ahead(dataset: Dataset, *, workers: int, pin: bool, sampler: range | None = None) -> Iterator:
    """What a dataset yields, in order, made ahead by `workers` processes; its errors are raised.

    A signal waits until the workers that are being forked can bear it.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        pin_memory=pin,
        multiprocessing_context="fork" if workers else None,
        prefetch_factor=2 if workers else None,
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # the default one is training's, and would be drawn from
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        outcomes = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome


class _Outcomes(Dataset):
    """Batches, or the error that one raised: DataLoader's own way would end its workers late."""

    def __init__(self, batches: Batches):
        self.batches = batches

    def __getitem__(self, number: int) -> Batch | Exception:
        try:
            return self.batches[number]
        except Exception as error:  # raised again where it is awaited
            return error


def iterate(batches: Batches, *, workers: int, first: int = 0, pin: bool = False) -> Iterator:
    """Batch number `first`, `first + 1`, ... in order, decoded ahead by `workers` processes."""
    numbers = range(first, len(batches))
    return ahead(_Outcomes(batches), workers=workers, pin=pin, sampler=numbers)
