"""A copy of the run directory behind an fsspec URL, updated by a thread during training.

The run directory is the source of truth: a failing store prints a warning and records an event,
but never ends the run. A checkpoint's manifest is copied after its other files and removed before
them, so an incomplete checkpoint in the copy has none.
"""

import contextlib
import threading

import fsspec

from lowprec.runs.record import Record

END_S = 600  # how long a run that has ended waits for its copy
STOPPED_S = 30  # how long one that will be resumed waits: the next attempt copies the rest


class NoCopy:
    """Copies nothing."""

    def start(self) -> None:
        """Requests an update of the copy; returns at once."""

    def close(self, stopped: str = "") -> None:
        """Updates the copy and waits for it, at most END_S.

        `stopped`: why the run ends early; it is printed first, and the wait is at most STOPPED_S.
        """


class RemoteCopy(NoCopy):
    """Copies what has changed in a run to `<url>/<study>/<run>`."""

    def __init__(self, url: str, record: Record):
        self.record, self.run = record, record.run
        self.url = "/".join([url.rstrip("/"), *self.run.parts[-2:]])
        self._copied: dict[str, tuple[int, int]] = {}  # file: bytes, time of its last change
        self._requested, self._closing = threading.Event(), threading.Event()
        self._abandoned = False  # nobody waits any more, and another process may hold the record
        self._thread = threading.Thread(target=self._work, daemon=True, name="remote copy")
        self._thread.start()

    def start(self) -> None:
        """See NoCopy."""
        self._requested.set()

    def close(self, stopped: str = "") -> None:
        """See NoCopy."""
        limit_s = STOPPED_S if stopped else END_S
        if stopped:
            print(f"{stopped}; waiting up to {limit_s} s for its remote copy", flush=True)
        self._closing.set()
        self._requested.set()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._fail(f"not done in {limit_s} s")
            self._abandoned = True

    def _work(self) -> None:
        is_last = False
        while not is_last:
            self._requested.wait()
            self._requested.clear()
            is_last = self._closing.is_set()  # read before copying: the last copy is complete
            try:
                self._copy()
            except Exception as error:  # of any store and network
                self._fail(f"{type(error).__name__}: {error}"[:500])

    def _fail(self, reason: str) -> None:
        if self._abandoned:
            return
        print(f"warning: {self.url} is not up to date: {reason}")
        with contextlib.suppress(OSError):  # a full disk ends the run elsewhere
            self.record.append("events", [{"not copied": reason, "to": self.url}])

    def _copy(self) -> None:
        store, root = fsspec.core.url_to_fs(self.url)
        root = root.rstrip("/")
        there = {name[name.index(root) + len(root) + 1 :]: facts["size"]
                 for name, facts in store.find(root, detail=True).items()}  # fmt: skip
        names = set()
        for path in sorted(self.run.rglob("*"), key=lambda path: (_is_manifest(path.name), path)):
            parts = path.relative_to(self.run).parts
            if self._abandoned or path.is_dir() or any(part.startswith(".") for part in parts):
                continue
            name = "/".join(parts)
            try:
                facts = path.stat()
                version = (facts.st_size, facts.st_mtime_ns)
                is_there = parts[0] == "checkpoints" and there.get(name) == facts.st_size
                if self._copied.get(name) != version and not is_there:  # checkpoints never change
                    store.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
                    store.put_file(str(path), f"{root}/{name}")
                self._copied[name] = version
                names.add(name)
            except FileNotFoundError:
                if path.exists():  # the store's error: otherwise the checkpoint was just retired
                    raise
        kept = {parts[1] for name in names if (parts := name.split("/"))[0] == "checkpoints"}
        oldest = min(kept, default="")
        retired = {
            name
            for name in there
            if (parts := name.split("/"))[0] == "checkpoints" and parts[1] < oldest
        }  # without a checkpoint here, as on a new machine, those of the copy stay
        gone = set() if self._abandoned else (set(self._copied) - names) | retired
        for name in sorted(gone, key=lambda name: (not _is_manifest(name), name)):
            with contextlib.suppress(FileNotFoundError):
                store.rm_file(f"{root}/{name}")
            self._copied.pop(name, None)


def _is_manifest(name: str) -> bool:
    return name.endswith("manifest.json")


def remote_copy(url: str | None, record: Record) -> NoCopy:
    """The copy that a config's `remote_sync` asks for."""
    return NoCopy() if url is None else RemoteCopy(url, record)
