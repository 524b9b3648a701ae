"""How a run's failures are noticed, recorded and reported to the user."""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

import torch

from lowprec.config.check import RunError
from lowprec.config.schema import TORCH_OPTIMIZERS, Config
from lowprec.data.shards import ShardError
from lowprec.runs.attempts import STOPPED, CheckpointError
from lowprec.runs.durable import DiskError
from lowprec.runs.read import ENDED
from lowprec.runs.record import NullRecord, Record, RecordError
from lowprec.train import watchdog
from lowprec.train.build import pick_device
from lowprec.train.distributed import PeerFailed, Ranks


@contextlib.contextmanager
def watched(config: Config, record: Record, world: Ranks) -> Iterator[None]:
    """Runs the watchdog; an error in this rank ends the other ranks too."""
    world.watchdog = watchdog.Watchdog(
        world,
        config.distributed.timeout_s,
        record.run / "stacks" / f"{record.attempt:04d}",
        on_end=lambda reason: record.status("failed", reason=reason, unless=ENDED),
    )
    try:
        yield
        world.close()
    except PeerFailed:
        world.watchdog.close()
        raise
    except BaseException as error:
        text = str(error).lower()
        of_torch = isinstance(error, RuntimeError) and not isinstance(error, RunError)
        lost_peer = of_torch and any(word in text for word in ("gloo", "nccl", "connection"))
        if world.size > 1 and lost_peer:
            traceback.print_exc()
            world.watchdog.end(_reason(error))
        world.watchdog.close(_reason(error))
        raise


def fail(error: BaseException, config: Config, record: Record, world: Ranks) -> NoReturn:
    """Records why an attempt failed, then raises or exits with advice for the user."""
    interrupted = isinstance(error, KeyboardInterrupt)
    with contextlib.suppress(OSError, RecordError):  # the disk may have failed, or the run is gone
        state = "preempted" if interrupted else "failed"
        record.status(state, reason=_reason(error), unless=ENDED)
    if interrupted:
        saved = record.last_status()["saved"]
        print(f"{record.run} stopped without saving; it will resume from step {saved}")
        sys.exit(STOPPED)
    of_peer = isinstance(error, PeerFailed) or isinstance(error.__cause__, PeerFailed)
    if of_peer and isinstance(record, NullRecord):
        raise PeerFailed from error
    saving = getattr(world.watchdog, "doing", None) == "saving"
    if advice := str(error) if of_peer else advice_for(error, config, saving=saving):
        raise RunError(f"{record.run} failed: {advice}") from error
    raise error


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def advice_for(error: BaseException, config: Config, *, saving: bool = False) -> str | None:
    """What a user can do about a failure that is not a bug; None for any other.

    `saving`: whether the run was being saved, for which the host's memory holds a copy of it.
    """
    again = "Once this is fixed, the same command resumes the run"
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, (DiskError, RecordError, ShardError)):
        return f"{error}. {again}"
    if config.optimizer.paged and isinstance(error, torch.AcceleratorError):
        if "out of memory" in str(error):
            return f"optimizer.paged=true needs more memory of the host ({error}). {again}"
    of_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    of_cpu |= isinstance(error, MemoryError)
    if of_cpu and (saving or pick_device(config.device).type != "cpu"):
        when = " while saving" * saving
        return (
            f"the host is out of memory{when} ({_reason(error)[:200]}): the run needs more of it "
            f"(on SLURM, launcher.mem_gb) or fewer data workers (num_workers). {again}"
        )
    if of_cpu or isinstance(error, torch.OutOfMemoryError):
        rule, is_gpus = config.optimizer, isinstance(error, torch.OutOfMemoryError)
        can_page = is_gpus and not rule.paged and rule.name not in TORCH_OPTIMIZERS
        can_page &= config.distributed.name != "fsdp2"
        return (
            f"out of memory with model={config.model.name}, batch_size={config.batch_size} and "
            f"precision.autocast={config.precision.autocast} ({str(error)[:200]}); "
            "checkpointing=true or a smaller batch_size saves memory (but starts another run)"
            + "; optimizer.paged=true continues this run, with moments on the host"
            * can_page
        )
    lost = isinstance(error, (ConnectionError, EOFError))  # the pipe to a dead worker
    if lost or (isinstance(error, RuntimeError) and "DataLoader worker" in str(error)):
        return (
            f"a data worker was killed ({error}), often for lack of memory (num_workers). {again}"
        )
    return None
