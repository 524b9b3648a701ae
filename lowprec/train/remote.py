"""A copy of a run directory behind an fsspec URL, brought up to date while training goes on.

The run directory is the truth. A failure is a line on the console and an event, never the end of a
run. A checkpoint's manifest is copied after its files, so that a copy without one is no checkpoint.
"""

import threading

import fsspec

from lowprec.record import Record

END_S = 600  # a run that ends waits so long for its copy


class NoCopy:
    """Copies nothing."""

    def start(self) -> None:
        """Asks for the copy to be brought up to date; returns at once."""

    def close(self) -> None:
        """Brings the copy up to date and waits for it."""


class RemoteCopy(NoCopy):
    """Copies what has changed of a run to `<url>/<study>/<run>`, in a thread of its own."""

    def __init__(self, url: str, record: Record):
        self.record, self.run = record, record.run
        self.url = "/".join([url.rstrip("/"), *self.run.parts[-2:]])
        self._copied: dict[str, tuple[int, int]] = {}  # file: bytes, time of its last change
        self._wanted, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="remote copy")
        self._thread.start()

    def start(self) -> None:
        """Asks for the copy to be brought up to date; returns at once."""
        self._wanted.set()

    def close(self) -> None:
        """Brings the copy up to date and waits for it, END_S at most."""
        self._ending.set()
        self._wanted.set()
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._fail(f"not done in {END_S} s")

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
        print(f"warning: {self.url} is not up to date: {reason}")
        self.record.append("events", [{"not copied": reason, "to": self.url}])

    def _copy(self) -> None:
        store, root = fsspec.core.url_to_fs(self.url)
        found = sorted(self.run.rglob("*"), key=lambda path: (path.name == "manifest.json", path))
        names = set()
        for path in found:
            parts = path.relative_to(self.run).parts
            if path.is_dir() or any(part.startswith(".") for part in parts):
                continue
            name = "/".join(parts)
            try:
                facts = path.stat()
                version = (facts.st_size, facts.st_mtime_ns)
                if self._copied.get(name) != version:
                    store.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
                    store.put_file(str(path), f"{root}/{name}")
                    self._copied[name] = version
                names.add(name)
            except FileNotFoundError:  # a checkpoint that has been retired meanwhile
                continue
        for name in set(self._copied) - names:
            store.rm_file(f"{root}/{name}")
            del self._copied[name]


def remote_copy(url: str | None, record: Record) -> NoCopy:
    """The copy of a config's `remote_sync`."""
    return NoCopy() if url is None else RemoteCopy(url, record)
