"""Algorithm 2 of arXiv:2304.13013 for one tensor, in plain torch: the definition of StableAdamW.

`plain` applies it to one tensor after the other. The kernels of `triton_adamw` do the same for all
tensors at once and are tested against it. All values of a step are tensors, so that nothing is read
back to the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Hyperparameters(NamedTuple):
    """Values of one step: 0-d for one tensor, [tensors] for all.

    They are float32, or float64 where a parameter is. A tensor that is skipped has `apply` 0, `lr`
    0 and betas 1, which leave it as it is.
    """

    apply: Tensor  # float32: 1 or 0
    lr: Tensor
    beta1_hat: Tensor  # debiased, as is beta2_hat
    beta2_hat: Tensor
    eps: Tensor
    weight_decay: Tensor
    clip_threshold: Tensor  # infinite: no update clipping
    clip_weight_decay: Tensor  # 1: weight decay by the clipped rate; 0: by `lr`


@dataclass(frozen=True)
class OnWarning:
    """What AdamW does in a step to a tensor whose RMS_t exceeds `threshold`.

    action:
        "clip" divides its rate by RMS_t / threshold, as StableAdamW with this `clip_threshold`.
        "skip" leaves the parameter as it is. The moments take the gradient all the same: otherwise
            RMS_t would stay high after a lasting growth of the gradients, and with it the skips.
        "beta2" computes u again, from the last step's, with the lower `beta2`.

    ValueError if a value is out of range.
    """

    action: str
    threshold: float = 2.3  # the paper's spike
    beta2: float = 0.9

    def __post_init__(self):
        for name, allowed, is_allowed in (
            ("action", "clip, skip or beta2", self.action in ("clip", "skip", "beta2")),
            ("threshold", "a number > 0", self.threshold > 0),
            ("beta2", "a number >= 0 and < 1", 0 <= self.beta2 < 1),
        ):
            if not is_allowed:
                raise ValueError(f"on_warning: {name}={getattr(self, name)!r} must be {allowed}")


class Response(NamedTuple):
    """The action "skip" or "beta2" of `OnWarning` in one step."""

    action: str
    threshold: float
    beta2_ratio: Tensor  # the lower beta2_hat / beta2_hat: 0-d for one tensor, [tensors] for all

    def without_skipped(self, h: Hyperparameters, rms: Tensor) -> Hyperparameters:
        """The values that leave the parameter of a tensor with a warning as it is."""
        moves = ~(rms > self.threshold)
        return h._replace(apply=h.apply * moves, lr=h.lr * moves)

    def second_beta2(self, rms: Tensor) -> Tensor:
        """The rate at which g^2 is averaged into u again: 1, which leaves u, without a warning.

        Averages with `beta2_hat` and then `beta2_ratio` equal one with the lower beta2_hat.
        """
        return torch.where(rms > self.threshold, self.beta2_ratio, 1.0)


def mean_square(x: Tensor) -> Tensor:
    """Mean of the squares of all elements, 0-d."""
    return torch.linalg.vector_norm(x).square() / x.numel()


def stable_adamw_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    h: Hyperparameters,
    mean_square: Callable[[Tensor], Tensor] = mean_square,
    compensation: Tensor | None = None,
    response: Response | None = None,
) -> tuple[Tensor, Tensor]:
    """Updates one tensor and its moments in place; returns RMS_t, 0-d, and the update.

    With gradient g, debiased betas (see `debiased`), v = exp_avg and u = exp_avg_sq:

        v <- beta1_hat v + (1 - beta1_hat) g
        u <- beta2_hat u + (1 - beta2_hat) g^2
        rms = sqrt(mean(g^2 / max(u, eps^2)))
        eta = lr / max(1, rms / clip_threshold)
        p <- p - eta weight_decay p - eta v / (sqrt(u) + eps)

    An infinite `clip_threshold` gives AdamW, for which a `response` may change u or keep p. `grad`
    and the moments have the dtype `wide_dtype` of the parameter. A 16-bit parameter needs
    `compensation`, of its shape and dtype: see `add_compensated_`. `mean_square(x)` is the mean
    over all elements; for a shard it must include the elements of the other processes.

    Source: Algorithm 2, arXiv:2304.13013; update clipping: section 5 of arXiv:1804.04235.
    """
    exp_avg.mul_(h.beta1_hat).add_(grad * (1 - h.beta1_hat))
    exp_avg_sq.mul_(h.beta2_hat).add_(grad.square().mul_(1 - h.beta2_hat))
    root_u = exp_avg_sq.sqrt()
    rms = mean_square(grad / root_u.clamp(min=h.eps)).sqrt()
    if response is not None and response.action == "skip":
        h = response.without_skipped(h, rms)
    elif response is not None:
        beta2 = response.second_beta2(rms)
        exp_avg_sq.mul_(beta2).add_((grad * (1 - beta2)).mul_(grad))  # 0, not NaN, for large g^2
        root_u = exp_avg_sq.sqrt()
    eta = clipped_lr(h, rms)
    update = (exp_avg / root_u.add_(h.eps)).mul_(eta)
    if compensation is None:
        param.mul_(decay_factor(h, eta)).sub_(update)
    else:
        change = (decay_factor(h, eta) - 1) * wide(param) - update
        add_compensated_(param, change, compensation, h.apply)
    return rms, update


def clipped_lr(h: Hyperparameters, rms: Tensor) -> Tensor:
    """The rate eta = lr / max(1, rms / clip_threshold); `lr` where `rms` is NaN."""
    return h.lr / (rms / h.clip_threshold).nan_to_num(1.0).clamp(min=1.0)


def decay_factor(h: Hyperparameters, eta: Tensor) -> Tensor:
    """What weight decay multiplies a parameter by: 1 - eta weight_decay, or 1 - lr weight_decay."""
    return 1 - torch.where(h.clip_weight_decay > 0, eta, h.lr) * h.weight_decay


def debiased(beta: Tensor | float, t: Tensor | float) -> Tensor | float:
    """beta_hat = beta (1 - beta^(t-1)) / (1 - beta^t), for the t-th update, counted from 1.

    A moment that is averaged with it equals Adam's moment after its bias correction.
    """
    return beta * (1 - beta ** (t - 1)) / (1 - beta**t)


def add_compensated_(param: Tensor, change: Tensor, compensation: Tensor, apply: Tensor) -> None:
    """Adds a float32 change to a 16-bit parameter, and what earlier additions rounded away.

    `compensation` keeps what this addition rounds away. Nothing changes where `apply` is 0.
    Source: W. Kahan, Further remarks on reducing truncation errors, 1965.
    """
    before, total = wide(param), change + wide(compensation)
    after = torch.where(apply > 0, (before + total).to(param.dtype), param)
    lost = total - (wide(after) - before)
    compensation.copy_(torch.where(apply > 0, lost, compensation))
    param.copy_(after)


def wide(x: Tensor) -> Tensor:
    """The tensor in its `wide_dtype`."""
    return x.to(wide_dtype(x))


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a tensor's moments and of its update: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)
