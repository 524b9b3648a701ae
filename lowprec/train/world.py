"""A process and its place among those of a run. Imports no torch: one process needs none of it."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class World:
    """One process alone: every method is the plain thing. `distributed.Ranks` is several.

    What `first` and `each` call may fail; then it fails in all processes: with the error itself in
    the one that it happened to (the lowest, if several), elsewhere with PeerFailed.
    """

    rank, size, local_rank, local_size = 0, 1, 0, 1
    watch: Any = None  # watch.Watch, once a run has begun

    @property
    def is_first(self) -> bool:
        """Whether this process writes the record and the console."""
        return self.rank == 0

    def first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, plain data, in every process."""
        return make()

    def each(self, make: Callable[[], T]) -> list[T]:
        """What every rank makes, plain data, in the order of ranks, in every process."""
        return [make()]

    def together(self, make: Callable[[], T]) -> T:
        """What this process makes, of any kind, once all have made theirs."""
        return make()

    def mean(self, value: Any) -> Any:
        """The mean of a tensor over ranks, on its device."""
        return value

    def whole(self, value: Any) -> Any:
        """The parts of a tensor that the ranks hold, one after the other."""
        return value

    def vote(self, number: int | None) -> int | None:
        """The number that any rank came with at the call before; alone: at this one."""
        return number

    def beat(self, step: int | None, doing: str) -> None:
        """Says that the process is at work; step None: as before."""
        if self.watch is not None:
            self.watch.beat(step, doing)

    def close(self) -> None:
        """Leaves the others."""
        if self.watch is not None:
            self.watch.close()


class PeerFailed(Exception):  # noqa: N818 (it says what has happened elsewhere)
    """Another rank failed, and says why itself; `rank` is its number."""


class PeerDiskFailed(PeerFailed, OSError):
    """Another rank could not write or read a file."""


ALONE = World()
