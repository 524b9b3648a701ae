"""The options of parameter groups: checked, and as numbers of every tensor on the device."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec.optim.on_device import Constants

OURS = ("clip_threshold", "clip_weight_decay", "beta2_decay")  # what torch's AdamW does not have


def check_rule(rule: dict) -> None:
    """ValueError names the first option of a group that is out of range."""
    betas = tuple(rule["betas"])
    are_betas = len(betas) == 2 and all(0 <= float(beta) < 1 for beta in betas)
    positive = "None or a number > 0"
    for name, allowed, is_allowed in (
        ("lr", "a number >= 0", 0 <= float(rule["lr"]) < math.inf),
        ("betas", "two numbers, >= 0 and < 1,", are_betas),
        ("eps", "a number > 0", 0 < rule["eps"] < math.inf),
        ("weight_decay", "a number >= 0", 0 <= rule["weight_decay"] < math.inf),
        ("clip_threshold", positive, is_positive(rule["clip_threshold"])),
        ("beta2_decay", positive, is_positive(rule["beta2_decay"])),
    ):
        if not is_allowed:
            raise ValueError(f"{name}={rule[name]}: {allowed} is needed")


def is_positive(value: float | None) -> bool:
    """Whether it is None or a number > 0."""
    return value is None or value > 0


@dataclass
class Rules:
    """[tensors] each, on the device; betas are debiased, `clip_weight_decay` is 1 or 0."""

    beta1: Tensor
    beta2: Tensor
    lr: Tensor
    eps: Tensor
    weight_decay: Tensor
    clip_threshold: Tensor
    clip_weight_decay: Tensor
    is_clipped: bool  # of any


def spread(
    groups: list[dict], of_group: list[int], t: Tensor, dtype: torch.dtype, constants: Constants
) -> Rules:
    """The rules of tensors: of each the number of its group, and in t [tensors] of its update."""
    table = torch.tensor([_numbers(group) for group in groups], dtype=torch.float64)
    group = torch.tensor(of_group)
    table = constants("rules", table[group].T.contiguous(), t.device)
    rates = torch.stack([_rate(group["lr"], t.device) for group in groups])
    rates = rates[constants("of_group", group, t.device)]
    beta1, beta2, beta2_decay = table[:3]
    t = t.double().clamp(min=1.0)
    beta2 = torch.where(beta2_decay.isnan(), _debiased(beta2, t), 1 - t**-beta2_decay)
    used = (groups[i] for i in set(of_group))
    return Rules(
        _debiased(beta1, t).to(dtype),
        beta2.to(dtype),
        rates.to(dtype),
        *table[3:].to(dtype),
        is_clipped=any(group["clip_threshold"] is not None for group in used),
    )


def _numbers(group: dict) -> list[float]:
    threshold, decay = group["clip_threshold"], group["beta2_decay"]
    return [
        *group["betas"],
        math.nan if decay is None else decay,
        group["eps"],
        group["weight_decay"],
        math.inf if threshold is None else threshold,
        float(group["clip_weight_decay"]),
    ]


def _rate(lr: float | Tensor, device: torch.device) -> Tensor:
    """0-d; a graph that was captured reads a rate on the device at each replay."""
    if isinstance(lr, Tensor):
        return lr.to(device, torch.float32).reshape(())
    return torch.full((), lr, device=device)


def _debiased(beta: Tensor, t: Tensor) -> Tensor:
    """`beta (1 - beta^(t-1)) / (1 - beta^t)`."""
    return beta * (1 - beta ** (t - 1)) / (1 - beta**t)
