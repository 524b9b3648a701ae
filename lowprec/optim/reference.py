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
        found = [gradient_parts(wide(grad) * factor) for grad in self.tensors.grads]
        return as_tables(found)

    def moments(self, c: Coefficients) -> tuple[Tensor, Tensor]:
        """Updates both moments; sums [tensors, 2] of g^2 / max(u, eps^2) and u; maxima of -u, u."""
        t, found = self.tensors, []
        for i, (grad, v, u) in enumerate(zip(t.grads, t.exp_avgs, t.exp_avg_sqs, strict=True)):
            g = torch.where(c.apply[i] > 0, wide(grad) * c.factor[i], 0.0)
            v.mul_(c.beta1[i]).add_(g * (1 - c.beta1[i]))
            u.mul_(c.beta2[i]).add_((g * g).mul_(1 - c.beta2[i]))
            found.append(moment_parts(g, u, c.eps[i]))
        return as_tables(found)

    def update(self, c: Coefficients) -> Tensor:
        """Parameters to `decay p - rate v / (sqrt(u) + eps)`; sums [tensors, 2] of squares.

        Of the update and of the new parameter.
        """
        t, found = self.tensors, []
        columns = (t.params, t.exp_avgs, t.exp_avg_sqs, t.compensations)
        for i, (p, v, u, lost) in enumerate(zip(*columns, strict=True)):
            change = (v / u.sqrt().add_(c.eps[i])).mul_(c.rate[i])
            if lost is None:
                p.mul_(c.decay[i]).sub_(change)
            else:  # Kahan's sum: what rounds away now is added the next time
                before = wide(p)
                wanted = (c.decay[i] - 1) * before - change + wide(lost)
                after = torch.where(c.apply[i] > 0, (before + wanted).to(p.dtype), p)
                lost.copy_(torch.where(c.apply[i] > 0, wanted - (wide(after) - before), lost))
                p.copy_(after)
            found.append(update_parts(change, p))
        return as_table(found)

    def moments_and_update(self, c: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
        """Both, of a rate that does not wait for the moments."""
        return *self.moments(c), self.update(c)


def gradient_parts(g: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Sums of a gradient's squares, infs and NaNs; its largest magnitude, of NaN anything."""
    norm = torch.linalg.vector_norm(g)
    if g.is_cpu and norm.isfinite():
        infs = nans = torch.zeros_like(norm)
    else:
        infs, nans = g.isinf().sum(), g.isnan().sum()
    least, largest = _extremes(g)
    return [norm.square(), infs, nans], [torch.maximum(-least, largest)]


def moment_parts(g: Tensor, u: Tensor, eps: Tensor | float) -> tuple[list[Tensor], list[Tensor]]:
    """Sums of g^2 / max(u, eps^2) and of u; the largest -u and u."""
    ratio = u.sqrt().clamp_(min=eps)
    torch.div(g, ratio, out=ratio)
    least, largest = _extremes(u)
    return [torch.linalg.vector_norm(ratio).square(), u.sum()], [-least, largest]


def update_parts(change: Tensor, p: Tensor) -> list[Tensor]:
    """Sums of squares of an update and of the parameter after it."""
    return [torch.linalg.vector_norm(x.float()).square() for x in (change, p)]


def as_tables(parts: list[tuple[list[Tensor], list[Tensor]]]) -> tuple[Tensor, Tensor]:
    """Sums and maxima [tensors, n] of a pair for each tensor."""
    return as_table([sums for sums, _ in parts]), as_table([maxima for _, maxima in parts])


def as_table(rows: list[list[Tensor]]) -> Tensor:
    """float32 [tensors, n] of n 0-d values for each tensor."""
    return torch.stack([value.float() for row in rows for value in row]).view(len(rows), -1)


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest element, which a shard without elements does not change."""
    if x.numel():
        return x.aminmax()
    return x.new_full((), torch.inf), x.new_full((), -torch.inf)


def wide(x: Tensor) -> Tensor:
    """In the dtype of its update."""
    return x.to(wide_dtype(x))


def wide_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's update and moments: float32, or float64 for float64."""
    return torch.promote_types(p.dtype, torch.float32)
