"""The optimizer's state: step counts of each tensor; copies, saved states, states of AdamW."""

import copy
import io
import math
import pickle

import pytest
import torch

from lowprec.optim import StableAdamW

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(5, 7), (16,), ()]


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def take(optimizer, steps, without=()):
    """Steps with gradients that depend on the step; `without`: tensors without a gradient."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = None if i in without else grad
        optimizer.step()


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_a_late_first_gradient_is_debiased_as_in_torch():
    ours, theirs = make_params(), make_params()
    for params, kind, more in (
        (ours, StableAdamW, {"clip_threshold": None}),
        (theirs, torch.optim.AdamW, {}),
    ):
        optimizer = kind(params, **ADAMW, **more)
        take(optimizer, range(1, 20), without=[1])
        take(optimizer, range(20, 23))
        if kind is StableAdamW:
            assert optimizer.steps == [22, 3, 22]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_skipped_updates_of_a_tensor_do_not_count():
    params, twin = make_params(), make_params()
    optimizer, twin_optimizer = (StableAdamW(p, skip="tensor", **ADAMW) for p in (params, twin))
    take(twin_optimizer, [9])
    for _ in range(30):
        for p in params:
            p.grad = torch.full_like(p, math.inf if p is params[0] else 1.0)
        optimizer.step()
    assert optimizer.steps == [0, 30, 30]
    take(optimizer, [9])
    assert torch.equal(params[0], twin[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_step_counts_survive_saving(dtype):
    whole = make_params(dtype)
    optimizer = StableAdamW(whole, **ADAMW)
    take(optimizer, range(1, 6), without=[2])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    second = [torch.nn.Parameter(p.detach().clone()) for p in whole]
    resumed = StableAdamW(second)
    resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert resumed.steps == [5, 5, 0]
    for o in (optimizer, resumed):
        take(o, range(6, 9))
    assert resumed.steps == [8, 8, 3]
    assert_equal(second, whole)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_continues_as_the_original_does(copied):
    optimizer = StableAdamW(make_params(), clip_norm=0.5, skip="tensor", fused=False, **ADAMW)
    optimizer.frozen = torch.tensor(False)
    take(optimizer, range(1, 4), without=[1])
    twin = copied(optimizer)
    assert torch.equal(twin.grad_norm, optimizer.grad_norm) and twin.skip == "tensor"
    take(twin, range(4, 6))
    assert optimizer.steps == [3, 0, 3]  # the copy counts its own steps
    take(optimizer, range(4, 6))
    assert_equal(twin.param_groups[0]["params"], optimizer.param_groups[0]["params"])
    assert torch.equal(twin.grad_norm, optimizer.grad_norm)
    twin.frozen.fill_(True)
    take(twin, [6])
    assert twin.steps == [5, 2, 5]


def test_a_state_of_torchs_adamw_continues():
    theirs = make_params()
    adamw = torch.optim.AdamW(theirs, **ADAMW)
    take(adamw, range(1, 5), without=[2])
    ours = [torch.nn.Parameter(p.detach().clone()) for p in theirs]
    optimizer = StableAdamW(ours, clip_threshold=None)
    optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.steps == [4, 4, 0]
    group = optimizer.param_groups[0]
    assert (group["lr"], group["eps"], group["clip_threshold"]) == (1e-2, 1e-6, None)
    for o in (adamw, optimizer):
        take(o, range(5, 9))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_16_bit_state_of_torchs_adamw_is_widened_and_compensated():
    theirs = make_params(torch.bfloat16)
    adamw = torch.optim.AdamW(theirs, **ADAMW)
    take(adamw, [1])
    optimizer = StableAdamW(make_params(torch.bfloat16))
    optimizer.load_state_dict(adamw.state_dict())
    take(optimizer, [2])
    for state in optimizer.state.values():
        assert state["exp_avg_sq"].dtype == torch.float32 and state["compensation"].any()


def test_torchs_adamw_refuses_our_state():
    optimizer = StableAdamW(make_params(), **ADAMW)
    take(optimizer, [1])
    adamw = torch.optim.AdamW(make_params())
    with pytest.raises(KeyError, match="step"):
        adamw.load_state_dict(optimizer.state_dict())


FOREIGN = "only a state of StableAdamW or torch.optim.AdamW"


@pytest.mark.parametrize("kind, options, message", [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, FOREIGN),
    (torch.optim.Adam, {}, FOREIGN),
    (torch.optim.AdamW, {"amsgrad": True}, FOREIGN),
    (torch.optim.Adamax, {}, "parameter 0 has step, exp_avg, exp_inf"),
])  # fmt: skip
def test_a_foreign_state_is_refused_before_anything_is_loaded(kind, options, message):
    foreign = kind(make_params(), **options)
    take(foreign, [1])
    optimizer = StableAdamW(make_params(), **ADAMW)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(foreign.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-2 and not optimizer.state


def test_moments_of_another_shape_are_refused():
    first = StableAdamW([("w", torch.nn.Parameter(torch.ones(4, 3)))])
    take(first, [1])
    second = StableAdamW([("w", torch.nn.Parameter(torch.ones(4, 1)))])
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 \(w\) .* \(4, 3\), not \(4, 1\)"):
        second.load_state_dict(first.state_dict())


def test_loaded_moments_have_the_parameters_memory_format():
    weight = torch.randn(4, 3, 2, 2)
    first = StableAdamW([torch.nn.Parameter(weight)])
    take(first, [1])
    p = torch.nn.Parameter(weight.to(memory_format=torch.channels_last))
    second = StableAdamW([p])
    second.load_state_dict(first.state_dict())
    assert second.state[p]["exp_avg"].stride() == p.stride()


def test_assigned_step_counts_are_used_in_the_next_step():
    optimizer = StableAdamW(make_params(), **ADAMW)
    take(optimizer, [1])
    optimizer.steps = [7, 8, 9]
    assert [float(state["updates"]) for state in optimizer.state.values()] == [7, 8, 9]
    take(optimizer, [2])
    assert optimizer.steps == [8, 9, 10]
    with pytest.raises(ValueError, match="2 step counts for 3"):
        optimizer.steps = [1, 2]
