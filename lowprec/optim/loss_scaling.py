"""Loss scaling: none, PyTorch's dynamic scaler or the paper's fixed scale, behind one interface.

`scaler.scale(loss).backward()`, then `scaler.step(optimizer)`; `value` is the scale of this step.
"""

import torch
from torch import Tensor


class NoScaler:
    """Leaves the loss as it is."""

    value = 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the scale."""
        return loss * self.value

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps the optimizer."""
        optimizer.step()

    def state_dict(self) -> dict:
        """Returns an empty state."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Loads nothing."""


class FixedScaler(NoScaler):
    """Multiplies the loss by a constant, by which the optimizer divides the gradients.

    Made for `StableAdamW(skip="tensor")`, which skips only the tensors whose gradients overflow.
    Source: the optimizer of the runs of arXiv:2304.13013.
    """

    def __init__(self, scale: float, device: torch.device | str):
        self.value = torch.full((), scale, dtype=torch.float32, device=device)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps the optimizer, which unscales the gradients."""
        optimizer.grad_scale = self.value
        optimizer.step()


class DynamicScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, which halves its scale when a gradient is not finite."""

    def __init__(self, init_scale: float, device: torch.device | str):
        super().__init__(torch.device(device).type, init_scale=init_scale)
        self.scale(torch.zeros((), device=device))  # allocates the scale

    @property
    def value(self) -> Tensor:
        """The current scale, 0-d on the device."""
        return self._scale

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps the optimizer unless a gradient is not finite, then adapts the scale.

        The optimizer unscales and skips on the device, so its statistics include skipped steps.
        """
        optimizer._step_supports_amp_scaling = True
        super().step(optimizer)
        self.update()


def build_scaler(
    name: str, init_scale: float, device: torch.device
) -> NoScaler | FixedScaler | DynamicScaler:
    """Returns the scaler for the config key `scaler.name`."""
    if name == "fixed":
        return FixedScaler(init_scale, device)
    return DynamicScaler(init_scale, device) if name == "dynamic" else NoScaler()
