"""Keeps the numbers of training steps on the device until the host fetches many at once."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class StepBuffer:
    """Scalars and a table for each of up to `capacity` steps, float32 on the device."""

    def __init__(self, capacity: int, num_scalars: int, table: tuple[int, int], device):
        self.num_scalars, self.table = num_scalars, table
        width = num_scalars + table[0] * table[1]
        self._values = torch.zeros(capacity, width, device=device)
        self._steps: list[int] = []

    @property
    def capacity(self) -> int:
        """Number of steps that fit."""
        return len(self._values)

    def __len__(self) -> int:
        """Number of steps since the last `fetch`."""
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """True when the next step needs a `fetch` first."""
        return len(self) == self.capacity

    def append(self, step: int, scalars: Sequence[Tensor], table: Tensor) -> None:
        """Adds a step: 0-d values and a table of the buffer's shape."""
        row = self._values[len(self._steps)]
        row[: self.num_scalars] = torch.stack([x.float().reshape(()) for x in scalars])
        row[self.num_scalars :] = table.flatten()
        self._steps.append(step)

    def fetch(self) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Empties the buffer: steps [n], scalars [n, num_scalars] and tables [n, *table].

        One copy, for which the host waits.
        """
        values = self._values[: len(self._steps)].to("cpu", copy=True).numpy()
        steps, self._steps = self._steps, []
        tables = values[:, self.num_scalars :].reshape(len(steps), *self.table)
        return steps, values[:, : self.num_scalars], tables
