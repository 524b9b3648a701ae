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
from pathlib import Path

from lowprec.sweep.cell import is_cancelled, run_cell
from lowprec.sweep.ledger import Ledger, Submission, is_locked, take_lock

JOB = "local"  # the job's name in a ledger's rows


def lock_path(folder: Path) -> Path:
    """The launcher holds the lock of this file as long as it lives."""
    return folder / ".local.lock"


def start(ledger: Ledger) -> None:
    """Starts the launcher in a session of its own, so that it outlives this process.

    Returns when there is one, this or an earlier: until then its cells would seem lost.
    """
    log = os.open(ledger.folder / "logs" / "launcher.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
    own: dict[int, tuple[int, int]] = {}  # process: (cell, slot)
    while True:
        own = {pid: place for pid, place in own.items() if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        ledger = Ledger(folder)  # cells may have been added
        submissions = ledger.submissions()
        mine = {cell for cell, _ in own.values()}
        others = _running(ledger, submissions) - mine  # of a launcher that was killed
        todo = [c for c in waiting(ledger, submissions) if c not in mine | others]
        if not (own or others or todo):
            break
        parallel = ledger.last_launcher("local")["parallel"]
        free = sorted(set(range(parallel)) - {slot for _, slot in own.values()})
        free = free[: max(0, parallel - len(own) - len(others))]
        for index, slot in zip(todo, free, strict=False):
            pid = _fork(ledger, index, submissions[index], slot, lock)
            own[pid] = (index, slot)
        signal.sigtimedwait({signal.SIGCHLD}, 1.0)  # a child's end, or time to look again
    os.close(lock)


def _running(ledger: Ledger, submissions: dict[int, Submission]) -> set[int]:
    """Local cells whose process lives, whoever started it."""
    local = [i for i, submission in submissions.items() if submission.launcher["name"] == "local"]
    return {index for index in local if is_locked(ledger.lock_of(index))}


def _fork(ledger: Ledger, index: int, submission: Submission, slot: int, lock: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.close(lock)  # or this cell would pass for the launcher
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        gpus = submission.launcher["gpus"]
        if gpus:
            chosen = visible_gpus()[slot * gpus : (slot + 1) * gpus]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        if not is_cancelled(ledger, index, submission.token):
            code = run_cell(ledger, index, submission.token, JOB, gpus)
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
