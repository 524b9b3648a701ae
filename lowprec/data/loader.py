"""Batches by step: read by offset, decoded in worker processes, uint8 until the device.

A batch is a pure function of its step, so a worker needs no state and a resume only a number.
"""

import io
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lowprec.data.index import Shards
from lowprec.data.order import REPLACEMENT, SampleOrder, random_words

BAD_SAMPLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)


@dataclass
class Batch:
    """images uint8 [batch, 3, size, size]; tokens int64 [batch, context]; labels int64 [batch]."""

    images: Tensor
    tokens: Tensor
    labels: Tensor
    skips: list[dict] = field(default_factory=list)

    def pin_memory(self) -> "Batch":
        """The same in page-locked memory (called by DataLoader)."""
        pinned = (t.pin_memory() for t in (self.images, self.tokens, self.labels))
        return Batch(*pinned, self.skips)

    def to(self, device: torch.device) -> "Batch":
        """The same on a device; from page-locked memory the copy does not block."""
        moved = (t.to(device, non_blocking=True) for t in (self.images, self.tokens, self.labels))
        return Batch(*moved, self.skips)


class _OpenFiles:
    """File descriptors by shard number; the least recently used is closed beyond `limit`."""

    def __init__(self, paths: list[Path], limit: int = 256):
        self.paths, self.limit = paths, limit
        self.descriptors: dict[int, int] = {}

    def __getitem__(self, shard: int) -> int:
        descriptor = self.descriptors.pop(shard, None)
        if descriptor is None:
            descriptor = os.open(self.paths[shard], os.O_RDONLY)
        self.descriptors[shard] = descriptor
        if len(self.descriptors) > self.limit:
            os.close(self.descriptors.pop(next(iter(self.descriptors))))
        return descriptor

    def __del__(self):
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def decode_image(data: bytes, size: int) -> np.ndarray:
    """uint8 [3, size, size]: RGB, the central square of the image, resized (bicubic)."""
    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "WEBP", "PNG")).convert("RGB")
    except UnidentifiedImageError as error:  # its text holds a memory address
        raise ValueError("not a JPEG, WEBP or PNG image") from error
    if image.size != (size, size):
        width, height = image.size
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        box = (left, top, left + side, top + side)
        image = image.resize((size, size), Image.Resampling.BICUBIC, box)
    return np.asarray(image).transpose(2, 0, 1)


class Batches(Dataset):
    """`batches[step - 1]` is the Batch of a step; sequential if `order` is None.

    A sample that cannot be read or decoded is listed in the batch's `skips`, and replaced by one
    that depends on its position only; in sequential reading it is left out.
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
    ):
        self.shards = shards
        self.order = order
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.image_size = image_size
        self.tokenizer = tokenizer
        self.seed = seed
        self._files = _OpenFiles(shards.paths)

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, number: int) -> Batch:
        first = number * self.batch_size
        last = first + self.batch_size
        if self.order is None:
            last = min(last, self.shards.num_samples)
            samples = range(first, last)
        else:
            samples = self.order.samples(first, self.batch_size)
        size = self.image_size
        images = np.empty((last - first, 3, size, size), dtype=np.uint8)
        captions, labels, skips = [], [], []
        for position, sample in enumerate(samples, first):
            read = self._read_or_replace(position, int(sample), skips)
            if read is not None:
                images[len(captions)], caption, label = read
                captions.append(caption)
                labels.append(label)
        whole = torch.from_numpy(images[: len(captions)])
        return Batch(whole, self.tokenizer(captions), torch.tensor(labels).long(), skips)

    def _read_or_replace(
        self, position: int, sample: int, skips: list[dict]
    ) -> tuple[np.ndarray, str, int] | None:
        for attempt in range(100):
            try:
                return self.read(sample)
            except BAD_SAMPLE as error:
                shard, row = self.shards.locate(sample)
                skips.append(
                    {
                        "position": position,
                        "shard": self.shards.paths[shard].name,
                        "key": self.key(shard, row),
                        "reason": f"{type(error).__name__}: {error}"[:200],
                    }
                )
                if self.order is None:
                    return None
                substitutes = random_words(self.seed, REPLACEMENT, position, 0, 100)
                sample = int(substitutes[attempt] % np.uint64(self.shards.num_samples))
        raise ValueError(f"no readable sample for position {position} in 100 tries")

    def read(self, sample: int) -> tuple[np.ndarray, str, int]:
        """Image uint8 [3, size, size], caption and label (-1: none) of a global sample number."""
        shard, row = self.shards.locate(sample)
        descriptor = self._files[shard]
        data = os.pread(descriptor, int(row["image_bytes"]), int(row["image_offset"]))
        text = os.pread(descriptor, int(row["text_bytes"]), int(row["text_offset"]))
        caption = text.decode("utf-8").strip()
        if not caption:
            raise ValueError("the caption is empty")
        return decode_image(data, self.image_size), caption, int(row["label"])

    def key(self, shard: int, row: np.void) -> str:
        """Name of the image's tar member, read from the header before it."""
        header = os.pread(self._files[shard], 100, int(row["image_offset"]) - 512)
        return header.split(b"\0")[0].decode("utf-8", "replace")


def num_workers(requested: int | None) -> int:
    """The number asked for, or one less than the cores of this process, at most 16."""
    if requested is not None:
        return requested
    return max(1, min(16, len(os.sched_getaffinity(0)) - 1))


def _ignore_signals(worker: int) -> None:
    """A signal to the whole process group is the training process's business, not a worker's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def iterate(batches: Batches, *, workers: int, first: int = 0, pin: bool = False) -> Iterator:
    """Batch number `first`, `first + 1`, ... in order, decoded ahead by `workers` processes."""
    return iter(
        DataLoader(
            batches,
            batch_size=None,
            sampler=range(first, len(batches)),
            num_workers=workers,
            pin_memory=pin,
            multiprocessing_context="fork" if workers else None,
            prefetch_factor=2 if workers else None,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # the default one is training's, and would be drawn from
        )
    )
