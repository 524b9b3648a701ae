"""A problem of 12 steps, the variants of algorithm 2 that StableAdamWs follow, and a search.

A variant is the definition (`lowprec.optim.adamw_update`) with other arguments, or with its result
changed. A trajectory is a list over steps of {tensor: values}, computed in float64.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec.optim.adamw_update import (
    Hyperparameters,
    clipped_lr,
    debiased,
    decay_factor,
    mean_square,
    stable_adamw_update,
)

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
STEPS = 12
SPIKE = 7  # the step whose gradients are 40 times as large
SHAPES = {"matrix": (5, 3), "scalar": (), "embedding": (6, 3), "faint": (4, 2), "growing": (3,)}

# The choices of each field of a Rule; the first one is algorithm 2's.
RATIOS = {
    "g^2 / max(u, eps^2)": lambda g, u, eps: g / u.sqrt().clamp(min=eps),
    "g^2 / (sqrt(u) + eps)^2": lambda g, u, eps: g / (u.sqrt() + eps),
    "g^2 / (u + eps^2)": lambda g, u, eps: g / (u + eps**2).sqrt(),
    "g^2 / (u + eps)": lambda g, u, eps: g / (u + eps).sqrt(),
    "g^2 / u": lambda g, u, eps: g / u.sqrt(),
}
DENOMINATORS = {
    "sqrt(u) + eps": lambda u, eps, debias: u.sqrt() + eps,
    "sqrt(u + eps^2)": lambda u, eps, debias: (u + eps**2).sqrt(),
    "sqrt(u + eps)": lambda u, eps, debias: (u + eps).sqrt(),
    "max(sqrt(u), eps)": lambda u, eps, debias: u.sqrt().clamp(min=eps),
    "sqrt(u) + eps before debiasing": lambda u, eps, debias: u.sqrt() + eps / math.sqrt(debias),
}
CHOICES = {
    "rms": tuple(RATIOS),
    "rms_of": ("the gradient", "the first moment"),
    "rms_moment": ("the new u", "the old u", "u without debiasing"),
    "denominator": tuple(DENOMINATORS),
    "debiased": ("both moments", "no moment", "the first moment only", "the second moment only"),
    "clipping": ("each tensor", "nothing"),
    "decay_rate": ("the clipped rate", "the raw rate"),
    "decay": ("before the update", "after the update"),
}
WORDS = {
    "rms": "RMS of {}",
    "rms_of": "RMS with {} for g",
    "rms_moment": "RMS from {}",
    "denominator": "update over {}",
    "debiased": "debiases {}",
    "clipping": "clips {}",
    "decay_rate": "decays by {}",
    "decay": "decays {}",
}


@dataclass(frozen=True)
class Rule:
    """One choice for each field; the defaults are algorithm 2."""

    rms: str = CHOICES["rms"][0]
    rms_of: str = CHOICES["rms_of"][0]
    rms_moment: str = CHOICES["rms_moment"][0]
    denominator: str = CHOICES["denominator"][0]
    debiased: str = CHOICES["debiased"][0]
    clipping: str = CHOICES["clipping"][0]
    decay_rate: str = CHOICES["decay_rate"][0]
    decay: str = CHOICES["decay"][0]

    def __str__(self) -> str:
        choices = vars(self).items()
        departures = [WORDS[f].format(choice) for f, choice in choices if choice != CHOICES[f][0]]
        return "; ".join(departures) or "algorithm 2"


@dataclass(frozen=True)
class Problem:
    """Start and gradients of each tensor, learning rate of each step, all exact in float32."""

    start: dict[str, list[float]]
    grads: list[dict[str, list[float]]]
    lrs: list[float]


@cache
def problem() -> Problem:
    """A spike; embedding rows used late or never; gradients near eps; gradients that grow.

    Each reveals one kind of departure: eps matters where gradients are tiny, and the RMS of the
    first moment exceeds 1 only for growing gradients of constant sign.
    """
    numbers = random.Random(0)

    def draw(name: str) -> list[float]:
        return [round(numbers.random() * 512 - 256) / 128 for _ in range(math.prod(SHAPES[name]))]

    def gradient(name: str, step: int) -> list[float]:
        values = draw(name)
        if name == "growing":
            return [(1 + step / 16) * sign for sign in (1, -1, 1)]
        if name == "embedding":  # row 4 is used from the spike on, row 5 never, the others at times
            rows = [step >= SPIKE if row == 4 else row < 4 and (row + step) % 3 for row in range(6)]
            values = [value if rows[i // 3] else 0.0 for i, value in enumerate(values)]
        size = (40 if step == SPIKE else 1) * (2**-20 if name == "faint" else 1)
        return [value * size for value in values]

    start = {name: draw(name) for name in SHAPES}
    grads = [{name: gradient(name, step) for name in SHAPES} for step in range(1, STEPS + 1)]
    return Problem(start, grads, [min(step, 4) / 128 for step in range(1, STEPS + 1)])


class State(NamedTuple):
    """Moments of one tensor; `raw_u` is the second moment without debiasing."""

    v: Tensor
    u: Tensor
    raw_u: Tensor


def trajectory(
    rule: Rule = Rule(), eps: float = 1e-6, clip_threshold: float = 1.0
) -> tuple[list[dict], list[dict]]:
    """Values and RMS_t of each tensor after each step of the problem."""
    values = {name: _float64(start) for name, start in problem().start.items()}
    states = {name: State(*(torch.zeros_like(p) for _ in range(3))) for name, p in values.items()}
    path, all_rms = [], []
    for step, (grads, lr) in enumerate(zip(problem().grads, problem().lrs, strict=True), 1):
        h = hyperparameters(rule, step, lr, eps, clip_threshold)
        all_rms.append({
            name: update(rule, values[name], _float64(grad), states[name], h, step).item()
            for name, grad in grads.items()
        })  # fmt: skip
        path.append({name: p.tolist() for name, p in values.items()})
    return path, all_rms


def hyperparameters(
    rule: Rule, step: int, lr: float, eps: float, clip_threshold: float
) -> Hyperparameters:
    """Arguments of the definition that follow from a rule's choices."""
    are_debiased = {"both moments": (1, 1), "the first moment only": (1, 0)}
    are_debiased |= {"no moment": (0, 0), "the second moment only": (0, 1)}
    betas = [
        debiased(beta, step) if is_debiased else beta
        for beta, is_debiased in zip(BETAS, are_debiased[rule.debiased], strict=True)
    ]
    threshold = clip_threshold if rule.clipping == "each tensor" else math.inf
    values = (1, lr, *betas, eps, WEIGHT_DECAY, threshold, rule.decay_rate == "the clipped rate")
    return Hyperparameters(*(_float64(value) for value in values))


def update(
    rule: Rule, param: Tensor, grad: Tensor, state: State, h: Hyperparameters, step: int
) -> Tensor:
    """Updates one tensor in place by the definition and a rule's departures; returns RMS_t."""
    v, u, raw_u = state
    moment = {"the new u": u, "the old u": u.clone(), "u without debiasing": raw_u}
    raw_u.lerp_(grad.square(), 1 - BETAS[1])

    def mean_square_of_rule(_: Tensor) -> Tensor:
        numerator = grad if rule.rms_of == "the gradient" else v
        return mean_square(RATIOS[rule.rms](numerator, moment[rule.rms_moment], h.eps))

    is_decayed_first = rule.decay == "before the update"
    decay = h.weight_decay if is_decayed_first else torch.zeros_like(h.weight_decay)
    h_update = h._replace(weight_decay=decay)
    rms, change = stable_adamw_update(param, grad, v, u, h_update, mean_square_of_rule)
    denominator = DENOMINATORS[rule.denominator](u, h.eps, 1 - BETAS[1] ** step)
    param.sub_(change * ((u.sqrt() + h.eps) / denominator - 1))
    if not is_decayed_first:
        param.mul_(decay_factor(h, clipped_lr(h, rms)))
    if rms.isnan() and rule.clipping == "each tensor":  # without the definition's guard
        param.fill_(math.nan)
    return rms


def _float64(values: float | list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@cache
def path_of(rule: Rule) -> list[dict]:
    """The values of `trajectory(rule)`."""
    return trajectory(rule)[0]


def distances(path: list[dict], base: list[dict]) -> list[tuple[float, str]]:
    """Largest difference after each step, relative to how far its tensor moves, and the tensor."""
    start, end = problem().start, path_of(Rule())[-1]
    travel = {name: _largest(end[name], start[name]) for name in start}
    return [
        max((_largest(a[name], b[name]) / travel[name], name) for name in start)
        for a, b in zip(path, base, strict=True)
    ]


def _largest(a: list[float], b: list[float]) -> float:
    """The largest difference; infinite if only one of two values is NaN."""
    differences = [
        0.0 if math.isnan(x) and math.isnan(y) else abs(x - y) for x, y in zip(a, b, strict=True)
    ]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def variants(most: int) -> Iterator[list[Rule]]:
    """Lists of the rules that depart from algorithm 2 in 0, 1, ..., `most` choices."""
    for count in range(most + 1):
        yield [
            replace(Rule(), **dict(zip(names, labels, strict=True)))
            for names in combinations(CHOICES, count)
            for labels in product(*(CHOICES[name][1:] for name in names))
        ]


def explain(path: list[dict], tolerance: float, most: int = 3) -> tuple[list[Rule], float]:
    """The rules with the fewest departures that lie within `tolerance`, and their distance.

    Without such a rule: an empty list and the smallest distance.
    """
    nearest = math.inf
    for rules in variants(most):
        distance = {rule: max(distances(path, path_of(rule)))[0] for rule in rules}
        matching = [rule for rule in rules if distance[rule] <= tolerance]
        if matching:
            return matching, max(distance[rule] for rule in matching)
        nearest = min(nearest, *distance.values())
    return [], nearest
