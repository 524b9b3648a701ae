"""The local launcher: a background process that trains the runs of a sweep, a few at a time.

    python -m lowprec.sweep.local FOLDER

There is one process per sweep; a second one exits when it finds the first. It keeps no state: it
reads the manifest, supervises one training process per run and restarts those that were preempted.
When it is killed, its runs save and stop, and the next `submit` continues them.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from lowprec.runs.attempts import STOPPED, STOPPING
from lowprec.runs.read import read_status
from lowprec.sweep.plan import Manifest, Submission, is_locked, take_lock
from lowprec.sweep.supervisor import POLL_S, Attempt

LOOK_S = 1.0  # between two reads of the manifest


def lock_path(folder: Path) -> Path:
    """The file that the launcher keeps locked as long as it lives."""
    return folder / ".local.lock"


def start(manifest: Manifest) -> None:
    """Starts the launcher in its own session, so that it outlives this process.

    Returns once a launcher is running: until then its runs would seem lost.
    """
    with open(manifest.folder / "logs" / "launcher.log", "ab") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "lowprec.sweep.local", str(manifest.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline and launcher.poll() is None:
            if is_locked(lock_path(manifest.folder)):
                break
            time.sleep(0.05)
    except KeyboardInterrupt:  # or runs would begin that `cancel` holds for lost
        launcher.terminate()
        launcher.wait()
        raise
    launcher.returncode = 0  # it outlives this process; subprocess would warn of that


def launch(folder: Path) -> None:
    """Trains waiting runs until none waits or trains, or until it is told to stop."""
    lock = take_lock(lock_path(folder), patience_s=5.0)  # longer than a launcher takes to exit
    if lock is None:
        return
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())  # for users who want to end it
    manifest = Manifest(folder)
    while any(is_locked(manifest.lock_of(index)) for index in _submitted(manifest)):
        time.sleep(LOOK_S)  # the trainings of a killed launcher are saving
    _end_orphans(manifest)
    runs_here = [one["parallel"] for one in manifest.launchers() if one["name"] == "local"]
    if (parallel := max(runs_here, default=1)) > 1:  # each run would otherwise use all cores
        threads = max(1, len(os.sched_getaffinity(0)) // parallel)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    requests: list[int] = []
    for number in STOPPING:
        signal.signal(number, lambda number, frame: requests.append(number))
    attempts: dict[int, Attempt] = {}
    while True:
        manifest = Manifest(folder)  # runs may have been added
        waiting = [] if requests else _waiting(manifest, attempts)
        local = [launcher for launcher in manifest.launchers() if launcher["name"] == "local"]
        free = local[-1]["parallel"] - len(attempts) if local else 0
        for index in waiting[: max(0, free)]:
            _start_if_free(manifest, index, attempts)
        if not attempts and not waiting:
            break
        _watch(attempts, requests)
    os.close(lock)


def _end_orphans(manifest: Manifest) -> None:
    """Records that the attempts of a killed launcher have ended, so that their runs continue.

    A run that has a result does not continue.
    """
    for index, submission in _submitted(manifest).items():
        rows = manifest.attempts(index, submission.token)
        status = read_status(manifest.directory_of(index), {"state": ""})
        has_result = manifest.runs[index].result(status) is not None
        if rows and rows[-1]["event"] == "started" and not has_result:
            row = {"event": "ended", "token": submission.token, "code": STOPPED, "again": True}
            manifest.append(index, row | {"reason": "its launcher was killed"})


def _watch(attempts: dict[int, Attempt], requests: list[int]) -> None:
    """Waits for an attempt to end or for the next poll; removes attempts that have ended."""
    until = time.monotonic() + LOOK_S
    for attempt in attempts.values():
        if requests or attempt.is_cancelled():
            attempt.stop()
    while time.monotonic() < until:
        for index, attempt in list(attempts.items()):
            if attempt.poll() is not None:
                del attempts[index]
                until = 0.0
        time.sleep(POLL_S)


def _submitted(manifest: Manifest) -> dict[int, Submission]:
    """The newest submissions to this launcher, in the order of their runs."""
    newest = sorted(manifest.submissions().items())
    return {index: one for index, one in newest if one.launcher["name"] == "local"}


def _waiting(manifest: Manifest, attempts: dict[int, Attempt]) -> list[int]:
    """Runs to start or restart, in order."""
    waiting = []
    for index, submission in _submitted(manifest).items():
        if index not in attempts and not submission.cancelled:
            rows = manifest.attempts(index, submission.token)
            waiting += [index] if not rows or rows[-1].get("again") else []
    return waiting


def _start_if_free(manifest: Manifest, index: int, attempts: dict[int, Attempt]) -> None:
    """Starts a run on the GPUs with the fewest runs, unless it has to wait for them."""
    submission = _submitted(manifest)[index]
    count, most = submission.launcher["gpus"], submission.launcher.get("runs_per_gpu", 1)
    runs = Counter(gpu for attempt in attempts.values() for gpu in attempt.visible or ())
    free = sorted((gpu for gpu in visible_gpus() if runs[gpu] < most), key=runs.__getitem__)
    if count > len(free) and attempts:
        return
    try:
        if count > len(free):
            raise OSError(f"launcher.gpus={count}, but {len(free)} GPUs are visible here")
        lock = take_lock(manifest.lock_of(index))
    except OSError as error:
        row = {"event": "ended", "token": submission.token, "code": 1, "again": False}
        manifest.append(index, row | {"reason": str(error)})
        return
    if lock is not None:  # else a job of an earlier submission is still saving
        visible = free[:count] if count else None
        attempt = Attempt(manifest, index, submission.token, lock, count, visible)
        attempt.start()
        if attempt.code is None:
            attempts[index] = attempt


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is not None:
        return [name for name in names.split(",") if name]
    driver = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(driver.iterdir())) if driver.exists() else 0)]


if __name__ == "__main__":
    launch(Path(sys.argv[1]))
