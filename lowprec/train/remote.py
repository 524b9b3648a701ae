"""A copy of the run directory behind an fsspec URL, updated by a thread during training.

The run directory is the source of truth: a failing store prints a warning and records an event,
but never ends the run. A checkpoint's manifest is copied last, so an incomplete copy has none. The
copy loses only retired checkpoints and what this process has copied; other files there stay.
"""

import contextlib
import re
import threading
import time

import fsspec

from lowprec.runs.record import Record, RecordError

END_S = 600  # how long a run that has ended waits for its copy
STOPPED_S = 30  # how long one that will be resumed waits: the next attempt copies the rest
OF_CHECKPOINT = re.compile(r"checkpoints/step_(\d+)/")


class RemoteCopy:
    """Copies what has changed in a run to `<url>/<study>/<run>`; nothing if the URL is None."""

    def __init__(self, url: str | None, record: Record):
        self.record, self.run = record, record.run
        self.url = url and "/".join([url.rstrip("/"), *self.run.parts[-2:]])
        self._copied: dict[str, tuple[int, int]] = {}  # file: bytes, time of its last change
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
        self._closed = True  # from now on another process may write the record and the copy

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
        remote = {
            name[name.index(root) + len(root) :].lstrip("/"): facts["size"]
            for name, facts in store.find(root, detail=True).items()
        }
        local = set()
        for path in sorted(self.run.rglob("*"), key=lambda path: path.name == "manifest.json"):
            if self._closed:
                return
            name = path.relative_to(self.run).as_posix()
            if path.is_dir() or name.startswith(".") or "/." in name:
                continue
            try:
                facts = path.stat()
                version = (facts.st_size, facts.st_mtime_ns)
                is_saved = name.startswith("checkpoints/") and remote.get(name) == facts.st_size
                if self._copied.get(name) != version and not is_saved:  # checkpoints never change
                    store.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
                    store.put_file(str(path), f"{root}/{name}")
            except FileNotFoundError:
                if path.exists():  # the store's error: otherwise the checkpoint was just retired
                    raise
                continue
            self._copied[name] = version
            local.add(name)
        saved = {_step_of(name) for name in local if "manifest" in name} - {-1}
        gone = set(remote) - local if saved else set()  # on a new machine the copy keeps its own
        for name in sorted(gone, key=lambda name: "manifest" not in name):
            is_retired = -1 < _step_of(name) < min(saved)
            if (is_retired or name in self._copied) and not self._closed:
                store.rm_file(f"{root}/{name}")


def _step_of(name: str) -> int:
    """The step of the checkpoint that a file belongs to, -1 for other files."""
    match = OF_CHECKPOINT.match(name)
    return int(match[1]) if match else -1
