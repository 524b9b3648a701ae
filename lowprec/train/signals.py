"""SIGTERM, SIGUSR2 and the first Ctrl-C request a run to stop at the next step boundary."""

import contextlib
import os
import signal
from collections.abc import Iterator

from lowprec.runs.attempts import STOPPING


class StopWaiting(BaseException):
    """A stop was requested while the run waited for data."""


class StopRequest:
    """`number`: the signal that requested the stop, or None."""

    number: int | None = None
    _interrupts = False

    @contextlib.contextmanager
    def waiting(self, interruptible: bool = True) -> Iterator[None]:
        """Raises StopWaiting in this context as soon as a stop is requested."""
        self._interrupts = interruptible
        try:
            self.check()
            yield
        finally:
            self._interrupts = False

    def check(self) -> None:
        """Raises StopWaiting if a stop was requested and the run waits."""
        if self._interrupts and self.number is not None:
            raise StopWaiting


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Catches the stopping signals while the context is open.

    A second Ctrl-C interrupts at once. Forked processes keep the default behavior.
    """
    request, owner = StopRequest(), os.getpid()

    def handle(number: int, frame: object) -> None:
        if os.getpid() != owner:  # a forked worker, which leaves Ctrl-C to its parent
            if number != signal.SIGINT:
                os._exit(128 + number)
        elif number == signal.SIGINT and request.number is not None:
            raise KeyboardInterrupt("second Ctrl-C: not saved")
        elif request.number is None:
            request.number = number
            name = signal.Signals(number).name
            again = "; Ctrl-C again stops without saving" if number == signal.SIGINT else ""
            os.write(2, f"\n{name}: saving and stopping after this step{again}\n".encode())
            request.check()

    try:
        previous = {number: signal.signal(number, handle) for number in STOPPING}
    except ValueError:  # not the main thread
        previous = {}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
