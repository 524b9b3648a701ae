"""A copy of a run directory behind an fsspec URL, brought up to date while training goes on.

The run directory is the truth. A failure is a line on the console and an event, never the end of a
run. A checkpoint's manifest is copied after its files and removed before them, so that a copy
without one is no checkpoint. What has been copied is noted in the run directory (`.copied.json`): a
store's own times are of another clock, or are missing, so that they could not tell what is new.
"""

import contextlib
import json
import threading

import fsspec

from lowprec.runs import durable
from lowprec.runs.record import Record

END_S = 600  # a run that has ended waits so long for its copy
STOPPED_S = 30  # and one that is to go on: what is missing is copied by the next attempt


class NoCopy:
    """Copies nothing."""

    def start(self) -> None:
        """Asks for the copy to be brought up to date; returns at once."""

    def close(self, said: str = "") -> None:
        """Brings the copy up to date and waits for it, END_S at most.

        `said`: why the run is to go on later; it is printed first, and STOPPED_S are enough.
        """


class RemoteCopy(NoCopy):
    """Copies what has changed of a run to `<url>/<study>/<run>`, in a thread of its own."""

    def __init__(self, url: str, record: Record):
        self.record, self.run = record, record.run
        self.url = "/".join([url.rstrip("/"), *self.run.parts[-2:]])
        self._noted = self.run / ".copied.json"
        self._copied: dict[str, list[int]] = {}  # file: bytes, time of its last change
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            noted = json.loads(self._noted.read_text())
            self._copied = noted["files"] if noted["to"] == self.url else {}
        self._wanted, self._ending = threading.Event(), threading.Event()
        self._left = False  # nobody waits any more, and the record may be another's
        self._thread = threading.Thread(target=self._work, daemon=True, name="remote copy")
        self._thread.start()

    def start(self) -> None:
        """Asks for the copy to be brought up to date; returns at once."""
        self._wanted.set()

    def close(self, said: str = "") -> None:
        """See NoCopy."""
        limit_s = STOPPED_S if said else END_S
        if said:
            print(f"{said}; its copy gets {limit_s} s", flush=True)
        self._ending.set()
        self._wanted.set()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._fail(f"not done in {limit_s} s")
            self._left = True

    def _work(self) -> None:
        last = False
        while not last:
            self._wanted.wait()
            self._wanted.clear()
            last = self._ending.is_set()  # before copying: what is asked for at the end is copied
            try:
                self._copy()
            except Exception as error:  # of whatever store and network
                self._fail(f"{type(error).__name__}: {error}"[:500])

    def _fail(self, reason: str) -> None:
        if self._left:
            return
        print(f"warning: {self.url} is not up to date: {reason}")
        with contextlib.suppress(OSError):  # a full disk ends a run, but not here
            self.record.append("events", [{"not copied": reason, "to": self.url}])

    def _copy(self) -> None:
        store, root = fsspec.core.url_to_fs(self.url)
        names = set()
        for path in sorted(self.run.rglob("*"), key=lambda path: (_is_manifest(path.name), path)):
            parts = path.relative_to(self.run).parts
            if self._left or path.is_dir() or any(part.startswith(".") for part in parts):
                continue
            name = "/".join(parts)
            try:
                facts = path.stat()
                version = [facts.st_size, facts.st_mtime_ns]
                if self._copied.get(name) != version:
                    store.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
                    store.put_file(str(path), f"{root}/{name}")
                    self._copied[name] = version
                    self._note()
                names.add(name)
            except FileNotFoundError:
                if path.exists():  # no: a checkpoint that has been retired meanwhile
                    raise
        gone = set(self._copied) - names if not self._left else set()
        for name in sorted(gone, key=lambda name: (not _is_manifest(name), name)):
            with contextlib.suppress(FileNotFoundError):
                store.rm_file(f"{root}/{name}")
            del self._copied[name]
            self._note()

    def _note(self) -> None:
        """Keeps for the next attempt what is in the copy."""
        text = json.dumps({"to": self.url, "files": self._copied})
        with contextlib.suppress(OSError):  # then the next attempt copies more than it must
            durable.replace(self._noted, text.encode())


def _is_manifest(name: str) -> bool:
    return name.endswith("manifest.json")


def remote_copy(url: str | None, record: Record) -> NoCopy:
    """The copy of a config's `remote_sync`."""
    return NoCopy() if url is None else RemoteCopy(url, record)
