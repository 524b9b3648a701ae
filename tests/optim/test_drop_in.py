"""StableAdamW in place of a torch optimizer: groups, schedulers, closures, GradScaler."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec.optim import StableAdamW

OPTIONS = [
    {},
    {"lr": 3e-3, "betas": (0.8, 0.9), "clip_threshold": 0.7},
    {"eps": 0.1, "weight_decay": 0.0, "clip_threshold": None, "beta2_decay": 0.6},
    {"weight_decay": 0.5, "clip_weight_decay": False},
]


def make_params(n=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(6, 5, generator=generator)) for _ in range(n)]


def set_grads(params, step):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator) * (30.0 if step == 4 else 1.0)


def after(optimizer, params, steps=6):
    for step in range(1, steps + 1):
        set_grads(params, step)
        optimizer.step()
    return [p.detach() for p in params]


def test_each_group_uses_its_own_options():
    params = make_params()
    groups = [{"params": [p], **options} for p, options in zip(params, OPTIONS, strict=True)]
    together = after(StableAdamW(groups, lr=1e-2), params)
    twins = make_params()
    alone = [StableAdamW([p], **{"lr": 1e-2, **r}) for p, r in zip(twins, OPTIONS, strict=True)]
    for step in range(1, 7):
        set_grads(twins, step)
        for optimizer in alone:
            optimizer.step()
    for found, expected in zip(together, twins, strict=True):
        assert torch.equal(found, expected)
    same = after(StableAdamW(twins := make_params(), lr=1e-2), twins)
    assert not any(torch.equal(a, b) for a, b in zip(same[1:], together[1:], strict=True))


def test_an_added_group_counts_its_own_steps():
    params, twin = make_params(2), make_params(2)
    optimizer = StableAdamW(params[:1], lr=1e-2)
    set_grads(params, 1)
    optimizer.step()
    optimizer.add_param_group({"params": params[1:], "lr": 1e-3})
    set_grads(params, 2)
    optimizer.step()
    assert optimizer.steps == [2, 1] and optimizer.statistics.shape == (2, 10)
    set_grads(twin, 2)
    StableAdamW(twin[1:], lr=1e-3).step()
    assert torch.equal(params[1], twin[1])


def test_a_closure_runs_with_gradients_and_its_loss_is_returned():
    (p,) = make_params(1)
    optimizer = StableAdamW([p], lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


SCHEDULERS = {
    "cosine": lambda o: CosineAnnealingLR(o, 6),
    "one cycle, which also changes beta1": lambda o: OneCycleLR(o, 3e-2, total_steps=7),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2), torch.tensor([1e-2])], ids=repr)
def test_schedulers_work_as_with_torchs_adamw(scheduler, lr):
    results = []
    for kind, rate, more in (
        (StableAdamW, lr, {"clip_threshold": None}),
        (torch.optim.AdamW, 1e-2, {}),
    ):
        params = make_params(3)
        rate = rate.clone() if isinstance(rate, torch.Tensor) else rate
        options = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
        optimizer = kind(params, lr=rate, **options, **more)
        schedule = scheduler(optimizer)
        for step in range(1, 7):
            set_grads(params, step)
            optimizer.step()
            schedule.step()
        results.append(params)
    for ours, theirs in zip(*results, strict=True):
        if scheduler is SCHEDULERS["cosine"]:  # torch debiases a changing beta otherwise
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        else:
            torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.02)


def test_a_learning_rate_may_be_a_tensor_in_each_group():
    rates = [1e-1, 1e-3, 1e-2]
    params, twins = make_params(3), make_params(3)
    pairs = list(zip(params, rates, strict=True))
    after(StableAdamW([{"params": [p], "lr": torch.tensor([r])} for p, r in pairs]), params, 2)
    pairs = zip(twins, rates, strict=True)
    after(StableAdamW([{"params": [p], "lr": r} for p, r in pairs]), twins, 2)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


def test_gradscaler_in_a_plain_loop_unscales_and_skips():
    params, twin = make_params(2), make_params(2)
    optimizer, other = StableAdamW(params, lr=1e-2), StableAdamW(twin, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        x = torch.full((6, 5), math.inf if step == 1 else step + 1.0)
        optimizer.zero_grad()
        scaler.scale(sum((p * x).sum() for p in params)).backward()
        before = [p.detach().clone() for p in params]
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert scaler.get_scale() == 512 and optimizer.steps == [1, 1]
            assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
            continue
        other.zero_grad()
        sum((p * x).sum() for p in twin).backward()
        other.step()
        torch.testing.assert_close(optimizer.grad_norm, other.grad_norm)
    assert optimizer.steps == [3, 3] and not hasattr(optimizer, "found_inf")
    for a, b in zip(params, twin, strict=True):
        torch.testing.assert_close(a, b)


def test_found_inf_prevents_an_update():
    params = make_params(2)
    optimizer = StableAdamW(params, lr=1e-2, skip="tensor")
    optimizer.found_inf = torch.tensor([1.0])
    before = [p.detach().clone() for p in params]
    assert all(torch.equal(p, b) for p, b in zip(after(optimizer, params), before, strict=True))
    assert optimizer.steps == [0, 0]


@pytest.mark.parametrize("options", [
    {"lr": math.nan}, {"lr": torch.tensor(-1.0)}, {"betas": (1.5, 2)}, {"betas": (0.9,)},
    {"betas": (0.9, 1.0)}, {"eps": 0.0}, {"weight_decay": -1}, {"clip_threshold": 0},
    {"clip_threshold": -1}, {"beta2_decay": -1.0}, {"beta2_decay": math.nan},
], ids=str)  # fmt: skip
def test_an_option_out_of_range_is_refused_in_every_group(options):
    params = make_params(2)
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"{name}="):
        StableAdamW(params, **options)
    optimizer = StableAdamW(params[:1])
    with pytest.raises(ValueError, match=f"{name}="):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("clip_norm", -3), ("clip_norm", 0.0), ("clip_norm", math.nan)]
    + [("skip", "never")],
)  # fmt: skip
def test_an_option_of_the_whole_optimizer_is_checked(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        StableAdamW(make_params(), **{name: value})


def test_fused_is_refused_without_a_gpu():
    params = [torch.nn.Parameter(torch.ones(3))]
    params[0].grad = torch.ones(3)
    with pytest.raises(ValueError, match="fused=True"):
        StableAdamW(params, fused=True).step()


def test_a_sparse_gradient_is_refused_by_name():
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 1)})
    model["words"] = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = StableAdamW(model.named_parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model["head"](model["words"](torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(ValueError, match=r"parameter 2 \(words.weight\) has a sparse gradient"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_complex_parameter_is_refused_by_its_number():
    params = [torch.ones(2), torch.ones(2, dtype=torch.complex64)]
    params = [torch.nn.Parameter(p) for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="parameter 1 is complex"):
        StableAdamW(params).step()


class _Reads(TorchDispatchMode):
    """Collects operations that make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat = [x for a in args for x in (a if isinstance(a, list | tuple) else [a])]
        by_mask = "index" in func.__name__ and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in flat[1:2]
        )
        if by_mask or func.__name__.startswith(("nonzero", "_local_scalar_dense", "equal")):
            self.operations.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_missing_gradients_cause_no_further_read_of_the_device():
    """On a CPU a step reads one value per tensor, its norm."""
    params = make_params(3)
    optimizer = StableAdamW(params, lr=1e-2)
    after(optimizer, params, 1)
    counts = []
    for without in ((), (1,)):
        for _ in range(2):  # the first step copies the index of the tensors with a gradient
            set_grads(params, 2)
            for i in without:
                params[i].grad = None
            with _Reads() as reads:
                optimizer.step()
        host_reads = reads.operations.count("equal.default")  # of values on the host
        counts.append((len(reads.operations) - host_reads) / (3 - len(without)))
    assert counts[0] == counts[1]
