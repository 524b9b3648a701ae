"""The local launcher: a process in the background that runs the cells of a sweep, a few at a time.

    python -m lowprec.sweep.local FOLDER

Submitit's local executor starts all jobs at once; this one keeps to `launcher.parallel`. It holds
no state: it reads the ledger, forks a process for each cell, and starts anew those that saved. When
it is killed the cells go on, and the next `submit` starts another that takes up where it stood. One
process a sweep: a second one leaves when it finds the first.
"""

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from lowprec.sweep.cell import is_cancelled, run_cell, say_end
from lowprec.sweep.manifest import Ledger, Submission, is_locked, take_lock

JOB = "local"  # the job's name in a ledger's rows


@dataclass
class Forked:
    """A cell's process that this launcher has started; `rows`: how many the cell had then."""

    index: int
    token: str
    gpus: list[str]
    rows: int


def log_path(folder: Path) -> Path:
    """What the launcher, and a cell's process outside training, has printed."""
    return folder / "logs" / "launcher.log"


def lock_path(folder: Path) -> Path:
    """The launcher holds the lock of this file as long as it lives."""
    return folder / ".local.lock"


def start(ledger: Ledger) -> None:
    """Starts the launcher in a session of its own, so that it outlives this process.

    Returns when there is one, this or an earlier: until then its cells would seem lost.
    """
    log = os.open(log_path(ledger.folder), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "lowprec.sweep.local", str(ledger.folder)],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(log)
        os.close(null)
    for _ in range(600):  # 30 s, for a Python that starts slowly
        if is_locked(lock_path(ledger.folder)) or os.waitpid(pid, os.WNOHANG) != (0, 0):
            return
        time.sleep(0.05)


def stop(ledger: Ledger, cells: list[int]) -> None:
    """Tells the running ones of these cells to save and stop."""
    for index in cells:
        starts = [row for row in ledger.rows(index) if row["event"] == "started"]
        if starts and is_locked(ledger.lock_of(index)):
            if starts[-1]["host"] != socket.gethostname():
                print(f"cell {index} runs on {starts[-1]['host']}: cancel it there")
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(starts[-1]["pid"], signal.SIGTERM)


def waiting(ledger: Ledger, submissions: dict[int, Submission]) -> list[int]:
    """Cells that this launcher has still to start, or to start again, in their order."""
    found = []
    for index, submission in sorted(submissions.items()):
        if submission.launcher["name"] == "local" and not submission.cancelled:
            rows = [row for row in ledger.rows(index) if row["token"] == submission.token]
            if not rows or rows[-1].get("again"):
                found.append(index)
    return found


def run(folder: Path) -> None:
    """Runs what waits until nothing does and nothing runs."""
    lock = take_lock(lock_path(folder), patience_s=5.0)  # outlasts a launcher that is leaving
    if lock is None:
        return
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())  # for whoever wants to end it
    os.chdir(Ledger(folder).cwd)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    own: dict[int, Forked] = {}  # by process
    while True:
        ledger = Ledger(folder)  # cells may have been added
        _reap(ledger, own)
        submissions = ledger.submissions()
        mine = {forked.index for forked in own.values()}
        others = _running(ledger, submissions) - mine  # of a launcher that was killed
        todo = [c for c in waiting(ledger, submissions) if c not in mine | others]
        if not (own or others or todo):
            break
        room = ledger.last_launcher("local")["parallel"] - len(own) - len(others)
        free = _free_gpus(ledger, own, others)
        for index in todo[: max(0, room)]:
            count = submissions[index].launcher["gpus"]
            if count > len(free) and (own or others):
                break  # until one of these ends
            pid, forked = _fork(ledger, index, submissions[index], free[:count], lock)
            own[pid], free = forked, free[count:]
        signal.sigtimedwait({signal.SIGCHLD}, 1.0)  # a child's end, or time to look again
    os.close(lock)


def _running(ledger: Ledger, submissions: dict[int, Submission]) -> set[int]:
    """Local cells whose process lives, whoever started it."""
    local = [i for i, submission in submissions.items() if submission.launcher["name"] == "local"]
    return {index for index in local if is_locked(ledger.lock_of(index))}


def _free_gpus(ledger: Ledger, own: dict[int, Forked], others: set[int]) -> list[str]:
    """Visible GPUs that no running cell has; those of `others` are in their rows."""
    busy = {gpu for forked in own.values() for gpu in forked.gpus}
    for index in others:
        starts = [row for row in ledger.rows(index) if row["event"] == "started"]
        if starts and starts[-1]["host"] == socket.gethostname():
            busy |= set(starts[-1].get("gpus", "").split(","))
    return [gpu for gpu in visible_gpus() if gpu not in busy]


def _reap(ledger: Ledger, own: dict[int, Forked]) -> None:
    """Forgets processes that have ended; for one that died without a row it writes the row.

    Else the cell would be forked for ever.
    """
    for pid, forked in list(own.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        del own[pid]
        code = os.waitstatus_to_exitcode(status)
        silent = len(ledger.rows(forked.index)) == forked.rows
        if code and silent and not is_cancelled(ledger, forked.index, forked.token):
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            reason = f"its process ended before training began ({how}); {log_path(ledger.folder)}"
            say_end(ledger, forked.index, forked.token, abs(code), f"{reason} may say why")


def _fork(
    ledger: Ledger, index: int, submission: Submission, gpus: list[str], lock: int
) -> tuple[int, Forked]:
    forked = Forked(index, submission.token, gpus, len(ledger.rows(index)))
    pid = os.fork()
    if pid:
        return pid, forked
    code = 1
    try:
        os.close(lock)  # or this cell would pass for the launcher
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        count = submission.launcher["gpus"]
        if count > len(gpus):
            raise RuntimeError(f"launcher.gpus={count}: {len(gpus)} GPUs are visible here")
        if count:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if not is_cancelled(ledger, index, submission.token):
            code = run_cell(ledger, index, submission.token, JOB, count)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def visible_gpus() -> list[str]:
    """GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    found = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(found.iterdir())) if found.exists() else 0)]


if __name__ == "__main__":
    run(Path(sys.argv[1]))
