"""The process that keeps watch over one cell: starts its training, passes signals on, writes rows.

Training is a child, so that whatever becomes of it, an import error or a kill for want of memory
too, is a row of the ledger and an exit status. The children are in process groups of their own: a
scheduler signals the whole group of a job's process, data workers included, which must not die
while the run saves.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from lowprec.sweep.manifest import Ledger, take_lock

STOPPED = 75  # exit status of a cell that saved because it was asked to stop: requeue it
STOPPING = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
ATTEMPTS = 3  # without a new checkpoint end a cell
GRACE_S = 60.0  # to save: for other ranks when one has ended, for training without its watcher


def run_cell(ledger: Ledger, index: int, token: str, job: str, gpus: int = 0) -> int:
    """One attempt of a cell; returns 0, STOPPED (requeue it) or another status (it failed).

    Nothing is started where another process runs the cell, where it was cancelled or has ended.
    Three attempts that begin at the same checkpoint are the last: a cell that is preempted before
    it can save must not run forever. Training holds the cell's lock too: where the process that
    watched it was killed, this one waits until it has saved.
    """
    lock = take_lock(ledger.lock_of(index), GRACE_S)
    if lock is None:
        print(f"cell {index} is run by another process; nothing to do")
        return 0
    try:
        return _attempt(ledger, index, token, job, gpus, lock)
    finally:
        os.close(lock)


def _attempt(ledger: Ledger, index: int, token: str, job: str, gpus: int, lock: int) -> int:
    if is_cancelled(ledger, index, token):
        print(f"cell {index} was cancelled; nothing to do")
        return 1
    rows = [row for row in ledger.rows(index) if row["token"] == token]
    if rows and not rows[-1].get("again", True):
        print(f"cell {index} has ended; nothing to do")  # while this process waited for the lock
        return int(rows[-1]["code"] != 0)
    saved = last_saved(ledger.run_of(index))
    before = [row for row in rows if row["event"] == "started"]
    if len(before) >= ATTEMPTS and all(row["saved"] == saved for row in before[-ATTEMPTS:]):
        reason = f"stopped: {ATTEMPTS} attempts without a new checkpoint (the last is of step "
        reason += f"{saved}); a smaller save_every, or more time and grace"
        say_end(ledger, index, token, 1, reason)
        print(f"cell {index} {reason}", file=sys.stderr)
        return 1
    started = {"event": "started", "token": token, "job": job, "saved": saved}
    started["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES", "") if gpus else ""
    ledger.append(index, started | {"pid": os.getpid(), "host": socket.gethostname()})
    if is_cancelled(ledger, index, token):  # while it started, when there was no process to stop
        say_end(ledger, index, token, 1, "cancelled")
        return 1
    try:
        code, reason, stopped = _train(ledger, index, gpus, lock)
    except Exception as error:
        code, reason, stopped = 1, repr(error), False
    again = stopped and (code == STOPPED or _killed_by(code) is not None)
    again = again and not is_cancelled(ledger, index, token)
    say_end(ledger, index, token, code, reason, again)
    if code:
        said = "saved, to be started again" if again else f"failed: {reason}"
        print(f"cell {index} {said}", file=sys.stderr)
    if code == STOPPED and not again:
        return 1  # the job of a cell that has ended must not go back into the queue
    return STOPPED if again else code


def say_end(
    ledger: Ledger, index: int, token: str, code: int, reason: str, again: bool = False
) -> None:
    """Writes how an attempt ended, and whether the cell is to be started `again`."""
    row = {"event": "ended", "token": token, "code": code, "reason": reason, "again": again}
    ledger.append(index, row)


def is_cancelled(ledger: Ledger, index: int, token: str) -> bool:
    """Whether the cell was cancelled, or handed over anew, since the submission of this token."""
    newest = ledger.submissions().get(index)
    return newest is None or newest.token != token or newest.cancelled


def last_saved(run: Path) -> int:
    """Step of a run's newest committed checkpoint, 0 if there is none."""
    manifests = run.glob("checkpoints/step_*/manifest.json")
    return max((int(path.parent.name.removeprefix("step_")) for path in manifests), default=0)


def _train(ledger: Ledger, index: int, gpus: int, lock: int) -> tuple[int, str, bool]:
    """Exit status (128 + signal for a kill), what a failure said last, whether it was to stop."""
    log, asked, children = ledger.log_of(index), [], []

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    handlers = {number: signal.signal(number, stop) for number in STOPPING}
    command = [*ledger.command, str(ledger.folder), str(index)]
    try:
        with open(log, "ab") as out:
            start = out.tell()
            for rank in _rank_environments(gpus):
                if asked:
                    break
                children.append(
                    subprocess.Popen(
                        command,
                        cwd=ledger.cwd,
                        env=os.environ | rank,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        process_group=0,
                        pass_fds=[lock],
                        preexec_fn=_die_with_parent,
                    )
                )
                if asked:  # between the fork and the list
                    children[-1].send_signal(asked[0])
            code = _wait(children) if children else STOPPED
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code, _reason(log, start, code), bool(asked)


def _rank_environments(gpus: int) -> list[dict[str, str]]:
    """What torch.distributed reads, for each process of a cell; nothing where it is alone."""
    if gpus < 2:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(gpus)}
    common["LOCAL_WORLD_SIZE"] = str(gpus)
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(gpus)]


def _die_with_parent() -> None:
    """Asks Linux for SIGTERM when the watching process is killed, so that none trains unwatched."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


def _wait(children: list[subprocess.Popen]) -> int:
    """The first non-zero exit status; when one rank has ended, others have GRACE_S to follow."""
    first, deadline = 0, None
    while True:
        codes = [child.poll() for child in children]
        ended = [code for code in codes if code is not None]
        first = first or next((code for code in ended if code), 0)
        if len(ended) == len(codes):
            return 128 - first if first < 0 else first
        if first and deadline is None:
            deadline = time.monotonic() + GRACE_S
        if deadline and time.monotonic() > deadline:
            for child in children:
                child.kill()
        if len(children) == 1:
            children[0].wait()
        else:
            time.sleep(0.2)


def _killed_by(code: int) -> str | None:
    """The signal whose exit status this is; None where it is no signal's (a program's own 255)."""
    return {128 + number: number.name for number in signal.Signals}.get(code)


def _reason(log: Path, start: int, code: int) -> str:
    """Why an attempt failed: the signal that killed it, or what it said last."""
    if code == 0:
        return ""
    if name := _killed_by(code):
        return f"killed by {name}" + (", often for want of memory" * (name == "SIGKILL"))
    with open(log, "rb") as file:
        file.seek(max(start, log.stat().st_size - 4000))
        lines = file.read().decode(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    first = [i for i, line in enumerate(said) if " failed: " in line or "fault(s) in" in line]
    sentences = said[first[-1] :] if first else said[-1:]  # of ours, or the last of a traceback
    return " ".join(sentences).rpartition(" failed: ")[2][:400] or f"exit status {code}"
