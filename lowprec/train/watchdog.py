"""Watchdog: ends a process that makes no progress, and leaves the stacks of its threads."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lowprec.runs.attempts import LOST

TICK_S = 0.5
SLOW_WORK = ("starting", "evaluating", "saving", "ending")  # reports no progress while it lasts
SLOW_WORK_S = 3600.0  # and may take this long


class Watchdog:
    """The watching thread of one rank, which ends the process after `timeout_s` without progress.

    `stacks`: the folder for stacks, new for each attempt. `on_end(reason)` is called last, after
    the stacks are written.
    """

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        stacks: Path,
        on_end: Callable[[str], None] = lambda reason: None,
    ):
        self.rank, self.timeout_s, self.stacks, self.on_end = rank, timeout_s, stacks, on_end
        self.step = 0
        self.heartbeat(0, "starting")
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def heartbeat(self, step: int | None, doing: str) -> None:
        """Reports progress of the training; step None: the step is still the same."""
        self.step = self.step if step is None else step
        self.doing, self.moved = doing, time.monotonic()

    def close(self) -> None:
        """Stops watching."""
        self.closing.set()
        self.thread.join(2)

    def end(self, reason: str) -> None:
        """Leaves the stacks in `rank_<rank>.txt` and ends this process, whatever it is doing."""
        try:
            self.closing.set()
            text = f"rank {self.rank} at step {self.step}, {self.doing}: {' '.join(reason.split())}"
            with contextlib.suppress(OSError, ValueError):  # the disk may hang: this first
                print(f"{text}; stacks: {self.stacks}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                for folder in (self.stacks.parent, self.stacks):  # not the run's: it may be gone
                    folder.mkdir(exist_ok=True)
                with open(self.stacks / f"rank_{self.rank}.txt", "w") as file:
                    file.write(text + "\n")
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
            self.on_end(text)
        finally:
            os._exit(LOST)

    def _watch(self) -> None:
        woke = time.monotonic()
        while not self.closing.wait(TICK_S):
            slept, woke = time.monotonic() - woke, time.monotonic()
            if slept > 8 * TICK_S:  # the whole process was suspended
                self.moved += slept
            slow = self.doing in SLOW_WORK
            limit = max(self.timeout_s, SLOW_WORK_S) if slow else self.timeout_s
            if time.monotonic() - self.moved > limit:
                self.end(f"no progress for {limit:g} s")
