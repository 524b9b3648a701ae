"""Optimizers of torch with the interface of StableAdamW.

The update is torch's. This file decides which gradients it sees and computes statistics.
"""

import math
import re

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lowprec.optim.clipping import GuardedStep, SkipStep, ZClip
from lowprec.optim.state import MOMENTS
from lowprec.optim.statistics import GradientSums, StepSums, statistics_table


class LibraryOptimizer(GuardedStep):
    """Optimizers of torch, with the attributes of StableAdamW that training uses.

    `step()` leaves `statistics`, `grad_norm`, `clipped_grad_norm` and `all_finite`; `clip_norm`,
    `skip`, `grad_scale`, `found_inf` and `frozen` work as in StableAdamW. Differences:

    - RMS_t and u are NaN for tensors without a second moment (Muon's).
    - The host reads once per step which tensors are updated, so no CUDA graph can capture it.
    - Gradients are divided by `grad_scale` and clipped in place; those not applied become None.
    - 16-bit parameters lose small updates to rounding: there is no compensation.

    Args:
        name: one of BUILDERS.
        groups: groups of named float32 parameters, already on their device.
        rule: lr, betas and eps.
        clip_norm, skip: as in StableAdamW.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling to step()

    def __init__(
        self,
        name: str,
        groups: list[dict],
        rule: dict,
        *,
        clip_norm: float | ZClip | SkipStep | None = None,
        skip: str = "step",
    ):
        self.clip_norm, self.skip = clip_norm, skip
        self.parts = BUILDERS[name](groups, rule)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.params = [p for group in self.param_groups for p in group["params"]]
        self.names = [name for group in self.param_groups for name in group["param_names"]]
        self.group_of = [group for group in self.param_groups for _ in group["params"]]
        part_of = {p: part for part in self.parts for x in part.param_groups for p in x["params"]}
        for p in self.params:
            _start(part_of[p], p)
        self.states = [part_of[p].state[p] for p in self.params]

    def summary(self) -> str:
        """Which tensors the first of several optimizers updates, or "" if there is one."""
        if len(self.parts) == 1:
            return ""
        first, second = ([p for g in x.param_groups for p in g["params"]] for x in self.parts)
        sizes = [sum(p.numel() for p in params) for params in (first, second)]
        names = [re.sub(r".*\.\d+\.", "", name) for name in self.names[: len(first)]]
        kinds = [type(part).__name__ for part in self.parts]
        return (
            f"{kinds[0]} updates {len(first)} matrices in numbered blocks "
            f"({sizes[0] / sum(sizes):.0%} of the parameters): {', '.join(dict.fromkeys(names))}; "
            f"{kinds[1]} updates the other {len(second)} tensors"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        rows = [i for i, p in enumerate(self.params) if p.grad is not None]
        if not rows:
            self._without_gradients(len(self.params), self.params[0].device)
            return
        grads = [self.params[i].grad for i in rows]
        scale = getattr(self, "grad_scale", None)  # set and deleted by GradScaler
        if scale is not None:
            torch._foreach_mul_(grads, 1 / scale.to(grads[0].device))
        norms = torch.stack(torch._foreach_norm(grads)).float()
        applied, factor = self._decide(norms)
        names = ("grad_norm", "rms", *GradientSums._fields, *StepSums._fields)
        values = {name: norms.new_zeros(len(self.params)) for name in names}
        values["grad_norm"][rows] = norms
        values["abs_max"][rows] = torch.stack(torch._foreach_norm(grads, math.inf))
        finite, applied = torch.stack([norms.isfinite(), applied]).tolist()  # the host waits here
        for i, grad, is_finite, is_applied in zip(rows, grads, finite, applied, strict=True):
            if not is_finite:
                values["num_inf"][i] = grad.isinf().sum()
                values["num_nan"][i] = grad.isnan().sum()
            if not is_applied:
                self.params[i].grad = None  # torch skips parameters without a gradient
        if self.clip_norm is not None:
            torch._foreach_mul_(grads, factor)
        values["rms"].fill_(math.nan)
        if any(applied):
            self._update([i for i in rows if self.params[i].grad is not None], values)
        values["param_squares"] = torch.stack(torch._foreach_norm(self.params)).square()
        sizes = norms.new_tensor([p.numel() for p in self.params])
        gradients, step = (
            kind(*(values[name] for name in kind._fields)) for kind in (GradientSums, StepSums)
        )
        rms, grad_norms = values["rms"], values["grad_norm"]
        self.statistics = statistics_table(rms, grad_norms, sizes, gradients, step)

    def _update(self, rows: list[int], values: dict[str, Tensor]) -> None:
        """Lets torch update the parameters of these rows, which alone have a gradient."""
        params, groups = ([x[i] for i in rows] for x in (self.params, self.group_of))
        decays = [1 - group["lr"] * group["weight_decay"] for group in groups]
        decayed = torch._foreach_mul(params, decays)
        for part in self.parts:
            part.step()
        updates = torch._foreach_sub(decayed, params)
        values["update_squares"][rows] = torch.stack(torch._foreach_norm(updates)).square()
        self._describe_second_moments(rows, values)

    def _describe_second_moments(self, rows: list[int], values: dict[str, Tensor]) -> None:
        """RMS_t and the statistics of u, NaN for tensors without a second moment."""
        for name in ("rms", "u_sum", "neg_u_min", "u_max"):
            values[name][rows] = math.nan
        rows = [i for i in rows if "exp_avg_sq" in self.states[i]]
        if not rows:
            return
        states, groups = ([x[i] for i in rows] for x in (self.states, self.group_of))
        pairs = zip(groups, states, strict=True)
        corrections = [1 - group["betas"][1] ** float(state["step"]) for group, state in pairs]
        u = torch._foreach_div([state["exp_avg_sq"] for state in states], corrections)
        roots = torch._foreach_clamp_min(torch._foreach_sqrt(u), [g["eps"] for g in groups])
        ratios = torch._foreach_div([self.params[i].grad for i in rows], roots)
        sizes = values["rms"].new_tensor([self.params[i].numel() for i in rows])
        values["rms"][rows] = torch.stack(torch._foreach_norm(ratios)) / sizes.sqrt()
        values["u_sum"][rows] = torch.stack(torch._foreach_norm(u, 1))
        values["neg_u_min"][rows] = -torch.stack([x.min() for x in u])
        values["u_max"][rows] = torch.stack(torch._foreach_norm(u, math.inf))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Torch's tensors of the state, by kind and parameter's name."""
        tensors: dict[str, dict[str, Tensor]] = {}
        for name, state in zip(self.names, self.states, strict=True):
            for kind, tensor in state.items():
                if kind != "step":
                    tensors.setdefault(kind, {})[name] = tensor
        return tensors

    @property
    def steps(self) -> list[float]:
        """AdamW's count of updates of each parameter that it has."""
        return [float(state["step"]) for state in self.states if "step" in state]

    @steps.setter
    def steps(self, steps: list[float]) -> None:
        counted = [state for state in self.states if "step" in state]
        for state, step in zip(counted, steps, strict=True):
            state["step"] = torch.tensor(step)


def _muon(groups: list[dict], rule: dict) -> list[Optimizer]:
    """torch.optim.Muon for the matrices of numbered blocks, and torch's AdamW for the rest.

    Muon's are all parameters with two dimensions inside a module whose name is a number, such as
    `resblocks.0`: weights of linear layers; the fused q/k/v projection is one matrix. AdamW's are
    the patch embedding, all other embeddings, projections to the shared embedding, gains, biases
    and `logit_scale`. `adjust_lr_fn` gives updates the size of AdamW's, so that
    one rate serves both. ValueError if there is no such matrix. Source: arXiv:2502.16982.
    """
    hidden, others = [], []
    for group in groups:
        for part, is_of_part in ((hidden, True), (others, False)):
            params = [pair for pair in group["params"] if _is_hidden(*pair) == is_of_part]
            part += [{**group, "params": params}] if params else []
    if not hidden:
        raise ValueError("Muon needs matrices in numbered blocks, as transformers have")
    muon = torch.optim.Muon(hidden, lr=rule["lr"], adjust_lr_fn="match_rms_adamw")
    return [muon, AdamW(others, **rule)] if others else [muon]


def _is_hidden(name: str, p: Tensor) -> bool:
    """Whether a parameter is a matrix inside a block: a module whose name is a number."""
    return p.ndim == 2 and any(module.isdecimal() for module in name.split(".")[:-1])


def _start(part: Optimizer, p: Tensor) -> None:
    """Initializes the state as torch's first step does."""
    is_muon = isinstance(part, torch.optim.Muon)
    moments = ("momentum_buffer",) if is_muon else MOMENTS
    part.state[p].update({name: torch.zeros_like(p) for name in moments})
    if not is_muon:
        part.state[p]["step"] = torch.tensor(0.0)


BUILDERS = {"muon": _muon}
