"""ZClip and SkipStep against the numbers of their reference implementations.

tests/fixtures/clipping.json holds 240 gradient norms and losses, the norms after zclip 1.0.0
(`ZClip(max_grad_norm=None)`), and the steps that OLMo-core 3.0.0 (`SkipStepOptimizer`) skips:
`make_clipping.py` computes both.
"""

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from lowprec.optim.clipping import SkipStep, ZClip
from lowprec.optim.stable_adamw import StableAdamW
from lowprec.train.checkpoint import list_checkpoints
from lowprec.train.loop import Stepper

REFERENCE = json.loads((Path(__file__).parents[1] / "fixtures" / "clipping.json").read_text())
YES = torch.tensor(True)
ZCLIP = {"optimizer.name": "adamw_zclip", "optimizer.zclip": 0.5}


def limits(policy, steps, is_live=YES):
    """The policy's limit at each step of the reference."""
    values = []
    for i in steps:
        policy.loss = torch.tensor(REFERENCE["losses"][i], dtype=torch.float64)
        norm = torch.tensor(REFERENCE["norms"][i], dtype=torch.float64)
        values.append(float(policy(norm, is_live)))
    return values


def test_zclip_clips_to_the_norms_of_the_reference():
    zclip, norms = ZClip(), REFERENCE["norms"]
    clipped = [min(pair) for pair in zip(norms, limits(zclip, range(240)), strict=True)]
    assert clipped == pytest.approx(REFERENCE["clipped"], rel=2e-6)  # its factor adds 1e-6
    assert sum(a < b for a, b in zip(clipped, norms, strict=True)) == 8
    assert float(zclip.mean) == pytest.approx(REFERENCE["mean"], rel=1e-10)
    assert float(zclip.variance) == pytest.approx(REFERENCE["variance"], rel=1e-10)


def test_skip_step_skips_the_steps_of_the_reference():
    values = limits(SkipStep(), range(240))
    assert [i for i, limit in enumerate(values) if limit == 0] == REFERENCE["skipped"]
    assert set(values) == {0, math.inf} and len(REFERENCE["skipped"]) >= 5


@pytest.mark.parametrize(("kind", "first"), [(ZClip, 26), (SkipStep, 64)])
def test_the_first_steps_are_neither_clipped_nor_skipped(kind, first):
    for step in (first - 1, first):
        policy = kind(sigmas=3.0)
        norms = [1 + 0.01 * (i % 3) for i in range(1, step)] + [9.0]
        limit = [policy(torch.tensor(norm), YES) for norm in norms][-1]
        assert limit.isinf() == (step < first)


@pytest.mark.parametrize("kind", [ZClip, SkipStep])
def test_a_step_that_updates_nothing_leaves_the_state(kind):
    policy = kind()
    limits(policy, range(90))
    before = copy.deepcopy(policy.state_dict())
    limits(policy, range(90, 95), torch.tensor(False))
    assert all(torch.equal(before[name], x) for name, x in policy.state_dict().items())
    assert limits(policy, [130]) != [math.inf]
    with pytest.raises(ValueError, match="sigmas=0 must be a number > 0"):
        kind(0)


@pytest.mark.parametrize("kind", [ZClip, SkipStep])
def test_the_optimizer_clips_or_skips_an_outlier_also_beside_what_is_not_finite(kind):
    start = torch.linspace(-1, 1, 64).reshape(8, 8)
    p, bad, alone, unclipped = (torch.nn.Parameter(start.clone()) for _ in range(4))
    ours = StableAdamW([p, bad], clip_norm=kind(sigmas=3.0), skip="tensor")
    other = StableAdamW([alone], clip_norm=kind(sigmas=3.0), skip="tensor")
    plain = StableAdamW([unclipped])
    for step in range(80):
        scale = 100.0 if step == 69 else 1 + 0.05 * (step % 3)
        for x in (p, alone, unclipped):
            x.grad = torch.cos(start * (step + 1)) * scale
        bad.grad = torch.zeros_like(bad)
        bad.grad[3, 4] = [math.inf, math.nan, 0.0][step % 3]
        before, bad_before = alone.detach().clone(), bad.detach().clone()
        for optimizer in (ours, other, plain):
            optimizer.step()
        torch.testing.assert_close(p, alone)
        assert ours.all_finite == (step % 3 == 2)
        assert step % 3 == 2 or torch.equal(bad, bad_before)
        torch.testing.assert_close(ours.clipped_grad_norm, other.clipped_grad_norm)
        assert (other.clipped_grad_norm < 0.2 * other.grad_norm) == (step == 69)
        assert torch.equal(alone, unclipped) or step >= 69
        if step == 69:
            norms = other.grad_norm.item(), other.clipped_grad_norm.item()
            assert norms[0] > 300 and torch.equal(alone, before) == (kind is SkipStep)
            assert norms[1] == 0 if kind is SkipStep else 3 < norms[1] < 10
            assert other.steps == [69 + (kind is ZClip)] and not torch.equal(alone, unclipped)
            skipped = other.statistics[0, 0].isnan() and other.statistics[0, 2] == 0
            assert skipped == (kind is SkipStep)
    states = ours.clip_norm.state_dict(), other.clip_norm.state_dict()
    torch.testing.assert_close(*states)


def test_a_policy_begins_anew_only_where_the_saved_run_had_none(
    built, make_config, run_once, tmp_path
):
    run_once(make_config({"num_steps": 4}), tmp_path / "run")
    built = built(ZCLIP)
    built.state.load(list_checkpoints(tmp_path / "run")[-1])
    assert built.state.optimizer.steps[0] == 4 and built.state.optimizer.clip_norm.count == 0
    run_once(make_config(ZCLIP | {"num_steps": 3}), tmp_path / "zclip")
    built.state.load(list_checkpoints(tmp_path / "zclip")[-1])
    assert built.state.optimizer.clip_norm.count == 3


def test_a_training_step_gives_skip_step_its_loss_and_gradient_norm(built):
    built = built({"optimizer.name": "adamw_skip_step", "optimizer.skip_sigmas": 1.5})
    values = Stepper(built)(1, next(built.batches_from(1)))
    window = built.state.optimizer.clip_norm.window
    assert window[:, 0].tolist() == [values["loss"].item(), values["grad_norm"].item()]
