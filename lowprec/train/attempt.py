"""How an attempt at a run ends: how failures are noticed, recorded and reported to the user."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from lowprec.config.check import RunError
from lowprec.config.schema import Config
from lowprec.data.shards import ShardError
from lowprec.runs.attempts import STOPPED, CheckpointError
from lowprec.runs.durable import DiskError
from lowprec.runs.read import ENDED
from lowprec.runs.record import NullRecord, Record, RecordError
from lowprec.train import watchdog
from lowprec.train.distributed import PeerFailed, Ranks
from lowprec.train.remote import NoCopy, remote_copy


def attempt(
    train: Callable[[NoCopy], tuple], config: Config, record: Record, world: Ranks
) -> object:
    """Runs `train(copy)` under the watchdog; returns how the run ended.

    `train` returns that and its logger. The logger and the remote copy are closed after the
    watchdog, so a slow one cannot change the outcome of a run that has ended.
    """
    copy = remote_copy(config.remote_sync if world.is_first else None, record)
    try:
        with watched(config, record, world):
            ended, logger = train(copy)
    except BaseException as error:
        with _ignored_child_signals():
            fail(error, config, record, copy)
    logger.close()
    copy.close("" if ended.state in ENDED else line_of(ended, record))
    return ended


@contextlib.contextmanager
def _ignored_child_signals() -> Iterator[None]:
    """Suspends torch's SIGCHLD handler, which raises in the main thread when a worker dies.

    The broken pipe to a killed worker is often noticed first; its signal must not interrupt
    recording it.
    """
    try:
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except ValueError:  # only the main thread may, and only there the handler raises
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def line_of(ended: object, record: Record) -> str:
    """How an attempt ended, in one line."""
    line = f"{record.run} {ended.state} at step {ended.step}"
    return f"{line}: {ended.reason}" if ended.reason else line


@contextlib.contextmanager
def watched(config: Config, record: Record, world: Ranks) -> Iterator[None]:
    """Runs the watchdog; an error in this rank ends the other ranks too."""
    world.watchdog = watchdog.Watchdog(
        world,
        config.distributed.timeout_s,
        record.run / "stacks",
        on_end=lambda reason: record.status("failed", reason=reason, unless=ENDED),
    )
    try:
        yield
        world.close()
    except PeerFailed:
        world.watchdog.close()
        raise
    except BaseException as error:
        if world.size > 1 and _lost_peer(error):  # the watchdog names the rank and ends this one
            time.sleep(watchdog.SILENT_S + 4 * watchdog.TICK_S)
        world.watchdog.close(f"{type(error).__name__}: {error}"[:1000])
        raise


def _lost_peer(error: BaseException) -> bool:
    """Whether an error comes from a connection to another rank."""
    return isinstance(error, RuntimeError) and any(
        word in str(error).lower() for word in ("gloo", "nccl", "connection")
    )


def fail(error: BaseException, config: Config, record: Record, copy: NoCopy) -> NoReturn:
    """Records why an attempt failed, then raises or exits with advice for the user."""
    interrupted = isinstance(error, KeyboardInterrupt)
    reason = f"{type(error).__name__}: {error}"[:1000]
    with contextlib.suppress(OSError):  # the disk itself may have failed
        record.status("preempted" if interrupted else "failed", reason=reason, unless=ENDED)
    if interrupted:
        saved = record.last_status()["saved"]
        print(f"{record.run} stopped without saving; it will resume from step {saved}")
        sys.exit(STOPPED)
    copy.close(f"{record.run} failed: {reason}")
    of_peer = isinstance(error, PeerFailed) or isinstance(error.__cause__, PeerFailed)
    if of_peer and isinstance(record, NullRecord):
        raise PeerFailed from error
    if advice := str(error) if of_peer else advice_for(error, config):
        raise RunError(f"{record.run} failed: {advice}") from error
    raise error


def advice_for(error: BaseException, config: Config) -> str | None:
    """What a user can do about a failure that is not a bug; None for any other."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, (DiskError, RecordError, ShardError)):
        return f"{error}. Once this is fixed, the same command resumes the run"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return (
            f"out of memory with model={config.model.name}, batch_size={config.batch_size} and "
            f"precision.autocast={config.precision.autocast} ({str(error)[:200]}). "
            "checkpointing=true, model.patch_dropout=0.5 or a smaller batch_size need less (each "
            "makes another run)"
        )
    lost = isinstance(error, (ConnectionError, EOFError))  # the pipe to a dead worker
    if lost or (isinstance(error, RuntimeError) and "DataLoader worker" in str(error)):
        return (
            f"a data worker was killed ({error}), often for lack of memory, which fewer "
            "num_workers save. Once this is fixed, the same command resumes the run"
        )
    return None
