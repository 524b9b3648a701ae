"""AdamW's response to a large RMS_t, against torch.optim.AdamW and StableAdamW."""

import copy

import numpy as np
import pytest
import torch

from lowprec.optim import OnWarning, StableAdamW, fused
from lowprec.optim.fused import AddressTables, FusedStep
from lowprec.optim.plain import PlainStep, Tensors
from lowprec.optim.state import TENSORS
from lowprec.optim.statistics import ShardReduction

LR, BETAS, EPS, DECAY, STEPS = 1e-2, (0.9, 0.95), 1e-6, 0.1, 10
JUMPS = {"calm": (), "jumps": (5,), "grows": range(6, STEPS + 1)}  # steps with large gradients
RESPONSES = [OnWarning("clip", 1.2), OnWarning("skip", 2.0), OnWarning("beta2", 2.0, 0.6)]
each_response = pytest.mark.parametrize("response", RESPONSES, ids=lambda r: r.action)


def gradient(name, step):
    generator = np.random.default_rng([step, len(name)])
    return generator.normal(size=(5, 7)) * (30.0 if step in JUMPS[name] else 1.0)


def train(dtype=torch.float64, **options):
    """Values of each tensor and RMS_t [tensors] after each of the steps."""
    params = [(name, torch.nn.Parameter(torch.ones(5, 7, dtype=dtype))) for name in JUMPS]
    optimizer = StableAdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **options)
    path, rms = [], []
    for step in range(1, STEPS + 1):
        for name, p in params:
            p.grad = torch.from_numpy(gradient(name, step)).to(dtype)
        optimizer.step()
        path.append({name: p.detach().clone() for name, p in params})
        rms.append(optimizer.statistics[:, 0].tolist())
    return path, np.array(rms), optimizer


def by_torch(name, response):
    """One tensor's values by torch.optim.AdamW, whose settings the response changes; and RMS_t.

    AdamW divides its second moment by 1 - beta2^t, so the moment is rescaled for another beta2.
    """
    p, path, all_rms = torch.nn.Parameter(torch.ones(5, 7, dtype=torch.float64)), [], []
    adamw = torch.optim.AdamW([p], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    [settings], last_u = adamw.param_groups, torch.zeros(())
    for t in range(1, STEPS + 1):
        p.grad = torch.from_numpy(gradient(name, t))
        usual = BETAS[1] * (1 - BETAS[1] ** (t - 1)) / (1 - BETAS[1] ** t)
        u = usual * last_u + (1 - usual) * p.grad**2
        rms = (p.grad**2 / u.clamp(min=EPS**2)).mean().sqrt().item()
        all_rms.append(rms)
        lr, beta2 = LR, BETAS[1]
        if rms > response.threshold:
            lr *= {"clip": response.threshold / rms, "skip": 0.0, "beta2": 1.0}[response.action]
            beta2 = response.beta2 if response.action == "beta2" else beta2
        settings.update(lr=lr, betas=(BETAS[0], beta2))
        if t > 1:
            adamw.state[p]["exp_avg_sq"] = last_u * (1 - beta2 ** (t - 1))
        adamw.step()
        last_u = adamw.state[p]["exp_avg_sq"] / (1 - beta2**t)
        path.append(p.detach().clone())
    return path, all_rms


@each_response
def test_responses_equal_changed_settings_of_torchs_adamw(response):
    path, rms, _ = train(clip_threshold=None, on_warning=response)
    usual, _, _ = train(clip_threshold=None)
    for i, name in enumerate(JUMPS):
        values, expected_rms = by_torch(name, response)
        np.testing.assert_allclose(rms[:, i], expected_rms, rtol=1e-5)
        for step, expected in enumerate(values):
            np.testing.assert_allclose(path[step][name], expected, rtol=1e-6, err_msg=f"{step}")
    assert (rms[:, 1:] > response.threshold).sum() >= 2  # the jump, and the first larger gradient
    if response.action != "clip":
        assert (rms[:, 0] < response.threshold).all()
        assert all(torch.equal(path[i]["calm"], usual[i]["calm"]) for i in range(STEPS))
        assert not torch.equal(path[4]["jumps"], usual[4]["jumps"])


def test_beta2_is_lowered_from_the_first_step_on_and_never_raised():
    response = OnWarning("beta2", 0.9, 0.6)  # RMS_t of the first step is 1
    path, _, _ = train(clip_threshold=None, on_warning=response)
    for name in JUMPS:
        np.testing.assert_allclose(path[-1][name], by_torch(name, response)[0][-1], rtol=1e-6)
    raised, _, _ = train(clip_threshold=None, on_warning=OnWarning("beta2", 0.9, 0.99))
    usual, _, _ = train(clip_threshold=None)
    assert all(torch.equal(raised[-1][name], usual[-1][name]) for name in JUMPS)


def test_clipping_from_an_rms_of_1_is_stable_adamw_to_the_bit():
    path, rms, _ = train(torch.float32, clip_threshold=None, on_warning=OnWarning("clip", 1.0))
    expected, expected_rms, _ = train(torch.float32, clip_threshold=1.0)
    assert np.array_equal(rms, expected_rms) and rms.max() > 2
    for values, right in zip(path, expected, strict=True):
        assert all(torch.equal(values[name], right[name]) for name in JUMPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_tensor_stays_to_the_bit_and_moves_again(dtype):
    path, rms, optimizer = train(dtype, clip_threshold=None, on_warning=OnWarning("skip", 2.0))
    stays = [
        [torch.equal(before[name], after[name]) for name in JUMPS]
        for before, after in zip(path, path[1:], strict=False)
    ]
    assert np.array_equal(stays, rms[1:] > 2.0) and 2 <= np.sum(stays) <= 6
    assert optimizer.steps == [STEPS] * 3  # the moments of a skipped step count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("action", ["skip", "beta2"])
@pytest.mark.usefixtures("right_interpreter")
def test_kernels_respond_as_the_definition_does(device, dtype, action, monkeypatch):
    monkeypatch.setattr(fused, "CHUNK", 16)  # 3 chunks per tensor
    fused._layout.cache_clear()
    response = OnWarning(action, 2.0)
    _, _, optimizer = train(dtype, clip_threshold=None, on_warning=response)
    params = optimizer._params()
    states = [[optimizer.state[p].get(kind) for p in params] for kind in TENSORS]
    grads = [torch.from_numpy(gradient(name, 5)).to(dtype) for name in JUMPS]
    tensors = [[p.detach() for p in params], grads, *states]
    h, is_clipped, values = optimizer._hyperparameters(params, (0, 1, 2), torch.ones(3) > 0)
    results, updated = [], []
    for kind, options in ((FusedStep, (AddressTables(),)), (PlainStep, ())):
        columns = copy.deepcopy(tensors)
        columns = [[x if x is None else x.to(device) for x in column] for column in columns]
        step = kind(Tensors(*columns), ShardReduction([], str), *options)
        on_device = [type(x)(*(to_device(y, device) for y in x)) for x in (h, values)]
        size, factor = torch.full((3,), 35.0, device=device), torch.ones((), device=device)
        results.append(step.update(on_device[0], factor, size, is_clipped, on_device[1]))
        updated.append(columns)
    fused._layout.cache_clear()
    (rms, sums), (right_rms, right_sums) = results
    assert (right_rms > 2.0).tolist() == [False, True, False]
    torch.testing.assert_close(rms, right_rms, rtol=1e-5, atol=0)
    for actual, right in zip(sums, right_sums, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-9)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-7}
    for actual, right in zip(*updated, strict=True):
        torch.testing.assert_close(actual, right, **tolerance)
    stays = torch.equal(updated[0][0][1].cpu(), tensors[0][1])
    assert stays == (action == "skip")


def to_device(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def test_values_out_of_range_are_refused_and_a_copy_responds():
    def build(clip_threshold=None, response=None, **options):
        response = response or OnWarning(**options)
        p = torch.nn.Parameter(torch.ones(2))
        return StableAdamW([p], clip_threshold=clip_threshold, on_warning=response)

    for options, fault in (
        ({"action": "halt"}, "action='halt' must be clip, skip or beta2"),
        ({"action": "skip", "threshold": 0.0}, "threshold=0.0 must be a number > 0"),
        ({"action": "beta2", "beta2": 1.0}, "beta2=1.0 must be a number >= 0 and < 1"),
        ({"action": "skip", "clip_threshold": 1.0}, "on_warning=skip needs clip_threshold=None"),
        ({"response": "skip"}, "on_warning='skip' must be None or an OnWarning"),
    ):
        with pytest.raises(ValueError, match=fault):
            build(**options)
    assert copy.deepcopy(build(action="skip")).on_warning == OnWarning("skip")
