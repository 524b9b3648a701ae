"""StableAdamW, and AdamW as the same with update clipping off; statistics of every tensor.

Plain torch over lists of tensors (foreach): a handful of calls for the whole model, and no value
is read back to the host. What is decided at run time (skip, clip) is a 0-d or [tensors] factor.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

STATISTICS = ("rms", "grad_norm", "update_norm")


class StableAdamW(torch.optim.Optimizer):
    """AdamW with AdaFactor's update clipping, tensor by tensor.

    With debiased betas b = beta (1 - beta^(t-1)) / (1 - beta^t):

        v <- b1 v + (1 - b1) g
        u <- b2 u + (1 - b2) g^2
        rms = sqrt(mean(g^2 / max(u, eps^2)))
        eta = lr / max(1, rms / clip_threshold)
        p <- p - eta weight_decay p - eta v / (sqrt(u) + eps)

    `clip_threshold=None` is AdamW (`eta = lr`), equal to torch.optim.AdamW.
    `clip_weight_decay=False` decays with the unclipped `lr`, as in the paper's runs. `clip_norm`
    bounds the global norm of the gradient. States are float32 also for 16-bit parameters.

    After `step()`:
      statistics: float32 [tensors, 3], in the order of `names`: rms; norm of the unscaled gradient
        before `clip_norm`; norm of the update `eta v / (sqrt(u) + eps)`. A skipped tensor shows its
        non-finite gradient norm, rms NaN and update norm 0.
      grad_norm, clipped_grad_norm: 0-d, over all tensors, before and after `clip_norm`.
      all_finite: 0-d bool, whether every tensor's gradient norm is finite.

    A tensor whose gradient is not finite (its norm, in float32) is never applied: with
    `skip="step"` no tensor is updated, with `skip="tensor"` only that one is left out. `grad_scale`
    (gradients are divided by it), `found_inf` and `frozen` (nonzero: no update) are attributes
    that a caller may set to 0-d tensors; torch.amp.GradScaler sets the first two. The step count,
    one a group, advances with `skip="step"` only when an update is made. `step()` may change the
    gradients. A parameter without a gradient is left alone and shows rms NaN, norms 0.
    Source: Algorithm 2, arXiv:2304.13013.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling to step()

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 0.2,
        *,
        clip_threshold: float | None = 1.0,
        clip_weight_decay: bool = True,
        clip_norm: float | None = None,
        skip: str = "step",
    ):
        if skip not in ("step", "tensor"):
            raise ValueError(f"skip={skip!r}: one of step, tensor")
        if lr < 0 or eps <= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr={lr} >= 0, eps={eps} > 0 and 0 <= betas={betas} < 1 are needed")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"clip_threshold": clip_threshold, "clip_weight_decay": clip_weight_decay}
        super().__init__(params, defaults)
        self.clip_norm = clip_norm
        self.skip = skip
        self.frozen: Tensor | None = None
        self.all_finite: Tensor | None = None
        self.statistics: Tensor | None = None
        self.grad_norm: Tensor | None = None
        self.clipped_grad_norm: Tensor | None = None

    @property
    def names(self) -> list[str]:
        """Names of the tensors in the order of `statistics`."""
        named = [group.get("param_names") for group in self.param_groups]
        if any(names is None for names in named):
            raise ValueError("names need named parameters: StableAdamW(model.named_parameters())")
        return [name for names in named for name in names]

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's, but moments keep their own dtype (torch casts them to the parameter's)."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for p, number in zip(params, numbers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[p][name] = value.to(p.device, _wide(p), copy=True)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Tensor | None:
        """One update of every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        device = params[0].device
        has_grad = torch.tensor([p.grad is not None for p in params])
        grads = [p.grad.to(_wide(p)) for p in params if p.grad is not None]
        if not grads:
            return loss
        if getattr(self, "grad_scale", None) is not None:  # set and deleted by GradScaler
            torch._foreach_mul_(grads, 1 / self.grad_scale)
        norms = torch.stack(torch._foreach_norm(grads))
        allowed = torch.ones((), dtype=torch.bool, device=device)
        for veto in (getattr(self, "found_inf", None), self.frozen):
            if veto is not None:
                allowed = allowed & (veto.to(device) == 0).reshape(())
        finite = norms.isfinite()
        self.all_finite = finite.all()
        apply = allowed & (self.all_finite if self.skip == "step" else finite)
        advance = (apply if self.skip == "step" else allowed).float()
        self._clip_global_norm(grads, norms, finite)
        for grad, bad in zip(grads, (~apply).expand_as(norms).unbind(), strict=True):
            grad.masked_fill_(bad, 0)  # a NaN would survive any factor

        rows, done = [], 0
        for group in self.param_groups:
            own = [p for p in group["params"] if p.grad is not None]
            if own:
                part = slice(done, done := done + len(own))
                factor = apply if apply.ndim == 0 else apply[part]
                rows.append(self._update_group(group, own, grads[part], factor.float(), advance))
        rms, update_norms = (torch.cat(column) for column in zip(*rows, strict=True))
        values = torch.stack((rms, norms, update_norms), dim=1)
        if has_grad.all():
            self.statistics = values
        else:
            self.statistics = torch.zeros(len(params), 3, device=device)
            self.statistics[:, 0] = math.nan
            self.statistics[has_grad.to(device)] = values.float()
        return loss

    def _clip_global_norm(self, grads: list[Tensor], norms: Tensor, finite: Tensor) -> None:
        self.grad_norm = torch.linalg.vector_norm(norms)
        self.clipped_grad_norm = self.grad_norm
        if self.clip_norm is not None:
            usable = torch.linalg.vector_norm(norms.masked_fill(~finite, 0))
            factor = (self.clip_norm / (usable + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads, factor)
            self.clipped_grad_norm = usable * factor

    def _update_group(
        self,
        group: dict,
        params: list[Tensor],
        grads: list[Tensor],
        apply: Tensor,
        advance: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Updates one group; `apply` is 1 or 0, 0-d or a tensor each. Returns rms, update norms."""
        device = params[0].device
        if "step" not in group:
            group["step"] = torch.zeros((), device=device)
        if group["step"].device != device:
            group["step"] = group["step"].to(device)
        group["step"].add_(advance)  # in place: a graph replays it
        for p in params:
            if "exp_avg" not in self.state[p]:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[p][name] = torch.zeros_like(p, dtype=_wide(p))
        return stable_adamw_update(
            params,
            grads,
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            step=group["step"],
            apply=apply,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            clip_threshold=group["clip_threshold"],
            clip_weight_decay=group["clip_weight_decay"],
        )


def stable_adamw_update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: Tensor,
    apply: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_threshold: float | None,
    clip_weight_decay: bool,
) -> tuple[Tensor, Tensor]:
    """The maths of one step over a list of tensors, in place; no host sync.

    `step` is 0-d, from 1. `apply` is 1 or 0, 0-d or [tensors]: where 0, nothing changes (its
    gradient must be finite). Gradients and states are float32. Returns RMS_t and the norm of the
    update, float32 [tensors]; RMS_t > 1 says that exp_avg_sq lags behind the gradient's square.
    """
    beta1_hat, beta2_hat = (_debiased(beta, step, apply) for beta in betas)
    _scale(exp_avgs, beta1_hat)
    torch._foreach_add_(exp_avgs, _scaled(grads, 1 - beta1_hat))
    _scale(exp_avg_sqs, beta2_hat)
    torch._foreach_add_(exp_avg_sqs, _scaled(torch._foreach_mul(grads, grads), 1 - beta2_hat))

    roots = torch._foreach_sqrt(exp_avg_sqs)
    ratios = torch._foreach_div(grads, torch._foreach_clamp_min(roots, eps))
    scales = [p.numel() ** -0.5 for p in params]
    rms = torch.stack(torch._foreach_mul(torch._foreach_norm(ratios), scales))
    rms = torch.where(apply > 0, rms, math.nan)

    rate = lr * apply
    clipped_rate = rate
    if clip_threshold is not None:
        clipped_rate = rate / (rms / clip_threshold).nan_to_num(1.0).clamp(min=1.0)
    updates = torch._foreach_div(exp_avgs, torch._foreach_add(roots, eps))
    _scale(updates, clipped_rate)
    update_norms = torch.stack(torch._foreach_norm(updates))
    decay = 1 - (clipped_rate if clip_weight_decay else rate) * weight_decay
    if all(p.dtype == update.dtype for p, update in zip(params, updates, strict=True)):
        if weight_decay:
            _scale(params, decay)
        torch._foreach_sub_(params, updates)
    else:  # in float32, rounded once into the parameter's dtype
        wide = [p.to(_wide(p)) for p in params]
        _scale(wide, decay)
        torch._foreach_sub_(wide, updates)
        torch._foreach_copy_(params, wide)
    return rms, update_norms


def _wide(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's update and states: float32, or float64 for float64."""
    return torch.promote_types(p.dtype, torch.float32)


def _debiased(beta: float, step: Tensor, apply: Tensor) -> Tensor:
    """`beta (1 - beta^(t-1)) / (1 - beta^t)` where applied, else 1: the moment stays."""
    t = step.double().clamp(min=1.0)
    beta_hat = (beta * (1 - beta ** (t - 1)) / (1 - beta**t)).float()
    return torch.where(apply > 0, beta_hat, 1.0)


def _scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies in place by one factor for all (0-d) or one for each ([tensors])."""
    torch._foreach_mul_(tensors, factor if factor.ndim == 0 else list(factor.unbind()))


def _scaled(tensors: list[Tensor], factor: Tensor) -> list[Tensor]:
    return torch._foreach_mul(tensors, factor if factor.ndim == 0 else list(factor.unbind()))
