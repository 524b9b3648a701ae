"""Decoded pairs in one file that the workers of all runs on a machine share."""

import hashlib
import os
import shutil
import struct
import zlib
from importlib.metadata import version
from pathlib import Path

import numpy as np

from lowprec.config.check import ConfigError

# the file's key, the sample's number and the checksums of its bytes in the shard and of the rest
HEADER = struct.Struct("<16sqII")


class DecodedCache:
    """Pixels and tokens by sample number, in a sparse file in `folder`, created if missing.

    Pixels: uint8 [3, image_size, image_size]; tokens: int32 [context_length]. `key`: all that the
    decoded values depend on beside the installed versions; it becomes the file's name. Processes
    read and write at the same time: the header of each record says which sample of which file it is
    and has two checksums, so a record that is incomplete, damaged or of another sample counts as
    missing. ConfigError if the disk is too small for all samples or the file cannot be used.
    """

    def __init__(
        self, folder: str, key: str, num_samples: int, image_size: int, context_length: int
    ):
        self._shape = (3, image_size, image_size)
        self._pixels_at = HEADER.size + 4 * context_length
        self._size = self._pixels_at + 3 * image_size**2
        parts = (key, num_samples, self._size, version("pillow"), version("open_clip_torch"))
        self._key = hashlib.sha256(repr(parts).encode()).digest()[:16]
        path, size = Path(folder, f"{self._key.hex()[:16]}.decoded"), num_samples * self._size
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            if os.fstat(self._file).st_size != size:
                os.ftruncate(self._file, size)
            missing = size - os.fstat(self._file).st_blocks * 512
            free = shutil.disk_usage(folder).free
        except OSError as error:
            fault = f"{error.filename or path}: {error.strerror}; use another folder or null"
            raise ConfigError([f"data.cache={folder}: {fault}"]) from error
        if missing > free:
            raise ConfigError(
                [
                    f"data.cache={folder}: the decoded pairs need another {missing / 1e9:.1f} GB, "
                    f"but only {free / 1e9:.1f} GB are free there; use another folder or null"
                ]
            )

    def read(self, sample: int, checksum: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Pixels and tokens of a sample, both read-only, or None if they are not stored.

        `checksum`: that of the sample's bytes in the index of its shard.
        """
        try:
            record = os.pread(self._file, self._size, sample * self._size)
        except OSError:  # else the sample would count as damaged, and be replaced
            return None
        header = self._header(sample, checksum, memoryview(record)[HEADER.size :])
        if not record.startswith(header):
            return None
        tokens = np.frombuffer(record[HEADER.size : self._pixels_at], np.int32)
        return np.frombuffer(record, np.uint8, offset=self._pixels_at).reshape(self._shape), tokens

    def write(self, sample: int, checksum: int, pixels: np.ndarray, tokens: np.ndarray) -> None:
        """Stores a sample, unless the disk has become full."""
        body = tokens.astype(np.int32).tobytes() + pixels.tobytes()
        record = self._header(sample, checksum, body) + body
        try:
            os.pwrite(self._file, record, sample * self._size)
        except OSError:
            return

    def _header(self, sample: int, checksum: int, body: bytes | memoryview) -> bytes:
        return HEADER.pack(self._key, sample, checksum, zlib.crc32(body))

    def __del__(self):
        if hasattr(self, "_file"):
            os.close(self._file)
