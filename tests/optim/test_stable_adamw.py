"""StableAdamW against the definition of its update and against torch's AdamW."""

import math

import pytest
import torch

from lowprec.optim.adamw_update import Hyperparameters, debiased, stable_adamw_update
from lowprec.optim.loss_scaling import build_scaler
from lowprec.optim.schedules import param_groups
from lowprec.optim.stable_adamw import STATISTICS, StableAdamW

SHAPES = [(5, 7), (16,), (3, 2, 2), ()]
RMS, GRAD_NORM, UPDATE_NORM = (
    STATISTICS.index(name) for name in ("rms", "grad_norm", "update_norm")
)


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [torch.nn.Parameter(p) for p in params]


def make_grads(step):
    generator = torch.Generator().manual_seed(step)
    size = 50.0 if step == 6 else 1.0  # a jump that is clipped
    return [torch.randn(shape, generator=generator) * size for shape in SHAPES]


def set_grads(params, step, scale=1.0):
    for p, grad in zip(params, make_grads(step), strict=True):
        p.grad = (grad * scale).to(p.dtype)


@pytest.mark.parametrize("clip_weight_decay", [True, False])
@pytest.mark.parametrize("clip_threshold", [1.0, None])
def test_follows_the_definition_in_float64(clip_threshold, clip_weight_decay):
    params = make_params()
    expected = [p.detach().double() for p in params]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in expected]
    options = {"clip_threshold": clip_threshold, "clip_weight_decay": clip_weight_decay}
    optimizer = StableAdamW(params, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **options)
    for step in range(1, 9):
        set_grads(params, step)
        optimizer.step()
        betas = (debiased(0.9, step), debiased(0.95, step))
        threshold = clip_threshold or math.inf
        values = (1, 1e-2, *betas, 1e-6, 0.1, threshold, clip_weight_decay)
        h = Hyperparameters(*(torch.tensor(value, dtype=torch.float64) for value in values))
        for i, grad in enumerate(make_grads(step)):
            rms, _ = stable_adamw_update(expected[i], grad.double(), *moments[i], h)
            assert optimizer.statistics[i, RMS].item() == pytest.approx(rms.item(), rel=1e-4)
            torch.testing.assert_close(params[i].double(), expected[i], rtol=2e-5, atol=1e-6)


def test_without_clipping_equals_torch_adamw():
    ours, theirs = make_params(), make_params()
    options = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    ours_optimizer = StableAdamW(ours, clip_threshold=None, **options)
    theirs_optimizer = torch.optim.AdamW(theirs, **options)
    for step in range(1, 31):
        for params, optimizer in ((ours, ours_optimizer), (theirs, theirs_optimizer)):
            set_grads(params, step)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_statistics_are_norms_of_gradient_and_update():
    params = make_params()
    optimizer = StableAdamW(params, lr=1e-2, weight_decay=0.0)
    before = [p.detach().clone() for p in params]
    set_grads(params, 1)
    norms = torch.stack([p.grad.norm() for p in params])
    optimizer.step()
    moved = torch.stack([(p - b).norm() for p, b in zip(params, before, strict=True)])
    torch.testing.assert_close(optimizer.statistics[:, GRAD_NORM], norms)
    update_norms = optimizer.statistics[:, UPDATE_NORM]
    torch.testing.assert_close(update_norms, moved.detach(), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(optimizer.grad_norm, norms.norm())
    torch.testing.assert_close(optimizer.statistics[:, RMS], torch.ones(4))  # u_1 = g_1^2


def test_clip_norm_equals_torch_clip_grad_norm():
    ours, theirs = make_params(), make_params()
    options = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    ours_optimizer = StableAdamW(ours, clip_threshold=None, clip_norm=1.0, **options)
    theirs_optimizer = torch.optim.AdamW(theirs, **options)
    for step in range(1, 9):
        set_grads(ours, step)
        ours_optimizer.step()
        set_grads(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        theirs_optimizer.step()
    assert ours_optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    assert ours_optimizer.clipped_grad_norm.item() == pytest.approx(1.0, rel=1e-4)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("skip", ["step", "tensor"])
def test_a_non_finite_gradient_leaves_skipped_tensors_unchanged(bad, skip):
    params, twin = make_params(), make_params()
    optimizer = StableAdamW(params, lr=1e-2, skip=skip)
    twin_optimizer = StableAdamW(twin, lr=1e-2, skip=skip)
    for p, o in ((params, optimizer), (twin, twin_optimizer)):
        set_grads(p, 1)
        o.step()
    saved = [p.detach().clone() for p in params]
    moments = [optimizer.state[p]["exp_avg_sq"].clone() for p in params]
    set_grads(params, 2)
    params[0].grad[1, 1] = bad
    optimizer.step()
    untouched = range(4) if skip == "step" else [0]
    for i in untouched:
        assert torch.equal(params[i], saved[i])
        assert torch.equal(optimizer.state[params[i]]["exp_avg_sq"], moments[i])
        assert optimizer.statistics[i, UPDATE_NORM] == 0 and optimizer.statistics[i, RMS].isnan()
    assert not optimizer.statistics[0, GRAD_NORM].isfinite()
    if skip == "tensor":
        set_grads(twin, 2)
        twin_optimizer.step()
        for i in (1, 2, 3):
            assert torch.equal(params[i], twin[i])
    else:  # the skipped step leaves no trace
        for p, o in ((params, optimizer), (twin, twin_optimizer)):
            set_grads(p, 3)
            o.step()
        assert all(torch.equal(a, b) for a, b in zip(params, twin, strict=True))


def test_fixed_scale_is_divided_out():
    params, twin = make_params(), make_params()
    optimizer = StableAdamW(params, lr=1e-2, skip="tensor")
    twin_optimizer = StableAdamW(twin, lr=1e-2)
    scaler = build_scaler("fixed", 65536.0, torch.device("cpu"))
    for step in range(1, 4):
        set_grads(params, step, scale=65536.0)
        scaler.step(optimizer)
        set_grads(twin, step)
        twin_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, twin, strict=True))
    assert scaler.scale(torch.tensor(2.0)) == 131072


def test_dynamic_scale_halves_on_a_skip_and_the_step_count_waits():
    params = make_params()
    optimizer = StableAdamW(params, lr=1e-2)
    scaler = build_scaler("dynamic", 1024.0, torch.device("cpu"))
    before = [p.detach().clone() for p in params]
    set_grads(params, 1, scale=1024.0)
    params[1].grad[0] = math.inf
    scaler.step(optimizer)
    assert scaler.value == 512 and set(optimizer.steps) == {0}
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    set_grads(params, 1, scale=512.0)
    scaler.step(optimizer)
    twin = make_params()
    twin_optimizer = StableAdamW(twin, lr=1e-2)
    set_grads(twin, 1)
    twin_optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, twin, strict=True))


@pytest.mark.parametrize("skip", ["step", "tensor"])
def test_frozen_steps_leave_no_trace(skip):
    params, twin = make_params(), make_params()
    optimizer, twin_optimizer = (StableAdamW(p, lr=1e-2, skip=skip) for p in (params, twin))
    optimizer.frozen = torch.tensor(True)
    for step in (1, 2):
        set_grads(params, step)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, twin, strict=True))
    optimizer.frozen.fill_(False)
    for p, o in ((params, optimizer), (twin, twin_optimizer)):
        set_grads(p, 3)
        o.step()
    assert all(torch.equal(p, q) for p, q in zip(params, twin, strict=True))


def test_a_skipped_tensor_does_not_affect_the_global_norm():
    params = make_params()
    optimizer = StableAdamW(params, lr=1e-2, clip_norm=1.0, skip="tensor")
    set_grads(params, 1)
    expected = torch.stack([p.grad.norm() for p in params[1:]]).norm()
    params[0].grad[0, 0] = math.inf
    optimizer.step()
    assert optimizer.grad_norm.isinf() and expected > 1
    assert optimizer.clipped_grad_norm.item() == pytest.approx(1.0, rel=1e-4)
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_resume_from_state_dict_is_bitwise(dtype):
    def run(params, optimizer, steps):
        for step in steps:
            set_grads(params, step)
            optimizer.step()

    whole = make_params(dtype)
    run(whole, StableAdamW(whole, lr=1e-2), range(1, 9))
    first = make_params(dtype)
    optimizer = StableAdamW(first, lr=1e-2)
    run(first, optimizer, range(1, 5))
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    resumed = StableAdamW(second, lr=1e-2)
    resumed.load_state_dict(optimizer.state_dict())
    run(second, resumed, range(5, 9))
    assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))


def test_float64_parameters_are_updated_in_float64():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = StableAdamW([p], lr=1e-12, weight_decay=0.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert ((1 - p).detach() / 1e-12).tolist() == pytest.approx([1.0] * 3, rel=1e-3)


def test_16_bit_parameters_are_rounded_once():
    params = make_params(torch.bfloat16)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer, wide_optimizer = (StableAdamW(p, lr=1e-2) for p in (params, wide))
    set_grads(params, 1)
    for p, w in zip(params, wide, strict=True):
        w.grad = p.grad.float()
    optimizer.step()
    wide_optimizer.step()
    assert all(torch.equal(p, w.bfloat16()) for p, w in zip(params, wide, strict=True))


def test_a_parameter_without_a_gradient_is_unchanged():
    params = make_params()
    optimizer = StableAdamW(params, lr=1e-2)
    set_grads(params, 1)
    params[2].grad = None
    before = params[2].detach().clone()
    optimizer.step()
    assert torch.equal(params[2], before)
    assert optimizer.statistics[2, 0].isnan() and (optimizer.statistics[2, 1:] == 0).all()
    assert optimizer.statistics[3].isfinite().all() and optimizer.all_finite


def test_param_groups_decay_matrices_only_and_keep_names():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    model.logit_scale = torch.nn.Parameter(torch.ones(()))
    groups = param_groups(model, 0.2)
    optimizer = StableAdamW(groups, lr=1e-3)
    assert optimizer.names == ["0.weight", "logit_scale", "0.bias", "1.weight", "1.bias"]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.0]


def test_adafactors_schedule_replaces_beta2():
    params = make_params()
    optimizer = StableAdamW(params, lr=1e-2, beta2_decay=0.5)
    u = [torch.zeros(shape).double() for shape in SHAPES]
    for step in range(1, 6):
        set_grads(params, step)
        optimizer.step()
        beta2 = 1 - step**-0.5
        u = [
            beta2 * x + (1 - beta2) * g.double().square()
            for x, g in zip(u, make_grads(step), strict=True)
        ]
    for p, expected in zip(params, u, strict=True):
        exp_avg_sq = optimizer.state[p]["exp_avg_sq"].double()
        torch.testing.assert_close(exp_avg_sq, expected, rtol=1e-5, atol=1e-8)


def test_statistics_describe_gradients_moments_and_parameters():
    params = make_params()
    optimizer = StableAdamW(params, lr=1e-2)
    set_grads(params, 1)
    optimizer.step()
    set_grads(params, 2)
    params[0].grad[0, 1], params[0].grad[2, 3] = math.inf, -math.inf
    params[1].grad[3] = math.nan
    optimizer.step()
    rows = dict(zip(STATISTICS, optimizer.statistics.T, strict=True))
    assert rows["grad_inf"].tolist() == [2, 0, 0, 0] and rows["grad_nan"].tolist() == [0, 1, 0, 0]
    assert rows["grad_abs_max"][0] == math.inf and rows["grad_abs_max"][1].isnan()
    assert rows["grad_abs_max"][2] == params[2].grad.abs().max()
    for i, p in enumerate(params):
        u = optimizer.state[p]["exp_avg_sq"]
        for name, expected in (("u_min", u.min()), ("u_mean", u.mean()), ("u_max", u.max())):
            torch.testing.assert_close(rows[name][i], expected)
        torch.testing.assert_close(rows["param_norm"][i], p.detach().norm())
