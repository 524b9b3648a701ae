"""How an attempt fails: who sees it, what its record says, and its user reads."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

from experiments import cli
from lowprec.config import Config
from lowprec.durable import DiskError
from lowprec.record import Record, RecordError
from lowprec.train.silent import SilentRecord
from lowprec.train.watch import Watch
from lowprec.train.world import PeerFailed, World

EXPLAINED_S = 3  # in which the watch finds out which rank a lost connection was to
STOPPED = 75  # exit status of a run that was asked to stop: the same command resumes it


@contextlib.contextmanager
def watched(config: Config, record: Record, world: World) -> Iterator[None]:
    """Watches this rank and the others; one that fails ends them all."""
    world.watch = Watch(
        world.rank,
        world.size,
        config.distributed.timeout_s,
        record.run / "stacks",
        meet=lambda address: world.first(lambda: address),
        on_end=lambda reason: record.status("failed", reason=reason),
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


def fail(error: BaseException, config: Config, record: Record) -> NoReturn:
    """Notes how an attempt failed, and says what its user can do about it."""
    interrupted = isinstance(error, KeyboardInterrupt)
    reason = f"{type(error).__name__}: {error}"[:1000]
    with contextlib.suppress(OSError):  # the disk may be what failed
        record.status("preempted" if interrupted else "failed", reason=reason)
    if interrupted:
        saved = record.last_status()["saved"]
        print(f"{record.run} stopped without saving; it goes on from step {saved}")
        sys.exit(STOPPED)
    of_peer = isinstance(error, PeerFailed) or isinstance(error.__cause__, PeerFailed)
    if of_peer and isinstance(record, SilentRecord):
        raise PeerFailed from error
    if sentence := str(error) if of_peer else sentence_of(error, config):
        raise cli.RunError(f"{record.run} failed: {sentence}") from error
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
