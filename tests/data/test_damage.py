"""Damaged and hostile shards: refused or skipped by name; nothing is lost, nothing is run."""

import itertools
import pickle
import struct
import tarfile
import zlib

import numpy as np
import pytest
import torch

from lowprec.data.index import open_shards
from lowprec.data.loader import Batches, iterate
from lowprec.data.shards import ShardError
from lowprec.data.tar import MEMBERS
from tests.data.conftest import encode, members, write_tar


def key_runs(path):
    """Runs of members with one key, found by Python's tarfile alone."""
    with tarfile.open(path) as tar:
        names = [m.name.rpartition(".") for m in tar if m.isfile()]
    return len(list(itertools.groupby(stem for stem, _, kind in names if kind in MEMBERS)))


def in_order(shards):
    """Batches of three samples; tokens are zeros."""
    count = -(-shards.num_samples // 3)
    return Batches(shards, None, 3, count, 8, lambda captions: torch.zeros(len(captions), 4))


def check(path):
    """What one pass over a shard reads and skips, and the digest; "error" if it is refused."""
    try:
        shards = open_shards(str(path))
    except ValueError as error:
        assert path.name in str(error)
        return "error", None
    loaded = list(iterate(in_order(shards), workers=0))
    read = [number for batch in loaded for number in batch.samples.tolist()]
    skips = [skip for batch in loaded for skip in batch.skips]
    assert len(read) + len(skips) == key_runs(path) == shards.num_samples
    assert all(s["shard"] == path.name and s["key"] and s["reason"] for s in skips)
    return (read, skips), shards.digest


def test_shard_that_vanishes_before_it_is_opened_is_an_error_naming_it(tmp_path):
    shards = open_shards(str(write_tar(tmp_path / "a.tar", members(0, 2))))
    (tmp_path / "a.tar").unlink()
    with pytest.raises(ShardError, match=r"a\.tar cannot be read: No such file"):
        shards.read(0, 0, 1)


def claiming_png(png, width, height):
    """The image with another size in its header."""
    data = bytearray(png)
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


NOISE = np.random.default_rng(3).integers(0, 256, (9, 9, 3), np.uint8)
JPG, PNG, GIF = (encode(NOISE, kind) for kind in ("jpg", "png", "gif"))
BAD_SAMPLES = {  # suffix and bytes of its image, caption, a word of the reason
    "no image": (None, b"a", "no image"),
    "no caption": (("jpg", JPG), None, "no caption"),
    "empty caption": (("jpg", JPG), b"", "caption is empty"),
    "invisible caption": (("jpg", JPG), "\u200b\ufeff \u00ad".encode(), "is empty"),
    "long caption": (("jpg", JPG), b"a " * 5000, "more than 8,192"),
    "not UTF-8": (("jpg", JPG), b"\xff\xfe", "utf-8"),
    "another kind of image": (("jpg", GIF), b"a", "not a JPEG"),
    "cut image": (("jpg", JPG[:-99]), b"a", "runcated"),
    "1 x 100,000": (("png", claiming_png(PNG, 1, 10**5)), b"a", "Error"),
    "100,000 squared": (("png", claiming_png(PNG, 10**5, 10**5)), b"a", "Bomb"),
}


@pytest.mark.parametrize("kind", BAD_SAMPLES)
def test_bad_sample_is_a_skip_that_names_shard_key_and_reason(tmp_path, kind):
    image, caption, word = BAD_SAMPLES[kind]
    bad = [(f"000003.{image[0]}", image[1])] if image else []
    bad += [("000003.txt", caption)] if caption is not None else []
    path = write_tar(tmp_path / "a.tar", [*members(0, 3), *bad, *members(4, 6)])
    (read, (skip,)), _ = check(path)
    assert read == [0, 1, 2, 4, 5]
    assert skip["key"].startswith("000003.") and word in skip["reason"]


def test_names_that_are_not_utf8_are_read(tmp_path):
    odd = [(name.replace("000001", "ca\udcfff"), data) for name, data in members(1, 2)]
    (read, skips), _ = check(write_tar(tmp_path / "a.tar", [*members(0, 1), *odd]))
    assert (read, skips) == ([0, 1], [])


KEYS = ("../../up", "/abs/olute", "a/../../b", "~/home", "$HOME", "`touch x`", "a\nb", "-rf")


def test_keys_are_never_paths(tmp_path, monkeypatch):
    renamed = [
        (f"{key}.{name.rpartition('.')[2]}", data if key != "/abs/olute" else b"")
        for number, key in enumerate(KEYS)
        for name, data in members(number, number + 1)
    ]
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    (read, (skip,)), _ = check(write_tar(folder / "a.tar", renamed))
    assert len(read) == len(KEYS) - 1 and skip["key"] == "/abs/olute.png"
    paths = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert {name for name in paths if ".index" not in name} == {"deep", "deep/er", "deep/er/a.tar"}


def test_index_files_with_pickles_are_not_loaded(tmp_path, payload, canary):
    path = write_tar(tmp_path / "a.tar", members(0, 1))
    digest = open_shards(str(path)).digest
    (catalog,) = tmp_path.glob(".index/catalog-*.npy")
    catalog.write_bytes(pickle.dumps(payload(canary)))
    assert open_shards(str(path)).digest == digest


def test_an_image_of_a_hole_of_gigabytes_is_skipped_unread(tmp_path):
    path = write_tar(tmp_path / "a.tar", members(0, 3))
    shards, reads = open_shards(str(path)), []
    table = shards.table(0).copy()
    table["image_bytes"][1] = 2**31 - 1
    shards.table = lambda shard: table
    read = shards.read
    shards.read = lambda shard, offset, size: reads.append(size) or read(shard, offset, size)
    batch = in_order(shards)[0]
    assert batch.samples.tolist() == [0, 2] and max(reads) < 10**6
    assert "more than 67,108,864" in batch.skips[0]["reason"]
