"""The definition, our optimizers and torch's AdamW against stored trajectories of algorithm 2."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from experiments.benchmarks.conformance import (
    BETAS,
    SHAPES,
    SPIKE,
    WEIGHT_DECAY,
    Rule,
    problem,
    run_optimizer,
    trajectory,
)
from lowprec.optim import StableAdamW

FOLDER = Path(__file__).parent / "golden"
FLOAT32 = 1e-6  # absolute, for values up to 2: eight units in the last place after 12 steps
COMMON = {"betas": BETAS, "weight_decay": WEIGHT_DECAY}
RAW = Rule(decay_rate="the raw rate")
GOLDEN = {  # case: the rule, and the same in options of StableAdamW
    "clipped_decay": (Rule(), {"eps": 1e-6}),
    "clipped_decay_eps8": (Rule(), {"eps": 1e-8}),
    "raw_decay": (RAW, {"eps": 1e-6, "clip_weight_decay": False}),
    "raw_decay_eps8": (RAW, {"eps": 1e-8, "clip_weight_decay": False}),
    "threshold_2": (Rule(), {"eps": 1e-6, "clip_threshold": 2.0}),
    "adamw": (Rule(clipping="nothing"), {"eps": 1e-8, "clip_threshold": None}),
}


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def assert_close(path, expected, tolerance):
    for step, (actual, right) in enumerate(zip(path, expected, strict=True), 1):
        for name, values in right.items():
            assert actual[name] == pytest.approx(values, rel=0, abs=tolerance), (step, name)


def ours(name, device):
    """Trajectory and RMS_t of our optimizer with a case's options."""
    rms = []

    def build(params):
        optimizer = StableAdamW(params, **read(name)["options"], **COMMON)
        optimizer.register_step_post_hook(
            lambda *_: rms.append(
                dict(zip(SHAPES, optimizer.statistics[:, 0].tolist(), strict=True))
            )
        )
        return optimizer

    return run_optimizer(build, device, torch.float32), rms


def test_the_definition_follows_the_stored_trajectories():
    stored = read("problem")
    assert {name: tuple(shape) for name, shape in stored["shapes"].items()} == SHAPES
    assert (tuple(stored["betas"]), stored["weight_decay"]) == (BETAS, WEIGHT_DECAY)
    assert {name: stored[name] for name in asdict(problem())} == asdict(problem())
    assert {path.stem for path in FOLDER.iterdir()} == {"problem", *GOLDEN}
    for name, (rule, options) in GOLDEN.items():
        stored = read(name)
        assert stored["options"] == options
        values, rms = trajectory(rule, options["eps"], options.get("clip_threshold") or 1.0)
        assert_close(stored["values"], values, 1e-9)
        assert stored["rms"] == [pytest.approx(step, rel=1e-9) for step in rms]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", GOLDEN)
def test_our_optimizer_follows_the_stored_trajectory(name, device):
    path, rms = ours(name, device)
    stored = read(name)
    assert_close(path, stored["values"], FLOAT32)
    for step, (actual, right) in enumerate(zip(rms, stored["rms"], strict=True), 1):
        assert actual == pytest.approx(right, rel=1e-5), step


def test_the_spike_is_clipped_in_every_tensor():
    stored = read("clipped_decay")
    assert all(rms > 1 for rms in stored["rms"][SPIKE - 1].values())
    unclipped = read("adamw")["values"][SPIKE - 1]
    for name, values in stored["values"][SPIKE - 1].items():
        assert values != pytest.approx(unclipped[name], rel=0, abs=100 * FLOAT32), name


def test_stored_cases_differ_by_more_than_the_tolerance():
    ends = [read(name)["values"][-1] for name in GOLDEN]
    for i, one in enumerate(ends):
        for other in ends[:i]:
            apart = [
                abs(a - b) for name in one for a, b in zip(one[name], other[name], strict=True)
            ]
            assert max(apart) > 100 * FLOAT32


def test_torch_adamw_follows_the_stored_trajectory_without_clipping():
    path = run_optimizer(lambda params: torch.optim.AdamW(params, eps=1e-8, **COMMON))
    assert_close(path, read("adamw")["values"], 1e-10)


def test_the_examples_of_the_readme_run(capsys):
    text = (Path(__file__).parents[2] / "lowprec" / "optim" / "README.md").read_text()
    names = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(example, names)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["50", "100"] and float(rows[1][1]) < float(rows[0][1])
    assert names["scaler"].value == 65536 and names["optimizer"].all_finite
