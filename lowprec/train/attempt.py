"""How an attempt ends: who sees a failure, what its record says, and its user reads."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from lowprec.config.check import RunError
from lowprec.config.schema import Config
from lowprec.runs.durable import DiskError
from lowprec.runs.null_record import SilentRecord
from lowprec.runs.read import scan_rows
from lowprec.runs.record import Record, RecordError
from lowprec.train.remote import NoCopy, remote_copy
from lowprec.train.watchdog import Watch
from lowprec.train.world import PeerFailed, World

EXPLAINED_S = 3  # in which the watch finds out which rank a lost connection was to
ATTEMPTS = 3  # of a job that begin at the same checkpoint are its last
ENDED = ("finished", "diverged")  # a run that is to go no further
STOPPED = 75  # exit status of a run that was asked to stop: the same command resumes it


def attempt(
    train: Callable[[NoCopy], tuple], config: Config, record: Record, world: World
) -> object:
    """How `train(copy)` ended, under the watch; it gives that and the logger.

    What copies the record is waited for when it is complete and nothing watches any more: however
    slow, it changes nothing of a run.
    """
    copy = remote_copy(config.remote_sync if world.is_first else None, record)
    try:
        with watched(config, record, world):
            ended, logger = train(copy)
    except BaseException as error:
        with _no_news_of_workers():
            fail(error, config, record, copy)
    logger.close()
    copy.close("" if ended.state in ENDED else line_of(ended, record))
    return ended


@contextlib.contextmanager
def _no_news_of_workers() -> Iterator[None]:
    """Without torch's handler of SIGCHLD, which raises wherever the main thread is.

    A worker that was killed is often noticed first by its broken connection: its signal must not
    end the writing down of that.
    """
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def line_of(ended: object, record: Record) -> str:
    """How an attempt ended, in a line."""
    line = f"{record.run} {ended.state} at step {ended.step}"
    return f"{line}: {ended.reason}" if ended.reason else line


@contextlib.contextmanager
def watched(config: Config, record: Record, world: World) -> Iterator[None]:
    """Watches this rank and the others; one that fails ends them all."""
    world.watch = Watch(
        world.rank,
        world.size,
        config.distributed.timeout_s,
        record.run / "stacks",
        meet=lambda address: world.first(lambda: address),
        on_end=lambda reason: record.status("failed", reason=reason, unless=ENDED),
    )
    try:
        yield
        world.close()
    except PeerFailed:
        world.watch.close()
        raise
    except BaseException as error:
        if world.size > 1 and _is_of_a_peer(error):
            time.sleep(EXPLAINED_S)  # the watch knows which rank is gone, and ends this one
        world.watch.close(f"{type(error).__name__}: {error}"[:1000])
        raise


def job_of(environment: Mapping[str, str]) -> str | None:
    """The SLURM job of a process, of an array its task; None outside of one."""
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environment.get('SLURM_ARRAY_TASK_ID')}"
    return environment.get("SLURM_JOB_ID")


def begins_at(run: Path) -> dict:
    """The step of the checkpoint that an attempt begins at, `saved`, and its scheduler's `job`.

    CheckpointError where a job was requeued to begin there once more: one that is stopped before it
    can save must not run forever. What somebody starts, also in a shell of a job, is not counted.
    """
    from lowprec.train.checkpoint import list_checkpoints
    from lowprec.train.state import CheckpointError

    names = [path.name for path in list_checkpoints(run)]
    saved = int(names[-1].removeprefix("step_")) if names else 0
    job = job_of(os.environ)
    rows = scan_rows(run / "attempts.jsonl")[0] if "SLURM_RESTART_COUNT" in os.environ else []
    last = [row.get("saved") for row in rows if row.get("job") == job][-ATTEMPTS:]
    if last == [saved] * ATTEMPTS:
        raise CheckpointError(
            f"stopped: {ATTEMPTS} attempts without a new checkpoint (the last is of step {saved}); "
            "a smaller save_every, or more time and grace"
        )
    return {"saved": saved, "job": job}


def fail(error: BaseException, config: Config, record: Record, copy: NoCopy) -> NoReturn:
    """Notes how an attempt failed, and says what its user can do about it."""
    interrupted = isinstance(error, KeyboardInterrupt)
    reason = f"{type(error).__name__}: {error}"[:1000]
    with contextlib.suppress(OSError):  # the disk may be what failed
        state = "preempted" if interrupted else "failed"
        record.status(state, reason=reason, unless=ENDED)  # what fails after the end is no matter
    if interrupted:
        saved = record.last_status()["saved"]
        print(f"{record.run} stopped without saving; it goes on from step {saved}")
        sys.exit(STOPPED)
    copy.close(f"{record.run} failed: {reason}")
    of_peer = isinstance(error, PeerFailed) or isinstance(error.__cause__, PeerFailed)
    if of_peer and isinstance(record, SilentRecord):
        raise PeerFailed from error
    if sentence := str(error) if of_peer else sentence_of(error, config):
        raise RunError(f"{record.run} failed: {sentence}") from error
    raise error


def sentence_of(error: BaseException, config: Config) -> str | None:
    """What a user can do about a failure that is no defect of the code; None for any other."""
    import torch

    from lowprec.data.shards import ShardError
    from lowprec.train.state import CheckpointError

    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, (DiskError, RecordError, ShardError)):
        return f"{error}. When that is mended, the same command goes on."
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return (
            f"out of memory with model={config.model.name}, batch_size={config.batch_size} and "
            f"precision.autocast={config.precision.autocast} ({str(error)[:200]}). Less memory, "
            "as another run: checkpointing=true, model.patch_dropout=0.5 or a smaller batch_size"
        )
    lost = isinstance(error, (ConnectionError, EOFError))  # the pipe of a worker that is gone
    if lost or (isinstance(error, RuntimeError) and "DataLoader worker" in str(error)):
        return (
            f"a data worker was killed ({error}), often for want of memory: fewer num_workers need "
            "less. When that is mended, the same command goes on."
        )
    return None


def _is_of_a_peer(error: BaseException) -> bool:
    """Whether an error is that of a connection to another rank."""
    return isinstance(error, RuntimeError) and any(
        word in str(error).lower() for word in ("gloo", "nccl", "connection")
    )
