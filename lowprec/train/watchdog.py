"""Watchdog: ends a run in which a rank fails or makes no progress, and leaves the threads' stacks.

Each rank watches its own training. If it makes no progress for `timeout_s`, or loses a peer, the
rank writes where it stands and its stacks to `rank_<rank>.txt` in a folder that all ranks see. A
rank that finds another's file there writes its own. All exit with status LOST; rank 0 records where
each stood, the furthest behind first, and which wrote nothing: these were killed or stopped.
"""

import contextlib
import faulthandler
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lowprec.runs.attempts import LOST
from lowprec.train.distributed import Ranks

TICK_S = 0.5
WAIT_S = 5.0  # for the files of other ranks
SLOW_WORK = ("starting", "evaluating", "saving", "ending")  # reports no progress while it lasts
SLOW_WORK_S = 3600.0  # and may take this long


class Watchdog:
    """The watching thread of one rank. `stacks`: the folder for stacks, new for each attempt.

    Rank 0 calls `on_end(reason)` before its process ends.
    """

    def __init__(
        self,
        world: Ranks,
        timeout_s: float,
        stacks: Path,
        on_end: Callable[[str], None] = lambda reason: None,
    ):
        self.rank, self.size, self.timeout_s = world.rank, world.size, timeout_s
        self.stacks, self.on_end = stacks, on_end
        self.num_reports, self.step = 0, 0
        self.heartbeat(0, "starting")
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def heartbeat(self, step: int | None, doing: str) -> None:
        """Reports progress of the training; step None: the step is still the same."""
        self.num_reports += 1
        self.step = self.step if step is None else step
        self.doing, self.moved = doing, time.monotonic()

    def close(self, reason: str = "") -> None:
        """Stops watching. A reason means that this rank has failed, which ends the others too."""
        if not self.closing.is_set():
            self.closing.set()
            self.thread.join(2)
            if reason:
                self._leave(f"failed: {reason}")

    def end(self, reason: str) -> None:
        """Leaves the stacks and ends this process, whatever it is doing."""
        try:
            self.closing.set()
            text = self._head(reason)
            _print(f"{text}; stacks: {self.stacks}")  # before the disk, which may hang or fail
            self._leave(reason)
            if self.size > 1:
                deadline = time.monotonic() + WAIT_S
                while self._num_files() < self.size and time.monotonic() < deadline:
                    time.sleep(TICK_S)
                _print(text := self._summary(text))
            if self.rank == 0:
                self.on_end(text)
        finally:
            os._exit(LOST)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self.closing.wait(TICK_S):
            now = time.monotonic()
            if now - last > 10 * TICK_S:  # this process was stopped meanwhile
                self.moved = now
            last = now
            slow = self.doing in SLOW_WORK
            limit = max(self.timeout_s, SLOW_WORK_S) if slow else self.timeout_s
            if now - self.moved > limit:
                self.end(f"no progress for {limit:g} s")
            elif self.size > 1 and self._num_files():
                self.end("another rank has ended")

    def _num_files(self) -> int:
        with contextlib.suppress(OSError):
            return len(list(self.stacks.glob("rank_*")))
        return 0

    def _head(self, reason: str) -> str:
        """One line: where this rank stands and why it ends."""
        where = f"process {os.getpid()} on {os.uname().nodename}, report {self.num_reports}"
        reason = " ".join(reason.split())
        return f"rank {self.rank} ({where}) at step {self.step}, {self.doing}: {reason}"

    def _leave(self, reason: str) -> None:
        """Writes where this rank stands, why it ends, and its stacks; the name comes last."""
        target = self.stacks / f"rank_{self.rank}.txt"
        with contextlib.suppress(OSError):
            for folder in (self.stacks.parent, self.stacks):  # not the run's: it may be gone
                folder.mkdir(exist_ok=True)
            with open(target.with_name(f".{target.name}"), "w") as file:
                file.write(self._head(reason) + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            os.replace(file.name, target)

    def _summary(self, own: str) -> str:
        """Where the ranks stood, the furthest behind first, after those that wrote nothing."""
        heads = {self.rank: own}
        for rank in {*range(self.size)} - {self.rank}:
            with contextlib.suppress(OSError):  # opened by name: NFS may list what was a minute ago
                text = (self.stacks / f"rank_{rank}.txt").read_text(errors="replace")
                heads[rank] = text.partition("\n")[0]
        silent = ", ".join(f"rank {rank}" for rank in range(self.size) if rank not in heads)
        late = [f"{silent} had not reported within {WAIT_S:g} s"] * bool(silent)
        return "; ".join(late + sorted(heads.values(), key=_num_reports))


def _num_reports(head: str) -> int:
    found = re.search(r", report (\d+)\) at step ", head)
    return int(found[1]) if found else 0


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a broken pipe, or a closed file
        print(text, file=sys.stderr, flush=True)
