"""File systems that cannot do what a record needs: a sentence, or a note and less safety."""

import errno
import fcntl
import os
import stat

import pytest

from lowprec.config.check import RunError
from lowprec.runs import durable
from lowprec.runs.record import Record
from lowprec.sweep.plan import is_locked, take_lock


def failing(number, call=None, when=lambda *_: True):
    """A system call that fails with an error, or else does what `call` does."""

    def fail(*arguments):
        if when(*arguments):
            raise OSError(number, os.strerror(number))
        return call(*arguments)

    return fail


def test_a_folder_that_cannot_be_synced_is_noted_once(tmp_path, monkeypatch, caplog):
    is_folder = lambda descriptor: stat.S_ISDIR(os.fstat(descriptor).st_mode)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EINVAL, os.fsync, is_folder))
        durable.write(tmp_path / "a", b"a")
        for _ in range(2):
            durable.sync(tmp_path)
    assert caplog.text.count(f"{tmp_path}: this file system cannot sync folders") == 1
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    for path in (tmp_path, tmp_path / "a"):
        with pytest.raises(durable.DiskError, match=f"{path} cannot be written: Input/output"):
            durable.sync(path)


def test_a_file_that_cannot_be_replaced_is_named_and_stays(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    durable.replace(path, b"old")
    monkeypatch.setattr(os, "replace", failing(errno.EPERM))
    with pytest.raises(durable.DiskError, match=r"status\.json cannot be written: Operation not"):
        durable.replace(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["status.json"]


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    fault = r"lock cannot be locked \(No locks available\): .*file system with locks"
    with pytest.raises(RunError, match=fault), durable.locked(tmp_path / ".lock"):
        pass
    with pytest.raises(RunError, match=fault):
        Record(tmp_path)
    with pytest.raises(RunError, match=fault):
        take_lock(tmp_path / "0.lock")


@pytest.mark.timeout(10)
def test_a_pipe_in_the_place_of_a_lock_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with durable.locked(tmp_path / ".lock"):
        pass
    assert not is_locked(tmp_path / ".lock")
    with pytest.raises(RunError, match=r"\.lock is not a regular file"):
        Record(tmp_path)
