"""Opened shards: the bytes of any sample by its number."""

import hashlib
import io
import os
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np

from lowprec.config.check import RunError

SAMPLE = np.dtype(
    [
        ("image_offset", "<i8"),
        ("image_bytes", "<i4"),  # -1: no image; the offset is that of another member
        ("text_offset", "<i8"),
        ("text_bytes", "<i4"),  # -1: no caption
        ("label", "<i4"),  # -1: none
        ("checksum", "<u4"),  # CRC-32 of the image and the caption
    ]
)
OPEN_LIMIT = 128  # tables and files open at a time
SEAL = 32  # bytes of the digest at the end of an index file


class ShardError(RunError):
    """A shard or its index can no longer be read; the message names it."""


def sealed(*arrays: np.ndarray) -> bytes:
    """The content of an index file: arrays, and the SHA-256 digest of all bytes before it."""
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array)
    return file.getvalue() + hashlib.sha256(file.getvalue()).digest()


def load_sealed(file: Path) -> list[np.ndarray]:
    """The arrays of an index file; OSError or ValueError if it is missing, old or damaged."""
    content = file.read_bytes()
    body = io.BytesIO(content[:-SEAL])
    if hashlib.sha256(body.getvalue()).digest() != content[-SEAL:]:
        raise ValueError("it is damaged or from an older version")
    arrays = []
    while body.tell() < len(body.getvalue()):
        arrays.append(np.load(body))
    return arrays


class Shards:
    """Indexed shards, read by offset.

    Opening them costs nothing: each table is loaded on first use. `paths`: uncompressed tar files;
    `tables`: the index file of each, its catalog entry and an array of `SAMPLE`; `catalog`: a
    structured array with the fields "samples", "digest", of the members' bytes, and "captions".

    Attributes:
        num_captions: samples with a caption in each shard, int64 [shards]; in a catalog of an
            earlier version, all samples.
    """

    def __init__(self, paths: list[str], tables: list[Path], catalog: np.ndarray):
        self.paths = paths
        self.starts = np.concatenate([[0], np.cumsum(catalog["samples"])]).astype(np.int64)
        self.digest = hashlib.sha256(b"".join(catalog["digest"].tolist())).hexdigest()
        self._table_files = tables
        is_counted = "captions" in catalog.dtype.names  # before, each shard had some
        self.num_captions = catalog["captions" if is_counted else "samples"]
        self._digests = catalog["digest"]
        self.table = lru_cache(OPEN_LIMIT)(self._load_table)
        self._file = lru_cache(OPEN_LIMIT)(_File)

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return int(self.starts[-1])

    @property
    def counts(self) -> np.ndarray:
        """Samples in each shard, int64 [shards]."""
        return np.diff(self.starts)

    def _load_table(self, shard: int) -> np.ndarray:
        try:
            entry, table = load_sealed(self._table_files[shard])
            if table.dtype != SAMPLE:
                raise ValueError("it is from an older version")
            if entry["digest"] != self._digests[shard] or len(table) != self.counts[shard]:
                raise ValueError("it was rebuilt while the shards were open")
        except (OSError, ValueError) as error:
            raise ShardError(
                f"{self._table_files[shard]}, the index of {self.paths[shard]}, cannot be read "
                f"({error}); python -m experiments.index_shards makes it again"
            ) from error
        return table

    def locate(self, sample: int) -> tuple[int, np.void]:
        """Shard number and table row of a global sample number."""
        shard = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return shard, self.table(shard)[sample - self.starts[shard]]

    @property
    def labels(self) -> np.ndarray:
        """int64 [samples]; -1 where a sample has no label."""
        labels = [self.table(n)["label"].astype(np.int64) for n in range(len(self.paths))]
        return np.concatenate(labels)

    def read_pair(self, shard: int, row: np.void) -> tuple[bytes, bytes]:
        """Image and caption of a table row; ShardError if they are not the bytes of the index.

        The caption is empty if there is none.
        """
        image = self.read(shard, int(row["image_offset"]), int(row["image_bytes"]))
        text = self.read(shard, int(row["text_offset"]), max(0, int(row["text_bytes"])))
        if zlib.crc32(text, zlib.crc32(image)) != row["checksum"]:
            raise ShardError(
                f"{self.paths[shard]}: {self.key(shard, row)} is not what was indexed: the shard "
                f"has changed. Restore it, or delete {self._table_files[shard]} and run "
                "python -m experiments.index_shards"
            )
        return image, text

    def key(self, shard: int, row: np.void) -> str:
        """Name of a sample's image (or only) member, read from the tar header."""
        header = self.read(shard, int(row["image_offset"]) - 512, 100)
        return header.split(b"\0")[0].decode("utf-8", "replace")

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Bytes of a shard's file, or ShardError if the file has shrunk. Safe after a fork."""
        try:
            data = os.pread(self._file(self.paths[shard]).descriptor, size, offset)
        except OSError as error:
            raise ShardError(f"{self.paths[shard]} cannot be read: {error.strerror}") from error
        if len(data) < size:
            raise ShardError(f"{self.paths[shard]} is shorter than when it was indexed")
        return data


class _File:
    """An open file descriptor, closed when nothing refers to it any more."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self):
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)
