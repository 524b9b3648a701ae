"""Trains a run for the local launcher: its processes, and how they ended.

Training is a child process, so that an import error or a kill for lack of memory is recorded as
well. Children have their own process groups: Ctrl-C and schedulers signal the whole group of a
process, including data workers, which must not die while the run saves.
"""

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

from lowprec.runs import attempts
from lowprec.runs.read import read_status
from lowprec.sweep.plan import DECLINED, TRAIN, Plan

GRACE_S = 60.0  # to save, for the other ranks after one has failed
POLL_S = 0.05  # between two polls of the training processes


class Training:
    """Trains a run until it ends or stops. After `start`, `poll` is called until it is true.

    `gpus`: the number of processes, one per GPU; 0 for one process that sees all GPUs. `visible`:
    GPUs to train on, None for those of this process.
    """

    def __init__(self, plan: Plan, index: int, gpus: int = 0, visible: list[str] | None = None):
        self.plan, self.index, self.gpus, self.visible = plan, index, gpus, visible
        self._children: list[subprocess.Popen] = []
        self._log_start = 0
        self._signaled = False
        self._first_failure = 0
        self._deadline: float | None = None

    def start(self, begun: list[int]) -> bool:
        """Starts training, unless the run makes no progress; returns whether it did.

        `begun`: the steps at which earlier attempts began, to which this one's is added.
        """
        saved = attempts.last_saved(self.plan.directory_of(self.index))
        if reason := attempts.no_progress([{"saved": step} for step in begun], saved):
            self._end(1, reason)
            return False
        begun.append(saved)
        try:
            self._start_training()
        except OSError as error:
            self._signal(signal.SIGKILL)
            self._end(1, repr(error))
            return False
        return True

    def stop(self) -> None:
        """Asks training to stop, the first time that it is called."""
        if not self._signaled:
            self._signaled = True
            self._signal(signal.SIGTERM)

    def poll(self) -> bool:
        """Whether all processes have ended.

        After one process has failed, the others have GRACE_S to exit before they are killed.
        """
        codes = [child.poll() for child in self._children]
        self._first_failure = self._first_failure or next((code for code in codes if code), 0)
        if None not in codes:
            code = self._first_failure
            code = 128 - code if code < 0 else code
            killed_early = self._signaled and _signal_of(code) is not None
            if code != attempts.STOPPED and not killed_early:  # else it continues
                self._end(code, _reason(self.plan.log_of(self.index), self._log_start, code))
            return True
        if self._first_failure:
            self._deadline = self._deadline or time.monotonic() + GRACE_S
            if time.monotonic() > self._deadline:
                self._signal(signal.SIGKILL)
        return False

    def _signal(self, number: int) -> None:
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def _start_training(self) -> None:
        command = [*TRAIN, str(self.plan.folder), str(self.index)]
        environment = dict(os.environ)
        if self.visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.visible)
        with open(self.plan.log_of(self.index), "ab") as out:
            self._log_start = out.tell()
            for rank in _rank_environments(self.gpus):
                self._children.append(
                    subprocess.Popen(
                        command,
                        env=environment | rank,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        process_group=0,
                        preexec_fn=lambda: attempts.end_with_parent(signal.SIGTERM),
                    )
                )

    def _end(self, code: int, reason: str) -> None:
        """Says why the run has no result, unless it has one or another process trains it."""
        status = read_status(self.plan.directory_of(self.index), {})
        has_result = self.plan.runs[self.index].result(status) is not None
        if has_result or (code in (0, DECLINED) and self.plan.is_training(self.index)):
            return
        self.plan.end(self.index, reason or "ended without a result")


def _rank_environments(gpus: int) -> list[dict[str, str]]:
    """The variables that torch.distributed reads in each process; none for a single process."""
    if gpus < 2:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as free:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    common |= {"WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(gpus)]


def _signal_of(code: int) -> str | None:
    """The name of the signal that an exit status encodes; None for a program's own status."""
    return {128 + number: number.name for number in signal.Signals}.get(code)


def _reason(log: Path, start: int, code: int) -> str:
    """Why an attempt failed: the signal that killed it, or the end of what it printed."""
    if code == 0:
        return ""
    if name := _signal_of(code):
        return f"killed by {name}" + (", often for lack of memory" * (name == "SIGKILL"))
    text = log.read_bytes()[start:][-4000:].decode(errors="replace")
    lines = [line.strip() for line in text.split("\n") if line.strip()] or [f"exit status {code}"]
    marks = re.compile(r".* failed: |error: |\d+ faults:")
    ours = [i for i, line in enumerate(lines) if marks.match(line)]
    first = ours[-1] if ours else -1  # our message, or a traceback's last line
    return " ".join(lines[first:]).rpartition(" failed: ")[2][:400]
