"""Writes that a kill, a full disk or a power cut leaves either complete or undone."""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from lowprec.config.check import RunError

logger = logging.getLogger("lowprec")
_unsynced: set[int] = set()  # devices on which folders cannot be synced


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


def write(path: Path, data: bytes) -> None:
    """Writes a new file and syncs it to disk."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_whole(descriptor, data)
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
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise error if isinstance(error, DiskError) else DiskError(path, error) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits for and holds the lock of a file, which is made with its folder if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        lock(descriptor, path, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, path: Path, how: int) -> None:
    """Locks an open file; RunError where the file system has no locks, or as `fcntl.flock`."""
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        raise
    except OSError as error:
        raise RunError(
            f"{path} cannot be locked ({error.strerror}): choose a folder on a file system with "
            "locks"
        ) from error


def try_lock(descriptor: int, path: Path, patience_s: float = 0.0, *, shared: bool = False) -> bool:
    """Locks an open file until it is closed; false if another process keeps it for so long."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            lock(descriptor, path, fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)


def sync(path: Path) -> None:
    """Syncs the content of a file, or the names in a folder, to disk.

    Some file systems cannot sync folders: the log says what a power cut may cost there.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        facts = os.fstat(descriptor)
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not stat.S_ISDIR(facts.st_mode):
            raise DiskError(path, error) from error
        if facts.st_dev not in _unsynced:
            lost = "a power cut may undo what was just saved"
            logger.warning("%s: this file system cannot sync folders: %s", path, lost)
        _unsynced.add(facts.st_dev)
    finally:
        os.close(descriptor)


def _write_whole(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    while written < len(data):  # a nearly full disk, or more than 2 GiB
        written += os.write(descriptor, memoryview(data)[written:])


def _free(path: Path) -> str:
    try:
        disk = os.statvfs(path.parent)
        if disk.f_files and not disk.f_favail:
            return "there are too many files: no inode is free there"
        return f"{disk.f_bavail * disk.f_frsize:,} bytes are free there"
    except OSError:
        return "the folder cannot be read"
