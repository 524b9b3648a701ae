"""Runs jobs, one per shard, in parallel processes."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing import active_children, get_context
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from lowprec.runs.attempts import follow_parent
from lowprec.waiting import Waiting

J, R = TypeVar("J"), TypeVar("R")


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_jobs(
    function: Callable[[J], R], jobs: Sequence[J], num_processes: int, doing: str
) -> list[R]:
    """The results of `function(job)`, in the order of the jobs; shows progress on stderr.

    With `num_processes` above 1, the jobs run in forked processes, which end when this process
    ends. After an error or Ctrl-C, unfinished jobs are killed. `doing` describes the work in
    messages.

    Raises what `function` raises, and ChildProcessError if a process was killed.
    """
    if min(num_processes, len(jobs)) <= 1:
        return list(_with_progress(map(function, jobs), doing, len(jobs)))
    others, fork = set(active_children()), get_context("fork")
    with ProcessPoolExecutor(num_processes, mp_context=fork, initializer=follow_parent) as pool:
        try:
            futures = [pool.submit(function, job) for job in jobs]  # map would cancel them
            results = (future.result() for future in futures)
            return list(_with_progress(results, doing, len(jobs)))
        except BaseException as error:
            for process in set(active_children()) - others:
                process.kill()
            if isinstance(error, BrokenProcessPool):
                message = f"{doing}: a process was killed, often for lack of memory"
                raise ChildProcessError(message) from error
            raise


def _with_progress(results: Iterable[R], doing: str, total: int) -> Iterator[R]:
    """Shows a progress bar on a terminal; elsewhere says now and then how many are done."""
    if sys.stderr.isatty():
        yield from track(results, doing, total, console=Console(stderr=True), transient=True)
        return
    with closing(Waiting(doing)) as waiting:
        for done, result in enumerate(results, 1):
            waiting.doing = f"{doing}: {done} of {total} shards"
            yield result
