"""Opened shards: the bytes of any sample by its number."""

import os

import numpy as np

from lowprec.data.tar import SAMPLE

OPEN_LIMIT = 128  # tables and files open at a time


class ShardError(RuntimeError):
    """A shard or its index can no longer be read; the message names it."""


class Shards:
    """Indexed shards, read by offset.

    `paths`: uncompressed tars; `names`: the shards they hold, packed ones too; `starts`: int64
    [shards + 1], global number of each shard's first sample; `digest`: of all members' bytes,
    whatever their container. Tables are memory-mapped when first asked for, so that any number of
    shards costs nothing to open.
    """

    def __init__(
        self,
        paths: list[str],
        tables: list[str],
        counts: np.ndarray,
        digest: str,
        names: list[str] | None = None,
    ):
        self.paths = paths
        self.names = names or paths
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.digest = digest
        self._table_files = tables
        self._tables: dict[int, np.ndarray] = {}
        self._files = _OpenFiles(paths)

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return int(self.starts[-1])

    @property
    def counts(self) -> np.ndarray:
        """Samples of each shard, int64 [shards]."""
        return np.diff(self.starts)

    def table(self, shard: int) -> np.ndarray:
        """The SAMPLE array of a shard, memory-mapped; the least recently used are let go."""
        table = self._tables.pop(shard, None)
        if table is None:
            try:
                table = np.load(self._table_files[shard], mmap_mode="r")
                if table.dtype != SAMPLE or len(table) != np.diff(self.starts[shard : shard + 2]):
                    raise ValueError("it is not the table that was indexed")
            except (OSError, ValueError, EOFError) as error:
                raise ShardError(
                    f"{self._table_files[shard]} cannot be read ({error}); remove it and "
                    "the catalog-*.npy beside it, and it is made again"
                ) from error
        self._tables[shard] = table
        if len(self._tables) > OPEN_LIMIT:
            del self._tables[next(iter(self._tables))]
        return table

    def locate(self, sample: int) -> tuple[int, np.void]:
        """Shard number and table row of a global sample number."""
        shard = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return shard, self.table(shard)[sample - self.starts[shard]]

    @property
    def labels(self) -> np.ndarray:
        """int64 [samples]; -1 where a sample has no label."""
        # astype copies: a view would keep each table's file open
        labels = [self.table(n)["label"].astype(np.int64) for n in range(len(self.paths))]
        return np.concatenate(labels)

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """`size` bytes of a shard's file, or ShardError where they are gone. Safe after a fork."""
        try:
            data = os.pread(self._files[shard], size, offset)
        except OSError as error:
            raise ShardError(f"{self.paths[shard]} cannot be read: {error.strerror}") from error
        if len(data) < size:
            raise ShardError(f"{self.paths[shard]} has become shorter than when it was indexed")
        return data


class _OpenFiles:
    """File descriptors by shard number; the least recently used is closed beyond `limit`."""

    def __init__(self, paths: list[str], limit: int = OPEN_LIMIT):
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
