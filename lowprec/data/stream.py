"""Batches of shards behind URLs: opened, grouped and shuffled by webdataset, seeded by segment.

A run is cut into segments at the multiples of `save_every`, where its checkpoints are. What a
worker reads in a segment is a pure function of (seed, segment, rank, worker, and the numbers of
both). A run that resumes at a boundary gets what the undisturbed run got and reads nothing twice;
one that resumes within a segment makes its first batches again and drops them.
"""

import hashlib
import itertools
import os
import random
from collections.abc import Callable, Iterator

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from webdataset import shuffle
from webdataset.tariterators import group_by_keys

from lowprec.data.images import BAD_IMAGE, CROP_WORDS, decode_image
from lowprec.data.loader import Batch, Sample, ahead, collate, decode_caption
from lowprec.data.order import AUGMENTATION, STREAM, permutation, random_words
from lowprec.data.remote import read_members
from lowprec.data.shards import ShardError
from lowprec.data.tar import IMAGES, label_of
from lowprec.data.urls import ShardUrls, check_readers, without_secrets

SHUFFLED = 1000  # samples a worker holds, undecoded, to draw from; webdataset starts with 100


class Stream:
    """A rank's batches, a worker making each whole: batch i of a segment is worker i % workers'.

    batch_size: samples of a step over all ranks; segment_steps: steps between two checkpoints. The
    URLs are permuted anew in each pass, and a worker reads its own share of them. What cannot be
    read is left out, the next sample takes its place, and a row in the batch's `skips` names it,
    at the first position of that batch. `augment`: random crop and flip, a function of (seed,
    segment, pass, shard, key).
    """

    def __init__(
        self,
        shards: ShardUrls,
        *,
        seed: int,
        batch_size: int,
        num_steps: int,
        segment_steps: int,
        workers: int,
        image_size: int,
        tokenizer: Callable[[list[str]], Tensor],
        augment: bool = False,
        pin: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ):
        if batch_size % world_size:
            raise ValueError(f"batch_size={batch_size} is not a multiple of {world_size} ranks")
        check_readers(shards, workers, world_size)
        self.urls = shards.urls
        self.seed = seed
        self.batch_size = batch_size
        self.num_steps = num_steps
        self.segment_steps = segment_steps
        self.workers = workers
        self.image_size = image_size
        self.tokenizer = tokenizer
        self.augment = augment
        self.pin = pin
        self.rank, self.world_size = rank, world_size

    def layout(self) -> dict[str, int]:
        """What the order of samples depends on beside the config (0 workers read as 1 does)."""
        return {"world_size": self.world_size, "workers": max(1, self.workers)}

    def batches_from(self, first: int) -> Iterator[Batch]:
        """Batches of steps first, first + 1, ... to the last, a fresh pipeline for each segment."""
        for segment in range(self._segment_of(first), self._segment_of(self.num_steps) + 1):
            batches = ahead(_Segment(self, segment), workers=self.workers, pin=self.pin)
            for step, batch in enumerate(batches, segment * self.segment_steps + 1):
                if step >= first:
                    yield batch

    def _segment_of(self, step: int) -> int:
        return (step - 1) // self.segment_steps


class _Segment(IterableDataset):
    """The batches of one segment, or of a worker process its share of them."""

    def __init__(self, stream: Stream, segment: int):
        self.stream, self.segment = stream, segment

    def __iter__(self) -> Iterator[Batch | Exception]:
        try:
            yield from self._batches()
        except ShardError as error:  # raised again where it is awaited, as it is
            yield error

    def _batches(self) -> Iterator[Batch]:
        stream, info = self.stream, get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        reader = _Reader(stream, self.segment, worker, workers)
        samples = reader.samples()
        begin = self.segment * stream.segment_steps + 1
        end = min(begin + stream.segment_steps, stream.num_steps + 1)
        for step in range(begin + worker, end, workers):
            found = list(itertools.islice(samples, stream.batch_size // stream.world_size))
            position = (step - 1) * stream.batch_size
            skips = [{"position": position, **skip} for skip in reader.skips]
            reader.skips = []
            yield collate(found, skips, stream.image_size, stream.tokenizer)


class _Reader:
    """The samples of one worker in one segment, without end; `skips`: what was left out lately."""

    def __init__(self, stream: Stream, segment: int, worker: int, workers: int):
        self.stream, self.segment = stream, segment
        self.share = slice(
            worker * stream.world_size + stream.rank, None, workers * stream.world_size
        )
        self.skips: list[dict] = []
        self.reading = "", ""  # URL and member that came last

    def samples(self) -> Iterator[Sample]:
        """Pass after pass; ShardError after one without a single good sample."""
        stream = self.stream
        for number in itertools.count():
            epoch = (self.segment << 32) + number
            order = permutation(stream.seed, STREAM, epoch, 0, len(stream.urls))[self.share]
            rng = random.Random(f"{stream.seed} {epoch} {self.share.start}")
            members = self._members([stream.urls[shard] for shard in order])
            good, before = 0, len(self.skips)
            for raw in shuffle(SHUFFLED, rng=rng)(group_by_keys(members, handler=self._twice)):
                try:
                    sample = self._decode(raw, epoch)
                except BAD_IMAGE as error:
                    self._skip(raw["__url__"], raw["__key__"], error)
                    continue
                good += 1
                yield sample
            if not good:
                first = self.skips[before]
                raise ShardError(
                    f"no readable sample in a worker's {len(order)} of {len(stream.urls)} shards; "
                    f"the first fault: {first['shard']} {first['key']}: {first['reason']}"
                )

    def _members(self, urls: list[str]) -> Iterator[dict]:
        """Members of shards one after the other, as webdataset's grouping wants them."""
        for url in urls:
            try:
                for name, data in read_members(url):
                    self.reading = url, name
                    yield {"fname": name, "data": data, "__url__": url}
            except Exception as error:  # a shard may be damaged, or its server gone, in any way
                self._skip(url, getattr(error, "key", ""), error)
            yield {}  # ends the last sample: one of the next shard may have the same key

    def _decode(self, raw: dict, epoch: int) -> Sample:
        """Image, caption and label; raises one of BAD_IMAGE. Nothing else is looked at."""
        image = next((raw[kind] for kind in IMAGES if kind in raw), None)
        if image is None:
            raise ValueError(f"no image ({', '.join(IMAGES)}) beside it")
        if "txt" not in raw:
            raise ValueError("no caption (txt) beside it")
        words = None
        if self.stream.augment:
            name = f"{os.path.basename(without_secrets(raw['__url__']))}/{raw['__key__']}"
            digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
            number = int.from_bytes(digest[:8]) >> 1
            words = random_words(self.stream.seed, AUGMENTATION, epoch, number, CROP_WORDS)
        pixels = decode_image(image, self.stream.image_size, words)
        return Sample(pixels, decode_caption(raw["txt"]), label_of(raw.get("cls", b"")))

    def _twice(self, error: Exception) -> bool:
        """Handles a second member of one kind: it is left out."""
        self._skip(*self.reading, ValueError("the sample has two of this kind"))
        return True

    def _skip(self, url: str, key: str, error: Exception) -> None:
        shard = without_secrets(url)
        reason = f"{type(error).__name__}: {error}".replace(url, shard)[:200]
        self.skips.append({"shard": shard, "key": key, "reason": reason})
