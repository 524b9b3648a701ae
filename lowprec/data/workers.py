"""Worker processes that make batches ahead of training, and how they end.

They end with the iterator, after a time limit, or with the process that started them.
"""

import atexit
import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lowprec.data.shards import ShardError
from lowprec.runs.attempts import STOPPING, follow_parent

SILENT_S = 300  # a worker that takes longer for a batch ends the run
CLOSING_S = 2  # a worker that takes longer to end is killed


@contextlib.contextmanager
def ignored_child_signals() -> Iterator[None]:
    """Suspends torch's SIGCHLD handler, which raises in the main thread when a worker dies."""
    try:
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except ValueError:  # only the main thread may, and only there the handler raises
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def end_workers(workers: set[BaseProcess]) -> None:
    """Kills worker processes that have not ended by themselves."""
    with ignored_child_signals():
        kill(workers)
        for worker in workers:
            worker.join(10)  # one that waits for a dead disk cannot be killed


def kill(workers: set[BaseProcess]) -> None:
    """Sends SIGKILL; does not wait."""
    for worker in workers:
        worker.kill()


class _Share(IterableDataset):
    """A worker's batches, or the error that ends them without the worker's traceback."""

    def __init__(self, share: Callable[[int, int], Iterator]):
        self.share = share

    def __iter__(self) -> Iterator:
        info = get_worker_info()
        try:
            yield from self.share(info.id, info.num_workers) if info else self.share(0, 1)
        except Exception as error:  # raised again by `ahead`
            yield error


def ahead(share: Callable[[int, int], Iterator], *, workers: int, pin: bool) -> Iterator:
    """Batches prefetched by processes: worker w of n makes the batches of `share(w, n)`.

    Takes one batch from each worker in turn; raises their errors, and ShardError if none answers
    for SILENT_S seconds. The workers end with the iterator, within about CLOSING_S seconds, or with
    the process.
    """
    loader = DataLoader(
        _Share(share),
        timeout=SILENT_S if workers else 0,
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        multiprocessing_context="fork" if workers else None,
        prefetch_factor=2 if workers else None,
        worker_init_fn=follow_parent,
        generator=torch.Generator(),  # the default generator is used by training
    )
    others = set(multiprocessing.active_children())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until the workers do
    try:
        outcomes = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    processes = set(multiprocessing.active_children()) - others
    end = partial(end_workers, processes)
    atexit.register(end)  # before the exit handler of multiprocessing, which waits for the workers
    try:
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome
    except RuntimeError as error:
        if "DataLoader timed out" not in str(error):
            raise
        raise ShardError(f"the data workers made no batch for {SILENT_S} s") from error
    finally:
        timer = threading.Timer(CLOSING_S, kill, [processes])  # the pinning thread ends before
        with ignored_child_signals():
            if any(process.is_alive() for process in processes):  # else it may be too late for it
                timer.start()
            getattr(outcomes, "_shutdown_workers", lambda: None)()
        timer.cancel()
        end()
        atexit.unregister(end)
