"""The processes (ranks) of one run: their communication, and the model they replicate or shard.

`Ranks` is a single process, `DistributedRanks` one of several over `torch.distributed`.
Collectives on the device go through torch's default group. The hosts agree over a gloo group of
their own, which neither waits for the device nor times out: the watchdog ends hung runs.
"""

import atexit
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from lowprec.train.ranks import place

T = TypeVar("T")
MARGIN_S = 60  # the watchdog, whose message is clearer, acts this long before torch's own timeout


class PeerFailed(Exception):  # noqa: N818 (the failure itself is raised in the other rank)
    """Another rank failed; that rank reports why."""


class PeerDiskFailed(PeerFailed, OSError):
    """Another rank failed to read or write a file."""


class Ranks:
    """A single process. Defines the interface that `DistributedRanks` implements.

    If a function passed to `first`, `each` or `together` raises, the call raises in all ranks: the
    error itself in the (lowest) rank where it happened, `PeerFailed` in the others.
    """

    rank, size, local_rank, local_size = 0, 1, 0, 1
    watchdog: Any = None  # a watchdog.Watchdog once the run has begun

    @property
    def is_first(self) -> bool:
        """Whether this process writes the record and the console."""
        return self.rank == 0

    def first(self, make: Callable[[], T]) -> T:
        """Calls `make` in rank 0; returns its result, plain data, in every rank."""
        return make()

    def each(self, make: Callable[[], T]) -> list[T]:
        """Calls `make` in every rank; returns all results, plain data, ordered by rank."""
        return [make()]

    def together(self, make: Callable[[], T]) -> T:
        """Calls `make` in every rank; returns this rank's result once all have theirs."""
        return make()

    def mean(self, value: Any) -> Any:
        """The mean of a tensor over ranks, on its device."""
        return value

    def all_gather(self, value: Any) -> Any:
        """The ranks' tensors, all of one shape, concatenated along the first dimension."""
        return value

    def stop_consensus(self, number: int | None) -> int | None:
        """The signal that any rank passed in at the previous call (single process: at this one)."""
        return number

    def heartbeat(self, step: int | None, doing: str) -> None:
        """Reports progress to the watchdog; step None: the step is still the same."""
        if self.watchdog is not None:
            self.watchdog.heartbeat(step, doing)

    def close(self) -> None:
        """Stops the watchdog, after all ranks have arrived."""
        if self.watchdog is not None:
            self.watchdog.close()


ONE_PROCESS = Ranks()


class DistributedRanks(Ranks):
    """One of several processes, as torchrun, srun or submitit started them.

    `device`: cpu, cuda or auto (cuda if there is a GPU). `captures`: steps will be captured as CUDA
    graphs, which does not go with torch's own thread for NCCL's errors; hangs are the watchdog's.
    """

    def __init__(self, device: str, timeout_s: float, *, captures: bool = False):
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        # open_clip's loss calls it
        warnings.filterwarnings("ignore", "torch.distributed.nn.functional.all_gather is depr")
        # gloo looks up the host's name, which processes of one machine do not need
        if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.rank, self.size, self.local_rank, self.local_size = place()
        if device == "cuda":
            torch.cuda.set_device(self.local_rank % torch.cuda.device_count())
        if not dist.is_initialized():  # once per process: all runs of a sweep share the group
            if captures:
                os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            limit = timedelta(seconds=timeout_s + MARGIN_S)
            dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=limit)
            atexit.register(dist.destroy_process_group)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
        self._pending: tuple[Tensor, dist.Work] | None = None

    def first(self, make: Callable[[], T]) -> T:
        """See Ranks."""
        return self.each(make if self.is_first else lambda: None)[0]

    def each(self, make: Callable[[], T]) -> list[T]:
        """See Ranks."""
        result, error, failure = None, None, None
        try:
            result = make()
        except Exception as raised:
            text = f"{type(raised).__name__}: {raised}"
            error, failure = raised, (isinstance(raised, OSError), text)
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, (result, failure), group=self.group)
        failures = {rank: failure for rank, (_, failure) in enumerate(gathered) if failure}
        if failures:
            rank, (is_disk, text) = min(failures.items())
            if rank == self.rank:
                raise error
            raise (PeerDiskFailed if is_disk else PeerFailed)(f"rank {rank}: {text}")
        return [result for result, _ in gathered]

    def together(self, make: Callable[[], T]) -> T:
        """See Ranks."""
        results = []
        self.each(lambda: results.append(make()))
        return results[0]

    def mean(self, value: Tensor) -> Tensor:
        """See Ranks."""
        value = value.clone()
        dist.all_reduce(value)
        return value / self.size

    def all_gather(self, value: Tensor) -> Tensor:
        """See Ranks."""
        gathered = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(gathered, value.contiguous())
        return torch.cat(gathered)

    def stop_consensus(self, number: int | None) -> int | None:
        """See Ranks. The reduction runs during the next step, so that no rank waits for it."""
        agreed = None
        if self._pending is not None:
            largest, work = self._pending
            work.wait()
            agreed = int(largest) or None
        largest = torch.tensor(number or 0)
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._pending = largest, work
        return agreed

    def close(self) -> None:
        """See Ranks."""
        self.each(lambda: None)
        if self._pending is not None:
            self._pending[1].wait()
        super().close()
        dist.destroy_process_group(self.group)


def shard(model: nn.Module, blocks: list[nn.Module], world: Ranks) -> None:
    """Shards parameters, gradients and optimizer states over ranks in place (FSDP2).

    Parameters are gathered in their own dtype, by block and embedding table, once per step: they
    stay whole from the forward pass to the end of their own backward pass. The few others, of the
    root, are gathered for both. Gradients are summed in float32. The logit scale is 0-d and cannot
    be sharded: every rank holds it, and `ContrastiveTask` averages its gradient.
    """
    mesh = torch.distributed.init_device_mesh(next(model.parameters()).device.type, (world.size,))
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        "reshard_after_forward": False,  # gradients and moments, most of the bytes, stay sharded
    }
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for module in (*blocks, *tables):
        fully_shard(module, **options)
    fully_shard(model, **options, ignored_params={model.logit_scale})
    for method in ("encode_image", "encode_text"):  # called by evaluation instead of forward
        register_fsdp_forward_method(model, method)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether any module keeps running statistics of its batches."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
