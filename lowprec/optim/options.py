"""Options of StableAdamW's parameter groups."""

import math

import torch
from torch import Tensor

OWN_OPTIONS = ("clip_threshold", "clip_weight_decay", "beta2_decay")  # torch's AdamW has none
UNSUPPORTED = ("amsgrad", "maximize", "differentiable")  # options of torch's AdamW


def check_options(group: dict) -> None:
    """ValueError names the first option of a group that is out of range or not supported."""
    betas = tuple(group["betas"])
    are_betas = len(betas) == 2 and all(0 <= float(beta) < 1 for beta in betas)
    for name, allowed, is_allowed in (
        ("lr", "a number >= 0", 0 <= float(group["lr"]) < math.inf),
        ("betas", "two numbers >= 0 and < 1", are_betas),
        ("eps", "a number > 0", 0 < group["eps"] < math.inf),
        ("weight_decay", "a number >= 0", 0 <= group["weight_decay"] < math.inf),
        ("clip_threshold", "None or a number > 0", is_positive_or_none(group["clip_threshold"])),
        ("beta2_decay", "None or a number > 0", is_positive_or_none(group["beta2_decay"])),
        *((name, "False, unlike in torch", not group.get(name)) for name in UNSUPPORTED),
    ):
        if not is_allowed:
            raise ValueError(f"{name}={group[name]} must be {allowed}")


def is_positive_or_none(value: float | None) -> bool:
    """Whether an option is None or positive (NaN is not)."""
    return value is None or value > 0


def options_of(group: dict) -> list[float]:
    """betas, beta2_decay, then the last four fields of Hyperparameters; None becomes infinite."""
    decay, threshold = (
        math.inf if group[name] is None else group[name]
        for name in ("beta2_decay", "clip_threshold")
    )
    own = (threshold, float(group["clip_weight_decay"]))
    return [*group["betas"], decay, group["eps"], group["weight_decay"], *own]


def lr_on_device(lr: float | Tensor, device: torch.device) -> Tensor:
    """float64, 0-d; a captured graph reads a learning rate on the device at each replay."""
    if isinstance(lr, Tensor):
        return lr.to(device, torch.float64).reshape(())
    return torch.full((), lr, device=device, dtype=torch.float64)
