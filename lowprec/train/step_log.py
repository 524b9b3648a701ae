"""The last steps' numbers, kept on the device until one copy brings them all to the host."""

import numpy as np
import torch
from torch import Tensor


class StepLog:
    """Room for `capacity` steps of named 0-d values and of a [tensors, statistics] table each.

    `append` never waits for the device; `fetch` waits once.
    """

    def __init__(self, names: tuple[str, ...], table: tuple[int, int], capacity: int, device: str):
        self.names = names
        self.table = table
        width = len(names) + table[0] * table[1]
        self._buffer = torch.zeros(capacity, width, device=device)
        self._steps: list[int] = []
        self._host: list[dict] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """True when the next step has no room."""
        return len(self) == len(self._buffer)

    def append(self, step: int, host: dict, values: dict[str, Tensor], table: Tensor) -> None:
        """Keeps a step: numbers known to the host, 0-d device values, the device table."""
        row = self._buffer[len(self)]
        scalars = [torch.as_tensor(values[name], device=row.device) for name in self.names]
        row[: len(scalars)] = torch.stack([scalar.float().reshape(()) for scalar in scalars])
        row[len(scalars) :] = table.flatten()
        self._steps.append(step)
        self._host.append(host)

    def fetch(self) -> tuple[list[dict], np.ndarray]:
        """Rows `{"step": ..., **host, **values}` and tables [steps, tensors, statistics]."""
        values = self._buffer[: len(self)].cpu().numpy()
        rows = [
            {"step": step, **host, **dict(zip(self.names, map(float, line), strict=False))}
            for step, host, line in zip(self._steps, self._host, values, strict=True)
        ]
        tables = values[:, len(self.names) :].reshape(len(self), *self.table)
        self._steps, self._host = [], []
        return rows, tables
