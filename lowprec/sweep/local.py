"""The local launcher: a background process that trains the runs of a sweep, a few at a time.

    python -m lowprec.sweep.local FOLDER

There is one process per sweep; a second one exits when it finds the first. It keeps no state: it
reads the plan, has a `Training` for each run that it trains, and restarts those that were
preempted. When it is told to stop or killed, its runs save and stop. The next `submit` continues
them: another launcher takes its place at once, and starts nothing before they have saved.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

from lowprec.runs.attempts import STOPPING
from lowprec.sweep.plan import Plan, is_locked, take_lock
from lowprec.sweep.training import POLL_S, Training

LOOK_S = 1.0  # between two reads of the plan


def lock_path(folder: Path) -> Path:
    """The file that the launcher keeps locked as long as it lives."""
    return folder / ".local.lock"


def start(plan: Plan, asked: set[int]) -> None:
    """Starts the launcher in its own session, so that it outlives this process.

    If none was running, of the waiting runs it gets those that were asked for; the others are lost.
    Returns once a launcher is running: until then its runs would seem lost.
    """
    if not is_locked(lock_path(plan.folder)):
        for index in set(plan.waiting()) - asked:
            plan.mark(index, "lost").touch()
    if not plan.waiting():
        return
    with open(plan.folder / "logs" / "launcher.log", "ab") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "lowprec.sweep.local", str(plan.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline and launcher.poll() is None:
            if is_locked(lock_path(plan.folder)):
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
    requests: list[int] = []

    def stop(number: int, frame: object) -> None:
        requests.append(number)
        fcntl.flock(lock, fcntl.LOCK_UN)  # what is submitted from now on is the next launcher's

    for number in STOPPING:
        signal.signal(number, stop)
    trainings: dict[int, Training] = {}
    begun: dict[int, list[int]] = defaultdict(list)  # the steps at which a run was started
    while True:
        plan = Plan(folder)  # runs may have been added
        # what an ended launcher has started; looked at first: a run releases its lock at its end
        saving = {run.index for run in plan.runs if plan.is_training(run.index)}
        waiting = [] if requests else [i for i in plan.waiting() if i not in trainings]
        for index in begun.keys() - {*waiting, *trainings}:
            del begun[index]  # it has ended; if it is submitted again, it counts from zero
        parallel = plan.launchers["local"]["parallel"] if waiting else 0
        if parallel > 1:  # each run would otherwise use all cores
            threads = max(1, len(os.sched_getaffinity(0)) // parallel)
            os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        room = 0 if saving & {*waiting} else max(0, parallel - len(trainings))
        for index in waiting[:room]:
            _start_if_free(plan, index, trainings, begun[index])
        if not trainings and not waiting:
            break
        _watch(trainings, requests)
    os.close(lock)


def _watch(trainings: dict[int, Training], requests: list[int]) -> None:
    """Waits for a training to end or for the next poll; removes trainings that have ended."""
    until = time.monotonic() + LOOK_S
    while time.monotonic() < until:
        for index, training in list(trainings.items()):
            if requests or training.plan.is_cancelled(index):
                training.stop()
            if training.poll():
                del trainings[index]
                until = 0.0
        time.sleep(POLL_S)


def _start_if_free(
    plan: Plan, index: int, trainings: dict[int, Training], begun: list[int]
) -> None:
    """Starts a run on the GPUs with the fewest runs, unless it has to wait for them."""
    count, share = plan.runs[index].gpus, Fraction(1, plan.runs[index].runs_per_gpu)
    used: Counter = Counter()
    for training in trainings.values():
        own = Fraction(1, training.plan.runs[training.index].runs_per_gpu)
        used.update(dict.fromkeys(training.visible or (), own))
    free = sorted((gpu for gpu in visible_gpus() if used[gpu] + share <= 1), key=used.__getitem__)
    if count > len(free):
        if not trainings:
            plan.end(index, f"launcher.gpus={count}, but {len(free)} GPUs are visible here")
        return
    training = Training(plan, index, count, free[:count] if count else None)
    if training.start(begun):
        trainings[index] = training


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is not None:
        return [name for name in names.split(",") if name]
    driver = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(driver.iterdir())) if driver.exists() else 0)]


if __name__ == "__main__":
    launch(Path(sys.argv[1]))
