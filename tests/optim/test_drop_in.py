"""StableAdamW in place of a torch optimizer: options, groups, schedulers, GradScaler, states."""

import copy
import math

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec.optim import StableAdamW
from lowprec.optim.clipping import SkipStep, ZClip
from tests.optim.optimizers import RULE, assert_close, assert_equal, make_params, params_of, take

ADAMW = {**RULE, "weight_decay": 0.1}


def test_each_group_uses_its_own_options():
    options = [
        {"lr": 3e-3, "betas": (0.8, 0.9), "clip_threshold": 0.7},
        {"eps": 0.1, "weight_decay": 0.0, "clip_threshold": None, "beta2_decay": 0.6},
        {"lr": torch.tensor(2e-2), "weight_decay": 0.5, "clip_weight_decay": False},
        {"lr": 1e-3},
    ]
    groups = [{"params": [p], **o} for p, o in zip(make_params(), options, strict=True)]
    together = StableAdamW(groups, lr=1e-2)
    take(together, range(1, 7))
    for i, own in enumerate(options):
        alone = StableAdamW(make_params(), **{"lr": 1e-2, **own})
        take(alone, range(1, 7))
        assert torch.equal(params_of(together)[i], params_of(alone)[i])


def test_groups_of_named_parameters_and_an_added_group_with_its_own_steps():
    params, twins = make_params()[:3], make_params()[:3]
    optimizer = StableAdamW([{"params": [("a", params[0]), ("b", params[1])]}], lr=1e-2)
    take(optimizer, [1])
    optimizer.add_param_group({"params": [("c", params[2])], "lr": 1e-3})
    take(optimizer, [2])
    assert optimizer.steps == [2, 2, 1] and optimizer.statistics.shape == (3, 10)
    assert optimizer.names == ["a", "b", "c"]
    other = StableAdamW(twins, lr=1e-3)
    take(other, [2])
    assert torch.equal(params[2], twins[2])
    with pytest.raises(ValueError, match="names need named parameters"):
        other.names  # noqa: B018


def test_a_parameter_without_elements_leaves_the_others_and_their_statistics():
    (first, last), twins = make_params()[:2], make_params()[:2]
    empty = torch.nn.Parameter(torch.ones(0, 4))
    optimizer = StableAdamW([("first", first), ("empty", empty), ("last", last)], clip_norm=1.0)
    alone = StableAdamW(twins, clip_norm=1.0)
    for step in (1, 2):
        take(alone, [step])
        first.grad, empty.grad, last.grad = twins[0].grad, torch.zeros(0, 4), twins[1].grad
        optimizer.step()
    assert torch.equal(first, twins[0]) and torch.equal(last, twins[1])
    assert torch.equal(optimizer.statistics[::2], alone.statistics)
    assert optimizer.statistics[1, 0].isnan() and not optimizer.statistics[1, 1:].any()
    assert optimizer.grad_norm == alone.grad_norm and optimizer.all_finite
    assert optimizer.steps == [2, 0, 2]


def test_a_closure_runs_with_gradients_and_its_loss_is_returned():
    optimizer = StableAdamW(make_params()[:1], lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = params_of(optimizer)[0].square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


SCHEDULERS = {
    "cosine": (lambda o: CosineAnnealingLR(o, 6), True),
    "one cycle": (lambda o: OneCycleLR(o, 3e-2, total_steps=7, cycle_momentum=False), True),
    "one cycle of beta1": (lambda o: OneCycleLR(o, 3e-2, total_steps=7), False),
}


@pytest.mark.parametrize("scheduler, is_equal", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2), torch.tensor([1e-2])], ids=repr)
def test_schedulers_work_as_with_torchs_adamw_unless_betas_change(scheduler, is_equal, lr):
    rate = lr.clone() if isinstance(lr, torch.Tensor) else lr
    ours = StableAdamW(make_params()[1::2], clip_threshold=None, **ADAMW | {"lr": rate})
    theirs = torch.optim.AdamW(make_params()[1::2], **ADAMW)
    for optimizer in (ours, theirs):
        schedule = scheduler(optimizer)
        for step in range(1, 7):
            take(optimizer, [step])
            schedule.step()
    if is_equal:
        assert_close(ours, theirs)
    else:
        assert_close(ours, theirs, rtol=0.1, atol=0.02)
        assert not torch.allclose(params_of(ours)[0], params_of(theirs)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [
    {"lr": math.nan}, {"lr": torch.tensor(-1.0)}, {"lr": "0.1"}, {"betas": (1.5, 2)},
    {"betas": (0.9,)}, {"betas": (0.9, 1.0)}, {"eps": 0.0}, {"weight_decay": -1},
    {"clip_threshold": 0}, {"beta2_decay": math.nan}, {"amsgrad": True}, {"maximize": True},
    {"differentiable": True}, {"lr": None}, {"lr": torch.ones(2)}, {"betas": 0.9},
    {"betas": ("0.9", "0.99")}, {"eps": "1e-8"}, {"weight_decay": None},  # YAML's 1e-8 is a string
], ids=str)  # fmt: skip
def test_an_option_out_of_range_is_refused_in_every_group(options):
    params = make_params()
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"{name}="):
        StableAdamW(params, **options)
    optimizer = StableAdamW(params[:1])
    with pytest.raises(ValueError, match=f"{name}="):
        optimizer.add_param_group({"params": params[1:], **options})
    with pytest.raises(ValueError, match="weigth_decay: no such option; nearest: weight_decay"):
        optimizer.add_param_group({"params": params[1:], "weigth_decay": 0.1})
    assert len(optimizer.param_groups) == 1
    others = dict.fromkeys(("initial_lr", "max_lr", "lr_scale", "base_momentum", "no_weight_decay"))
    StableAdamW([{"params": params, "weight_decay_mult": 0.0, **others}])  # as in torch
    for name, value in (
        *(("clip_norm", math.nan), ("clip_norm", "zclip"), ("skip", "no"), ("optim_bits", 4)),
    ):
        with pytest.raises(ValueError, match=f"{name}="):
            StableAdamW(params, **{name: value})


def test_options_of_torchs_adamw_that_change_nothing_are_accepted():
    off = {"maximize": False, "capturable": True, "differentiable": False, "fused": None}
    ours = StableAdamW(make_params(), 1e-2, (0.9, 0.95), 1e-6, 0.1, False, foreach=True, **off)
    plain = StableAdamW(make_params(), **ADAMW)
    for optimizer in (ours, plain):
        take(optimizer, [1, 2])
    assert_equal(ours, plain)


@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_gradients_that_do_not_work_are_refused_by_name_before_anything_changes():
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 1)})
    model["words"] = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = StableAdamW(model.named_parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model["head"](model["words"](torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(ValueError, match=r"parameter 2 \(words.weight\) has a sparse gradient"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="parameter 0 is complex"):
        StableAdamW([p]).step()
    here, elsewhere = (torch.nn.Parameter(torch.ones(2, device=d)) for d in ("cpu", "meta"))
    here.grad, elsewhere.grad = torch.ones_like(here), torch.ones_like(elsewhere)
    with pytest.raises(ValueError, match="parameter 1 is on meta; the first parameter is on cpu"):
        StableAdamW([here, elsewhere]).step()
    assert torch.equal(here, torch.ones(2))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(model["head"], device_id=torch.device("cpu"))
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(ValueError, match="parameter 0 .* is sharded by FSDP1: use fully_shard"):
            StableAdamW(model.named_parameters()).step()
    finally:
        torch.distributed.destroy_process_group()


class _Reads(TorchDispatchMode):
    """Counts operations that make the host wait for a device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat = [x for a in args for x in (a if isinstance(a, list | tuple) else [a])]
        by_mask = "index" in func.__name__ and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in flat[1:2]
        )
        self.count += by_mask or func.__name__.startswith(("nonzero", "_local_scalar_dense"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clipping", [None, ZClip(), SkipStep()])
@pytest.mark.parametrize("without", [[], [1]])
def test_a_step_reads_nothing_back_from_the_device(without, clipping):
    optimizer = StableAdamW(make_params(), lr=1e-2, clip_norm=clipping)
    take(optimizer, [1, 2], without)  # copies indices to the device
    with _Reads() as reads:
        take(optimizer, [3], without)
    assert reads.count == 1  # is_clipped, from values on the host


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ours_continues_the_state_of_torchs_adamw(dtype):
    first = torch.optim.AdamW(make_params(dtype), **ADAMW)
    take(first, range(1, 5), without=[2])  # whose first gradient comes late
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params_of(first)]
    second = StableAdamW(twins, clip_threshold=None)
    second.load_state_dict(first.state_dict())
    assert second.steps == [4, 4, 0, 4] and second.param_groups[0]["clip_threshold"] is None
    assert (second.param_groups[0]["lr"], second.param_groups[0]["eps"]) == (1e-2, 1e-6)
    for each in (first, second):
        take(each, range(5, 9))
    tolerances = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {}
    assert_close(first, second, **tolerances)


def state_of(kind, **options):
    optimizer = kind(make_params(), **options)
    take(optimizer, [1])
    return optimizer.state_dict()


FOREIGN = {
    "SGD": lambda: state_of(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": lambda: state_of(torch.optim.Adam),
    "AMSGrad": lambda: state_of(torch.optim.AdamW, amsgrad=True),
    "maximize": lambda: state_of(torch.optim.AdamW, maximize=True),
    "NAdam": lambda: state_of(torch.optim.NAdam, decoupled_weight_decay=True),
    "a model": lambda: torch.nn.Linear(2, 2).state_dict(),
    "8-bit moments": lambda: state_of(StableAdamW, optim_bits=8, min_8bit_size=1),
    "another shape": lambda: {
        **(saved := state_of(StableAdamW)),
        "state": {0: {**saved["state"][0], "exp_avg": torch.ones(20, 1)}},
    },
}


@pytest.mark.parametrize("saved", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_state_is_refused_before_anything_is_loaded(saved):
    optimizer = StableAdamW(make_params(), **ADAMW)
    message = "only StableAdamW's and torch.optim.AdamW's states|exp_avg of parameter 0 .*shape|"
    message += "parameter 0 has 8-bit moments in this state, not 32-bit ones"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved())
    assert optimizer.param_groups[0]["lr"] == 1e-2 and not optimizer.state


def test_a_state_without_steps_starts_again():
    optimizer, fresh = (StableAdamW(make_params(), lr=1e-2) for _ in range(2))
    take(optimizer, [1, 2])
    optimizer.load_state_dict(fresh.state_dict())
    assert not any(optimizer.steps) and not optimizer.state
    with torch.no_grad():
        for p, start in zip(params_of(optimizer), params_of(fresh), strict=True):
            p.copy_(start)
    for each in (optimizer, fresh):
        take(each, [3])
    assert_equal(optimizer, fresh)


@pytest.mark.parametrize("kind", [StableAdamW, torch.optim.AdamW])
def test_hooks_change_a_state_before_it_is_loaded_and_see_it_afterwards(kind):
    saved = state_of(kind)
    optimizer, seen = kind(make_params()[::-1]), {}
    numbers = saved["param_groups"][0]["params"]
    twin = dict(zip(numbers, numbers[::-1], strict=True))
    optimizer.register_load_state_dict_pre_hook(
        lambda _, old: {**old, "state": {twin[n]: state for n, state in old["state"].items()}}
    )
    optimizer.register_load_state_dict_post_hook(lambda own: seen.update(own.state))
    optimizer.load_state_dict(saved)
    for p, n in zip(params_of(optimizer), numbers[::-1], strict=True):
        assert torch.equal(seen[p]["exp_avg"], saved["state"][n]["exp_avg"])


@pytest.mark.parametrize("kind", [StableAdamW, torch.optim.AdamW])
def test_loading_changes_neither_an_earlier_state_nor_a_callers_learning_rate(kind):
    rate = torch.tensor(1e-2)
    optimizer, other = kind(make_params(), lr=rate), kind(make_params(), lr=torch.tensor(2e-2))
    take(optimizer, [1, 2])
    take(other, [3])
    earlier = optimizer.state_dict()
    before = copy.deepcopy(earlier)
    optimizer.load_state_dict(other.state_dict())
    assert rate == torch.tensor(1e-2) and optimizer.param_groups[0]["lr"] == torch.tensor(2e-2)
    for n, state in before["state"].items():
        assert all(torch.equal(earlier["state"][n][name], x) for name, x in state.items())
