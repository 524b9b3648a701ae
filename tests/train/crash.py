"""An attempt of a run that leaves what a crash at each point would leave; a job of `ranks.py`.

A point is a call that changes what is on disk in the run directory. `<point>.before` is what a kill
before it leaves, `<point>.half` a kill in the middle of a write, and `<point>.cut` a power cut,
which also takes away what was not synced: bytes of files since their last fsync, and renames of
directories whose parent was not synced since.
"""

import json
import os
import shutil
import stat
import threading
from pathlib import Path

from experiments import train as entry
from lowprec.config.check import check
from lowprec.train import run as running
from lowprec.train.checkpoint import Saver

CHANGES = ("write", "fsync", "truncate", "ftruncate", "rename", "replace", "mkdir", "unlink")
CHANGES += ("rmdir",)
SYNCS = ("fsync", "rename", "replace", "truncate")  # before which a power cut is tried
ORIGINAL = {name: getattr(os, name) for name in CHANGES}
ORIGINAL["fsync"] = lambda target: None  # only a real power cut could tell, and it takes 3 ms


class Disk:
    """The os module's writing calls, counted."""

    def __init__(self, root: str, log: str, snapshots: str | None):
        self.root, self.snapshots = root, snapshots
        self.log_file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.points: list[str] = []
        self.lock = threading.Lock()  # a checkpoint's files are written side by side
        self.synced: dict[int, int] = {}  # inode: bytes that a power cut leaves
        self.renames: list[tuple[str, str]] = []
        self.committed = None
        for path in Path(root).rglob("*"):
            if path.is_file():
                self.synced[path.stat().st_ino] = path.stat().st_size
        for name in CHANGES:
            setattr(os, name, self._wrap(name))

    def note(self, **facts: object) -> None:
        """Tells the tests something, whatever happens next."""
        row = {"point": len(self.points), **facts}
        ORIGINAL["write"](self.log_file, (json.dumps(row) + "\n").encode())

    def _wrap(self, name: str):
        def call(target, *rest, **options):
            path = self._path(target, options.get("dir_fd"))
            if path is None:
                return ORIGINAL[name](target, *rest, **options)
            with self.lock:
                if name != "fsync":  # a kill here leaves what a kill at the next point leaves
                    self._leave("before")
                if name in SYNCS:
                    self._leave("cut")
                written = 0
                if name == "write":
                    data = bytes(rest[0])
                    written = ORIGINAL["write"](target, data[: len(data) // 2])
                    self._leave("half")
                    rest = (data[written:],)
                self.points.append(f"{name} {path[len(self.root) + 1 :]}")
                result = ORIGINAL[name](target, *rest, **options)
                self._remember(name, path, target, rest)
                return result + written if name == "write" else result

        return call

    def _leave(self, kind: str) -> None:
        """Copies the run directory as a crash would leave it now."""
        if self.snapshots is None or not os.path.exists(self.root):
            return
        copy = f"{self.snapshots}/{len(self.points):04d}.{kind}"
        shutil.copytree(self.root, copy)
        if kind == "cut":
            for path in Path(copy).rglob("*"):  # another thread may have created a file since
                if path.is_file():
                    inode = os.stat(self.root + str(path).removeprefix(copy)).st_ino
                    ORIGINAL["truncate"](path, min(path.stat().st_size, self.synced.get(inode, 0)))
            for pair in reversed(self.renames):
                before, after = (copy + path.removeprefix(self.root) for path in pair)
                if os.path.exists(after):
                    ORIGINAL["rename"](after, before)

    def _path(self, target: object, folder: int | None) -> str | None:
        """The path that a call changes, if it lies in the run directory."""
        if isinstance(target, int):
            path = os.readlink(f"/proc/self/fd/{target}")
        elif folder is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(target))
        else:
            path = os.path.abspath(target)
        return path if path.startswith(self.root + "/") or path == self.root else None

    def _remember(self, name: str, path: str, target: object, rest: tuple) -> None:
        if name == "fsync":
            facts = os.fstat(target)
            if stat.S_ISDIR(facts.st_mode):
                self.renames = [pair for pair in self.renames if os.path.dirname(pair[1]) != path]
                if self.committed is not None and not self.renames:
                    self.note(durable=self.committed)
            else:
                self.synced[facts.st_ino] = facts.st_size
        elif name == "rename":
            final = os.path.abspath(rest[0])
            self.renames.append((path, final))
            if os.path.basename(final).startswith("step_"):
                self.committed = int(final[-9:])
                self.note(committed=self.committed)


def attempt(folder: Path, rank: int, size: int, *, config: dict, snapshots: str | None) -> None:
    """One attempt of a run, as `python -m experiments.train` makes it.

    Copies of the run directory as a crash at each point leaves it go to the folder `snapshots`.
    """
    disk = Disk(config["run_dir"], f"{folder}/notes.jsonl", snapshots)
    restore = Saver.restore

    def noted_restore(saver):
        step = restore(saver)
        disk.note(restored=step)
        return step

    Saver.restore = noted_restore
    running.environment = lambda: {"threads": 1}
    try:
        entry.main(check(config))
    finally:
        disk.note(points=disk.points)
