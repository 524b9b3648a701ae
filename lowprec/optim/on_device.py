"""Values that seldom change, on the device: a step that copies nothing waits for nothing."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def index_on(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [len(numbers)] on the device, copied there once."""
    return torch.tensor(numbers, dtype=torch.int64).to(device)


class Constants:
    """Values by name, copied to the device only when they have changed."""

    def __init__(self):
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, name: str, value: Tensor, device: torch.device) -> Tensor:
        """The value on the device."""
        kept = self._kept.get(name)
        if kept is None or kept[1].device != device or not _same(kept[0], value):
            kept = self._kept[name] = (value, value.to(device))
        return kept[1]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))
