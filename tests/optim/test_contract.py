"""What every optimizer of a run keeps to: ours in plain torch and by kernels, and Muon."""

import math

import pytest
import torch

from lowprec.optim.loss_scaling import build_scaler
from tests.optim.optimizers import (
    COPIES,
    HALF,
    KINDS,
    OURS,
    assert_equal,
    params_of,
    row_of,
    set_grads,
    take,
)

each = pytest.mark.parametrize("kind", KINDS)
pytestmark = [
    pytest.mark.usefixtures("right_interpreter"),
    pytest.mark.filterwarnings("ignore:invalid value"),  # numpy's, of the interpreter's inf - inf
]


def snapshot(optimizer):
    """Copies of parameters and state, by kind and name."""
    pairs = zip(optimizer.names, params_of(optimizer), strict=True)
    kinds = {"p": dict(pairs), **optimizer.tensors()}
    return {(k, n): x.detach().clone() for k, named in kinds.items() for n, x in named.items()}


def changed(optimizer, before):
    """Names of the tensors that have another value or state."""
    return {key[1] for key, x in snapshot(optimizer).items() if not torch.equal(x, before[key])}


def by_checkpoint(optimizer, twin):
    """As a run's checkpoint does: tensors and steps."""
    for p, own in zip(params_of(twin), params_of(optimizer), strict=True):
        p.data.copy_(own)
    for kind, tensors in twin.tensors().items():
        for name, tensor in tensors.items():
            tensor.copy_(optimizer.tensors()[kind][name])
    twin.steps = optimizer.steps
    return twin


def after_offloading(optimizer, twin):
    for state in optimizer.state.values():  # to the host and back
        state.update({kind: tensor.clone() for kind, tensor in state.items()})
    return COPIES["file"](optimizer, twin)


WAYS = {"checkpoint": by_checkpoint, **COPIES, "file": after_offloading}


@pytest.mark.parametrize(
    "kind, way",
    [
        *((kind, "checkpoint") for kind in (*OURS, "muon")),
        *((kind, way) for kind in OURS if kind in KINDS for way in ("file", "deepcopy", "pickle")),
    ],
)
def test_a_saved_or_copied_state_continues_bitwise(kind, way, build):
    optimizer, twin = (build(kind, clip_norm=0.5, skip="tensor") for _ in range(2))
    optimizer.frozen, twin.frozen = (torch.zeros(1) for _ in range(2))
    take(optimizer, [1, 2, 3], without=[1])
    twin = WAYS[way](optimizer, twin)
    for both in (twin, optimizer):
        take(both, [4, 5])
    assert not changed(twin, snapshot(optimizer)) and twin.steps == optimizer.steps
    assert twin.grad_norm == optimizer.grad_norm and twin.skip == "tensor"
    assert torch.equal(twin.statistics.nan_to_num(-1), optimizer.statistics.nan_to_num(-1))
    before = snapshot(twin)
    twin.frozen.fill_(1)
    take(twin, [6])
    take(optimizer, [6])
    assert not changed(twin, before) and changed(optimizer, before)  # they share no memory


@pytest.mark.parametrize(
    "kind, bad, skip",
    [
        *((k, bad, s) for k in KINDS for bad in (math.inf, math.nan) for s in ("step", "tensor")),
        *((kind, math.inf, "tensor") for kind in OURS if kind not in KINDS),
    ],
)
def test_a_non_finite_gradient_is_never_applied(kind, bad, skip, build):
    optimizer, twin = (take(build(kind, skip=skip), [1, 2]) for _ in range(2))
    before, steps = snapshot(optimizer), optimizer.steps
    set_grads(optimizer, 3)
    params_of(optimizer)[1].grad.view(-1)[:3] = bad
    optimizer.step()
    if skip == "tensor":
        take(twin, [3], without=[1])
    others = {*optimizer.names} - {optimizer.names[1]}
    assert changed(optimizer, before) == (others if skip == "tensor" else set())
    assert not changed(optimizer, snapshot(twin))  # as without this gradient
    assert optimizer.steps == twin.steps and (optimizer.steps == steps) == (skip == "step")
    row = row_of(optimizer, 1)
    assert (row["grad_inf"], row["grad_nan"]) == ((3, 0) if bad == math.inf else (0, 3))
    assert not optimizer.all_finite and not math.isfinite(row["grad_norm"])
    assert str(row["grad_abs_max"]) == str(bad)
    assert row["update_norm"] == 0 and math.isnan(row["rms"])


@each
@pytest.mark.parametrize("veto", ["frozen", "found_inf"])
@pytest.mark.parametrize("skip", ["step", "tensor"])
def test_a_vetoed_step_leaves_no_trace(kind, skip, veto, build, device):
    optimizer, twin = build(kind, skip=skip), build(kind, skip=skip)
    setattr(optimizer, veto, torch.ones(1, device=device))
    take(optimizer, [1, 2])
    assert_equal(optimizer, twin)
    getattr(optimizer, veto).fill_(0)
    for both in (optimizer, twin):
        take(both, [3])
    assert not changed(optimizer, snapshot(twin)) and optimizer.steps == twin.steps


@each
def test_loss_scales_are_divided_out_and_a_dynamic_one_halves_on_a_skip(kind, build, device):
    if OURS.get(kind) is HALF and device.type == "cuda":
        pytest.skip("torch.amp.GradScaler does not unscale bfloat16 gradients on a GPU")
    fixed, dynamic = (build_scaler(name, 1024.0, device) for name in ("fixed", "dynamic"))
    ours, other, twin = build(kind, skip="tensor"), build(kind), build(kind)
    set_grads(other, 1, scale=1024.0)
    params_of(other)[0].grad.view(-1)[0] = math.inf
    dynamic.step(other)
    assert fixed.scale(torch.tensor(2.0)) == 2048 and dynamic.value == 512 and not any(other.steps)
    set_grads(other, 1, scale=512.0)
    dynamic.step(other)
    set_grads(ours, 1, scale=1024.0)
    fixed.step(ours)
    take(twin, [1])
    for scaled in (ours, other):
        assert not changed(scaled, snapshot(twin))
        torch.testing.assert_close(scaled.grad_norm, twin.grad_norm)
    assert not hasattr(other, "found_inf")


@each
def test_a_clipped_step_is_one_of_gradients_clipped_beforehand(kind, build):
    optimizer, twin = build(kind, clip_norm=1.0, skip="tensor"), build(kind, skip="tensor")
    for step, bad in ((1, 1.0), (2, math.inf)):  # skipped tensors do not count
        for both in (optimizer, twin):
            set_grads(both, step)
            params_of(both)[0].grad.view(-1)[0] *= bad
        norms = torch.stack([p.grad.float().norm() for p in params_of(twin)])
        factor = 1 / (norms[norms.isfinite()].norm() + 1e-6)
        for p in params_of(twin):
            p.grad *= factor
        for both in (optimizer, twin):
            both.step()
        torch.testing.assert_close(optimizer.grad_norm, norms.norm())
        assert optimizer.clipped_grad_norm.item() == pytest.approx(1.0, rel=1e-4)
        near = (
            {"rtol": 1e-5, "atol": 1e-6} if "16-bit" not in kind else {"rtol": 0.02, "atol": 1e-3}
        )
        torch.testing.assert_close(params_of(optimizer), params_of(twin), **near)


@each
def test_non_finite_elements_are_counted_before_a_skipped_step_scales_them_by_0(kind, build):
    class Skip(torch.nn.Module):
        def forward(self, norm, is_live):
            return torch.zeros_like(norm)

    optimizer = build(kind, skip="tensor", clip_norm=Skip())
    set_grads(optimizer, 1)
    params_of(optimizer)[1].grad.view(-1)[:3] = math.inf
    before = snapshot(optimizer)
    optimizer.step()
    assert (row_of(optimizer, 1)["grad_inf"], row_of(optimizer, 1)["grad_nan"]) == (3, 0)
    assert not changed(optimizer, before) and optimizer.clipped_grad_norm == 0


@each
def test_statistics_describe_gradients_updates_and_parameters(kind, build):
    optimizer = build(kind, weight_decay=0.0)
    for step in (1, 2):
        before = [p.detach().clone() for p in params_of(optimizer)]
        set_grads(optimizer, step, without=[1])
        grads = [p.grad for p in params_of(optimizer)]
        norms = [0.0 if g is None else g.float().norm().item() for g in grads]
        largest = [0.0 if g is None else g.float().abs().max().item() for g in grads]
        optimizer.step()
        pairs = zip(params_of(optimizer), before, strict=True)
        moved = [(p - b).float().norm().item() for p, b in pairs]
        rows = [row_of(optimizer, i) for i in range(4)]
        assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
        assert [row["grad_abs_max"] for row in rows] == pytest.approx(largest)
        if "16-bit" not in kind:  # whose parameters move when the compensation suffices
            updates = [row["update_norm"] for row in rows]
            assert updates == pytest.approx(moved, rel=1e-3, abs=1e-6)
        assert optimizer.grad_norm.item() == pytest.approx(math.hypot(*norms), rel=1e-4)
        for i in (0, 2, 3):
            size = params_of(optimizer)[i].float().norm().item()
            assert rows[i]["param_norm"] == pytest.approx(size, rel=1e-3)
            if kind in OURS and "8-bit" not in kind:
                u = optimizer.state[params_of(optimizer)[i]]["exp_avg_sq"]
                expected = [x.item() for x in (u.min(), u.mean(), u.max())]
                u_row = [rows[i][name] for name in ("u_min", "u_mean", "u_max")]
                assert u_row == pytest.approx(expected, rel=1e-4)
                assert step > 1 or rows[i]["rms"] == pytest.approx(1.0)  # u_1 = g_1^2
        assert torch.equal(params_of(optimizer)[1], before[1]) and math.isnan(rows[1]["rms"])
        assert optimizer.all_finite


@each
def test_a_step_without_gradients_changes_nothing(kind, build):
    optimizer = take(build(kind), [1])
    before, steps = snapshot(optimizer), optimizer.steps
    optimizer.zero_grad()
    optimizer.step()
    assert not changed(optimizer, before) and optimizer.steps == steps and optimizer.all_finite
    assert optimizer.statistics[:, 0].isnan().all() and not optimizer.statistics[:, 1:].any()
    assert optimizer.grad_norm == optimizer.clipped_grad_norm == 0
