"""Watchdog: ends a run in which a rank has died or hangs, names that rank, and leaves the stacks.

Every rank publishes heartbeats in a `TCPStore`, which rank 0 serves, and reads the others'. All
ranks end with exit status LOST, and leave their threads' stacks in `stacks/`, when a rank reports
that it failed, its heartbeats cease for SILENT_S (its process was killed or stopped), or its
training makes no progress for `timeout_s`. A single process is watched without the store.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lowprec.runs.attempts import LOST
from lowprec.train.distributed import Ranks

TICK_S = 0.5
SILENT_S = 12.0  # torchrun kills the other ranks 30 s after it has noticed a dead one
SLOW_WORK = ("starting", "evaluating", "saving", "ending")  # reports no progress while it lasts
SLOW_WORK_S = 3600.0  # and may take this long


@dataclass
class Heartbeat:
    """The latest report of one rank, and when (on this rank's clock) it last changed."""

    name: str
    beats: int = 0
    step: int = 0
    doing: str = "starting"
    ended: str = ""  # why it ends all ranks
    report: bytes = b""
    heard: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)

    def read(self, report: bytes) -> None:
        """Takes what the rank has published."""
        if report != self.report:
            self.report, self.heard, before = report, time.monotonic(), self.beats
            _, self.name, self.beats, self.step, self.doing, self.ended = json.loads(report)
            if self.beats != before:
                self.moved = self.heard

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}, {self.doing}"


class Watchdog:
    """The watching thread of one rank; all ranks of a run construct theirs together.

    `stacks`: the folder for stacks; rank 0 calls `on_end(reason)` before its process ends.
    """

    def __init__(
        self,
        world: Ranks,
        timeout_s: float,
        stacks: Path,
        on_end: Callable[[str], None] = lambda reason: None,
    ):
        self.rank, self.timeout_s, self.stacks, self.on_end = world.rank, timeout_s, stacks, on_end
        self.ranks = [Heartbeat(f"rank {rank}") for rank in range(world.size)]
        self.own = self.ranks[self.rank]
        self.own.name += f" (process {os.getpid()} on {os.uname().nodename})"
        self.closing = threading.Event()
        self.store = _meet(world) if world.size > 1 else None
        self.ticks = 0
        world.each(self._publish)
        loops = [self._watch] + [self._exchange] * (self.store is not None)
        self.threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
        for thread in self.threads:
            thread.start()

    def heartbeat(self, step: int | None, doing: str) -> None:
        """Reports progress of the training; step None: the step is still the same."""
        self.own.beats += 1
        self.own.step = self.own.step if step is None else step
        self.own.doing, self.own.moved = doing, time.monotonic()

    def close(self, reason: str = "") -> None:
        """Stops watching. A reason means that this rank has failed, which ends the others too."""
        if not self.closing.is_set():
            if reason:
                self.own.ended = f"{self.own} failed: {reason}"
            self.closing.set()
            for thread in self.threads:
                thread.join(2)
            self._let_others_read()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self.closing.wait(TICK_S):
            now = self.own.heard = time.monotonic()
            if now - last > SILENT_S / 2:  # this process was stopped meanwhile
                for rank in self.ranks:
                    rank.heard = rank.moved = now
            last = now
            if (fault := self._fault(now)) and not self.closing.is_set():
                self._end(fault)

    def _exchange(self) -> None:
        """Publishes and reads heartbeats; blocks while the process of rank 0 is stopped."""
        keys = [str(rank) for rank in range(len(self.ranks))]
        is_last = False
        while not is_last:
            is_last = self.closing.wait(TICK_S)
            with contextlib.suppress(RuntimeError):  # rank 0, which holds the store, is gone
                self._publish()
                for rank, report in zip(self.ranks, self.store.multi_get(keys), strict=True):
                    if rank is not self.own:
                        rank.read(report)

    def _publish(self) -> None:
        if self.store is not None:
            self.ticks += 1
            own = self.own
            report = [self.ticks, own.name, own.beats, own.step, own.doing, own.ended]
            self.store.set(str(self.rank), json.dumps(report))

    def _fault(self, now: float) -> str | None:
        """Why all ranks must end, or None."""
        for rank in self.ranks:
            if rank.ended and rank is not self.own:
                return rank.ended
        first = self.ranks[0]  # holds the store: the others' state is known up to its last report
        as_of = now if now - first.heard > SILENT_S else first.heard
        silent = [rank for rank in self.ranks if as_of - rank.heard > SILENT_S]
        if silent:
            lost = [first] if first in silent else silent
            return f"no heartbeats for {SILENT_S:g} s from {'; '.join(map(str, lost))}"
        for rank in self.ranks:
            slow = rank.doing in SLOW_WORK
            limit = max(self.timeout_s, SLOW_WORK_S) if slow else self.timeout_s
            if now - rank.moved > limit:
                behind = sorted(self.ranks, key=lambda rank: rank.beats)
                return f"no progress for {limit:g} s: {'; '.join(map(str, behind))}"
        return None

    def _end(self, reason: str) -> None:
        """Leaves the stacks and ends this process, whatever it is doing."""
        print(f"{reason}; stacks: {self.stacks}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            self.stacks.mkdir(exist_ok=True)
            with open(self.stacks / f"rank_{self.rank}.txt", "w") as file:
                file.write(f"{reason}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        if self.rank == 0:
            with contextlib.suppress(Exception):
                self.on_end(reason)
        self.own.ended = reason
        self._let_others_read()
        os._exit(LOST)

    def _let_others_read(self) -> None:
        """Waits until the other ranks have read why this one ends; the store ends with rank 0."""
        if self.own.ended and self.rank == 0 and self.store is not None:
            time.sleep(3 * TICK_S)


def _meet(world: Ranks) -> dist.TCPStore:
    """The heartbeats' store, which rank 0 serves at a free port."""
    host, wait = os.environ["MASTER_ADDR"], {"timeout": timedelta(seconds=60)}
    server = None
    if world.is_first:
        server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, **wait)
    port = world.first(lambda: server.port)
    store = server or dist.TCPStore(host, port, is_master=False, **wait)
    store.set_timeout(timedelta(seconds=2 * TICK_S))
    return store
