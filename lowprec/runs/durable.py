"""Writes that a kill, a full disk or a power cut leaves either complete or undone."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from lowprec.config.check import RunError


class DiskError(RunError, OSError):
    """A file cannot be written; the message gives its path, the reason and the free space."""

    def __init__(self, path: Path, error: OSError):
        reason = error.strerror or str(error)
        super().__init__(f"{path} cannot be written: {reason} ({_free(path)})")
        self.arguments = path, error

    def __reduce__(self) -> tuple:
        return DiskError, self.arguments  # workers raise it too


def append(path: Path, rows: Iterable[bytes]) -> None:
    """Appends each row with one write; a row that does not fit is removed again."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            for row in rows:
                size = os.fstat(descriptor).st_size
                try:
                    _write_whole(descriptor, row)
                except OSError:
                    os.ftruncate(descriptor, size)
                    raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DiskError(path, error) from error


def write(path: Path, *chunks: bytes) -> None:
    """Writes a new file and syncs it to disk."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for chunk in chunks:
                _write_whole(descriptor, chunk)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DiskError(path, error) from error


def replace(path: Path, data: bytes) -> None:
    """Replaces a small file; readers see either the old or the new content, never a mixture."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary, data)
    except DiskError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits for and holds the lock of a file, which is made with its folder if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_lock(descriptor: int, patience_s: float = 0.0, *, shared: bool = False) -> bool:
    """Locks an open file until it is closed; false if another process keeps it for so long."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
            return True
        except BlockingIOError:  # any other error: the file system has no locks
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)


def sync(path: Path) -> None:
    """Syncs the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_whole(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    while written < len(data):  # a nearly full disk, or more than 2 GiB
        written += os.write(descriptor, memoryview(data)[written:])


def _free(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        return "the folder cannot be read"
