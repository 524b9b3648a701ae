"""A copy of the run directory behind an fsspec URL, updated by a thread during training.

The run directory is the source of truth: a failing store prints a warning and records an event,
but never ends the run. The copy loses only what the run has removed from its checkpoints and
snapshots up to its newest checkpoint. A manifest is copied last: it vouches for the other files.
"""

import contextlib
import os
import threading
import time
from pathlib import Path

import fsspec

from lowprec.runs.attempts import last_saved, step_of
from lowprec.runs.record import Record, RecordError

END_S = 600  # how long a run that has ended waits for its copy
STOPPED_S = 30  # how long one that will be resumed waits: the next attempt copies the rest


class RemoteCopy:
    """Copies what has changed in a run to `<url>/<study>/<run>`; nothing if the URL is None."""

    def __init__(self, url: str | None, record: Record):
        self.record, self.run = record, record.run
        self.url = url and "/".join([url.rstrip("/"), *self.run.parts[-2:]])
        self._copied: dict[Path, tuple[int, int]] = {}  # file: bytes, time of its last change
        self._closed = False
        self._update = threading.Thread()  # of nothing yet
        self._update.start()

    def start(self) -> None:
        """Starts an update unless one is running; returns at once."""
        if self.url and not self._update.is_alive():
            self._update = threading.Thread(target=self._work, daemon=True)
            self._update.start()

    def close(self, limit_s: float) -> None:
        """Updates the copy a last time; waits at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        self._update.join(limit_s)  # it may have missed the end of the record
        self.start()
        self._update.join(max(0, deadline - time.monotonic()))
        if self._update.is_alive():
            self._fail(f"not finished within {limit_s} s")
        self._closed = True  # from now on another process may write the record

    def _work(self) -> None:
        try:
            self._copy()
        except Exception as error:  # of any store and network
            self._fail(f"{type(error).__name__}: {error}"[:500])

    def _fail(self, reason: str) -> None:
        if not self._closed:
            print(f"warning: {self.url} is not up to date: {reason}")
            with contextlib.suppress(OSError, RecordError):  # they end the run elsewhere
                self.record.append("events", [{"not copied": reason, "to": self.url}])

    def _copy(self) -> None:
        store, root = fsspec.url_to_fs(self.url)
        files = [Path(folder, name) for folder, _, names in os.walk(self.run) for name in names]
        for path in sorted(files, key=_is_manifest):
            name = path.relative_to(self.run).as_posix()
            try:
                facts = path.stat()
                version = (facts.st_size, facts.st_mtime_ns)
                if "/." in f"/{name}" or self._copied.get(path) == version:
                    continue
                store.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
                store.put_file(str(path), f"{root}/{name}")
            except FileNotFoundError:
                if path.exists():  # the store's error: otherwise the checkpoint was just retired
                    raise
                continue
            self._copied[path] = version
        newest = last_saved(self.run)
        for kind in ("checkpoints", "snapshots"):
            if not (self.run / kind).exists():  # a new disk
                continue
            for folder in store.glob(f"{root}/{kind}/step_*"):
                own = self.run / kind / Path(folder).name
                gone = [f for f in store.glob(f"{folder}/*") if not (own / Path(f).name).exists()]
                if gone and step_of(own) <= newest:
                    store.rm(gone if own.exists() else folder, recursive=True)


def _is_manifest(file: Path) -> bool:
    return file.name == "manifest.json"
