"""Sees that a rank has died or stands still, says which, leaves every stack, and ends the rest.

Every rank holds a connection to rank 0, and a thread says each second how far its training has
come. The kernel closes the connection of a process that dies, however it dies, so that the others
know within a second or two. A rank that has not come further for `timeout_s` is named with its
step; its own stacks are there too unless the whole process is stopped. One process alone is
watched in the same way.

Ranks that all stand at the same point are in a collective, or one of them hangs there: from how far
they have come nobody can tell which, so that none is named, and their stacks are left.
"""

import contextlib
import faulthandler
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

LOST = 76  # exit status of a process that was ended because a rank died or stood still
TICK_S = 0.5
MEET_S = 60  # for the others to connect
SILENT_S = 4 * TICK_S
WORK = ("starting", "saving", "ending")  # of the host, which says nothing before it is done
WORK_S = 3600.0  # that it may take
DUMP_S = 1.0  # what the others get to write their stacks before rank 0 ends


@dataclass
class Seen:
    """What is known of a rank: how often and where it was last seen at work, and when it moved."""

    name: str
    beats: int = 0
    step: int = 0
    doing: str = "starting"
    moved: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    left: bool = False
    unread: bytes = b""

    def note(self, beats: int, step: int, doing: str) -> None:
        """Takes a report."""
        self.heard = time.monotonic()
        if beats != self.beats:
            self.moved = self.heard
        self.beats, self.step, self.doing = beats, step, doing

    def may_take(self, timeout_s: float) -> float:
        """Seconds without a sign of life that are no standstill yet."""
        return max(timeout_s, WORK_S) if self.doing in WORK else timeout_s

    @property
    def where(self) -> str:
        """The point that the rank has come to."""
        return f"at step {self.step}, {self.doing}"

    def __str__(self) -> str:
        return f"{self.name} {self.where}"


class Watch:
    """The thread that watches. `stacks`: the folder for stacks; `on_end(reason)` is rank 0's.

    `meet(address)` gives every rank the address that rank 0 came with. What comes before the
    first `beat` (reading data, building) says nothing of itself and may take WORK_S, as saving may.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_s: float,
        stacks: Path,
        *,
        meet: Callable[[dict | None], dict],
        on_end: Callable[[str], None] = lambda reason: None,
    ):
        self.rank, self.size, self.timeout_s, self.on_end = rank, size, timeout_s, on_end
        self.own = Seen(f"rank {rank} (process {os.getpid()} on {os.uname().nodename})")
        self.seen: dict[socket.socket, Seen] = {}
        self.selector = selectors.DefaultSelector()
        self.closing = threading.Event()
        self.waker, self.woken = socket.socketpair()  # ends the thread's wait for news
        self.selector.register(self.woken, selectors.EVENT_READ)
        self.stacks = stacks
        if size > 1:
            self._connect(meet)
        self.thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self.thread.start()

    def beat(self, step: int | None, doing: str) -> None:
        """Says that this process has come to a point of its training; step None: as before."""
        self.own.note(self.own.beats + 1, self.own.step if step is None else step, doing)

    def close(self, reason: str = "") -> None:
        """Says goodbye; with a reason, which ends the others too: this rank has failed."""
        if self.closing.is_set():
            return
        self.closing.set()
        kind = "end" if self.rank == 0 and reason else "bye"
        text = f"{self.own} failed: {reason}" if reason else ""
        self._tell({kind: text})
        self.waker.send(b".")
        self.thread.join(2)
        faulthandler.cancel_dump_traceback_later()
        for end in (*self.seen, self.waker, self.woken):
            end.close()

    def _connect(self, meet: Callable[[dict | None], dict]) -> None:
        if self.rank == 0:
            host = os.environ["MASTER_ADDR"]
            with socket.create_server(("", 0), backlog=self.size) as listener:
                listener.settimeout(MEET_S)
                key = os.urandom(16).hex()
                meet({"host": host, "port": listener.getsockname()[1], "key": key})
                while len(self.seen) < self.size - 1:
                    peer, _ = listener.accept()
                    peer.settimeout(MEET_S)
                    with contextlib.suppress(OSError, ValueError):  # anybody may knock
                        key_given, name = json.loads(_read_line(peer))
                        if key_given == key:
                            self.seen[peer] = Seen(name)
        else:
            there = meet(None)
            server = socket.create_connection((there["host"], there["port"]))
            self.seen[server] = Seen("rank 0")
            server.sendall(json.dumps([there["key"], self.own.name]).encode() + b"\n")
        for peer in self.seen:
            os.register_at_fork(after_in_child=peer.close)  # a worker must not outlive as this rank
            self.selector.register(peer, selectors.EVENT_READ)

    def _tell(self, message: dict) -> None:
        for peer, seen in self.seen.items():
            if not seen.left:
                with contextlib.suppress(OSError):  # its end is noticed where it is read
                    peer.sendall(json.dumps(message).encode() + b"\n")

    def _run(self) -> None:
        last = time.monotonic()
        while not self.closing.is_set():
            for event, _ in self.selector.select(TICK_S):
                if event.fileobj is not self.woken:
                    self._read(event.fileobj)
            now = time.monotonic()
            if now - last > SILENT_S:  # this process was stopped: none stood still
                for seen in (self.own, *self.seen.values()):
                    seen.moved = seen.heard = now
            if now - last >= TICK_S:
                last = now
                own = self.own
                self._tell({"at": [own.name, own.beats, own.step, own.doing]})
                if sys.__stderr__:  # also where Python itself is held up
                    late = own.may_take(self.timeout_s) + 2 * TICK_S
                    faulthandler.dump_traceback_later(late, file=sys.__stderr__)
                self._find_still(now)

    def _read(self, peer: socket.socket) -> None:
        seen = self.seen[peer]
        try:
            data = peer.recv(65536)
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(peer)
            if not seen.left and not self.closing.is_set():
                self._end(f"{seen}, is gone")
            seen.left = True
            return
        *lines, seen.unread = (seen.unread + data).split(b"\n")
        for message in map(json.loads, lines):
            if "at" in message:
                seen.name, *report = message["at"]
                seen.note(*report)
            elif "end" in message or message.get("bye"):
                self._end(message.get("end") or message["bye"])
            elif "bye" in message:
                seen.left = True

    def _find_still(self, now: float) -> None:
        """Ends all when a rank has not moved for too long.

        Named is the one that reports no more (its whole process is stopped), else the one furthest
        behind, unless all stand at the same point.
        """
        known = [self.own, *(seen for seen in self.seen.values() if not seen.left)]
        still = [s for s in known if now - s.moved >= s.may_take(self.timeout_s)]
        if not still:
            return
        if self.rank:  # rank 0 knows all and speaks first, unless it is the one that is stopped
            known = [seen for seen in known if seen is not self.own]
            if not known or now - known[0].moved < known[0].may_take(self.timeout_s) + 2:
                return
        silent = [s for s in known if s is not self.own and now - s.heard > SILENT_S]
        least = min(seen.beats for seen in known)
        if silent:
            what = "reports no more: " + "; ".join(map(str, silent))
        elif len(known) > 1 and len({seen.where for seen in known}) == 1:
            what = f"all stand {self.own.where} (in a collective, or one of them hangs there); "
            what += "stacks tell which"
        else:
            what = "furthest behind: " + "; ".join(str(s) for s in known if s.beats == least)
        waited = min(seen.may_take(self.timeout_s) for seen in still)
        self._end(f"nothing has moved for {waited:g} s; {what}")

    def _end(self, reason: str) -> None:
        """Tells the others, leaves the stacks and ends this process, whatever it is doing."""
        if self.closing.is_set():  # it is about to end, and says why
            return
        if self.rank == 0:
            self._tell({"end": reason})
        faulthandler.cancel_dump_traceback_later()
        print(f"{reason}; stacks: {self.stacks}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            self.stacks.mkdir(exist_ok=True)
            with open(self.stacks / f"rank_{self.rank}.txt", "w") as file:
                file.write(f"{reason}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                os.fsync(file.fileno())
        if self.rank == 0:
            with contextlib.suppress(Exception):
                self.on_end(reason)
            time.sleep(DUMP_S if self.seen else 0)
        os._exit(LOST)


def _read_line(peer: socket.socket) -> bytes:
    """One line and not a byte more: what follows is read by the thread."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 1000 and (byte := peer.recv(1)):
        line += byte
    return line
