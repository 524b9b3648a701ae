"""Small shards that a test can damage, one pass over them, and payloads that try to run."""

import io
import itertools
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lowprec.data.index import open_shards
from lowprec.data.loader import Batches
from lowprec.data.tar import MEMBERS

SIZE = 8


def encode(pixels: np.ndarray, kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, {"jpg": "jpeg"}.get(kind, kind))
    return file.getvalue()


def pair(number: int, kind: str = "jpg") -> list[tuple[str, bytes]]:
    """Members of one sample: noise that depends on its number, and its caption."""
    pixels = np.random.default_rng(number).integers(0, 256, (10, 14, 3), dtype=np.uint8)
    name = f"{number:06d}"
    return [(f"{name}.{kind}", encode(pixels, kind)), (f"{name}.txt", f"picture {number}".encode())]


def pairs(count: int, first: int = 0) -> list[tuple[str, bytes]]:
    return [member for number in range(first, first + count) for member in pair(number)]


def write_members(path: Path, members: list) -> Path:
    """A tar of (name or TarInfo, bytes); the size is the bytes' unless the TarInfo says otherwise.

    A float mtime gives every member an extended header, as webdataset's own writer does.
    """
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = name
            if isinstance(name, str):
                info = tarfile.TarInfo(name)
                info.size, info.mtime = len(data), 1.5
            tar.addfile(info, io.BytesIO(data) if data else None)
    return path


def read_all(pattern: str) -> tuple[list[int], list[dict], object]:
    """Sample numbers read and the skips of one pass in order; the shards."""
    shards = open_shards(pattern)
    batches = Batches(
        shards, None, batch_size=3, num_batches=-(-shards.num_samples // 3), image_size=SIZE,
        tokenizer=lambda captions: torch.zeros(len(captions), 4, dtype=torch.int64),
    )  # fmt: skip
    found = [batches[i] for i in range(len(batches))]
    read = [number for batch in found for number in batch.samples.tolist()]
    return read, [skip for batch in found for skip in batch.skips], shards


def key_runs(path):
    """Runs of members with one key, found by Python's tarfile alone."""
    with tarfile.open(path) as tar:
        names = [m.name.rpartition(".") for m in tar if m.isfile()]
    return len(list(itertools.groupby(stem for stem, _, kind in names if kind in MEMBERS)))


@pytest.fixture
def shard(tmp_path):
    return write_members(tmp_path / "a.tar", pairs(8))


@pytest.fixture
def check():
    """A function: reads a shard whole. "error" if it was refused by name, else (read, skips)."""

    def check(path):
        try:
            read, skips, shards = read_all(str(path))
        except ValueError as error:
            assert path.name in str(error)
            return "error", None
        assert len(read) + len(skips) == key_runs(path) == shards.num_samples
        assert all(s["shard"] == path.name and s["key"] and s["reason"] for s in skips)
        return (read, skips), shards.digest

    return check


def refresh(folder):
    """Takes the index away, as if the shards had always been like this."""
    for file in folder.glob(".index/*"):
        file.unlink()


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, canary, call=os.system):
        self.canary, self.call = str(canary), call

    def __reduce__(self):
        if self.call is os.system:
            return os.system, (f"touch {self.canary}",)
        if self.call is eval:
            return eval, (f"open({self.canary!r}, 'w').close()",)
        return self.call, (self.canary, "w")


@pytest.fixture
def canary(tmp_path):
    """A path that a payload would create; it must not exist when the test ends."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists()


def constant(name: str, value: object):
    """A fixture of a function or class of this file."""
    return pytest.fixture(name=name)(lambda: value)


payload_fixture = constant("payload", Payload)
encode_fixture = constant("encode", encode)
pair_fixture = constant("pair", pair)
pairs_fixture = constant("pairs", pairs)
write_members_fixture = constant("write_members", write_members)
refresh_fixture = constant("refresh", refresh)
read_all_fixture = constant("read_all", read_all)
