"""Decoded pairs in one file that the workers of all runs on a machine share."""

import hashlib
import os
import shutil
import zlib
from importlib.metadata import version
from pathlib import Path

import numpy as np

from lowprec.config.check import ConfigError

CHECKSUM = 4  # bytes; zeros: not stored


class DecodedCache:
    """Pixels and tokens by sample number, in a sparse file in `folder`, created if missing.

    Pixels: uint8 [3, image_size, image_size]; tokens: int32 [context_length]. `key`: all that the
    decoded values depend on beside the installed versions; it becomes the file's name. Processes
    read and write at the same time: every record has its CRC-32, so one that is incomplete or
    damaged counts as missing. ConfigError if the disk is too small for all samples or the file
    cannot be opened.
    """

    def __init__(
        self, folder: str, key: str, num_samples: int, image_size: int, context_length: int
    ):
        self._shape = (3, image_size, image_size)
        self._pixels_at = CHECKSUM + 4 * context_length
        self._size = self._pixels_at + 3 * image_size**2
        parts = (key, num_samples, self._size, version("pillow"), version("open_clip_torch"))
        path = Path(folder, f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.decoded")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            fault = f"{error.filename}: {error.strerror}; use another folder or null"
            raise ConfigError([f"data.cache={folder}: {fault}"]) from error
        missing = num_samples * self._size - os.fstat(self._file).st_blocks * 512
        free = shutil.disk_usage(folder).free
        if missing > free:
            raise ConfigError(
                [
                    f"data.cache={folder}: the decoded pairs need another {missing / 1e9:.1f} GB, "
                    f"but only {free / 1e9:.1f} GB are free there; use another folder or null"
                ]
            )
        os.ftruncate(self._file, num_samples * self._size)

    def read(self, sample: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Pixels and tokens of a sample, both read-only, or None if they cannot be read."""
        try:
            record = os.pread(self._file, self._size, sample * self._size)
        except OSError:  # else the sample would count as damaged, and be replaced
            return None
        stored = record[:CHECKSUM]
        if stored == bytes(CHECKSUM) or stored != _checksum(memoryview(record)[CHECKSUM:]):
            return None
        tokens = np.frombuffer(record[CHECKSUM : self._pixels_at], np.int32)
        return np.frombuffer(record, np.uint8, offset=self._pixels_at).reshape(self._shape), tokens

    def write(self, sample: int, pixels: np.ndarray, tokens: np.ndarray) -> None:
        """Stores a sample, unless the disk has become full."""
        body = tokens.astype(np.int32).tobytes() + pixels.tobytes()
        try:
            os.pwrite(self._file, _checksum(body) + body, sample * self._size)
        except OSError:
            return

    def __del__(self):
        if hasattr(self, "_file"):
            os.close(self._file)


def _checksum(body: bytes | memoryview) -> bytes:
    return zlib.crc32(body).to_bytes(CHECKSUM, "little")
