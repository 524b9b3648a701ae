"""Runs jobs, one per shard, in parallel processes."""

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import active_children, get_context
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from lowprec.runs.attempts import end_with_parent

J, R = TypeVar("J"), TypeVar("R")


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_jobs(
    function: Callable[[J], R], jobs: Sequence[J], num_processes: int, doing: str
) -> list[R]:
    """The results of `function(job)`, in the order of the jobs; shows progress on a terminal.

    With `num_processes` above 1, the jobs run in forked processes, which end when this process
    ends. After an error or Ctrl-C, unfinished jobs are killed. `doing` describes the work in
    messages.

    Raises what `function` raises, and ChildProcessError if a process was killed.
    """
    console = Console(stderr=True)
    options = {"console": console, "transient": True, "disable": not console.is_terminal}
    progress = partial(track, description=doing, total=len(jobs), **options)
    if min(num_processes, len(jobs)) <= 1:
        return list(progress(map(function, jobs)))
    others, fork = set(active_children()), get_context("fork")
    with ProcessPoolExecutor(num_processes, mp_context=fork, initializer=_end_with_parent) as pool:
        try:
            return list(progress(pool.map(function, jobs)))
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(active_children()) - others:
                process.kill()
            if isinstance(error, BrokenProcessPool):
                message = f"{doing}: a process was killed, often for lack of memory"
                raise ChildProcessError(message) from error
            raise


def _end_with_parent() -> None:
    """Leaves Ctrl-C to the parent process and ends this process when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
