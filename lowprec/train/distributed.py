"""Several processes of one run: torch's process group, and a gloo group to agree on the host."""

import atexit
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lowprec.runs.place import place
from lowprec.train.world import PeerDiskFailed, PeerFailed, World

T = TypeVar("T")
MARGIN_S = 60  # a collective gives up so much later than the watch, which says more


class Ranks(World):
    """One of several processes. Collectives on the device go through torch's default group.

    The host agrees over gloo, without waiting for the device and without a limit of time: a rank
    that dies or stands still is the watch's business.
    """

    def __init__(self, device: str, timeout_s: float):
        self.rank, self.size, self.local_rank, self.local_size = place()
        if device == "cuda":
            torch.cuda.set_device(self.local_rank % torch.cuda.device_count())
        if not dist.is_initialized():  # once a process: the cells of a sweep meet once
            limit = timedelta(seconds=timeout_s + MARGIN_S)
            dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=limit)
            atexit.register(dist.destroy_process_group)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
        self._voting: tuple[Tensor, dist.Work] | None = None

    def first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, plain data, in every process."""
        return self._agree(make if self.is_first else lambda: None)[0]

    def each(self, make: Callable[[], T]) -> list[T]:
        """What every rank makes, plain data, in the order of ranks, in every process."""
        return self._agree(make)

    def together(self, make: Callable[[], T]) -> T:
        """What this process makes, of any kind, once all have made theirs."""
        made = []
        self._agree(lambda: made.append(make()))
        return made[0]

    def _agree(self, make: Callable[[], Any]) -> list[Any]:
        """Every rank's result; where one failed all fail."""
        own = (None, None, "")
        error = None
        try:
            own = (make(), None, "")
        except Exception as raised:
            error = raised
            own = (None, isinstance(raised, OSError), f"{type(raised).__name__}: {raised}")
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self.group)
        failed = [rank for rank, (_, is_disk, _) in enumerate(found) if is_disk is not None]
        if failed and failed[0] == self.rank:
            raise error
        if failed:
            _, is_disk, text = found[failed[0]]
            raise (PeerDiskFailed if is_disk else PeerFailed)(f"rank {failed[0]}: {text}")
        return [result for result, _, _ in found]

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over ranks, on its device."""
        value = value.clone()
        dist.all_reduce(value)
        return value / self.size

    def whole(self, value: Tensor) -> Tensor:
        """The parts of a tensor that the ranks hold, one after the other."""
        parts = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(parts, value.contiguous())
        return torch.cat(parts)

    def vote(self, number: int | None) -> int | None:
        """The largest number that a rank came with at the call before, so that nobody waits."""
        found = None
        if self._voting is not None:
            ballot, work = self._voting
            work.wait()
            found = int(ballot) or None
        ballot = torch.tensor(number or 0)
        work = dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._voting = ballot, work
        return found

    def close(self) -> None:
        """Leaves the others, once all are here."""
        self.each(lambda: None)
        if self._voting is not None:
            self._voting[1].wait()
        super().close()
        dist.destroy_process_group(self.group)


def join(device: str, timeout_s: float) -> Ranks:
    """Meets the other processes; `device`: cpu, cuda or auto (cuda where there is one)."""
    # open_clip's loss calls it; it works, and its follower differs between the versions of torch
    warnings.filterwarnings("ignore", "torch.distributed.nn.functional.all_gather is deprecated")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # The host agrees over gloo beside GPUs too: its name that leads nowhere must not stop processes
    # of one machine.
    if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return Ranks(device, timeout_s)
