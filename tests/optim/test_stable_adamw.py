"""StableAdamW's update against stored trajectories of algorithm 2; its statistics and skips."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lowprec.optim.schedules import learning_rate
from lowprec.optim.stable_adamw import StableAdamW
from tests.optim.conformance import (
    BETAS,
    SHAPES,
    WEIGHT_DECAY,
    Rule,
    problem,
    run_optimizer,
    trajectory,
)
from tests.optim.optimizers import make_params, params_of, take

FOLDER = Path(__file__).parent / "golden"
GOLDEN = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != "problem")
FLOAT32 = 1e-6  # absolute, for values up to 2: eight units in the last place after 12 steps
COMMON = {"betas": BETAS, "weight_decay": WEIGHT_DECAY}


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def assert_path(path, expected, tolerance):
    for step, (actual, right) in enumerate(zip(path, expected, strict=True), 1):
        for name, values in right.items():
            assert actual[name] == pytest.approx(values, rel=0, abs=tolerance), (step, name)


def test_the_definition_follows_the_stored_trajectories():
    stored = read("problem")
    assert {name: tuple(shape) for name, shape in stored["shapes"].items()} == SHAPES
    assert (tuple(stored["betas"]), stored["weight_decay"]) == (BETAS, WEIGHT_DECAY)
    assert {name: stored[name] for name in asdict(problem())} == asdict(problem())
    assert len(GOLDEN) == 6
    for name in GOLDEN:
        stored = read(name)
        options = {"clip_threshold": 1.0, "clip_weight_decay": True, **stored["options"]}
        changes = {} if options["clip_weight_decay"] else {"decay_rate": "the raw rate"}
        if options["clip_threshold"] is None:
            changes["clipping"] = "nothing"
        values, rms = trajectory(Rule(**changes), options["eps"], options["clip_threshold"] or 1.0)
        assert_path(stored["values"], values, 1e-9)
        assert stored["rms"] == [pytest.approx(step, rel=1e-9) for step in rms]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", GOLDEN)
def test_our_optimizer_follows_the_stored_trajectory(name, device):
    stored, rms = read(name), []

    def build(params):
        optimizer = StableAdamW(params, **stored["options"], **COMMON)
        optimizer.register_step_post_hook(
            lambda *_: rms.append(
                dict(zip(SHAPES, optimizer.statistics[:, 0].tolist(), strict=True))
            )
        )
        return optimizer

    assert_path(run_optimizer(build, device, torch.float32), stored["values"], FLOAT32)
    for step, (actual, right) in enumerate(zip(rms, stored["rms"], strict=True), 1):
        assert actual == pytest.approx(right, rel=1e-5), step


@pytest.mark.parametrize("name", GOLDEN)
def test_float64_parameters_are_updated_and_clipped_in_float64(name):
    stored = read(name)
    path = run_optimizer(lambda params: StableAdamW(params, **stored["options"], **COMMON))
    assert_path(path, stored["values"], 1e-10)


def test_torch_adamw_follows_the_stored_trajectory_without_clipping():
    path = run_optimizer(lambda params: torch.optim.AdamW(params, eps=1e-8, **COMMON))
    assert_path(path, read("adamw")["values"], 1e-10)


def test_16_bit_parameters_are_rounded_once():
    optimizer = StableAdamW(make_params(torch.bfloat16), lr=1e-2)
    params = params_of(optimizer)
    wide = StableAdamW([torch.nn.Parameter(p.detach().float()) for p in params], lr=1e-2)
    take(optimizer, [1])
    for p, w in zip(*(o.param_groups[0]["params"] for o in (optimizer, wide)), strict=True):
        w.grad = p.grad.float()
    wide.step()
    for p, w in zip(params_of(optimizer), params_of(wide), strict=True):
        assert torch.equal(p, w.bfloat16())


def test_adafactors_schedule_replaces_beta2():
    optimizer = StableAdamW(make_params(), lr=1e-2, beta2_decay=0.5)
    params = optimizer.param_groups[0]["params"]
    expected = [torch.zeros_like(p).double() for p in params]
    for step in range(1, 6):
        take(optimizer, [step])
        for u, p in zip(expected, params, strict=True):
            u.lerp_(p.grad.double().square(), step**-0.5)
    moments = [optimizer.state[p]["exp_avg_sq"].double() for p in params]
    torch.testing.assert_close(moments, [u.detach() for u in expected], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("step", "expected"), [(1, 0.2), (5, 1.0), (10, 2.0), (60, 1.0), (35, 1.7071068), (110, 0.0)]
)
def test_warmup_then_cosine(step, expected):
    lr = learning_rate(step, peak=2.0, num_steps=110, warmup_steps=10)
    assert lr == pytest.approx(expected, abs=1e-6)


def test_warmup_then_constant_and_default_warmups():
    constant = {"peak": 2.0, "shape": "constant"}
    rates = [learning_rate(s, num_steps=9, warmup_steps=4, **constant) for s in range(1, 10)]
    assert rates == [0.5, 1.0, 1.5] + [2.0] * 6
    assert learning_rate(5, peak=1.0, num_steps=100, warmup_steps=None) == 0.5
    for num_steps in (10, 10**6):  # no rate depends on the length of the run
        assert learning_rate(5, num_steps=num_steps, warmup_steps=None, **constant) == 0.1


def test_the_examples_of_the_readme_run(capsys):
    text = (Path(__file__).parents[2] / "lowprec" / "optim" / "README.md").read_text()
    names = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(example, names)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["50", "100"] and float(rows[1][1]) < float(rows[0][1])
    assert names["scaler"].value == 65536 and names["optimizer"].all_finite
