"""StableAdamW, and AdamW as the same with update clipping off; statistics of every tensor.

`adamw_update` defines the update; `plain` or `fused` applies it to all tensors. The class decides
what a step applies. No value is read back to the host: skipping and clipping are factors on the
device.
"""

import math
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lowprec.optim.adamw_update import Hyperparameters, debiased, wide_dtype
from lowprec.optim.fused import AddressTables, FusedStep, first_unfit
from lowprec.optim.plain import PlainStep, Tensors
from lowprec.optim.statistics import (
    STATISTICS,
    ShardReduction,
    expand_rows,
    index_on,
    local,
    no_statistics,
    statistics_table,
)

__all__ = ["STATISTICS", "StableAdamW"]

MOMENTS = ("exp_avg", "exp_avg_sq")
OWN_OPTIONS = ("clip_threshold", "clip_weight_decay", "beta2_decay")  # torch's AdamW has none
FOREIGN = "only a state of StableAdamW or torch.optim.AdamW, without amsgrad and maximize, loads"


class StableAdamW(torch.optim.Optimizer):
    """AdamW with AdaFactor's update clipping for each tensor: see `stable_adamw_update`.

    Args:
        params: parameters, named parameters or groups of either; real, with dense gradients.
        lr: learning rate, a number or a 0-d tensor.
        betas: decay rates of the moments v and u.
        eps: added to sqrt(u), and the least sqrt(u) in RMS_t.
        weight_decay: decoupled weight decay.
        clip_threshold: largest RMS_t that is not clipped. None: AdamW, as torch.optim.AdamW.
        clip_weight_decay: False decays by `lr` instead of eta, as in the paper's runs.
        beta2_decay: x replaces beta2_hat with AdaFactor's 1 - t^-x.
        clip_norm: largest global norm of the gradient; larger gradients are scaled down.
        skip: what a gradient whose norm is not finite keeps from being updated: every tensor
            ("step") or its own ("tensor").
        fused: None uses the Triton kernels if all tensors are dense, float32, bfloat16 or float16,
            on one GPU, with gradients in the same order in memory; otherwise plain torch, with a
            warning on a GPU. False: always plain torch. True: ValueError if kernels cannot run.

    After `step()`:
        statistics: float32 [tensors, 10], in the order of `names` and STATISTICS: RMS_t (above 1, u
            lags behind g^2); norm of the unscaled gradient before `clip_norm`; norm of the update
            eta v / (sqrt(u) + eps); of the unscaled gradient the largest absolute value (NaN if an
            element is) and the numbers of infinite and NaN elements; norm of the parameter after
            the step; least, mean and largest u. A skipped tensor shows RMS_t NaN and update norm 0.
            A parameter without a gradient or without elements stays as it is and shows RMS_t NaN
            and 0 elsewhere. Rows of sharded parameters (FSDP2's DTensors) describe whole tensors.
        grad_norm, clipped_grad_norm: 0-d, over all tensors, before and after `clip_norm`.
        all_finite: 0-d bool, whether the gradient norms of all tensors are finite.

    Callers may set three attributes to 0-d tensors: `grad_scale` divides the gradients, which are
    not modified; `found_inf` and `frozen` prevent any update if nonzero. torch.amp.GradScaler sets
    the first two. Each tensor counts its own updates, so skipped steps do not count.

    `state[p]` holds the debiased moments exp_avg and exp_avg_sq in float32 (float64 for float64),
    the count `updates` and, for a 16-bit parameter, `compensation` (see `add_compensated_`). The
    count is not called step, so that torch's AdamW does not take our moments for its own.

    Source: Algorithm 2, arXiv:2304.13013.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling to step()
    _copied = ("clip_norm", "skip", "fused", "frozen")  # with a copy or a pickle
    _copied += ("all_finite", "statistics", "grad_norm", "clipped_grad_norm")

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
            raise ValueError(f"skip={skip!r} must be step or tensor")
        if not _is_positive_or_none(clip_norm):
            raise ValueError(f"clip_norm={clip_norm} must be None or a number > 0")
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

    def add_param_group(self, param_group: dict) -> None:
        """As in torch; ValueError if an option is out of range."""
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._reset_caches()

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in the order of `statistics`; ValueError if they have none."""
        named = [group.get("param_names") for group in self.param_groups]
        if any(names is None for names in named):
            raise ValueError("names need named parameters: StableAdamW(model.named_parameters())")
        return [name for names in named for name in names]

    @property
    def steps(self) -> list[float]:
        """Number of updates of each parameter, in the order of `statistics`; reads the device."""
        return self._counts().tolist()

    @steps.setter
    def steps(self, steps: list[float]) -> None:
        self._update_counts = None
        counts = self._counts()
        if len(steps) != len(counts):
            raise ValueError(f"{len(steps)} step counts for {len(counts)} parameters")
        counts.copy_(torch.tensor(steps))

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Tensor | None:
        """Updates every parameter that has a gradient; returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        all_params = self._params()
        rows = tuple(i for i, p in enumerate(all_params) if p.grad is not None and p.numel())
        if not rows:
            self.statistics = no_statistics(len(all_params), all_params[0].device)
            self.all_finite = self.statistics.new_ones((), dtype=torch.bool)
            self.grad_norm = self.clipped_grad_norm = self.statistics.new_zeros(())
            return loss
        params = [all_params[i] for i in rows]
        device = params[0].device
        update_all = self._plain_or_fused(params, rows)
        grad_scale = getattr(self, "grad_scale", None)  # set and deleted by GradScaler
        unscale = torch.ones((), device=device) if grad_scale is None else 1 / grad_scale
        gradients = update_all.gradients(unscale)
        grad_norms = gradients.squares.sqrt()
        applied = self._decide(grad_norms)
        factor = unscale * self._clip_global_norm(grad_norms)
        sizes = torch.tensor([float(p.numel()) for p in params])
        sizes = self._on_device("sizes", sizes, device)
        h, is_clipped = self._hyperparameters(params, rows, applied)
        rms, sums = update_all.update(h, factor, sizes, is_clipped)
        rms = torch.where(applied, rms, math.nan)
        table = statistics_table(rms, grad_norms, sizes, gradients, sums)
        self.statistics = expand_rows(table, rows, len(all_params))
        return loss

    def _plain_or_fused(self, params: list[Tensor], rows: tuple[int, ...]) -> PlainStep | FusedStep:
        """What updates these parameters, `rows` among all."""
        states = self._states(params, rows)
        tensors = Tensors(
            [local(p) for p in params],
            [local(p.grad) for p in params],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [local(state.get("compensation")) for state in states],
        )
        for p, grad in zip(params, tensors.grads, strict=True):
            if p.is_complex() or grad.layout != torch.strided:
                what = "is complex" if p.is_complex() else "has a sparse gradient"
                raise ValueError(f"{self._describe(p)} {what}; only real, dense tensors work")
        shards = ShardReduction(params, lambda i: self._describe(params[i]))
        unfit = None if self.fused is False else first_unfit(tensors)
        if self.fused is not False and unfit is None:
            return FusedStep(tensors, shards, self._addresses)
        if self.fused:
            raise ValueError(
                "fused=True needs dense float32, bfloat16 or float16 tensors of one GPU"
            )
        if unfit is not None and params[0].is_cuda and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"all tensors are updated in plain torch: no kernel takes the dtype, the device or "
                f"the order in memory of {self._describe(params[unfit])}",
                stacklevel=5,  # the caller of step, beyond two wrappers of torch
            )
        return PlainStep(tensors, shards)

    def _decide(self, grad_norms: Tensor) -> Tensor:
        """Which tensors are updated: bool [tensors]."""
        allowed = torch.ones((), dtype=torch.bool, device=grad_norms.device)
        for veto in (getattr(self, "found_inf", None), self.frozen):
            if veto is not None:
                allowed = allowed & (veto.to(grad_norms.device) == 0).reshape(())
        finite = grad_norms.isfinite()
        self.all_finite = finite.all()
        return allowed & (self.all_finite.expand_as(finite) if self.skip == "step" else finite)

    def _clip_global_norm(self, grad_norms: Tensor) -> Tensor:
        """Factor, 0-d, that bounds the global norm; records the norm before and after."""
        self.grad_norm = torch.linalg.vector_norm(grad_norms)
        self.clipped_grad_norm = self.grad_norm
        if self.clip_norm is None:
            return torch.ones_like(self.grad_norm)
        finite_norm = torch.linalg.vector_norm(grad_norms.masked_fill(~grad_norms.isfinite(), 0))
        factor = (self.clip_norm / (finite_norm + 1e-6)).clamp(max=1.0)
        self.clipped_grad_norm = finite_norm * factor
        return factor

    def _hyperparameters(
        self, params: list[Tensor], rows: tuple[int, ...], applied: Tensor
    ) -> tuple[Hyperparameters, bool]:
        """Values of this update, which it counts, and whether any tensor is clipped."""
        device, groups = applied.device, self.param_groups
        group_of = [i for i, group in enumerate(groups) for _ in group["params"]]
        group_of = torch.tensor([group_of[i] for i in rows])
        options = torch.tensor([_options_of(group) for group in groups], dtype=torch.float64)
        options = self._on_device("options", options[group_of].T.contiguous(), device)
        lrs = torch.stack([_lr_on_device(group["lr"], device) for group in groups])
        lrs = lrs[self._on_device("group_of", group_of, device)]
        apply = applied.float()
        t = self._count(apply, rows).double().clamp(min=1.0)
        beta1, beta2, beta2_decay = options[:3]
        is_constant = beta2_decay == math.inf
        beta2_hat = torch.where(is_constant, debiased(beta2, t), 1 - t**-beta2_decay)
        dtype = wide_dtype(max(params, key=lambda p: p.dtype.itemsize))
        is_clipped = any(groups[i]["clip_threshold"] is not None for i in set(group_of.tolist()))
        h = Hyperparameters(
            apply,
            lrs.to(dtype) * apply,
            torch.where(applied, debiased(beta1, t).to(dtype), 1.0),
            torch.where(applied, beta2_hat.to(dtype), 1.0),
            *options[3:].to(dtype),
        )
        return h, is_clipped

    def _on_device(self, name: str, values: Tensor, device: torch.device) -> Tensor:
        """Host values on the device, copied only if they have changed since the last step."""
        kept = self._copies.get(name)
        if kept is None or kept[1].device != device or not torch.equal(kept[0], values):
            kept = self._copies[name] = (values, values.to(device))
        return kept[1]

    def _states(self, params: list[Tensor], rows: tuple[int, ...]) -> list[dict]:
        """States of these parameters, `rows` among all; a new one is zero."""
        counts = self._counts()
        for i, p in zip(rows, params, strict=True):
            if "exp_avg" not in self.state[p]:
                self.state[p].update(_zero_state(p), updates=counts[i].zero_())
        return [self.state[p] for p in params]

    def _counts(self) -> Tensor:
        """Updates of all parameters: float32 [tensors], on the device.

        `updates` of each state is a view of it, so that a step counts in one operation.
        """
        params, counts = self._params(), self._update_counts
        device = params[0].device
        if counts is None or len(counts) != len(params) or counts.device != device:
            states = [self.state.get(p, {}) for p in params]
            updates = [torch.as_tensor(s.get("updates", 0.0)).to(device).float() for s in states]
            self._update_counts = counts = torch.stack(updates)
            for i, state in enumerate(states):
                if state:
                    state["updates"] = counts[i]
        return counts

    def _count(self, apply: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Counts an update of these parameters, in place for CUDA graphs; returns their counts."""
        counts = self._counts()
        if len(rows) == len(counts):
            return counts.add_(apply)
        index = index_on(rows, counts.device)
        return counts.index_add_(0, index, apply)[index]

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _describe(self, p: Tensor) -> str:
        """A parameter's number and, if it has one, its name, for messages."""
        number = next(i for i, other in enumerate(self._params()) if other is p)
        named = all("param_names" in group for group in self.param_groups)
        return f"parameter {number}" + (f" ({self.names[number]})" if named else "")

    def _reset_caches(self) -> None:
        """Forgets what steps keep beside the state."""
        self._update_counts: Tensor | None = None
        self._addresses = AddressTables()
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}
        self._has_warned = False

    def __getstate__(self) -> dict:
        return super().__getstate__() | {name: getattr(self, name) for name in self._copied}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._reset_caches()

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a state of StableAdamW or torch.optim.AdamW.

        Moments keep their own dtype (torch casts them to the parameter's). Those of AdamW are
        debiased, and options that it does not have stay as they are. ValueError, before anything is
        loaded, if the state is of another optimizer or its shapes differ.
        """
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, own_group in zip(groups, self.param_groups, strict=False):
            _check_is_adamw(group)
            for name in OWN_OPTIONS:
                group.setdefault(name, own_group[name])
            _check_options(group)
        numbers = [(n, group["betas"]) for group in groups for n in group["params"]]
        rows = zip(self._params(), numbers, strict=False)  # torch compares the lengths
        states = state_dict["state"]
        loaded = [(p, states[n], betas) for p, (n, betas) in rows if n in states]
        for p, state, _ in loaded:
            self._check_fits(p, state)
        super().load_state_dict({**state_dict, "param_groups": groups})
        for p, state, betas in loaded:
            self.state[p] = _converted_state(p, state, betas)

    def _check_fits(self, p: Tensor, state: dict) -> None:
        if not (state.keys() >= {*MOMENTS} and state.keys() & {"updates", "step"}):
            raise ValueError(f"{FOREIGN}: {self._describe(p)} has {', '.join(map(str, state))}")
        for name in MOMENTS:
            if state[name].shape != p.shape:
                shapes = f"{tuple(state[name].shape)}, not {tuple(p.shape)}"
                raise ValueError(f"{name} of {self._describe(p)} has the shape {shapes}")


def _check_options(group: dict) -> None:
    """ValueError names the first option of a group that is out of range."""
    betas = tuple(group["betas"])
    are_betas = len(betas) == 2 and all(0 <= float(beta) < 1 for beta in betas)
    for name, allowed, is_allowed in (
        ("lr", "a number >= 0", 0 <= float(group["lr"]) < math.inf),
        ("betas", "two numbers >= 0 and < 1", are_betas),
        ("eps", "a number > 0", 0 < group["eps"] < math.inf),
        ("weight_decay", "a number >= 0", 0 <= group["weight_decay"] < math.inf),
        ("clip_threshold", "None or a number > 0", _is_positive_or_none(group["clip_threshold"])),
        ("beta2_decay", "None or a number > 0", _is_positive_or_none(group["beta2_decay"])),
    ):
        if not is_allowed:
            raise ValueError(f"{name}={group[name]} must be {allowed}")


def _is_positive_or_none(value: float | None) -> bool:
    return value is None or value > 0


def _check_is_adamw(group: dict) -> None:
    """ValueError if a group's update rule is not AdamW's or has what ours does not."""
    is_adamw = "betas" in group and group.get("decoupled_weight_decay", True)
    if not is_adamw or group.get("amsgrad") or group.get("maximize"):
        raise ValueError(FOREIGN)


def _options_of(group: dict) -> list[float]:
    """betas, beta2_decay, then the last four fields of Hyperparameters; None becomes infinite."""
    threshold, decay = group["clip_threshold"], group["beta2_decay"]
    return [
        *group["betas"],
        math.inf if decay is None else decay,
        group["eps"],
        group["weight_decay"],
        math.inf if threshold is None else threshold,
        float(group["clip_weight_decay"]),
    ]


def _lr_on_device(lr: float | Tensor, device: torch.device) -> Tensor:
    """float32, 0-d; a captured graph reads a learning rate on the device at each replay."""
    if isinstance(lr, Tensor):
        return lr.to(device, torch.float32).reshape(())
    return torch.full((), lr, device=device)


def _zero_state(p: Tensor) -> dict[str, Tensor]:
    """Moments, and for a 16-bit parameter the compensation, in the parameter's order in memory."""
    dtypes = dict.fromkeys(MOMENTS, wide_dtype(p))
    if wide_dtype(p) != p.dtype:
        dtypes["compensation"] = p.dtype
    return {name: torch.zeros_like(p, dtype=dtype) for name, dtype in dtypes.items()}


def _converted_state(p: Tensor, loaded: dict, betas: tuple[float, float]) -> dict[str, Tensor]:
    """A parameter's state from a loaded one, ours or torch AdamW's."""
    state = _zero_state(p)
    for name in state.keys() & loaded.keys():
        state[name].copy_(loaded[name])
    if "updates" in loaded:
        return {**state, "updates": loaded["updates"]}
    t = torch.as_tensor(loaded["step"], dtype=torch.float64)
    for name, beta in zip(MOMENTS, betas, strict=True):
        state[name].div_(1 - beta ** t.clamp(min=1))
    return {**state, "updates": t}
