"""StableAdamW, which is AdamW when update clipping is off, with statistics of every tensor.

`adamw_update` defines the update; `fused` does the same with kernels. The class decides
what a step applies. No value is read back to the host: skipping and clipping are factors on the
device.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lowprec.ops.launch import on_device
from lowprec.optim.adamw_update import Hyperparameters, PlainStep, Tensors, debiased, wide_dtype
from lowprec.optim.clipping import GuardedStep, SkipStep, ZClip
from lowprec.optim.fused import NEEDED, AddressTables, FusedStep, first_unfit, is_capturing
from lowprec.optim.paging import check_paged, place, wait_for_states
from lowprec.optim.schedules import matching
from lowprec.optim.state import (
    OWN_OPTIONS,
    TENSORS,
    can_be_8bit,
    check_dense,
    check_names,
    check_options,
    is_positive_or_none,
    loaded_groups,
    loaded_state,
    lr_on_device,
    options_of,
    zero_state,
)
from lowprec.optim.statistics import (
    STATISTICS,
    ShardReduction,
    expand_rows,
    index_on,
    is_sharded,
    local,
    statistics_table,
)

__all__ = ["STATISTICS", "StableAdamW"]


class StableAdamW(GuardedStep, torch.optim.Optimizer):
    """AdamW with AdaFactor's update clipping for each tensor: see `stable_adamw_update`.

    Args:
        params: parameters, named parameters or groups of either; real, on one device, with dense
            gradients.
        lr: learning rate, a number or a 0-d tensor.
        betas: decay rates of the moments v and u.
        eps: added to sqrt(u), and the least sqrt(u) in RMS_t.
        weight_decay: decoupled weight decay.
        clip_threshold: largest RMS_t that is not clipped. None: AdamW, as torch.optim.AdamW.
        clip_weight_decay: False decays by `lr` instead of eta, as in the paper's runs.
        beta2_decay: x replaces beta2_hat with AdaFactor's 1 - t^-x.
        clip_norm: largest global norm of the gradient; larger gradients are scaled down. A ZClip or
            SkipStep on the parameters' device decides from earlier steps; `state_dict()` leaves
            its state out, so save `clip_norm.state_dict()`.
        optim_bits: 8 keeps both moments in 2.03 bytes per parameter instead of 8: see `eight_bit`.
            Update and statistics are computed before moments are rounded. Parameters that are
            float64, not contiguous, smaller than `min_8bit_size` elements or, by name or module, in
            `override_32bit` keep their moments. ValueError if a parameter is sharded.
        paged: keeps states that do not fit on the GPU in page-locked memory of the host (`paging`),
            from the first step on. Updates are equal to the bit. Synchronize the GPU before `state`
            is read or freed. ValueError if kernels cannot run or a parameter is sharded.
        skip: which tensors a gradient with a non-finite norm leaves unchanged: all of them
            ("step") or only its own ("tensor"). A torch.amp.GradScaler skips whole steps in either
            case, and calls `step()` then only if `fused=True`: otherwise, the attributes below
            stay as they were, `statistics` and `all_finite` None before the first update.
        fused: None uses the Triton kernels if all tensors are dense, float32, bfloat16 or float16,
            on one GPU, with gradients and a state of the same shape and order in memory; otherwise
            plain torch, with a warning on a GPU. False: always plain torch. True: ValueError if
            kernels cannot run.
        foreach, capturable: as in torch, without effect: a CUDA graph can capture any step but the
            first, one step per graph. A replay reads gradients and learning rates that are tensors;
            other options keep their values from the capture. Capture again after `add_param_group`
            and `load_state_dict`.
        amsgrad, maximize, differentiable: ValueError if true.

    After `step()`:
        statistics: float32, a row for each of `names`, a column for each of STATISTICS: RMS_t
            (above 1, u lags behind g^2); norm of the unscaled gradient before `clip_norm`; norm of
            the update eta v / (sqrt(u) + eps); largest absolute value (NaN if an element is) and
            numbers of infinite and NaN elements of the unscaled gradient; norm of the parameter
            after the step; least, mean and largest u. A skipped tensor has RMS_t NaN and update
            norm 0. A parameter without gradient or elements stays as it is; its RMS_t is NaN and
            the rest are 0. Rows of FSDP2's shards describe whole tensors; FSDP1's are refused.
        grad_norm, clipped_grad_norm: 0-d, over all tensors, before and after `clip_norm`; the
            latter is 0 for a step that SkipStep skips.
        all_finite: 0-d bool, whether the gradient norms of all tensors are finite.

    Callers may set three attributes to 0-d tensors: `grad_scale` divides the gradients, which are
    not modified; `found_inf` and `frozen` prevent any update if nonzero. As in torch,
    torch.amp.GradScaler sets the first two if `fused=True`, instead of unscaling and skipping
    itself. Each tensor counts its own updates, so skipped steps do not count; in the code of the
    paper's runs they do. Where betas change during training (OneCycleLR's `cycle_momentum`),
    moments stay weighted means of the gradients; torch's AdamW then differs.

    `state[p]` holds the debiased moments exp_avg and exp_avg_sq in float32 (float64 for float64; as
    8-bit moments uint8, with float32 scales exp_avg_scale and exp_avg_sq_scale), the count
    `updates` and, for a 16-bit parameter, `compensation` (see `add_compensated_`). The count is not
    called step, so that torch's AdamW does not mistake our moments for its own. To continue as
    AdamW, set `clip_threshold` of the groups to None.

    Source: Algorithm 2, arXiv:2304.13013.
    """

    # whether torch.amp.GradScaler leaves unscaling to step(): then Lightning clips no gradients
    _step_supports_amp_scaling = False
    _copied = (  # with a copy or a pickle
        *("clip_norm", "skip", "fused", "frozen", "_step_supports_amp_scaling"),
        *("optim_bits", "min_8bit_size", "override_32bit", "paged"),
    )

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 0.2,
        amsgrad: bool = False,
        *,
        clip_threshold: float | None = 1.0,
        clip_weight_decay: bool = True,
        beta2_decay: float | None = None,
        clip_norm: float | ZClip | SkipStep | None = None,
        optim_bits: int = 32,
        min_8bit_size: int = 4096,
        override_32bit: Sequence[str] = (),
        paged: bool = False,
        skip: str = "step",
        fused: bool | None = None,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
    ):
        if skip not in ("step", "tensor"):
            raise ValueError(f"skip={skip!r} must be step or tensor")
        if not (isinstance(clip_norm, torch.nn.Module) or is_positive_or_none(clip_norm)):
            allowed = "None, a number > 0, ZClip() or SkipStep()"
            raise ValueError(f"clip_norm={clip_norm!r} must be {allowed}")
        if optim_bits not in (8, 32):
            raise ValueError(f"optim_bits={optim_bits} must be 8 or 32")
        self.clip_norm, self.skip, self.fused, self.paged = clip_norm, skip, fused, paged
        self._step_supports_amp_scaling = bool(fused)
        self.optim_bits, self.min_8bit_size = optim_bits, min_8bit_size
        self.override_32bit = tuple(override_32bit)
        self._reset_caches()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"amsgrad": amsgrad, "maximize": maximize, "differentiable": differentiable}
        own_options = (clip_threshold, clip_weight_decay, beta2_decay)
        defaults |= dict(zip(OWN_OPTIONS, own_options, strict=True))
        super().__init__(params, defaults)
        self._with_8bit_moments()  # names are checked
        if paged:
            check_paged(self._params(), self._describe, fused)

    def add_param_group(self, param_group: dict) -> None:
        """As in torch; ValueError if an option is out of range or misspelled."""
        check_names(param_group, self.defaults)
        check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in the order of `statistics`; ValueError if they have none."""
        if not all("param_names" in group for group in self.param_groups):
            raise ValueError("names need named parameters: StableAdamW(model.named_parameters())")
        return [name for group in self.param_groups for name in group["param_names"]]

    @property
    def steps(self) -> list[float]:
        """Number of updates of each parameter, in the order of `statistics`; reads the device."""
        return self._counts().tolist()

    @steps.setter
    def steps(self, steps: list[float]) -> None:
        self._counts().copy_(torch.tensor(steps, dtype=torch.float32))

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
            self._without_gradients(len(all_params), all_params[0].device)
            return loss
        params = [all_params[i] for i in rows]
        device = params[0].device
        with on_device(device):  # kernels launch on the current device
            update_all = self._plain_or_fused(params, rows)
            grad_scale = getattr(self, "grad_scale", None)  # set and deleted by GradScaler
            one = torch.ones((), dtype=torch.float32, device=device)
            unscale = one if grad_scale is None else 1 / grad_scale
            gradients = update_all.gradients(unscale)
            grad_norms = gradients.squares.sqrt()
            applied, clip_factor = self._decide(grad_norms)
            factor = unscale * clip_factor
            sizes = torch.tensor([p.numel() for p in params], dtype=torch.float32)
            sizes = self._on_device("sizes", sizes, device)
            h, is_clipped = self._hyperparameters(params, rows, applied)
            rms, sums = update_all.update(h, factor, sizes, is_clipped)
            if is_capturing(device):
                self._captured.append(self._read_by_a_graph(params, rows, update_all))
        rms = torch.where(applied, rms, math.nan)
        table = statistics_table(rms, grad_norms, sizes, gradients, sums)
        self.statistics = expand_rows(table, rows, len(all_params))
        return loss

    def _plain_or_fused(self, params: list[Tensor], rows: tuple[int, ...]) -> PlainStep | FusedStep:
        """What updates these parameters, `rows` among all."""
        states = self._states(params, rows, "meta")
        if self.paged:
            place(params, states)
        tensors = Tensors(
            [local(p) for p in params],
            [local(p.grad) for p in params],
            *([local(state.get(kind)) for state in states] for kind in TENSORS),
        )
        check_dense(params, tensors.grads, self._describe)
        shards = ShardReduction(params, lambda i: self._describe(params[i]))
        if self.fused is False:
            return PlainStep(tensors, shards)
        unfit = first_unfit(tensors)
        if unfit is None:
            return FusedStep(tensors, shards, self._addresses)
        reason = f"{NEEDED}, unlike {self._describe(params[unfit])}"
        if self.fused or self.paged:
            raise ValueError(f"{'paged' if self.paged else 'fused'}=True: {reason}")
        if params[0].is_cuda:  # stacklevel: the caller of step, beyond two wrappers of torch
            warnings.warn(f"all tensors are updated in plain torch: {reason}", stacklevel=5)
        return PlainStep(tensors, shards)

    def _read_by_a_graph(
        self, params: list[Tensor], rows: tuple[int, ...], update_all: PlainStep | FusedStep
    ) -> list:
        """What a graph of this step reads, apart from gradients, which the graph itself keeps."""
        counts = self._counts()
        own = [counts, *self._copies.values()]
        if len(rows) < len(counts):
            own.append(index_on(rows, counts.device))
        own += [group["lr"] for group in self.param_groups]
        own += [x for p in params for x in self.state[p].values()]
        return [*own, update_all if isinstance(update_all, FusedStep) else None]

    def _hyperparameters(
        self, params: list[Tensor], rows: tuple[int, ...], applied: Tensor
    ) -> tuple[Hyperparameters, bool]:
        """Values of this update, which it counts, and whether any tensor is clipped."""
        device, groups = applied.device, self.param_groups
        group_of = [i for i, group in enumerate(groups) for _ in group["params"]]
        group_of = torch.tensor([group_of[i] for i in rows])
        options = torch.tensor([options_of(group) for group in groups], dtype=torch.float64)
        options = options[group_of].T.contiguous()
        is_clipped = bool(options[5].isfinite().any())
        options = self._on_device("options", options, device)
        lrs = torch.stack([lr_on_device(group["lr"], device) for group in groups])
        lrs = lrs[self._on_device("group_of", group_of, device)]
        apply = applied.float()
        t = self._count(apply, rows).double().clamp(min=1.0)
        beta1, beta2, beta2_decay = options[:3]
        beta2_hat = torch.where(beta2_decay == math.inf, debiased(beta2, t), 1 - t**-beta2_decay)
        dtype = wide_dtype(max(params, key=lambda p: p.dtype.itemsize))
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
        copies = self._copies.get(name)
        if copies is None or copies[1].device != device or not torch.equal(copies[0], values):
            copies = self._copies[name] = (values, values.to(device))
        return copies[1]

    def _states(self, params: list[Tensor], rows: tuple[int, ...], at: str = "cpu") -> list[dict]:
        """States of these parameters, `rows` among all; a new one is zero, and `at` if paged."""
        counts, device = self._counts(), at if self.paged else None
        if any("exp_avg" not in self.state[p] for p in params):
            are_8bit = self._with_8bit_moments()
            for i, p in zip(rows, params, strict=True):
                if "exp_avg" not in self.state[p]:
                    state = zero_state(p, p in are_8bit, device)
                    self.state[p].update(state, updates=counts[i].zero_())
        return [self.state[p] for p in params]

    def _with_8bit_moments(self) -> set[Tensor]:
        """Parameters with 8-bit moments; ValueError if one is sharded or a pattern matches none."""
        if self.optim_bits == 32:
            return set()
        params, names = self._params(), self.override_32bit and self.names
        wide = matching(names, self.override_32bit)
        wide = {p for p, name in zip(params, names, strict=False) if name in wide}
        sharded = [p for p in params if is_sharded(p)]
        if sharded:
            raise ValueError(f"optim_bits=8: {self._describe(sharded[0])} is sharded")
        return {p for p in params if p not in wide and can_be_8bit(p, self.min_8bit_size)}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of the state, by kind (TENSORS) and parameter's name; new ones are zero."""
        wait_for_states(self)
        params = self._params()
        states = self._states(params, tuple(range(len(params))))
        pairs = list(zip(self.names, states, strict=True))
        kinds = {kind: {name: s[kind] for name, s in pairs if kind in s} for kind in TENSORS}
        return {kind: tensors for kind, tensors in kinds.items() if tensors}

    def _counts(self) -> Tensor:
        """Updates, float32 [tensors] on the device; `updates` of each state is a view."""
        params, counts = self._params(), self._update_counts
        device, states = params[0].device, [self.state.get(p, {}) for p in params]
        # the states count where a caller has moved their tensors
        are_views = all(s["updates"]._base is counts for s in states if "updates" in s)
        if counts is None or not are_views or len(counts) != len(params) or counts.device != device:
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
        """Sets what steps keep besides the state, for a new optimizer."""
        self._captured: list[list] = []  # kept for good: graphs may be replayed at any time
        self._update_counts: Tensor | None = None
        self._addresses = AddressTables()
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}

    def state_dict(self) -> dict:
        """As in torch."""
        wait_for_states(self)
        return super().state_dict()

    def __getstate__(self) -> dict:
        wait_for_states(self)
        return super().__getstate__() | {name: getattr(self, name) for name in self._copied}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if "_captured" not in vars(self):  # not in load_state_dict: graphs may still be replayed
            self._reset_caches()

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a copy of a state of StableAdamW or torch.optim.AdamW.

        Moments keep their own dtype (torch casts them to the parameter's). Options that AdamW does
        not have stay as they are. ValueError, before anything is loaded, if the state is of another
        optimizer or its shapes differ.
        """
        wait_for_states(self)
        convert = self.register_load_state_dict_pre_hook(StableAdamW._converted)  # the last
        try:
            super().load_state_dict(state_dict)  # compares the lengths
        finally:
            convert.remove()
        self._update_counts = None  # an earlier state_dict() keeps its own
        self._counts()

    def _converted(self, state_dict: dict) -> dict:
        """A state dict whose states have parameters as keys: torch takes these as they are."""
        groups = loaded_groups(state_dict, self.param_groups)
        numbers = [(n, group["betas"]) for group in groups for n in group["params"]]
        saved, are_8bit = state_dict["state"], self._with_8bit_moments()
        devices = dict.fromkeys(self._params(), "cpu" if self.paged else None)
        on_gpu = (p for p, s in self.state.items() if s and s["exp_avg"].device == p.device)
        devices |= {p: p.device for p in on_gpu}
        states = {
            p: loaded_state(p, self._describe(p), saved[n], betas, p in are_8bit, devices[p])
            for p, (n, betas) in zip(self._params(), numbers, strict=False)
            if saved.get(n)  # reading `state[p]` before a step leaves an empty one
        }
        return {"state": states, "param_groups": groups}
