"""Learning rate as a function of the step."""

import math

import torch


def learning_rate(
    step: int, *, peak: float, num_steps: int, warmup_steps: int | None = 0, shape: str = "cosine"
) -> float:
    """The rate of update `step`, counted from 1.

    Linear from 0 to `peak` over `warmup_steps`, reached at step = warmup_steps; then constant, or a
    cosine that reaches 0 at step = num_steps. `warmup_steps=None`: a tenth of the steps, or 100 for
    the constant shape, which must not depend on its length. Source: section 2, arXiv:2304.13013.
    """
    if warmup_steps is None:
        warmup_steps = 100 if shape == "constant" else num_steps // 10
    if step < warmup_steps:
        return peak * step / warmup_steps
    if shape == "constant":
        return peak
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the rate of every group; a rate that lives on the device is filled there."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
