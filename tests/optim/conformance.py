"""An oracle: which variant of algorithm 2 an optimizer follows, on one problem of 12 steps.

A trajectory is a list over steps of {tensor: values}.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from lowprec.optim.adamw_update import Hyperparameters, debiased, mean_square, stable_adamw_update

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
STEPS = 12
SPIKE = 7  # the step whose gradients are 40 times as large
SHAPES = {"matrix": (5, 3), "scalar": (), "embedding": (6, 3), "faint": (4, 2), "growing": (3,)}
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # of distances; rules are further apart

# Choices of a rule: {what it says in the table: the formula}, algorithm 2's first.
RATIOS = {
    "g^2 / max(u, eps^2)": lambda g, u, eps: g / u.sqrt().clamp(min=eps),
    "g^2 / (sqrt(u) + eps)^2": lambda g, u, eps: g / (u.sqrt() + eps),
    "g^2 / (u + eps^2)": lambda g, u, eps: g / (u + eps**2).sqrt(),
    "g^2 / (u + eps)": lambda g, u, eps: g / (u + eps).sqrt(),
}
FIELDS = {  # field of a rule: (words of the table, choices)
    "rms": ("RMS of {}", tuple(RATIOS)),
    "rms_moment": ("RMS from {}", ("the new u", "the old u")),
    "clipping": ("clips {}", ("each tensor", "nothing")),
    "decay_rate": ("decays by {}", ("the clipped rate", "the raw rate")),
}


@dataclass(frozen=True)
class Rule:
    """One choice for each of FIELDS; the defaults are algorithm 2."""

    rms: str = "g^2 / max(u, eps^2)"
    rms_moment: str = "the new u"
    clipping: str = "each tensor"
    decay_rate: str = "the clipped rate"

    @property
    def departures(self) -> list[str]:
        """Its differences from algorithm 2, in words."""
        fields = zip(FIELDS.values(), vars(self).values(), strict=True)
        return [words.format(choice) for (words, choices), choice in fields if choice != choices[0]]

    def __str__(self) -> str:
        return "; ".join(self.departures) or "algorithm 2"


RULES = [Rule(*choices) for choices in product(*(choices for _, choices in FIELDS.values()))]


@dataclass(frozen=True)
class Problem:
    """Start and gradients of each tensor, learning rate of each step, all exact in float32."""

    start: dict[str, list[float]]
    grads: list[dict[str, list[float]]]
    lrs: list[float]


@cache
def problem() -> Problem:
    """A spike; embedding rows used late or never; gradients near eps; gradients that grow."""
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


def run_optimizer(
    build: Callable, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> list[dict]:
    """Trajectory of an optimizer on the problem."""

    def tensor(name: str, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).reshape(SHAPES[name])

    params = {name: torch.nn.Parameter(tensor(name, v)) for name, v in problem().start.items()}
    optimizer = build(list(params.values()))
    path = []
    for grads, lr in zip(problem().grads, problem().lrs, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for name, p in params.items():
            p.grad = tensor(name, grads[name])
        optimizer.step()
        path.append({name: p.detach().flatten().tolist() for name, p in params.items()})
    return path


def trajectory(
    rule: Rule, eps: float = 1e-6, clip_threshold: float = 1.0
) -> tuple[list[dict], list[dict]]:
    """Values and RMS_t of each tensor after each step of the problem, in float64."""
    values = {name: _float64(start) for name, start in problem().start.items()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in values.items()}
    path, all_rms = [], []
    for step, (grads, lr) in enumerate(zip(problem().grads, problem().lrs, strict=True), 1):
        betas = [debiased(beta, step) for beta in BETAS]
        threshold = clip_threshold if rule.clipping == "each tensor" else math.inf
        clips_decay = rule.decay_rate == "the clipped rate"
        numbers = (1, lr, *betas, eps, WEIGHT_DECAY, threshold, clips_decay)
        h = Hyperparameters(*map(_float64, numbers))
        rms = {
            name: update(rule, values[name], _float64(grad), *moments[name], h).item()
            for name, grad in grads.items()
        }
        path.append({name: p.tolist() for name, p in values.items()})
        all_rms.append(rms)
    return path, all_rms


def update(
    rule: Rule, param: Tensor, grad: Tensor, v: Tensor, u: Tensor, h: Hyperparameters
) -> Tensor:
    """Updates one tensor in place by the definition and a rule's departures; returns RMS_t."""
    moment = u if rule.rms_moment == "the new u" else u.clone()

    def mean_square_of_rule(_: Tensor) -> Tensor:
        return mean_square(RATIOS[rule.rms](grad, moment, h.eps))

    return stable_adamw_update(param, grad, v, u, h, mean_square_of_rule)[0]


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
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def explain(path: list[dict], tolerance: float) -> tuple[list[Rule], float]:
    """The rules with the fewest departures that lie within `tolerance`, and the largest distance.

    Without such a rule: an empty list and NaN.
    """
    distance = {rule: max(distances(path, path_of(rule)))[0] for rule in RULES}
    matching = [rule for rule in RULES if distance[rule] <= tolerance]
    fewest = min((len(rule.departures) for rule in matching), default=0)
    matching = [rule for rule in matching if len(rule.departures) == fewest]
    return matching, max((distance[rule] for rule in matching), default=math.nan)
