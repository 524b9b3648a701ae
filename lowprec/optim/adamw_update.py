"""Algorithm 2 of arXiv:2304.13013 in plain torch, on any device: the definition of StableAdamW.

`PlainStep` applies `stable_adamw_update` to one tensor after the other. The kernels of
`triton_adamw` do the same for all tensors at once and are tested against it. All values of a step
are tensors, so that nothing is read back to the host.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec.optim.eight_bit import dequantize, quantize_
from lowprec.optim.statistics import GradientSums, MomentSums, ShardReduction, StepSums


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
) -> tuple[Tensor, Tensor]:
    """Updates one tensor and its moments in place; returns RMS_t, 0-d, and the update.

    With gradient g, debiased betas (see `debiased`), v = exp_avg and u = exp_avg_sq:

        v <- beta1_hat v + (1 - beta1_hat) g
        u <- beta2_hat u + (1 - beta2_hat) g^2
        rms = sqrt(mean(g^2 / max(u, eps^2)))
        eta = lr / max(1, rms / clip_threshold)
        p <- p - eta weight_decay p - eta v / (sqrt(u) + eps)

    An infinite `clip_threshold` gives AdamW. `grad` and the moments have the dtype `wide_dtype` of
    the parameter. A 16-bit parameter needs `compensation`, of its shape and dtype: see
    `add_compensated_`. `mean_square(x)` is the mean over all elements; for a shard it must include
    the elements of the other processes.

    Source: Algorithm 2, arXiv:2304.13013; update clipping: section 5 of arXiv:1804.04235.
    """
    exp_avg.mul_(h.beta1_hat).add_(grad * (1 - h.beta1_hat))
    exp_avg_sq.mul_(h.beta2_hat).add_(grad.square().mul_(1 - h.beta2_hat))
    root_u = exp_avg_sq.sqrt()
    rms = mean_square(grad / root_u.clamp(min=h.eps)).sqrt()
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


class Tensors(NamedTuple):
    """What a step reads and writes of the tensors that have a gradient, or of their local shards.

    Moments are float32, float64 for float64, or codes with scales: see `eight_bit`.
    """

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    compensations: list[Tensor | None]  # None: not a 16-bit parameter
    exp_avg_scales: list[Tensor | None]  # None: not 8-bit moments
    exp_avg_sq_scales: list[Tensor | None]


class PlainStep:
    """The two passes of a step, and one that only reads. `fused.FusedStep` has the same methods."""

    def __init__(self, tensors: Tensors, shards: ShardReduction):
        self.tensors = tensors
        self.shards = shards

    def gradients(self, factor: Tensor) -> GradientSums:
        """Sums over the gradients times `factor` (0-d), [tensors] each."""
        sums = [GradientSums.of(wide(grad) * factor) for grad in self.tensors.grads]
        return self.shards.totals(GradientSums, sums)

    def observe(self, values: Tensor) -> MomentSums:
        """Sums over gradients and biased moments, [tensors] each; `values` [tensors, 4]."""
        columns = (self.tensors.grads, self.tensors.exp_avgs, self.tensors.exp_avg_sqs, values)
        sums = [MomentSums.of(*row) for row in zip(*columns, strict=True)]
        return self.shards.totals(MomentSums, sums)

    def update(
        self, h: Hyperparameters, factor: Tensor, sizes: Tensor, is_clipped: bool
    ) -> tuple[Tensor, StepSums]:
        """Updates moments and parameters; returns RMS_t and sums over them, [tensors] each.

        `factor` (0-d) multiplies the gradients; `sizes` [tensors] counts the elements, with those
        of other processes. `is_clipped` says whether any tensor has a finite `clip_threshold`.
        """
        factor = factor.to(h.lr.dtype)
        rms, sums = [], []
        for i, (param, grad, v, u, lost, *scales) in enumerate(zip(*self.tensors, strict=True)):
            values = Hyperparameters(*(value[i] for value in h))
            grad = torch.where(values.apply > 0, wide(grad) * factor, 0.0)
            coded = [(v, scales[0], True), (u, scales[1], False)] if scales[0] is not None else []
            moments = [dequantize(*codes) for codes in coded] or [v, u]
            mean_square = partial(self._mean_square, i, sizes[i])
            rms_t, update = stable_adamw_update(param, grad, *moments, values, mean_square, lost)
            for codes, moment in zip(coded, moments, strict=False):
                quantize_(*codes, moment, values.apply)
            rms.append(rms_t.float())
            sums.append(StepSums.of(moments[1], update, param))
        return torch.stack(rms), self.shards.totals(StepSums, sums)

    def _mean_square(self, i: int, size: Tensor, x: Tensor) -> Tensor:
        """Mean of the squares of the i-th tensor, of which `x` may be a shard."""
        square_sum = torch.linalg.vector_norm(x).square()
        return self.shards.sum_one(i, square_sum) / size
