"""Parameter groups, and the learning rate as a function of the step."""

import math

import torch
from torch import nn

from lowprec.config.schema import default_warmup


def param_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups of named parameters: matrices and embeddings decay, the others do not.

    Gains, biases, layer-scale vectors and the logit scale have fewer than two dimensions.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(name, p) for name, p in named if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def learning_rate(
    step: int, *, peak: float, num_steps: int, warmup_steps: int | None = 0, shape: str = "cosine"
) -> float:
    """The learning rate of update `step`, counted from 1.

    It rises linearly from 0 to `peak`, which it reaches at step = warmup_steps. Then it is constant
    (`shape="constant"`) or follows a cosine that reaches 0 at step = num_steps. `warmup_steps=None`
    takes `default_warmup`. Source: section 2, arXiv:2304.13013.
    """
    if warmup_steps is None:
        warmup_steps = default_warmup(num_steps, shape)
    if step < warmup_steps:
        return peak * step / warmup_steps
    if shape == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
