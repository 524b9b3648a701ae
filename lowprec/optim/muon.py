"""torch's Muon for the matrices of blocks and AdamW for the rest, with the statistics of all."""

import math
import re

import torch
from torch import Tensor

from lowprec.optim.clipping import GuardedStep, SkipStep, ZClip
from lowprec.optim.stable_adamw import StableAdamW
from lowprec.optim.statistics import (
    GradientSums,
    StepSums,
    expand_rows,
    no_statistics,
    statistics_table,
)


class _AdamW(StableAdamW):
    """AdamW for some of the tensors; the optimizer of all decides what a step applies."""

    decision: tuple[Tensor, Tensor]  # see GuardedStep._decide

    def _decide(self, grad_norms: Tensor) -> tuple[Tensor, Tensor]:
        return self.decision


class MuonAdamW(GuardedStep):
    """torch.optim.Muon and AdamW, with the attributes of StableAdamW that training uses.

    Muon's are all parameters with two dimensions inside a module whose name is a number, such as
    `resblocks.0`: weights of linear layers; the fused q/k/v projection is one matrix. AdamW's are
    the patch embedding, all other embeddings, projections to the shared embedding, gains, biases
    and `logit_scale`. `adjust_lr_fn` gives updates the size of AdamW's, so that one rate serves
    both. Differences from StableAdamW:

    - RMS_t and u are NaN for Muon's tensors, which have no second moment.
    - The host reads once per step which tensors are updated, so no CUDA graph can capture it.
    - Muon's gradients are divided by `grad_scale` and clipped in place; those not applied become
      None.

    Args:
        groups: groups of named float32 parameters, already on their device. ValueError if none or
            all of them are Muon's.
        rule: lr, betas and eps.
        clip_norm, skip: as in StableAdamW.

    Source: arXiv:2502.16982.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling to step()

    def __init__(
        self,
        groups: list[dict],
        rule: dict,
        *,
        clip_norm: float | ZClip | SkipStep | None = None,
        skip: str = "step",
    ):
        self.clip_norm, self.skip = clip_norm, skip
        parts: tuple[list, list] = [], []  # AdamW's groups, Muon's
        for group in groups:
            for part, own in enumerate(parts):
                params = [pair for pair in group["params"] if _is_hidden(*pair) == part]
                own += [{**group, "params": params}] if params else []
        if not all(parts):
            raise ValueError("Muon needs matrices in numbered blocks, as transformers have")
        self.adamw = _AdamW(parts[0], **rule, clip_threshold=None)
        self.muon = torch.optim.Muon(parts[1], lr=rule["lr"], adjust_lr_fn="match_rms_adamw")
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]
        self.names = [name for group in self.param_groups for name in group["param_names"]]
        self.hidden, self.others = (
            [p for group in part.param_groups for p in group["params"]]
            for part in (self.muon, self.adamw)
        )
        for p in self.hidden:  # as torch's first step does
            self.muon.state[p]["momentum_buffer"] = torch.zeros_like(p)

    def summary(self) -> str:
        """Which tensors Muon updates."""
        sizes = [sum(p.numel() for p in params) for params in (self.hidden, self.others)]
        names = (re.sub(r".*\.\d+\.", "", name) for name in self.names[: len(self.hidden)])
        return (
            f"Muon updates {len(self.hidden)} matrices in numbered blocks "
            f"({sizes[0] / sum(sizes):.0%} of the parameters): {', '.join(dict.fromkeys(names))}; "
            f"AdamW updates the other {len(self.others)} tensors"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch."""
        for part in (self.muon, self.adamw):
            part.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        rows = tuple(i for i, p in enumerate(self.hidden) if p.grad is not None)
        params = [self.hidden[i] for i in rows]
        others = [p.grad for p in self.others if p.grad is not None and p.numel()]
        if not rows and not others:
            self._without_gradients(len(self.names), self.hidden[0].device)
            return
        self.adamw.grad_scale = scale = getattr(self, "grad_scale", None)  # of GradScaler
        unscale = 1.0 if scale is None else 1 / scale
        sums = [GradientSums.of(p.grad.mul_(unscale)) for p in params]
        norms = [each.squares.sqrt() for each in sums]
        norms += torch._foreach_mul(torch._foreach_norm(others), unscale) if others else []
        norms = torch.stack(norms).float()
        applied, factor = self._decide(norms)
        self.adamw.decision = applied[len(rows) :], factor
        self.adamw.step()
        table = no_statistics(len(self.hidden), norms.device)
        if rows:
            step = self._update(params, applied[: len(rows)], factor)
            gradients = GradientSums(*(torch.stack(x).float() for x in zip(*sums, strict=True)))
            sizes = norms.new_tensor([p.numel() for p in params])
            table = statistics_table(step.u_sum, norms[: len(rows)], sizes, gradients, step)
            table = expand_rows(table, rows, len(self.hidden))
        self.statistics = torch.cat([table, self.adamw.statistics])

    def _update(self, params: list[Tensor], applied: Tensor, factor: Tensor) -> StepSums:
        """Lets torch update Muon's tensors; their u is NaN."""
        decay = {
            p: 1 - g["lr"] * g["weight_decay"] for g in self.muon.param_groups for p in g["params"]
        }
        for p, is_applied in zip(params, applied.tolist(), strict=True):  # the host waits here
            if not is_applied:
                p.grad = None  # torch skips parameters without a gradient
            elif self.clip_norm is not None:
                p.grad.mul_(factor)
        decayed = [p.clone() if p.grad is None else p * decay[p] for p in params]
        self.muon.step()
        norms = (torch._foreach_norm(x) for x in (torch._foreach_sub(decayed, params), params))
        update_squares, param_squares = (torch.stack(x).square() for x in norms)
        nan = torch.full_like(update_squares, math.nan)
        return StepSums(nan, update_squares, param_squares, nan, nan)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of the state, by kind and parameter's name."""
        momenta = (self.muon.state[p]["momentum_buffer"] for p in self.hidden)
        named = dict(zip(self.names[: len(self.hidden)], momenta, strict=True))
        return {**self.adamw.tensors(), "momentum": named}  # "momentum_buffer" before 1.0

    @property
    def steps(self) -> list[float]:
        """Number of updates of each of AdamW's parameters."""
        return self.adamw.steps

    @steps.setter
    def steps(self, steps: list[float]) -> None:
        self.adamw.steps = steps


def _is_hidden(name: str, p: Tensor) -> bool:
    """Whether a parameter is a matrix inside a block: a module whose name is a number."""
    return p.ndim == 2 and any(module.isdecimal() for module in name.split(".")[:-1])
