"""A step over all tensors in plain torch, one tensor after the other, on any device."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec.optim.adamw_update import Hyperparameters, Response, stable_adamw_update, wide
from lowprec.optim.eight_bit import dequantize, quantize_
from lowprec.optim.statistics import GradientSums, ShardReduction, StepSums


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
    """The two passes of a step. `fused.FusedStep` has the same interface."""

    def __init__(self, tensors: Tensors, shards: ShardReduction):
        self.tensors = tensors
        self.shards = shards

    def gradients(self, factor: Tensor) -> GradientSums:
        """Sums over the gradients times `factor` (0-d), [tensors] each."""
        sums = [GradientSums.of(wide(grad) * factor) for grad in self.tensors.grads]
        return self.shards.totals(GradientSums, sums)

    def update(
        self,
        h: Hyperparameters,
        factor: Tensor,
        sizes: Tensor,
        is_clipped: bool,
        response: Response | None = None,
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
            own = response and response._replace(beta2_ratio=response.beta2_ratio[i])
            rms_t, update = stable_adamw_update(
                param, grad, *moments, values, mean_square, lost, own
            )
            for codes, moment in zip(coded, moments, strict=False):
                quantize_(*codes, moment, values.apply)
            rms.append(rms_t)
            sums.append(StepSums.of(moments[1], update, param))
        return torch.stack(rms), self.shards.totals(StepSums, sums)

    def _mean_square(self, i: int, size: Tensor, x: Tensor) -> Tensor:
        """Mean of the squares of the i-th tensor, of which `x` may be a shard; float32."""
        square_sum = torch.linalg.vector_norm(x).square().float()
        return self.shards.sum_one(i, square_sum) / size
