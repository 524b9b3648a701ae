"""Parameter groups, and the learning rate as a function of the step."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import nn

from lowprec.config.schema import num_warmup_steps
from lowprec.nearest import nearest

TOWERS = ("image", "text")  # names of CLIP's towers
LOGITS = ("logit_scale", "logit_bias")  # its parameters outside of them


def param_groups(
    model: nn.Module, weight_decay: float, lr_scale: Mapping[str, float] | None = None
) -> list[dict]:
    """Groups of named parameters: matrices and embeddings decay, the others do not.

    Gains, biases, layer-scale vectors and the logit scale have fewer than two dimensions.
    `set_learning_rate` multiplies the rate of a group by its `lr_scale`, see `lr_scales`. The order
    of the parameters does not depend on it. Locked parameters are left out.
    """
    scales = lr_scales(model, lr_scale or {})
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = []
    for (decays, scale), params in groupby(
        sorted(named, key=lambda pair: pair[1].ndim < 2),
        key=lambda pair: (pair[1].ndim >= 2, scales[pair[0]]),
    ):
        decay = weight_decay if decays else 0.0
        groups.append({"params": list(params), "weight_decay": decay, "lr_scale": scale})
    return groups


def lock(model: nn.Module, lr_scale: Mapping[str, float]) -> None:
    """Turns off the gradients of the parameters whose factor is 0, see `lr_scales`.

    Raises ValueError if none would be left, or for batch norm, whose statistics would still change.
    """
    scales = lr_scales(model, lr_scale)
    if not any(scales.values()):
        raise ValueError("no parameter would be trained")
    for name, p in model.named_parameters():
        if scales[name] == 0:
            owner = name.rpartition(".")[0]
            if isinstance(model.get_submodule(owner), nn.modules.batchnorm._BatchNorm):
                raise ValueError(f"{owner} is batch norm, whose statistics would still change")
            p.requires_grad_(False)


def lr_scales(model: nn.Module, patterns: Mapping[str, float]) -> dict[str, float]:
    """The factor of each parameter's learning rate, by name: 1 unless a pattern matches.

    The longest pattern that matches a parameter counts; TOWERS count as the shortest. Raises
    ValueError for a pattern that matches nothing, see `matching`.
    """
    names = [name for name, _ in model.named_parameters()]
    scales = dict.fromkeys(names, 1.0)
    for pattern in sorted(patterns, key=lambda name: (name not in TOWERS, len(name), name)):
        scales.update(dict.fromkeys(matching(names, [pattern]), patterns[pattern]))
    return scales


def matching(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """Names of CLIP's parameters that match a pattern, or that lie in a module or tower that does.

    `*` and `?` match dots too. ValueError names a pattern that matches nothing.
    """
    image = [name for name in names if name.startswith("visual.")]
    towers = dict(zip(TOWERS, (image, set(names) - {*image, *LOGITS}), strict=True))
    matches = set()
    for pattern in patterns:
        new = {*fnmatch.filter(names, pattern), *fnmatch.filter(names, f"{pattern}.*")}
        new.update(towers.get(pattern, ()))
        if not new:
            modules = {name.rpartition(".")[0] for name in names} - {""}
            near = nearest(pattern, [*TOWERS, *sorted(modules), *names])
            raise ValueError(f"{pattern!r} matches no module and no parameter{near}")
        matches |= new
    return matches


def learning_rate(
    step: int, *, peak: float, num_steps: int, warmup_steps: int | None = 0, shape: str = "cosine"
) -> float:
    """The learning rate of update `step`, counted from 1.

    It rises linearly from 0 to `peak`, which it reaches at step = warmup_steps. Then it is constant
    (`shape="constant"`) or follows a cosine that reaches 0 at step = num_steps. `warmup_steps=None`
    takes the default of `num_warmup_steps`. Source: section 2, arXiv:2304.13013.
    """
    warmup_steps = num_warmup_steps(warmup_steps, num_steps, shape)
    if step < warmup_steps:
        return peak * step / warmup_steps
    if shape == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the rate of each group, times its `lr_scale` if any, in place where it is a tensor."""
    for group in optimizer.param_groups:
        scaled = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled
