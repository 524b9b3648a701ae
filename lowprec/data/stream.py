"""Batches from shards behind URLs: grouped and shuffled by webdataset, seeded by segment.

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
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from torch import Tensor
from webdataset.filters import pick
from webdataset.tariterators import group_by_keys

from lowprec.data import loader
from lowprec.data.order import AUGMENTATION, STREAM, permutation, random_words
from lowprec.data.shards import ShardError
from lowprec.data.sources import ShardUrls, check_readers, without_secrets
from lowprec.data.tar import (
    IMAGES,
    MEMBERS,
    DamagedError,
    LostPairsError,
    StrictHeader,
    parse_label,
    read_members,
)
from lowprec.data.workers import ahead
from lowprec.runs.attempts import follow_parent

SHUFFLED, FIRST = 1000, 100  # undecoded samples that a worker shuffles, and starts with
HELD_BYTES = 2**28  # of these samples
LARGEST_OTHER = loader.LONGEST_CAPTION + 1  # bytes of a member that is no image
CURL = ("curl", "-fsL", "--connect-timeout", "30", "--retry", "30", "--retry-delay", "2")
CURL += ("--retry-max-time", "60", "--speed-limit", "100", "--speed-time", "60")  # B/s and s
CURL_FAULTS = {6: "no such host", 7: "cannot connect", 22: "an HTTP error, such as 404"}
CURL_FAULTS |= {28: "less than 100 B/s for a minute"}
_named: set[str] = set()  # URLs of shards that were warned of


@dataclass
class Stream:
    """A rank's batches; worker i % workers makes the whole batch i of a segment.

    `batch_size` counts the samples of all ranks; `segment_steps`: steps between two checkpoints.
    The URLs are permuted in each pass, and each worker reads its own share of them. Unreadable
    samples are left out, the next ones take their place, and rows in the batch's `skips` name them
    at its first position. `augment`: random crop and flip, a function of (seed, segment, pass,
    shard, key). `fast`: see `loader.decode_image`.
    """

    shards: ShardUrls
    seed: int
    batch_size: int
    num_steps: int
    segment_steps: int
    workers: int
    image_size: int
    tokenizer: Callable[[list[str]], Tensor]
    augment: bool = False
    fast: bool = False
    pin: bool = False
    rank: int = 0
    world_size: int = 1

    def __post_init__(self):
        check_readers(self.shards, self.workers, self.world_size)

    def layout(self) -> dict[str, int]:
        """What the sample order depends on besides the config (0 workers read like 1)."""
        return {"world_size": self.world_size, "workers": max(1, self.workers)}

    def batches_from(self, first: int) -> Iterator[loader.Batch]:
        """Batches for step `first` up to the last step, from a fresh pipeline per segment."""
        for begin in range(1, self.num_steps + 1, self.segment_steps):
            if begin + self.segment_steps <= first:
                continue
            share = partial(self._share, begin)
            batches = ahead(share, workers=self.workers, pin=self.pin)
            yield from itertools.islice(batches, max(0, first - begin), None)

    def _share(self, begin: int, worker: int, workers: int) -> Iterator[loader.Batch]:
        """A worker's batches in the segment that begins at a step."""
        reader = _Reader(self, (begin - 1) // self.segment_steps, worker, workers)
        samples = reader.samples()
        end = min(begin + self.segment_steps, self.num_steps + 1)
        for step in range(begin + worker, end, workers):
            batch = list(itertools.islice(samples, self.batch_size // self.world_size))
            position = (step - 1) * self.batch_size
            skips = [{"position": position, **skip} for skip in reader.skips]
            reader.skips = []
            yield loader.collate(batch, skips, self.image_size, self.tokenizer)


class _Reader:
    """Endless samples for one worker in one segment; `skips` lists what was left out recently."""

    def __init__(self, stream: Stream, segment: int, worker: int, workers: int):
        self.stream, self.segment = stream, segment
        ranks = stream.world_size
        self.share = slice(worker * ranks + stream.rank, None, workers * ranks)
        self.skips: list[dict] = []
        self.reading = "", ""  # URL and name of the latest member

    def samples(self) -> Iterator[loader.Sample]:
        """Samples, pass after pass; ShardError after a pass without a readable sample."""
        stream, urls = self.stream, self.stream.shards.urls
        for number in itertools.count():
            epoch = (self.segment << 32) + number
            order = permutation(stream.seed, STREAM, epoch, 0, len(urls))[self.share]
            rng = random.Random(f"{stream.seed} {epoch} {self.share.start}")
            members = self._members([urls[shard] for shard in order])
            good, before = 0, len(self.skips)
            # webdataset's own function leaves out `.jpg`, which is a member of a sample in an index
            grouped = group_by_keys(
                members, lambda name: name.rpartition(".")[::2], handler=self._twice
            )
            for raw in shuffled(grouped, rng):
                try:
                    sample = self._decode(raw, epoch)
                except loader.BAD_IMAGE as error:
                    self._skip(raw["__url__"], raw["__key__"], error)
                    continue
                good += 1
                yield sample
            if not good:
                first = self.skips[before]
                raise ShardError(
                    f"no readable sample in a worker's {len(order)} of {len(urls)} shards; "
                    f"the first fault: {first['shard']} {first['key']}: {first['reason']}"
                )

    def _members(self, urls: list[str]) -> Iterator[dict]:
        """Members of one shard after the other, in the form that webdataset's grouping expects."""
        for url in urls:
            try:
                for name, data in read_url(url):
                    self.reading = url, name
                    yield {"fname": name, "data": data, "__url__": url}
            except Exception as error:  # shards and servers fail in many ways
                self._skip(url, getattr(error, "key", ""), error)
            yield {}  # ends the last sample: the next shard may begin with the same key

    def _decode(self, raw: dict, epoch: int) -> loader.Sample:
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
            words = random_words(self.stream.seed, AUGMENTATION, epoch, number, loader.CROP_WORDS)
        size, fast = self.stream.image_size, self.stream.fast
        pixels = loader.decode_image(image, size, words, fast)
        tokens = self.stream.tokenizer([loader.decode_caption(raw["txt"])])
        return loader.Sample(pixels, tokens, parse_label(raw.get("cls", b"")))

    def _twice(self, error: Exception) -> bool:
        """Skips a second member of one kind."""
        self._skip(*self.reading, ValueError("the sample has two of this kind"))
        return True

    def _skip(self, url: str, key: str, error: Exception) -> None:
        shard = without_secrets(url)
        reason = f"{type(error).__name__}: {error}".replace(url, shard)[:200]
        self.skips.append({"shard": shard, "key": key, "reason": reason})


def shuffled(samples: Iterator[dict], rng: random.Random) -> Iterator[dict]:
    """Samples in the order of webdataset's `shuffle`, which would hold SHUFFLED of any size.

    Fewer are held as long as they have more than HELD_BYTES.
    """
    held, size = [], 0
    while new := list(itertools.islice(samples, 1 + (len(held) + 1 < SHUFFLED))):
        held += new
        size += sum(map(_bytes_of, new))
        is_due = len(held) >= min(FIRST, SHUFFLED)
        while is_due or size > HELD_BYTES:
            sample = pick(held, rng)
            size -= _bytes_of(sample)
            is_due = False
            yield sample
    while held:
        yield pick(held, rng)


def _bytes_of(sample: dict) -> int:
    return sum(len(data) for data in sample.values() if isinstance(data, bytes))


def read_url(url: str) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each image, caption and label in a tar; skips other members.

    Images and captions that are too large to be decoded are cut off just beyond their limit.
    The tar may be compressed (gz, bz2, xz). Errors of servers, commands and damaged bytes come
    after all members before them, as DamagedError where the place is known. A warning names, once,
    a shard that also holds pairs that cannot be seen; LostPairsError if it holds no others.
    """
    is_empty = True
    limits = dict.fromkeys(MEMBERS, LARGEST_OTHER) | dict.fromkeys(IMAGES, loader.LARGEST_IMAGE + 1)
    with (
        contextlib.closing(_Source(url)) as source,
        tarfile.open(fileobj=source, mode="r|*", tarinfo=StrictHeader) as tar,
    ):
        try:
            for member, _, _, data in read_members(tar, limits):
                is_empty = False
                yield member.name, data
        except LostPairsError as error:
            if is_empty:
                raise
            if url not in _named:
                print(f"warning: {without_secrets(url)}: {error}", file=sys.stderr)
            _named.add(url)
    if is_empty:
        raise DamagedError("no image, caption or label in it")


class _Source:
    """The bytes of a file, of a URL (by curl) or of a `pipe:` command; its failure is an error.

    `close` ends a command with its children. If the reader is killed, curl and a single command
    (`pipe:exec COMMAND`) end with it; the parts of a pipeline (`pipe:a | b`) may go on.
    """

    def __init__(self, url: str):
        scheme, self.command = urlsplit(url).scheme, None
        if not scheme:
            self.descriptor = os.open(url, os.O_RDONLY | os.O_NONBLOCK)  # for a FIFO
        else:
            options = {"stdout": subprocess.PIPE, "bufsize": 0, "start_new_session": True}
            options["preexec_fn"] = follow_parent  # a signal must not cut a shard short
            redirects = "=https" if scheme == "https" else "=http,https"
            command = [*CURL, "--proto-redir", redirects, url]
            if scheme == "pipe":
                command = url.removeprefix("pipe:")
            self.command = subprocess.Popen(command, shell=scheme == "pipe", **options)
            self.descriptor = self.command.stdout.fileno()

    def read(self, size: int) -> bytes:
        data = os.read(self.descriptor, size)
        if not data and self.command and (status := self.command.wait()):
            if isinstance(self.command.args, str):  # a command line may hold secrets
                raise OSError(f"the command failed with status {status}")
            hint = f" ({CURL_FAULTS[status]})" if status in CURL_FAULTS else ""
            raise OSError(f"curl failed with status {status}{hint}")
        return data

    def close(self) -> None:
        if not self.command:
            os.close(self.descriptor)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.command.pid, signal.SIGKILL)
        self.command.wait()
        self.command.stdout.close()
