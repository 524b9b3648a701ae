"""Says what a command that takes long is doing."""

import sys
import threading
import time

SILENT_S = 10.0  # after which a command says what it is doing


class Waiting:
    """A thread that prints what is being done, every SILENT_S at first and later more rarely.

    `doing` may be changed at any time. Of several that are open, the newest one prints.
    """

    _opened: list["Waiting"] = []

    def __init__(self, doing: str):
        self.doing, self._ended = doing, threading.Event()
        self._opened.append(self)
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def _tell(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(max(SILENT_S, (time.monotonic() - began) / 20)):
            if self._opened[-1:] == [self]:
                seconds = time.monotonic() - began
                print(f"{self.doing} ({seconds:.0f} s)", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the thread."""
        if not self._ended.is_set():
            self._ended.set()
            self._opened.remove(self)
            self._thread.join(1)  # a process with threads should not fork


def doing(what: str | None) -> None:
    """Changes what the newest open `Waiting` prints, if there is one; None closes it."""
    for waiting in Waiting._opened[-1:]:
        if what is None:
            waiting.close()
        else:
            waiting.doing = what
