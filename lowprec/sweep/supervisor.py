"""Supervises the training of one run: starts it, passes signals on and records how it ended.

    python -m lowprec.sweep.supervisor FOLDER INDEX TOKEN

is what a SLURM job runs; the local launcher has an `Attempt` for each of its runs. Training is a
child process, so that an import error or a kill for lack of memory is recorded as well. Children
have their own process groups: a scheduler signals the whole group of a job's process, including
data workers, which must not die while the run saves.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from lowprec.alert import alert
from lowprec.runs import attempts
from lowprec.sweep.plan import TRAIN, Manifest, take_lock

GRACE_S = 60.0  # to save: for the other ranks after one has failed, for training left by a kill
POLL_S = 0.05  # between two polls of the training processes


class Attempt:
    """One attempt to train a run; holds the run's lock, which its training inherits.

    `gpus`: the number of processes, one per GPU; 0 for one process that sees all GPUs. `visible`:
    GPUs to train on, None for those of this process. After `start`, `poll` is called until `code`
    is set: 0, STOPPED (the run is to be restarted) or another exit status (it failed).
    """

    def __init__(
        self,
        manifest: Manifest,
        index: int,
        token: str,
        lock: int,
        gpus: int = 0,
        visible: list[str] | None = None,
    ):
        self.manifest, self.index, self.token = manifest, index, token
        self.gpus, self.visible = gpus, visible
        self.code: int | None = None
        self._lock = lock
        self._children: list[subprocess.Popen] = []
        self._log_start = 0
        self._stop_signal: int | None = None
        self._signaled = False
        self._first_failure = 0
        self._deadline: float | None = None

    def start(self) -> None:
        """Starts training, unless the run was cancelled, has ended or makes no progress."""
        rows = self.manifest.attempts(self.index, self.token)
        saved = attempts.last_saved(self.manifest.directory_of(self.index))
        starts = [row for row in rows if row["event"] == "started"]
        if self.is_cancelled():
            self._leave(1, "was cancelled; nothing to do")
        elif rows and not rows[-1].get("again", True):  # it ended while this process was waiting
            self._leave(int(rows[-1].get("code") != 0), "has ended; nothing to do")
        elif reason := attempts.no_progress(starts, saved):
            self._end(1, reason)
        else:
            row = {"event": "started", "token": self.token, "saved": saved}
            self.manifest.append(self.index, row)
            try:
                self._start_training()
            except OSError as error:
                self._signal(signal.SIGKILL)
                self._end(1, repr(error))

    def is_cancelled(self) -> bool:
        """Whether this attempt's submission was cancelled or replaced."""
        return self.manifest.is_cancelled(self.index, self.token)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Passes a first request to stop on to training at the next `poll`; a signal handler."""
        self._stop_signal = self._stop_signal or number

    def poll(self) -> int | None:
        """The exit status once all processes have ended, else None.

        After one process has failed, the others have GRACE_S to exit before they are killed.
        """
        codes = [child.poll() for child in self._children]
        self._first_failure = self._first_failure or next((code for code in codes if code), 0)
        if None not in codes:
            code = self._first_failure
            code = 128 - code if code < 0 else code
            killed_early = self._signaled and _signal_of(code) is not None
            again = (code == attempts.STOPPED or killed_early) and not self.is_cancelled()
            log = self.manifest.log_of(self.index)
            self._end(code, _reason(log, self._log_start, code), again)
            return self.code
        if self._first_failure:
            self._deadline = self._deadline or time.monotonic() + GRACE_S
            if time.monotonic() > self._deadline:
                self._signal(signal.SIGKILL)
        if self._stop_signal and not self._signaled:
            self._signaled = True
            self._signal(self._stop_signal)
        return None

    def _signal(self, number: int) -> None:
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def _start_training(self) -> None:
        log = self.manifest.log_of(self.index)
        command = [*TRAIN, str(self.manifest.folder), str(self.index)]
        environment = dict(os.environ)
        if self.visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.visible)
        with open(log, "ab") as out:
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
                        pass_fds=[self._lock],
                        preexec_fn=lambda: attempts.end_with_parent(signal.SIGTERM),
                    )
                )

    def _end(self, code: int, reason: str, again: bool = False) -> None:
        """Records how the attempt ended and whether to start the run `again`."""
        row = {"event": "ended", "token": self.token, "code": code, "reason": reason}
        self.manifest.append(self.index, row | {"again": again})
        if not again and _signal_of(code):  # training reports other failures itself
            alert(f"{self.manifest.directory_of(self.index)} failed: {reason}")
        how = "has saved and will be restarted" if again else f"failed: {reason}"
        if again:
            code = attempts.STOPPED
        elif code == attempts.STOPPED:
            code = 1  # the job of a run that has ended must not be requeued
        self._leave(code, how if code else "has ended")

    def _leave(self, code: int, message: str) -> None:
        print(f"run {self.index} {message}", file=sys.stderr, flush=True)
        os.close(self._lock)
        self.code = code


def supervise(manifest: Manifest, index: int, token: str) -> int:
    """One attempt at a run; returns the exit status of its job, STOPPED to be requeued.

    Waits for training left behind by a killed supervisor, which saves before it stops.
    """
    lock = take_lock(manifest.lock_of(index), GRACE_S)
    if lock is None:
        print(f"run {index} is trained by another process; nothing to do")
        return 0
    submission = manifest.submissions().get(index)
    gpus = submission.launcher["gpus"] if submission else 0
    attempt = Attempt(manifest, index, token, lock, gpus)
    numbers = attempts.STOPPING
    handlers = {n: signal.signal(n, lambda number, frame: attempt.stop(number)) for n in numbers}
    try:
        attempt.start()
        while attempt.code is None and attempt.poll() is None:
            time.sleep(POLL_S)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return attempt.code


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
    ours = [i for i, line in enumerate(lines) if " failed: " in line or "fault(s):" in line]
    first = ours[-1] if ours else -1  # our message, or a traceback's last line
    return " ".join(lines[first:]).rpartition(" failed: ")[2][:400]


if __name__ == "__main__":
    folder, index, token = sys.argv[1:]
    sys.exit(supervise(Manifest(Path(folder)), int(index), token))
