"""Batches by step: read by offset, decoded in worker processes, uint8 until they reach the device.

A batch is a pure function of its step, so workers need no state and a resume needs only the step.
"""

import io
import math
import os
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import (
    Image,
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401 (else the first image loads all plugins, which takes 0.1 s)
)
from torch import Tensor
from torch.nn.functional import interpolate

from lowprec.data.cache import DecodedCache
from lowprec.data.order import AUGMENTATION, REPLACEMENT, SampleOrder, random_words
from lowprec.data.shards import ShardError, Shards
from lowprec.data.tar import IMAGES
from lowprec.data.workers import ahead

REPLACEMENTS = 100  # tries to find a readable sample for one position
BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
BAD_IMAGE = (OSError, ValueError, SyntaxError, *BOMBS)
warnings.simplefilter("error", Image.DecompressionBombWarning)  # from 89 million pixels: 0.5 GB
LARGEST_IMAGE = 2**26  # bytes
LONGEST_CAPTION = 8192  # bytes
LONG_WORD = re.compile(r"[^\W\d_]{1000}|([^\w\s]|_){1000}")  # takes the tokenizer quadratic time
CROP_WORDS = 41  # random words for a crop and a flip
AREA = (0.9, 1.0)  # share of the image in a random crop; open_clip's default
RATIO = (3 / 4, 4 / 3)


@dataclass
class Batch:
    """Image-text pairs.

    images: uint8 [batch, 3, size, size]; tokens: int64 [batch, context]; labels: int64 [batch], -1
    if none; samples: int64 [batch], global sample numbers; skips: one row per unreadable sample.
    """

    images: Tensor
    tokens: Tensor
    labels: Tensor
    samples: Tensor
    skips: list[dict] = field(default_factory=list)

    def pin_memory(self) -> "Batch":
        """Copies the tensors to page-locked memory (called by DataLoader)."""
        pinned = (t.pin_memory() for t in (self.images, self.tokens, self.labels))
        return Batch(*pinned, self.samples, self.skips)

    def to(self, device: torch.device) -> "Batch":
        """Copies the tensors to a device, without blocking if they are in page-locked memory."""
        moved = (t.to(device, non_blocking=True) for t in (self.images, self.tokens, self.labels))
        return Batch(*moved, self.samples, self.skips)


@dataclass
class Batches:
    """`batches[step - 1]` is a rank's share of the batch for a step; sequential if `order` is None.

    `batch_size` counts the samples of all ranks; rank r gets the r-th equal part, so the samples of
    a step depend neither on the number of ranks nor on workers. A sample that cannot be read or
    decoded is listed in the batch's `skips` and replaced by one that depends only on the position;
    sequential reading leaves it out. `augment`: random crop and flip, a function of (seed, epoch,
    sample). `cache`: decoded samples, stored when first read; not together with `augment`.
    `fast`: see `decode_image`. `captions`: whether a sample without a caption is unreadable; else
    it has the tokens of "".
    """

    shards: Shards
    order: SampleOrder | None
    batch_size: int
    num_batches: int
    image_size: int
    tokenizer: Callable[[list[str]], Tensor]
    seed: int = 0
    augment: bool = False
    fast: bool = False
    cache: DecodedCache | None = None
    rank: int = 0
    world_size: int = 1
    captions: bool = True

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, number: int) -> Batch:
        size = self.batch_size // self.world_size
        first = number * self.batch_size + self.rank * size
        if self.order is None:
            samples = range(first, min(first + size, self.shards.num_samples))
        else:
            samples = self.order.samples(first, size).tolist()
        decoded, skips = [], []
        for position, sample in enumerate(samples, first):
            decoded += self._read_or_replace(position, sample, skips)
        return collate(decoded, skips, self.image_size, self.tokenizer)

    def _read_or_replace(self, position: int, sample: int, skips: list[dict]) -> list["Sample"]:
        """The sample, or the first readable one among the substitutes for its position."""
        for attempt in range(REPLACEMENTS):
            try:
                return [self.read(sample, position)]
            except BAD_IMAGE as error:
                shard, row = self.shards.locate(sample)
                name = os.path.basename(self.shards.paths[shard])
                skip = {"position": position, "shard": name, "key": self.shards.key(shard, row)}
                skips.append({**skip, "reason": f"{type(error).__name__}: {error}"[:200]})
                if self.order is None:
                    return []
                substitutes = random_words(self.seed, REPLACEMENT, position, 0, REPLACEMENTS)
                sample = int(substitutes[attempt] % np.uint64(self.shards.num_samples))
        raise ShardError(
            f"no readable sample for position {position} in {REPLACEMENTS} tries; the last: "
            f"{skips[-1]['shard']} {skips[-1]['key']}: {skips[-1]['reason']}"
        )

    def read(self, sample: int, position: int = 0) -> "Sample":
        """Reads sample number `sample`; `position` seeds its crop. Raises one of BAD_IMAGE.

        ShardError if the shard holds other bytes than when it was indexed.
        """
        shard, row = self.shards.locate(sample)
        *_, label, checksum = row.item()
        if self.cache is not None and (stored := self.cache.read(sample, checksum)):
            pixels, tokens = stored[0], torch.from_numpy(stored[1].astype(np.int64))[None]
            return Sample(pixels, tokens, label, sample)
        if row["image_bytes"] < 0:
            raise ValueError(f"no image ({', '.join(IMAGES)}) in the sample")
        has_caption = row["text_bytes"] >= 0
        if self.captions and not has_caption:
            raise ValueError("no caption (txt) in the sample")
        refuse_size("image", row["image_bytes"], LARGEST_IMAGE)
        refuse_size("caption", row["text_bytes"], LONGEST_CAPTION)
        data, text = self.shards.read_pair(shard, row)
        words = None
        if self.augment:
            epoch = position // self.shards.num_samples
            words = random_words(self.seed, AUGMENTATION, epoch, sample, CROP_WORDS)
        pixels = decode_image(data, self.image_size, words, self.fast)
        tokens = self.tokenizer([decode_caption(text) if has_caption else ""])
        if self.cache is not None and has_caption:
            self.cache.write(sample, checksum, pixels, tokens.numpy())
        return Sample(pixels, tokens, label, sample)


def refuse_size(part: str, size: int, largest: int) -> None:
    """ValueError for a part of a sample that is too large to be decoded, or even read."""
    if size > largest:
        raise ValueError(f"the {part} has at least {size:,} bytes, more than {largest:,}")


def decode_image(
    data: bytes, size: int, words: np.ndarray | None = None, fast: bool = False
) -> np.ndarray:
    """Decodes RGB pixels, uint8 [3, size, size], from the central square or a random box (bicubic).

    `words`: uint64 [CROP_WORDS] of randomness for `random_box` and a horizontal flip. `fast`:
    torch resizes instead of PIL, and a JPEG is decoded at 1/2 or 1/4 of its size if the box still
    has `size` pixels on each side; its edges are then rounded outward. Pixels differ slightly.
    Raises one of BAD_IMAGE unless the bytes are a complete JPEG, WEBP or PNG image with not too
    many pixels.
    """
    refuse_size("image", len(data), LARGEST_IMAGE)
    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "WEBP", "PNG"))
        if image.mode.startswith("I;16"):  # gray; `convert` would clip it to white
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        width, height = image.size
        left, top, right, bottom = box = crop_box(width, height, words)
        if fast:  # `draft` takes the largest divisor that leaves this many pixels
            least = max(size / (right - left), size / (bottom - top))
            sides = ((math.ceil(n * least), n // 4) for n in image.size)
            image.draft(None, tuple(map(max, sides)))
            divisor = round(width / image.width)  # the last pixels may lie half outside
            box = (left // divisor, top // divisor, -(-right // divisor), -(-bottom // divisor))
        image.load()
        if image.mode != "RGB":
            image = image.convert("RGB")
    except UnidentifiedImageError as error:  # its message holds a memory address
        raise ValueError("not a JPEG, WEBP or PNG image") from error
    except (LookupError, ArithmeticError, TypeError) as error:  # damaged chunks
        raise ValueError(f"damaged: {type(error).__name__}: {error}") from error
    if image.size == (size, size) and box == (0, 0, size, size):
        pixels = np.asarray(image)
    elif fast:
        pixels = resize_by_torch(image, size, box)
    else:
        pixels = np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box))
    if words is not None and words[-1] >> np.uint64(63):
        pixels = pixels[:, ::-1]
    return pixels.transpose(2, 0, 1)


def resize_by_torch(image: Image.Image, size: int, box: tuple[int, int, int, int]) -> np.ndarray:
    """Resizes a box of an RGB image bicubically to uint8 [size, size, 3].

    The filter is PIL's, but it ends at the box's edges, and its weights have fewer bits.
    """
    left, top, right, bottom = box
    crop = torch.from_numpy(np.asarray(image)[top:bottom, left:right].copy())
    resized = interpolate(
        crop.permute(2, 0, 1)[None], size=(size, size), mode="bicubic", antialias=True
    )
    return resized[0].permute(1, 2, 0).numpy()


def crop_box(width: int, height: int, words: np.ndarray | None) -> tuple[int, int, int, int]:
    """`random_box`, or without `words` the central square."""
    if words is not None:
        return random_box(width, height, words)
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, words: np.ndarray) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a random crop within AREA and RATIO; words: uint64 [>= 40].

    Tries ten boxes, then takes the largest central box within RATIO. Source: torchvision's
    RandomResizedCrop (the algorithm, not the random numbers).
    """
    draws = (words[:40] >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
    for area, ratio, x, y in draws.reshape(10, 4).tolist():
        pixels = width * height * (AREA[0] + area * (AREA[1] - AREA[0]))
        shape = math.exp(math.log(RATIO[0]) + ratio * (math.log(RATIO[1]) - math.log(RATIO[0])))
        w, h = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


@dataclass
class Sample:
    """A decoded pair: pixels uint8 [3, size, size], tokens int64 [1, context].

    A label or number of -1: none, not indexed.
    """

    pixels: np.ndarray
    tokens: Tensor
    label: int = -1
    number: int = -1


def decode_caption(data: bytes) -> str:
    """A caption without surrounding whitespace.

    Raises ValueError if it is empty, not UTF-8 or so long that tokenizing it would take seconds.
    """
    refuse_size("caption", len(data), LONGEST_CAPTION)
    caption = data.decode("utf-8").strip()
    if all(unicodedata.category(letter)[0] in "CMZ" for letter in caption):  # nothing is visible
        raise ValueError("the caption is empty")
    if LONG_WORD.search(caption):
        raise ValueError("the caption has a word of 1,000 characters or more")
    return caption


def collate(
    samples: list[Sample],
    skips: list[dict],
    image_size: int,
    tokenizer: Callable[[list[str]], Tensor],
) -> Batch:
    """A Batch of decoded samples, possibly empty."""
    images = np.empty((len(samples), 3, image_size, image_size), dtype=np.uint8)
    for i, sample in enumerate(samples):
        images[i] = sample.pixels
    return Batch(
        torch.from_numpy(images),
        torch.cat([sample.tokens for sample in samples]) if samples else tokenizer([]),
        torch.tensor([sample.label for sample in samples], dtype=torch.int64),
        torch.tensor([sample.number for sample in samples], dtype=torch.int64),
        skips,
    )


def iterate(batches: Batches, *, workers: int, first: int = 0, pin: bool = False) -> Iterator:
    """Batches number `first`, `first + 1`, ... in order, decoded ahead by `workers` processes."""

    def share(worker: int, workers: int) -> Iterator[Batch]:
        return map(batches.__getitem__, range(first + worker, len(batches), workers))

    return ahead(share, workers=workers, pin=pin)
