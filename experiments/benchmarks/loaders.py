"""The two loaders that `bench_data` compares: ours, and a plain webdataset pipeline.

The second has none of our guarantees: no shuffling, no position to go on from, another order for
each number of workers, and a bad sample ends it. Both decode with the same PIL operations, one
thread a process, and their captions are new to the tokenizer, as in a large set's first epoch.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import webdataset
from torch.utils.data import DataLoader

from lowprec.clip.tokenizer import Tokenizer
from lowprec.data.images import CROP_WORDS, decode_image
from lowprec.data.loader import Batches, Sample, collate, decode_caption, iterate
from lowprec.data.order import SampleOrder
from lowprec.data.shards import Shards
from lowprec.data.tar import IMAGES

CONTEXT_LENGTH = 32  # tokens of a caption
ROUNDS = 3  # of both loaders in turn; the median counts
AHEAD = 2  # batches that each worker of a DataLoader keeps ready


class Difference(ValueError):
    """The loaders do not deliver the same samples."""


@dataclass
class Case:
    """Opened shards and what is made of them."""

    shards: Shards
    image_size: int
    augment: bool
    batch_size: int
    workers: int


def compare(case: Case, num_batches: int) -> tuple[float, float]:
    """Images a second of ours and of the webdataset, each a median over rounds of `num_batches`.

    Difference if they do not deliver the same samples over an epoch.
    """
    if epoch_digests(case, ours) != epoch_digests(case, plain_webdataset):
        raise Difference("the loaders deliver different samples over an epoch; no number")
    rates = [
        [images_per_second(case, loader, num_batches) for loader in (ours, plain_webdataset)]
        for _ in range(ROUNDS)
    ]
    return tuple(statistics.median(column) for column in zip(*rates, strict=True))


def epoch_digests(case: Case, loader: Callable) -> list[bytes]:
    """Sorted digests of an epoch's samples: tokens and label, and pixels unless at random."""
    found = []
    for batch in loader(case, None):
        if batch.skips:
            raise Difference(f"a sample cannot be read, no number: {batch.skips[0]}")
        for parts in zip(batch.images, batch.tokens, batch.labels, strict=True):
            parts = [part.numpy().tobytes() for part in parts[case.augment :]]
            found.append(hashlib.sha256(b"".join(parts)).digest())
    return sorted(found[: case.shards.num_samples])  # ours goes on into the next epoch


def images_per_second(case: Case, loader: Callable, num_batches: int) -> float:
    """Over batches in the middle: workers are as far ahead at the end as at the start."""
    batches = loader(case, 1 + 2 * AHEAD * case.workers + num_batches)
    for _ in range(1 + AHEAD * case.workers):
        next(batches)
    start = time.perf_counter()
    images = sum(len(next(batches).images) for _ in range(num_batches))
    return images / (time.perf_counter() - start)


def ours(case: Case, count: int | None) -> Iterator:
    """`count` shuffled batches; None: an epoch, and the start of the next."""
    return iterate(
        Batches(
            case.shards,
            SampleOrder(case.shards.counts, seed=0),
            batch_size=case.batch_size,
            num_batches=count or -(-case.shards.num_samples // case.batch_size),
            image_size=case.image_size,
            tokenizer=Tokenizer(CONTEXT_LENGTH),
            augment=case.augment,
        ),
        workers=case.workers,
    )


def plain_webdataset(case: Case, count: int | None) -> Iterator:
    """Batches in the order of the tars, without end; None: an epoch, whose last ones are short."""
    random, tokenizer = np.random.Philox(0), Tokenizer(CONTEXT_LENGTH)

    def decode(members: dict) -> Sample:
        image = next(members[kind] for kind in IMAGES if kind in members)
        words = random.random_raw(CROP_WORDS) if case.augment else None
        pixels = decode_image(image, case.image_size, words)
        return Sample(pixels, decode_caption(members["txt"]), int(members.get("cls", -1)))

    def to_batch(samples: list[Sample]) -> object:
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
