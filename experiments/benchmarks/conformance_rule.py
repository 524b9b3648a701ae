"""Algorithm 2 in plain Python floats, the ways in which StableAdamWs depart from it, and a search.

A trajectory is a list over steps of {tensor: values}. Nothing here needs torch.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations, product

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
STEPS = 12
SPIKE = 7  # the step whose gradients are 40 times as large
SHAPES = {"matrix": (5, 3), "scalar": (), "embedding": (6, 3), "faint": (4, 2), "growing": (3,)}

# What each field of a Rule may say; the first choice is algorithm 2.
RATIOS = {
    "g^2 / max(u, eps^2)": lambda g, u, eps: g * g / max(u, eps * eps),
    "g^2 / (sqrt(u) + eps)^2": lambda g, u, eps: g * g / (math.sqrt(u) + eps) ** 2,
    "g^2 / (u + eps^2)": lambda g, u, eps: g * g / (u + eps * eps),
    "g^2 / (u + eps)": lambda g, u, eps: g * g / (u + eps),
    "g^2 / u": lambda g, u, eps: g * g / u if u else math.nan,
}
DENOMINATORS = {
    "sqrt(u) + eps": lambda u, eps, debias: math.sqrt(u) + eps,
    "sqrt(u + eps^2)": lambda u, eps, debias: math.sqrt(u + eps * eps),
    "sqrt(u + eps)": lambda u, eps, debias: math.sqrt(u + eps),
    "max(sqrt(u), eps)": lambda u, eps, debias: max(math.sqrt(u), eps),
    "sqrt(u) + eps before debiasing": lambda u, eps, debias: math.sqrt(u) + eps / math.sqrt(debias),
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
    """One choice a field; all firsts: algorithm 2."""

    rms: str = CHOICES["rms"][0]
    rms_of: str = CHOICES["rms_of"][0]
    rms_moment: str = CHOICES["rms_moment"][0]
    denominator: str = CHOICES["denominator"][0]
    debiased: str = CHOICES["debiased"][0]
    clipping: str = CHOICES["clipping"][0]
    decay_rate: str = CHOICES["decay_rate"][0]
    decay: str = CHOICES["decay"][0]

    def __str__(self) -> str:
        parts = [
            WORDS[f.name].format(getattr(self, f.name))
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return "; ".join(parts) or "algorithm 2"


@dataclass(frozen=True)
class Problem:
    """Start and gradients of each tensor, learning rate of each step; all exact in float32."""

    start: dict[str, list[float]]
    grads: list[dict[str, list[float]]]
    lrs: list[float]


@cache
def problem() -> Problem:
    """A spike; embedding rows used late or never; gradients near eps; gradients that grow.

    Each is what shows one of the departures: eps matters where gradients are faint, and only
    gradients that keep their sign and grow make the first moment's RMS exceed 1.
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


def trajectory(
    rule: Rule = Rule(), eps: float = 1e-6, clip_threshold: float = 1.0
) -> tuple[list[dict], list[dict]]:
    """Values and RMS_t of each tensor after each step of the problem, in float64."""
    values = {name: list(start) for name, start in problem().start.items()}
    states = {name: _zeros(len(start)) for name, start in values.items()}
    path, all_rms = [], []
    for step, (grads, lr) in enumerate(zip(problem().grads, problem().lrs, strict=True), 1):
        rms = {}
        for name, g in grads.items():
            v, u, rms[name] = _moments_and_rms(rule, states[name], g, step, eps)
            clipped = lr
            if rule.clipping == "each tensor" and not rms[name] <= clip_threshold:  # NaN goes on
                clipped = lr * clip_threshold / rms[name]
            kept = 1 - (clipped if rule.decay_rate == "the clipped rate" else lr) * WEIGHT_DECAY
            over = DENOMINATORS[rule.denominator]
            debias = 1 - BETAS[1] ** step
            moves = [clipped * a / over(b, eps, debias) for a, b in zip(v, u, strict=True)]
            if rule.decay == "before the update":
                values[name] = [kept * p - m for p, m in zip(values[name], moves, strict=True)]
            else:
                values[name] = [kept * (p - m) for p, m in zip(values[name], moves, strict=True)]
        path.append(dict(values))
        all_rms.append(rms)
    return path, all_rms


def _zeros(count: int) -> dict[str, list[float]]:
    return {name: [0.0] * count for name in ("v", "u", "raw_v", "raw_u")}


def _moments_and_rms(
    rule: Rule, state: dict, g: list[float], step: int, eps: float
) -> tuple[list[float], list[float], float]:
    """Advances the moments of a tensor, debiased (v, u) and not; those of the rule, and RMS_t."""
    first = "" if rule.debiased in ("both moments", "the first moment only") else "raw_"
    second = "" if rule.debiased in ("both moments", "the second moment only") else "raw_"
    old_u = state[second + "u"]
    for name, beta, new in (("v", BETAS[0], g), ("u", BETAS[1], [x * x for x in g])):
        debiased = beta * (1 - beta ** (step - 1)) / (1 - beta**step)
        for key, b in ((name, debiased), ("raw_" + name, beta)):
            state[key] = [b * m + (1 - b) * x for m, x in zip(state[key], new, strict=True)]
    v, u = state[first + "v"], state[second + "u"]
    moment = {"the new u": u, "the old u": old_u, "u without debiasing": state["raw_u"]}
    above = g if rule.rms_of == "the gradient" else v
    pairs = zip(above, moment[rule.rms_moment], strict=True)
    ratios = [RATIOS[rule.rms](x, m, eps) for x, m in pairs]
    return v, u, math.sqrt(sum(ratios) / len(ratios))


@cache
def path_of(rule: Rule) -> list[dict]:
    """The values of `trajectory(rule)`."""
    return trajectory(rule)[0]


def distances(path: list[dict], base: list[dict]) -> list[tuple[float, str]]:
    """Of each step: the largest difference in a tensor over how far algorithm 2 moves it; which."""
    start, end = problem().start, path_of(Rule())[-1]
    travel = {name: _largest(end[name], start[name]) for name in start}
    return [
        max((_largest(a[name], b[name]) / travel[name], name) for name in start)
        for a, b in zip(path, base, strict=True)
    ]


def _largest(a: list[float], b: list[float]) -> float:
    """The largest difference; infinite where only one is NaN."""
    differences = [
        0.0 if math.isnan(x) and math.isnan(y) else abs(x - y) for x, y in zip(a, b, strict=True)
    ]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def variants(most: int) -> Iterator[list[Rule]]:
    """All rules that depart from algorithm 2 in no point, in one, ..., in `most`."""
    for count in range(most + 1):
        yield [
            replace(Rule(), **dict(zip(names, labels, strict=True)))
            for names in combinations(CHOICES, count)
            for labels in product(*(CHOICES[name][1:] for name in names))
        ]


def explain(path: list[dict], tolerance: float, most: int = 3) -> tuple[list[Rule], float]:
    """The rules of fewest departures whose trajectory is within `tolerance`, and their distance.

    No rule and the smallest distance that was found, where none is.
    """
    nearest = math.inf
    for rules in variants(most):
        found = {rule: max(distances(path, path_of(rule)))[0] for rule in rules}
        matching = [rule for rule, distance in found.items() if distance <= tolerance]
        if matching:
            return matching, max(found[rule] for rule in matching)
        nearest = min(nearest, *found.values())
    return [], nearest
