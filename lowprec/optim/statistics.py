"""Statistics of every tensor of a model, from the sums that `reference` and `fused` make."""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lowprec.optim import sharding
from lowprec.optim.on_device import index_on
from lowprec.optim.reference import (
    as_table,
    as_tables,
    gradient_parts,
    moment_parts,
    update_parts,
    wide,
)

STATISTICS = (
    *("rms", "grad_norm", "update_norm"),
    *("grad_abs_max", "grad_inf", "grad_nan", "param_norm", "u_min", "u_mean", "u_max"),
)

NEEDED = {"step", "exp_avg", "exp_avg_sq"}  # of the state of an optimizer that is not ours

Parts = tuple[Tensor, Tensor]  # sums and maxima, of shards already put together


@torch.no_grad()
def second_moment_statistics(optimizer: torch.optim.Optimizer) -> Tensor:
    """`StableAdamW.statistics` of torch.optim.AdamW: float32 [tensors, 10], on the device.

    Call it between `step()` and `zero_grad()`, before a scheduler changes the rate. u is the second
    moment after the step, debiased: `exp_avg_sq / (1 - beta2^step)`. g is what `grad` holds, so it
    must be unscaled; the update is `lr v / (sqrt(u) + eps)`, of which amsgrad knows nothing.
    Any optimizer will do whose state has step, exp_avg and exp_avg_sq as torch's Adam has them, not
    debiased; of StableAdamW its own statistics are returned. A tensor without a gradient or such a
    state shows rms NaN, all else 0. ValueError if that is so of all.
    """
    if isinstance(getattr(optimizer, "statistics", None), Tensor):
        return optimizer.statistics
    every = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    having = [i for i, (p, _) in enumerate(every) if p.grad is not None and p.numel()]
    having = [i for i in having if optimizer.state.get(every[i][0], {}).keys() >= NEEDED]
    if not having:
        raise ValueError("no tensor has a gradient and a second moment (exp_avg_sq) beside it")
    parts: tuple[list, list, list] = ([], [], [])
    for p, group in (every[i] for i in having):
        state, (beta1, beta2) = optimizer.state[p], group["betas"]
        t = torch.as_tensor(state["step"]).double()
        g, u = wide(local(p.grad)), wide(local(state["exp_avg_sq"])) / (1 - beta2**t)
        v = wide(local(state["exp_avg"])) / (1 - beta1**t)
        parts[0].append(gradient_parts(g))
        parts[1].append(moment_parts(g, u, group["eps"]))
        parts[2].append(update_parts(group["lr"] * v / (u.sqrt() + group["eps"]), local(p)))
    params = [every[i][0] for i in having]
    reduce = sharding.reducer(params, lambda i: f"tensor {having[i]}")
    gradients, moments = reduce(*as_tables(parts[0])), reduce(*as_tables(parts[1]))
    sizes = torch.tensor([float(p.numel()) for p in params], device=params[0].device)
    rms = (moments[0][:, 0] / sizes).sqrt()
    found = columns(rms, sizes, gradients, moments, reduce(as_table(parts[2])))
    return in_rows(found, tuple(having), len(every))


def columns(
    rms: Tensor, sizes: Tensor, gradients: Parts, moments: Parts, updates: Tensor
) -> Tensor:
    """float32 [tensors, 10] from sums and maxima; `sizes` [tensors] counts the elements."""
    (squares, infs, nans), largest = gradients[0].unbind(1), gradients[1][:, 0]
    u_sum, (least, u_max) = moments[0][:, 1], moments[1].unbind(1)
    changes, params = updates.sqrt().unbind(1)
    largest = torch.where(nans > 0, math.nan, largest)
    values = (rms, squares.sqrt(), changes, largest, infs, nans, params)
    return torch.stack((*values, -least, u_sum / sizes, u_max), dim=1).float()


def in_rows(values: Tensor, having: tuple[int, ...], count: int) -> Tensor:
    """[count, 10]: the values in their rows, and in the others rms NaN, all else 0."""
    if len(having) == count:
        return values
    table = nothing(count, values.device)
    return table.index_copy_(0, index_on(having, values.device), values)


def nothing(count: int, device: torch.device) -> Tensor:
    """[count, 10] of tensors without a gradient."""
    table = torch.zeros(count, len(STATISTICS), device=device)
    table[:, 0].fill_(math.nan)
    return table


def local(x: Tensor | None) -> Tensor | None:
    """The part of a sharded tensor that this process holds; of others themselves."""
    return x.to_local() if isinstance(x, DTensor) else x
