"""StableAdamW, and AdamW as the same with update clipping off; statistics of every tensor.

The sums over elements are made by `reference` (plain torch, the definition) or `fused` (Triton);
here is what a step does with them. No value is read back to the host: what is decided at run time
(skip, clip) is a 0-d or [tensors] factor on the device.
"""

import math
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lowprec.optim import sharding
from lowprec.optim.adamw_state import AdamWState
from lowprec.optim.fused import Addresses, Fused, first_unfit
from lowprec.optim.on_device import Constants
from lowprec.optim.reference import Coefficients, Reference, Tensors
from lowprec.optim.rules import Rules, is_positive, spread
from lowprec.optim.statistics import STATISTICS, columns, in_rows, local, nothing

__all__ = ["STATISTICS", "StableAdamW"]


class StableAdamW(AdamWState):
    """AdamW with AdaFactor's update clipping, tensor by tensor.

    With debiased betas b = beta (1 - beta^(t-1)) / (1 - beta^t):

        v <- b1 v + (1 - b1) g
        u <- b2 u + (1 - b2) g^2
        rms = sqrt(mean(g^2 / max(u, eps^2)))
        eta = lr / max(1, rms / clip_threshold)
        p <- p - eta weight_decay p - eta v / (sqrt(u) + eps)

    `clip_threshold=None` is AdamW (`eta = lr`), equal to torch.optim.AdamW.
    `clip_weight_decay=False` decays with the unclipped `lr`, as in the paper's runs.
    `beta2_decay=x` takes AdaFactor's b2 = 1 - t^-x instead of beta2. `clip_norm` bounds the global
    norm of the gradient. Moments are float32 also for 16-bit parameters, which are summed after
    Kahan: what rounding takes from them is kept, in their dtype, and added the next time.

    After `step()`:
      statistics: float32 [tensors, 10], in the order of `names` and STATISTICS: rms; norm of the
        unscaled gradient before `clip_norm`; norm of the update `eta v / (sqrt(u) + eps)`; of the
        unscaled gradient the largest magnitude (NaN where there is one) and how many elements are
        infinite and NaN; norm of the parameter after the step; least, mean and largest u. A
        skipped tensor shows its non-finite gradient norm, rms NaN and update norm 0.
      grad_norm, clipped_grad_norm: 0-d, over all tensors, before and after `clip_norm`.
      all_finite: 0-d bool, whether every tensor's gradient norm is finite.

    A tensor whose gradient is not finite (its norm, in float32) is never applied: with
    `skip="step"` no tensor is updated, with `skip="tensor"` only that one is left out. `grad_scale`
    (gradients are divided by it), `found_inf` and `frozen` (nonzero: no update) are attributes
    that a caller may set to 0-d tensors; torch.amp.GradScaler sets the first two. t counts the
    updates that a tensor was given, so it waits where one is skipped. Gradients are not changed.
    A parameter without a gradient or without elements is left alone and shows rms NaN, all else 0.

    `fused=None` takes the Triton kernels where they can run: dense float32, bfloat16 and float16
    tensors of one GPU, gradients in the same order in memory. Where a tensor of a GPU is not of
    these all go by the definition, and a warning names it. False takes the definition, True raises
    ValueError where kernels cannot run. Sparse gradients and complex parameters are a ValueError.
    Sharded parameters (FSDP2's DTensors) show the statistics of the whole tensors.
    Source: Algorithm 2, arXiv:2304.13013; sums of 16 bits: Kahan, 1965.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling to step()
    attributes = ("clip_norm", "skip", "fused", "frozen", "all_finite", "statistics", "grad_norm")
    attributes += ("clipped_grad_norm",)

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 0.2,
        *,
        clip_threshold: float | None = 1.0,
        clip_weight_decay: bool = True,
        beta2_decay: float | None = None,
        clip_norm: float | None = None,
        skip: str = "step",
        fused: bool | None = None,
    ):
        if skip not in ("step", "tensor"):
            raise ValueError(f"skip={skip!r}: one of step, tensor")
        if not is_positive(clip_norm):
            raise ValueError(f"clip_norm={clip_norm}: None or a number > 0 is needed")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"clip_threshold": clip_threshold, "clip_weight_decay": clip_weight_decay}
        super().__init__(params, defaults | {"beta2_decay": beta2_decay})
        self.clip_norm = clip_norm
        self.skip = skip
        self.fused = fused
        self.frozen: Tensor | None = None
        self.all_finite: Tensor | None = None
        self.statistics: Tensor | None = None
        self.grad_norm: Tensor | None = None
        self.clipped_grad_norm: Tensor | None = None

    def _forget(self) -> None:
        super()._forget()
        self._addresses = Addresses()
        self._constants = Constants()
        self._has_warned = False

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Tensor | None:
        """One update of every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = self._params()
        having = tuple(i for i, p in enumerate(every) if p.grad is not None and p.numel())
        if not having:
            self.statistics = nothing(len(every), every[0].device)
            self.all_finite = self.statistics.new_ones((), dtype=torch.bool)
            self.grad_norm = self.clipped_grad_norm = self.statistics.new_zeros(())
            return loss
        params = [every[i] for i in having]
        passes = self._passes(params, having)
        reduce = sharding.reducer(params, lambda i: self._called(params[i]))
        device = params[0].device
        grad_scale = getattr(self, "grad_scale", None)  # set and deleted by GradScaler
        unscale = torch.ones((), device=device) if grad_scale is None else 1 / grad_scale
        gradients = reduce(*passes.gradients(unscale))
        norms = gradients[0][:, 0].sqrt()
        apply = self._decide(norms)
        factor = unscale * self._clip_global_norm(norms)
        sizes = torch.tensor([float(p.numel()) for p in params])
        sizes = self._constants("sizes", sizes, device)
        rules = self._rules(params, having, apply)
        rms, moments, updates = _update(passes, reduce, rules, sizes, apply, factor)
        values = columns(rms, sizes, gradients, moments, updates)
        self.statistics = in_rows(values, having, len(every))
        return loss

    def _passes(self, params: list[Tensor], having: tuple[int, ...]) -> Reference | Fused:
        states = self._states(params, having)
        tensors = Tensors(
            [local(p) for p in params],
            [local(p.grad) for p in params],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [local(state.get("compensation")) for state in states],
        )
        for p, grad in zip(params, tensors.grads, strict=True):
            if grad.layout != torch.strided:
                raise ValueError(
                    f"{self._called(p)} has a sparse gradient: only dense ones will do"
                )
        unfit = None if self.fused is False else first_unfit(tensors)
        if self.fused is not False and unfit is None:
            return Fused(tensors, self._addresses)
        if self.fused:
            raise ValueError("fused=True: dense float32, bfloat16 or float16 tensors of one GPU")
        if unfit is not None and params[0].is_cuda and not self._has_warned:
            self._has_warned = True
            what = "its dtype, its device or the order in memory of its gradient or moments"
            warnings.warn(
                f"all tensors are updated one by one, in plain torch: no kernel takes "
                f"{self._called(params[unfit])} for {what}",
                stacklevel=5,  # who called step, beyond two wrappers of torch
            )
        return Reference(tensors)

    def _decide(self, norms: Tensor) -> Tensor:
        """Which tensors are updated, [tensors]: 1 or 0."""
        allowed = torch.ones((), dtype=torch.bool, device=norms.device)
        for veto in (getattr(self, "found_inf", None), self.frozen):
            if veto is not None:
                allowed = allowed & (veto.to(norms.device) == 0).reshape(())
        finite = norms.isfinite()
        self.all_finite = finite.all()
        apply = allowed & (self.all_finite.expand_as(finite) if self.skip == "step" else finite)
        return apply.float()

    def _clip_global_norm(self, norms: Tensor) -> Tensor:
        """The factor that bounds the global norm; remembers the norm before and after."""
        self.grad_norm = torch.linalg.vector_norm(norms)
        self.clipped_grad_norm = self.grad_norm
        if self.clip_norm is None:
            return torch.ones_like(self.grad_norm)
        usable = torch.linalg.vector_norm(norms.masked_fill(~norms.isfinite(), 0))
        factor = (self.clip_norm / (usable + 1e-6)).clamp(max=1.0)
        self.clipped_grad_norm = usable * factor
        return factor

    def _rules(self, params: list[Tensor], having: tuple[int, ...], apply: Tensor) -> Rules:
        """Of this update, which is counted."""
        t = self._count(apply, having)
        of_group = [i for i, group in enumerate(self.param_groups) for _ in group["params"]]
        dtype = max((p.dtype for p in params), key=lambda kind: kind.itemsize)
        dtype = torch.promote_types(dtype, torch.float32)
        return spread(self.param_groups, [of_group[i] for i in having], t, dtype, self._constants)


def _update(
    passes: Reference | Fused,
    reduce: Callable,
    rules: Rules,
    sizes: Tensor,
    apply: Tensor,
    factor: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Updates all tensors; RMS_t [tensors], parts of the moments and parts of the update."""
    applied = apply > 0
    rate = rules.lr * apply
    c = Coefficients(
        apply,
        factor.to(rate.dtype).expand_as(apply),
        torch.where(applied, rules.beta1, 1.0),
        torch.where(applied, rules.beta2, 1.0),
        rules.eps,
    )
    if rules.is_clipped:
        moments = reduce(*passes.moments(c))
        rms = (moments[0][:, 0] / sizes).sqrt()
        c.rate = rate / (rms / rules.clip_threshold).nan_to_num(1.0).clamp(min=1.0)
        decay_rate = torch.where(rules.clip_weight_decay > 0, c.rate, rate)
        c.decay = 1 - decay_rate * rules.weight_decay
        updates = reduce(passes.update(c))
    else:
        c.rate, c.decay = rate, 1 - rate * rules.weight_decay
        sums, maxima, updates = passes.moments_and_update(c)
        moments, updates = reduce(sums, maxima), reduce(updates)
        rms = (moments[0][:, 0] / sizes).sqrt()
    return torch.where(applied, rms, math.nan), moments, updates
