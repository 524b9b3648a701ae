"""Batches from shards behind URLs: opened, grouped and shuffled by webdataset, seeded by segment.

A run is divided into segments at the multiples of `save_every`, where its checkpoints are. What a
worker reads in a segment is a pure function of (seed, segment, rank, worker, world size, number of
workers). A run that resumes at a boundary continues exactly and reads nothing twice; a run that
resumes within a segment regenerates the segment's first batches and discards them.
"""

import contextlib
import hashlib
import itertools
import os
import random
import signal
import tarfile
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from webdataset import shuffle
from webdataset.gopen import Pipe, gopen
from webdataset.tariterators import base_plus_ext, group_by_keys

from lowprec.config.patterns import ShardUrls, check_readers, without_secrets
from lowprec.data.loader import (
    BAD_IMAGE,
    CROP_WORDS,
    STOPPING,
    Batch,
    Sample,
    ahead,
    collate,
    decode_caption,
    decode_image,
)
from lowprec.data.order import AUGMENTATION, STREAM, permutation, random_words
from lowprec.data.shards import IMAGES, LARGEST, MEMBERS, ShardError, parse_label

SHUFFLED = 1000  # undecoded samples that a worker shuffles; webdataset starts with 100
CURL = {6: "no such host", 7: "cannot connect", 22: "an HTTP error, such as 404", 28: "timed out"}


class Stream:
    """A rank's batches; worker i % workers makes the whole batch i of a segment.

    `batch_size` counts the samples of all ranks; `segment_steps`: steps between two checkpoints.
    The URLs are permuted in each pass, and each worker reads its own share of them. Unreadable
    samples are left out, the next ones take their place, and rows in the batch's `skips` name them
    at its first position. `augment`: random crop and flip, a function of (seed, segment, pass,
    shard, key).
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
        """What the sample order depends on besides the config (0 workers read like 1)."""
        return {"world_size": self.world_size, "workers": max(1, self.workers)}

    def batches_from(self, first: int) -> Iterator[Batch]:
        """Batches for step `first` up to the last step, from a fresh pipeline per segment."""
        for segment in range(self._segment_of(first), self._segment_of(self.num_steps) + 1):
            batches = ahead(_Segment(self, segment), workers=self.workers, pin=self.pin)
            for step, batch in enumerate(batches, segment * self.segment_steps + 1):
                if step >= first:
                    yield batch

    def _segment_of(self, step: int) -> int:
        return (step - 1) // self.segment_steps


class _Segment(IterableDataset):
    """The batches of one segment, or in a worker process the worker's share of them."""

    def __init__(self, stream: Stream, segment: int):
        self.stream, self.segment = stream, segment

    def __iter__(self) -> Iterator[Batch | Exception]:
        try:
            yield from self._batches()
        except ShardError as error:  # raised again by `ahead`
            yield error

    def _batches(self) -> Iterator[Batch]:
        stream, info = self.stream, get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        reader = _Reader(stream, self.segment, worker, workers)
        samples = reader.samples()
        begin = self.segment * stream.segment_steps + 1
        end = min(begin + stream.segment_steps, stream.num_steps + 1)
        for step in range(begin + worker, end, workers):
            share = list(itertools.islice(samples, stream.batch_size // stream.world_size))
            position = (step - 1) * stream.batch_size
            skips = [{"position": position, **skip} for skip in reader.skips]
            reader.skips = []
            yield collate(share, skips, stream.image_size, stream.tokenizer)


class _Reader:
    """Endless samples for one worker in one segment; `skips` lists what was left out recently."""

    def __init__(self, stream: Stream, segment: int, worker: int, workers: int):
        self.stream, self.segment = stream, segment
        self.share = slice(
            worker * stream.world_size + stream.rank, None, workers * stream.world_size
        )
        self.skips: list[dict] = []
        self.reading = "", ""  # URL and name of the latest member

    def samples(self) -> Iterator[Sample]:
        """Samples, pass after pass; ShardError after a pass without a readable sample."""
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
        """Members of one shard after the other, in the form that webdataset's grouping expects."""
        for url in urls:
            try:
                for name, data in read_members(url):
                    self.reading = url, name
                    yield {"fname": name, "data": data, "__url__": url}
            except Exception as error:  # shards and servers fail in many ways
                self._skip(url, getattr(error, "key", ""), error)
            yield {}  # ends the last sample: the next shard may begin with the same key

    def _decode(self, raw: dict, epoch: int) -> Sample:
        """Decodes image, caption and label only; raises one of BAD_IMAGE."""
        image = next((raw[kind] for kind in IMAGES if kind in raw), None)
        if image is None:
            raise ValueError(f"no image ({', '.join(IMAGES)}) in the sample")
        if "txt" not in raw:
            raise ValueError("no caption (txt) in the sample")
        words = None
        if self.stream.augment:
            name = f"{os.path.basename(without_secrets(raw['__url__']))}/{raw['__key__']}"
            digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
            number = int.from_bytes(digest[:8]) >> 1
            words = random_words(self.stream.seed, AUGMENTATION, epoch, number, CROP_WORDS)
        pixels = decode_image(image, self.stream.image_size, words)
        return Sample(pixels, decode_caption(raw["txt"]), parse_label(raw.get("cls", b"")))

    def _twice(self, error: Exception) -> bool:
        """Skips a second member of one kind."""
        self._skip(*self.reading, ValueError("the sample has two of this kind"))
        return True

    def _skip(self, url: str, key: str, error: Exception) -> None:
        shard = without_secrets(url)
        reason = f"{type(error).__name__}: {error}".replace(url, shard)[:200]
        self.skips.append({"shard": shard, "key": key, "reason": reason})


class DamagedError(ValueError):
    """A tar is truncated or damaged, in the member `key` or, if that is "", between two."""

    def __init__(self, message: str, key: str = ""):
        super().__init__(message)
        self.key = key


def read_members(url: str) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each image, caption and label in a tar; skips other members.

    The tar may be compressed (gz, bz2, xz). Errors of servers, commands and damaged bytes come
    after all members before them, as DamagedError where the place is known.
    """
    is_empty = True
    with (
        contextlib.closing(_Source(url)) as source,
        tarfile.open(fileobj=source, mode="r|*", tarinfo=_StrictHeader) as tar,
    ):
        while (member := tar.next()) is not None:
            tar.members = []  # else it keeps the headers of the whole shard
            if not 0 <= member.size <= LARGEST:
                raise DamagedError(f"a size of {member.size} at byte {member.offset}")
            stem, kind = base_plus_ext(member.name)
            plain = member.isfile() and not member.issparse()
            if plain and stem is not None and kind.lower() in MEMBERS:
                is_empty = False
                try:
                    data = tar.extractfile(member).read()
                except tarfile.ReadError as error:
                    place = f"in the member at byte {member.offset}"
                    raise DamagedError(f"{error} {place}", member.name) from None
                yield member.name, data
        rest = iter(lambda: tar.fileobj.read(1 << 16), b"")
        if any(chunk.strip(b"\0") for chunk in rest):
            raise DamagedError(f"early end at byte {tar.offset}")
    if is_empty:
        raise DamagedError("no image, caption or label in it")


class _StrictHeader(tarfile.TarInfo):
    """Raises an error for a damaged header, which tarfile mistakes for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(tar)
        except (
            tarfile.InvalidHeaderError,
            tarfile.EmptyHeaderError,
            tarfile.TruncatedHeaderError,
        ) as error:
            raise DamagedError(f"bad header at byte {tar.offset}: {error}") from None


class _Source:
    """The bytes that webdataset opens for a URL; their end is an error if its command has failed.

    webdataset checks the command after each read, so how much is read before the error depends on
    timing. Here all bytes are read first.
    """

    def __init__(self, url: str):
        # A signal to the process group must not end curl: half a shard would be missing. Workers
        # and their commands ignore signals; this is for num_workers=0.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            self.opened = gopen(url if urlsplit(url).scheme else os.path.abspath(url))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        piped = isinstance(self.opened, Pipe)  # kept alive: it closes its stream when collected
        self.command = self.opened.proc if piped else None
        self.file = self.opened.stream if piped else self.opened

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        if not data and self.command and self.command.wait():
            shell = isinstance(self.command.args, str)  # a command line may hold secrets
            program = "the command" if shell else self.command.args[0]
            status = self.command.returncode
            hint = f" ({CURL[status]})" if program == "curl" and status in CURL else ""
            raise OSError(f"{program} failed with status {status}{hint}")
        return data

    def close(self) -> None:
        if self.command:
            self.command.kill()
        self.file.close()
        if self.command:
            self.command.wait()
