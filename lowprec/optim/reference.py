"""The optimizer's numbers in plain torch, a tensor at a time: the definition of `triton_adamw`.

All coefficients are 0-d tensors or [tensors], one each, so that nothing is read back to the host.
Where `apply` is 0 nothing changes. `parts` are sums and maxima over a tensor's elements, from which
norms and means follow; over the shards of a tensor they add up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Tensors:
    """What the optimizer reads and writes of every tensor that has a gradient, in one order.

    Moments are float32 (float64 for float64). `compensation`, in the parameter's dtype, is what
    rounding took from a 16-bit parameter so far; None for the others.
    """

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    compensations: list[Tensor | None]


@dataclass
class Coefficients:
    """Of one step, [tensors] each; `factor` multiplies the gradient, `decay` the parameter."""

    apply: Tensor  # 1 or 0
    factor: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    rate: Tensor | None = None
    decay: Tensor | None = None


class Reference:
    """The three passes of a step over all tensors."""

    def __init__(self, tensors: Tensors):
        self.tensors = tensors

    def gradients(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Parts of `g * factor` (0-d): sums [tensors, 3] of squares, infs, NaNs; maxima [., 1].

        The maximum is that of the magnitudes, of NaN anything.
        """
        sums, maxima = [], []
        for grad in self.tensors.grads:
            g = _wide(grad) * factor
            norm = torch.linalg.vector_norm(g)
            if g.is_cpu and norm.isfinite():
                infs = nans = torch.zeros_like(norm)
            else:
                infs, nans = g.isinf().sum(), g.isnan().sum()
            sums += [norm.square(), infs, nans]
            maxima.append(torch.linalg.vector_norm(g, torch.inf) if g.numel() else norm - torch.inf)
        return _table(sums, 3), _table(maxima, 1)

    def moments(self, c: Coefficients) -> tuple[Tensor, Tensor]:
        """Updates both moments; sums [tensors, 2] of g^2 / max(u, eps^2) and u; maxima of -u, u."""
        t, sums, maxima = self.tensors, [], []
        for i, (grad, v, u) in enumerate(zip(t.grads, t.exp_avgs, t.exp_avg_sqs, strict=True)):
            g = torch.where(c.apply[i] > 0, _wide(grad) * c.factor[i], 0.0)
            v.mul_(c.beta1[i]).add_(g * (1 - c.beta1[i]))
            u.mul_(c.beta2[i]).add_((g * g).mul_(1 - c.beta2[i]))
            ratio = g.div_(u.sqrt().clamp_(min=c.eps[i]))
            sums += [torch.linalg.vector_norm(ratio).square(), u.sum()]
            least, largest = u.aminmax() if u.numel() else (u.new_tensor(torch.inf),) * 2
            maxima += [-least, largest if u.numel() else -largest]
        return _table(sums, 2), _table(maxima, 2)

    def update(self, c: Coefficients) -> Tensor:
        """Parameters to `decay p - rate v / (sqrt(u) + eps)`; sums [tensors, 2] of squares.

        Of the update and of the new parameter.
        """
        t, sums = self.tensors, []
        columns = (t.params, t.exp_avgs, t.exp_avg_sqs, t.compensations)
        for i, (p, v, u, lost) in enumerate(zip(*columns, strict=True)):
            change = (v / u.sqrt().add_(c.eps[i])).mul_(c.rate[i])
            if lost is None:
                p.mul_(c.decay[i]).sub_(change)
            else:  # Kahan's sum: what rounds away now is added the next time
                before = _wide(p)
                wanted = (c.decay[i] - 1) * before - change + _wide(lost)
                after = torch.where(c.apply[i] > 0, (before + wanted).to(p.dtype), p)
                lost.copy_(torch.where(c.apply[i] > 0, wanted - (_wide(after) - before), lost))
                p.copy_(after)
            sums += [torch.linalg.vector_norm(x.float()).square() for x in (change, p)]
        return _table(sums, 2)

    def moments_and_update(self, c: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
        """Both, of a rate that does not wait for the moments."""
        return *self.moments(c), self.update(c)


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x))


def wide_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's update and moments: float32, or float64 for float64."""
    return torch.promote_types(p.dtype, torch.float32)


def _table(values: list[Tensor], columns: int) -> Tensor:
    return torch.stack([value.float() for value in values]).view(-1, columns)
