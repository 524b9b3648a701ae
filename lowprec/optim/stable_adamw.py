"""StableAdamW, and AdamW as the same with update clipping off; statistics of every tensor.

The sums over elements are made by `reference` (plain torch, the definition) or `fused` (Triton);
here is what a step does with them. No value is read back to the host: what is decided at run time
(skip, clip) is a 0-d or [tensors] factor on the device.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lowprec.optim import sharding
from lowprec.optim.fused import Addresses, Fused, can_fuse
from lowprec.optim.reference import Coefficients, Reference, Tensors, wide_dtype

STATISTICS = (
    *("rms", "grad_norm", "update_norm"),
    *("grad_abs_max", "grad_inf", "grad_nan", "param_norm", "u_min", "u_mean", "u_max"),
)


class StableAdamW(torch.optim.Optimizer):
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
    that a caller may set to 0-d tensors; torch.amp.GradScaler sets the first two. The step count,
    one a group, advances with `skip="step"` only when an update is made. Gradients are not changed.
    A parameter without a gradient is left alone and shows rms NaN, all else 0.

    `fused=None` takes the Triton kernels where they can run: dense float32, bfloat16 and float16
    tensors of one GPU. False takes the definition, True raises ValueError where they cannot run.
    Sharded parameters (FSDP2's DTensors) show the statistics of the whole tensors.
    Source: Algorithm 2, arXiv:2304.13013; sums of 16 bits: Kahan, 1965.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling to step()

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
        if lr < 0 or eps <= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr={lr} >= 0, eps={eps} > 0 and 0 <= betas={betas} < 1 are needed")
        for name, value in (("clip_threshold", clip_threshold), ("beta2_decay", beta2_decay)):
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value}: None or a number > 0 is needed")
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
        self._addresses = Addresses()
        self._kept_constants: dict[str, tuple[Tensor, Tensor]] = {}

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
                dtype = p.dtype if name == "compensation" else wide_dtype(p)
                self.state[p][name] = value.to(p.device, dtype, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Tensor | None:
        """One update of every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        params = [p for group in groups for p in group]
        if not params:
            return loss
        passes = self._passes(params)
        reduce = sharding.reducer(params)
        device = params[0].device
        grad_scale = getattr(self, "grad_scale", None)  # set and deleted by GradScaler
        unscale = torch.ones((), device=device) if grad_scale is None else 1 / grad_scale
        sums, maxima = reduce(*passes.gradients(unscale))
        norms = sums[:, 0].sqrt()
        apply, advance = self._decide(norms)
        factor = unscale * self._clip_global_norm(norms)
        columns = self._step_groups(groups, apply, advance, factor, passes, reduce)
        rms, changes, squares, least, mean, largest = columns
        magnitudes = torch.where(sums[:, 2] > 0, math.nan, maxima[:, 0])
        columns = (rms, norms, changes, magnitudes, sums[:, 1], sums[:, 2], squares)
        self._keep(torch.stack((*columns, least, mean, largest), dim=1))
        return loss

    def _passes(self, params: list[Tensor]) -> Reference | Fused:
        for p in params:
            state = self.state[p]
            if "exp_avg" not in state:
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(p, dtype=wide_dtype(p))
                if wide_dtype(p) != p.dtype:
                    state["compensation"] = torch.zeros_like(p)
        tensors = Tensors(
            [_local(p) for p in params],
            [_local(p.grad) for p in params],
            [_local(self.state[p]["exp_avg"]) for p in params],
            [_local(self.state[p]["exp_avg_sq"]) for p in params],
            [_local(self.state[p].get("compensation")) for p in params],
        )
        if self.fused is not False and can_fuse(tensors):
            return Fused(tensors, self._addresses)
        if self.fused:
            raise ValueError("fused=True: dense float32, bfloat16 or float16 tensors of one GPU")
        return Reference(tensors)

    def _decide(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        """Which tensors are updated, [tensors], and whether the step counts, 0-d: 1 or 0."""
        allowed = torch.ones((), dtype=torch.bool, device=norms.device)
        for veto in (getattr(self, "found_inf", None), self.frozen):
            if veto is not None:
                allowed = allowed & (veto.to(norms.device) == 0).reshape(())
        finite = norms.isfinite()
        self.all_finite = finite.all()
        apply = allowed & (self.all_finite.expand_as(finite) if self.skip == "step" else finite)
        advance = allowed & self.all_finite if self.skip == "step" else allowed
        return apply.float(), advance.float()

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

    def _step_groups(
        self,
        groups: list[list[Tensor]],
        apply: Tensor,
        advance: Tensor,
        factor: Tensor,
        passes: Reference | Fused,
        reduce: Callable,
    ) -> tuple[Tensor, ...]:
        """Updates all tensors; [tensors] each: rms, norms of update and p, u's min, mean, max."""
        used = [i for i, group in enumerate(groups) if group]
        counts = [len(groups[i]) for i in used]
        device = apply.device
        sizes = torch.tensor([float(p.numel()) for group in groups for p in group])
        sizes = self._constant("sizes", sizes, device)
        of_group = torch.repeat_interleave(torch.arange(len(used)), torch.tensor(counts))
        of_group = self._constant("of_group", of_group, device)
        beta1, beta2, lr, rule = self._rules(used, advance, device)
        dtype = max((p.dtype for group in groups for p in group), key=lambda kind: kind.itemsize)
        dtype = torch.promote_types(dtype, torch.float32)
        spread = [value[of_group].to(dtype) for value in (beta1, beta2, lr, *rule)]
        beta1, beta2, lr, eps, weight_decay, threshold, decays_clipped = spread
        applied = apply > 0
        rate = lr * apply
        c = Coefficients(
            apply,
            factor.to(dtype).expand_as(apply),
            torch.where(applied, beta1, 1.0),
            torch.where(applied, beta2, 1.0),
            eps,
        )
        if any(self.param_groups[i]["clip_threshold"] is not None for i in used):
            sums, maxima = reduce(*passes.moments(c))
            rms = (sums[:, 0] / sizes).sqrt()
            c.rate = rate / (rms / threshold).nan_to_num(1.0).clamp(min=1.0)
            c.decay = 1 - torch.where(decays_clipped > 0, c.rate, rate) * weight_decay
            updates = reduce(passes.update(c))
        else:
            c.rate, c.decay = rate, 1 - rate * weight_decay
            sums, maxima, updates = passes.moments_and_update(c)
            (sums, maxima), updates = reduce(sums, maxima), reduce(updates)
            rms = (sums[:, 0] / sizes).sqrt()
        rms = torch.where(applied, rms, math.nan)
        changes, squares = updates.sqrt().unbind(1)
        return rms, changes, squares, -maxima[:, 0], sums[:, 1] / sizes, maxima[:, 1]

    def _rules(self, used: list[int], advance: Tensor, device: torch.device) -> tuple:
        """Debiased betas and rates of the used groups [groups], and their constants."""
        steps, rates, constants = [], [], []
        for i in used:
            group = self.param_groups[i]
            if "step" not in group:
                group["step"] = torch.zeros((), device=device)
            if group["step"].device != device:
                group["step"] = group["step"].to(device)
            group["step"].add_(advance)  # in place: a graph replays it
            steps.append(group["step"])
            lr = group["lr"]
            on_device = (
                lr.to(device) if isinstance(lr, Tensor) else torch.full((), lr, device=device)
            )
            rates.append(on_device.float())
            threshold, decay = group["clip_threshold"], group.get("beta2_decay")
            constants.append(
                [*group["betas"], math.nan if decay is None else decay, group["eps"]]
                + [group["weight_decay"], math.inf if threshold is None else threshold]
                + [float(group["clip_weight_decay"])]
            )
        table = torch.tensor(constants, dtype=torch.float64).T
        beta1, beta2, decay, *rest = self._constant("rules", table, device)
        t = torch.stack(steps).double().clamp(min=1.0)
        beta2 = torch.where(decay.isnan(), _debiased(beta2, t), 1 - t**-decay)
        return _debiased(beta1, t), beta2, torch.stack(rates), rest

    def _constant(self, name: str, value: Tensor, device: torch.device) -> Tensor:
        """The value on the device, copied there only when it has changed."""
        kept = self._kept_constants.get(name)
        if kept is None or kept[1].device != device or not _same(kept[0], value):
            kept = self._kept_constants[name] = (value, value.to(device))
        return kept[1]

    def _keep(self, values: Tensor) -> None:
        """Sets `statistics`: the values of the tensors that have a gradient, in their places."""
        has_grad = torch.tensor(
            [p.grad is not None for g in self.param_groups for p in g["params"]]
        )
        if has_grad.all():
            self.statistics = values.float()
            return
        self.statistics = torch.zeros(len(has_grad), len(STATISTICS), device=values.device)
        self.statistics[:, 0] = math.nan
        self.statistics[has_grad.to(values.device)] = values.float()


def _local(x: Tensor | None) -> Tensor | None:
    """The part of a sharded tensor that this process holds; of others themselves."""
    return x.to_local() if isinstance(x, DTensor) else x


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))


def _debiased(beta: Tensor, t: Tensor) -> Tensor:
    """`beta (1 - beta^(t-1)) / (1 - beta^t)`."""
    return beta * (1 - beta ** (t - 1)) / (1 - beta**t)
