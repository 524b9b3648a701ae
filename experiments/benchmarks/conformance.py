"""Compares public StableAdamW implementations on one problem and finds the rule each follows.

    python -m experiments.benchmarks.conformance
    python -m experiments.benchmarks.conformance golden=tests/optim/golden

Each row of the table gives, for one implementation, the first step at which it differs from
algorithm 2 (ours), the difference after the last step (relative to how far the tensor moved), the
rule of `conformance_rule` that reproduces it to rounding, and the distance to that rule. Ours and
those on a GPU compute in float32, the others in float64. The second command writes the
trajectories of algorithm 2 that the tests compare with, one JSON file for each case.
"""

import importlib.metadata
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from experiments.benchmarks.conformance_rule import (
    BETAS,
    SHAPES,
    WEIGHT_DECAY,
    Rule,
    distances,
    explain,
    path_of,
    problem,
    trajectory,
)
from experiments.benchmarks.peers import library_optimizer
from experiments.entry import run_command
from lowprec.config.schema import key

DIGITS = 11  # in golden files; float32 has 7
RAW = Rule(decay_rate="the raw rate")
GOLDEN = {  # case: the rule, and the same in options of StableAdamW
    "clipped_decay": (Rule(), {"eps": 1e-6}),
    "clipped_decay_eps8": (Rule(), {"eps": 1e-8}),
    "raw_decay": (RAW, {"eps": 1e-6, "clip_weight_decay": False}),
    "raw_decay_eps8": (RAW, {"eps": 1e-8, "clip_weight_decay": False}),
    "threshold_2": (Rule(), {"eps": 1e-6, "clip_threshold": 2.0}),
    "adamw": (Rule(clipping="nothing"), {"eps": 1e-8, "clip_threshold": None}),
}
COLUMNS = ("implementation", "version", "differs at", "after the last step", "rule", "distance")


COMMON = {"betas": BETAS, "eps": 1e-6, "weight_decay": WEIGHT_DECAY}
TOLERANCES = {  # of distances due to rounding; rules are further apart
    torch.float64: 1e-9,
    torch.float32: 1e-4,
}


@dataclass(frozen=True)
class Peer:
    """`build(params)` makes the optimizer and fails if `package` is not installed."""

    package: str
    build: Callable
    device: str = "cpu"
    dtype: torch.dtype = torch.float64


stable_adamw = partial(library_optimizer, name="StableAdamW", **COMMON)
OURS = partial(stable_adamw, "lowprec.optim")
OPTIMI = partial(stable_adamw, "optimi", lr=1e-3)
TIMM = partial(library_optimizer, "timm.optim", "AdamWLegacy", clipping_threshold=1.0, **COMMON)
SINGLE = {"dtype": torch.float32}
GPU = {"device": "cuda", **SINGLE}
PEERS = {
    "lowprec": Peer("lowprec", OURS(), **SINGLE),
    "lowprec, clip_weight_decay=False": Peer("lowprec", OURS(clip_weight_decay=False), **SINGLE),
    "lowprec, clip_threshold=None": Peer("lowprec", OURS(clip_threshold=None), **SINGLE),
    "lowprec, on a GPU": Peer("lowprec", OURS(), **GPU),
    "torch AdamW": Peer("torch", library_optimizer("torch.optim", "AdamW", **COMMON)),
    "optimi": Peer("torch-optimi", OPTIMI(foreach=False, triton=False)),
    "optimi, foreach": Peer("torch-optimi", OPTIMI(foreach=True, triton=False)),
    "optimi, triton": Peer("torch-optimi", OPTIMI(foreach=False, triton=True), **GPU),
    "pytorch_optimizer": Peer(
        "pytorch_optimizer", stable_adamw("pytorch_optimizer", foreach=False)
    ),
    "pytorch_optimizer, foreach": Peer(
        "pytorch_optimizer", stable_adamw("pytorch_optimizer", foreach=True)
    ),
    # timm has no StableAdamW; this AdamW, which can clip, is the closest
    "timm AdamWLegacy, clipping_threshold=1.0": Peer("timm", TIMM(foreach=False)),
    "timm AdamWLegacy, the same, foreach": Peer("timm", TIMM(foreach=True)),
}


def run_optimizer(
    build: Callable, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> list[dict]:
    """Trajectory of an optimizer on the problem."""
    params = {
        name: torch.nn.Parameter(_tensor(values, name, device, dtype))
        for name, values in problem().start.items()
    }
    optimizer = build(list(params.values()))
    path = []
    for grads, lr in zip(problem().grads, problem().lrs, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for name, p in params.items():
            p.grad = _tensor(grads[name], name, device, dtype)
        optimizer.step()
        path.append({name: p.detach().flatten().tolist() for name, p in params.items()})
    return path


def _tensor(values: list[float], name: str, device: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).reshape(SHAPES[name])


@dataclass
class ConformanceConfig:
    """Keys of the command."""

    golden: str | None = key(None, "folder to write trajectories to; null: prints the table")


def main(config: ConformanceConfig) -> None:
    """Prints the table or writes the trajectories; exits with 1 if ours is not algorithm 2."""
    if config.golden is not None:
        write_golden(Path(config.golden))
        return
    rows = table()
    for row in (COLUMNS, ("---",) * len(COLUMNS), *rows):
        print(f"| {' | '.join(row)} |")
    rules = {row[0]: row[4] for row in rows}
    if rules["lowprec"] != "algorithm 2":
        sys.exit("lowprec does not follow algorithm 2")


def table() -> list[tuple[str, ...]]:
    """Rows under COLUMNS, one for each implementation."""
    return [(name, *_row(peer)) for name, peer in PEERS.items()]


def _row(peer: Peer) -> tuple[str, ...]:
    try:
        version = importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        if peer.package != "lowprec":  # ours also runs uninstalled
            return "not installed", "", "", "", ""
        version = "this tree"
    if peer.device == "cuda" and not torch.cuda.is_available():
        return version, "", "", "not run: needs a GPU", ""
    try:
        path = run_optimizer(peer.build, peer.device, peer.dtype)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return version, "", "", f"not run: {type(error).__name__}: {lines[0]}"[:160], ""
    return version, *_compare(path, TOLERANCES[peer.dtype])


def _compare(path: list[dict], tolerance: float) -> tuple[str, str, str, str]:
    """First differing step, difference after the last step, rule and distance to the rule."""
    differences = distances(path, path_of(Rule()))
    steps = [step for step, (size, _) in enumerate(differences, 1) if size > tolerance]
    rules, distance = explain(path, tolerance)
    return (
        str(steps[0]) if steps else "never",
        f"{differences[-1][0]:.2g} ({differences[-1][1]})" if steps else "",
        " or ".join(map(str, rules)) or "no variant matches",
        f"{distance:.0e}",
    )


def write_golden(folder: Path) -> None:
    """Writes problem.json, which all cases share, and one file for each case."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {"shapes": SHAPES, "betas": BETAS, "weight_decay": WEIGHT_DECAY, **asdict(problem())}
    (folder / "problem.json").write_text(_json(shared))
    for name in GOLDEN:
        (folder / f"{name}.json").write_text(_json(golden(name)))


def golden(name: str) -> dict:
    """A case's options, and the values and RMS_t of each tensor after each step."""
    rule, options = GOLDEN[name]
    path, rms = trajectory(rule, options["eps"], options.get("clip_threshold") or 1.0)
    return {"options": options, "values": _rounded(path), "rms": _rounded(rms)}


def _rounded(node: object) -> object:
    if isinstance(node, dict):
        return {name: _rounded(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_rounded(value) for value in node]
    return float(f"{node:.{DIGITS}g}")


def _json(node: dict) -> str:
    """JSON with a line for each step."""
    parts = []
    for name, value in node.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
        else:
            text = json.dumps(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    run_command(main, "benchmark", ConformanceConfig)
