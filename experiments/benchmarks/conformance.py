"""Where StableAdamWs part: each implementation on one problem, and the rule that it follows.

    python -m experiments.benchmarks.conformance
    python -m experiments.benchmarks.conformance golden=tests/optim/golden

A row an implementation: the first step at which it differs from algorithm 2, which is ours; by how
much after the last (as a share of how far the tensor moved); the rule of `conformance_rule` that
reproduces it to rounding, found by trying algorithm 2 and its variants; how far it is from that.
Ours and what runs on a GPU computes in float32, the rest in float64. What is not installed is a row
that says so. The second command writes the trajectories of algorithm 2 that the tests follow, one
JSON file a case.
"""

import importlib.metadata
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
from experiments.entry import run_command
from lowprec.config.schema import key

if TYPE_CHECKING:
    from experiments.benchmarks.conformance_peers import Peer

DIGITS = 11  # of a golden number; float32 has 7
RAW = Rule(decay_rate="the raw rate")
GOLDEN = {  # case: rule, and the options of ours that are the same
    "clipped_decay": (Rule(), {"eps": 1e-6}),
    "clipped_decay_eps8": (Rule(), {"eps": 1e-8}),
    "raw_decay": (RAW, {"eps": 1e-6, "clip_weight_decay": False}),
    "raw_decay_eps8": (RAW, {"eps": 1e-8, "clip_weight_decay": False}),
    "threshold_2": (Rule(), {"eps": 1e-6, "clip_threshold": 2.0}),
    "adamw": (Rule(clipping="nothing"), {"eps": 1e-8, "clip_threshold": None}),
}
HEADS = ("implementation", "version", "parts at step", "after the last step", "rule", "distance")


@dataclass
class ConformanceConfig:
    """What is made."""

    golden: str | None = key(None, "folder to write trajectories to; null: prints the table")


def main(config: ConformanceConfig) -> None:
    """Prints the table, or writes the trajectories; exits with 1 if ours is not algorithm 2."""
    if config.golden is not None:
        write_golden(Path(config.golden))
        return
    rows = table()
    for row in (HEADS, ("---",) * len(HEADS), *rows):
        print(f"| {' | '.join(row)} |")
    rules = {row[0]: row[4] for row in rows}
    if rules["lowprec"] != "algorithm 2":
        sys.exit("lowprec does not follow algorithm 2")


def table() -> list[tuple[str, ...]]:
    """The rows under HEADS."""
    from experiments.benchmarks.conformance_peers import PEERS

    return [(name, *_row(peer)) for name, peer in PEERS.items()]


def _row(peer: "Peer") -> tuple[str, ...]:
    import torch

    from experiments.benchmarks.conformance_peers import TOLERANCES, run_optimizer

    try:
        version = importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        if peer.package != "lowprec":  # ours runs uninstalled too
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
    """Step at which it leaves algorithm 2, how far it ends up, its rule, distance to that."""
    apart = distances(path, path_of(Rule()))
    parts = [step for step, (distance, _) in enumerate(apart, 1) if distance > tolerance]
    rules, distance = explain(path, tolerance)
    return (
        str(parts[0]) if parts else "never",
        f"{apart[-1][0]:.2g} ({apart[-1][1]})" if parts else "",
        " or ".join(map(str, rules)) or "no variant matches",
        f"{distance:.0e}",
    )


def write_golden(folder: Path) -> None:
    """problem.json, which all cases share, and one file a case."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {"shapes": SHAPES, "betas": BETAS, "weight_decay": WEIGHT_DECAY, **asdict(problem())}
    (folder / "problem.json").write_text(_json(shared))
    for name in GOLDEN:
        (folder / f"{name}.json").write_text(_json(golden(name)))


def golden(name: str) -> dict:
    """Options of a case; values and RMS_t of each tensor after each step."""
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
    """A line a step."""
    parts = []
    for name, value in node.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
        else:
            text = json.dumps(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    run_command(main, "conformance", ConformanceConfig)
