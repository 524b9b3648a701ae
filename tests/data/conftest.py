import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def encode(pixels: np.ndarray, kind: str = "png") -> bytes:
    """Bytes of an image file of uint8 pixels [height, width, 3]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, {"jpg": "jpeg"}.get(kind, kind))
    return file.getvalue()


def sample(number: int, size: tuple[int, int] = (12, 16)) -> dict[str, bytes]:
    """Members of one sample: noise that depends on its number, a caption, label number % 7."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    return {
        "png": encode(pixels),
        "txt": f"caption {number}".encode(),
        "cls": str(number % 7).encode(),
    }


def members(first: int, last: int, change: dict | None = None) -> list[tuple[str, bytes]]:
    """Members of samples `first` .. `last - 1` in order.

    `change`: sample number to members that replace (None: remove) those of that sample.
    """
    named = []
    for n in range(first, last):
        parts = sample(n) | (change or {}).get(n, {})
        named += [(f"{n:06d}.{k}", v) for k, v in parts.items() if v is not None]
    return named


def write_tar(path: Path, members: list[tuple], mtime: float = 0) -> Path:
    """A tar (or .tar.gz) of bytes by name or TarInfo, in order."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size, info.mtime = len(data), mtime
            tar.addfile(info, io.BytesIO(data))
    whole = file.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(whole) if path.suffix == ".gz" else whole)
    return path


def write_shards(folder: Path, counts: list[int], change: dict | None = None) -> str:
    """Shards train-000.tar, ... of numbered samples, changed as by `members`; their pattern."""
    for shard, count in enumerate(counts):
        first = sum(counts[:shard])
        write_tar(folder / f"train-{shard:03d}.tar", members(first, first + count, change))
    return str(folder / "train-*.tar")


def tokenize(captions: list[str]) -> torch.Tensor:
    """Stands in for a tokenizer: the numbers in the captions of `sample`."""
    return torch.tensor([[int(caption.split()[-1])] for caption in captions])


def same(a, b) -> bool:
    """Whether two batches hold the same, to the bit."""
    tensors = ("images", "tokens", "labels", "samples")
    return a.skips == b.skips and all(torch.equal(getattr(a, x), getattr(b, x)) for x in tensors)
