"""What a step applies: which tensors are skipped, and to what norm the gradient is clipped.

`ZClip` and `SkipStep` take the place of a constant `clip_norm`. All decisions stay on the device.
"""

import math

import torch
from torch import Tensor, nn

from lowprec.optim.statistics import no_statistics

ZCLIP_DECAY = 0.97  # of the mean and variance
ZCLIP_FIRST = 25  # steps whose norms give the first mean and variance
WINDOW = 128  # steps that SkipStep compares with


def _checked(sigmas: float) -> float:
    if not sigmas > 0:
        raise ValueError(f"sigmas={sigmas} must be a number > 0")
    return sigmas


class ZClip(nn.Module):
    """Clips a gradient whose global norm is an outlier among those of earlier steps.

    With the running mean m and standard deviation s of the norm, a norm of z = (norm - m) / s
    above `sigmas` is clipped to m + s sigmas^2 / z: the larger it is, the smaller it becomes. The
    clipped norm enters m and s. The first 25 steps are not clipped.

    The buffers mean, variance and count (float64, 0-d) are the state. Source: arXiv:2504.02507.
    """

    def __init__(self, sigmas: float = 2.5):
        super().__init__()
        self.sigmas = _checked(sigmas)
        for name in ("mean", "variance", "count"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def forward(self, norm: Tensor, is_live: Tensor) -> Tensor:
        """Largest norm of this step, 0-d, infinite if it is no outlier.

        `is_live` (0-d bool): whether the step updates anything; if not, the state stays.
        """
        norm = norm.double()
        deviation = self.variance.sqrt()
        z = (norm - self.mean) / (deviation + 1e-6)
        is_outlier = (self.count >= ZCLIP_FIRST) & (z > self.sigmas)
        limit = self.mean + self.sigmas * deviation / (z / self.sigmas)
        norm = torch.where(is_outlier, limit, norm)
        first = self.count < ZCLIP_FIRST
        weight = torch.where(first, 1 / (self.count + 1), 1 - ZCLIP_DECAY)
        mean = self.mean + weight * (norm - self.mean)
        before = torch.where(first, self.mean, mean)  # Welford's sums give the exact variance
        square = (norm - before) * (norm - mean)
        variance = self.variance + weight * (square - self.variance)
        for buffer, value in (
            (self.mean, mean),
            (self.variance, variance),
            (self.count, self.count + 1),
        ):
            buffer.copy_(torch.where(is_live, value, buffer))
        return torch.where(is_outlier, limit, math.inf)


class SkipStep(nn.Module):
    """Skips a step whose loss or global gradient norm is an outlier among the last 128 steps.

    An outlier exceeds the mean by more than `sigmas` standard deviations. Skipped steps also enter
    the window. The first 63 steps are not skipped. Set `loss` (0-d) before each step; without it
    only the norm counts.

    The buffers window (float64 [2, 128], losses and norms) and count are the state. Source:
    SkipStepOptimizer of OLMo-core 3.0.
    """

    def __init__(self, sigmas: float = 6.0):
        super().__init__()
        self.sigmas = _checked(sigmas)
        self.loss: Tensor | None = None
        self.register_buffer("window", torch.zeros(2, WINDOW, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, norm: Tensor, is_live: Tensor) -> Tensor:
        """Largest norm of this step, 0-d: 0 if it is skipped, else infinite. See ZClip."""
        loss = torch.zeros_like(norm) if self.loss is None else self.loss
        values = torch.stack([loss.double(), norm.double()])[:, None]
        slots = torch.arange(WINDOW, device=norm.device)
        size = self.count.clamp(max=WINDOW)
        mean = self.window.sum(1, keepdim=True) / size
        squares = torch.where(slots < size, (self.window - mean).square(), 0.0)
        variance = squares.sum(1, keepdim=True) / (size - 1)
        is_outlier = (values - mean > self.sigmas * variance.sqrt()).any()
        is_outlier &= self.count + 1 >= WINDOW // 2
        is_next = slots == self.count % WINDOW
        self.window.copy_(torch.where(is_live & is_next, values, self.window))
        self.count.add_(is_live)
        return torch.where(is_outlier, torch.zeros_like(norm), math.inf)


class GuardedStep:
    """Base of an optimizer that skips non-finite gradients and clips the global norm.

    Subclasses set `clip_norm` (None, a number, ZClip or SkipStep) and `skip` ("step" or "tensor").
    """

    clip_norm: float | ZClip | SkipStep | None
    skip: str
    statistics: Tensor | None = None
    frozen: Tensor | None = None
    all_finite: Tensor | None = None
    grad_norm: Tensor | None = None
    clipped_grad_norm: Tensor | None = None

    def _without_gradients(self, count: int, device: torch.device) -> None:
        """What a step leaves that has no gradient of any of `count` tensors."""
        self.statistics = no_statistics(count, device)
        self.all_finite = torch.ones((), dtype=torch.bool, device=device)
        self.grad_norm = self.clipped_grad_norm = self.statistics.new_zeros(())

    def _decide(self, grad_norms: Tensor) -> tuple[Tensor, Tensor]:
        """Which tensors are updated, bool [tensors], and the factor (0-d) of all gradients.

        `grad_norms` [tensors]: norms of the unscaled gradients. Sets `all_finite`, `grad_norm` and
        `clipped_grad_norm`, which is 0 if SkipStep skips the step.
        """
        finite = grad_norms.isfinite()
        self.all_finite = finite.all()
        applied = self.all_finite.expand_as(finite) if self.skip == "step" else finite
        for veto in (getattr(self, "found_inf", None), self.frozen):
            if veto is not None:
                applied = applied & (veto.to(grad_norms.device) == 0).reshape(())
        limit = self.clip_norm
        if isinstance(limit, nn.Module):
            limit = limit(_finite_norm(grad_norms), applied.any()).float()
            applied = applied & (limit > 0)
        clipping = clip_global_norm(grad_norms, limit)
        self.grad_norm, self.clipped_grad_norm, factor = clipping
        return applied, factor


def clip_global_norm(
    grad_norms: Tensor, max_norm: float | Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The global norm before and after clipping, and the factor that clips the gradients: 0-d.

    Tensors with a non-finite norm count in the first norm only.
    """
    norm = torch.linalg.vector_norm(grad_norms)
    if max_norm is None:
        return norm, norm, torch.ones_like(norm)
    finite_norm = _finite_norm(grad_norms)
    factor = (max_norm / (finite_norm + 1e-6)).clamp(max=1.0)
    return norm, finite_norm * factor, factor


def _finite_norm(grad_norms: Tensor) -> Tensor:
    return torch.linalg.vector_norm(grad_norms.masked_fill(~grad_norms.isfinite(), 0))
