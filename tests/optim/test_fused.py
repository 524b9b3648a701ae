"""The optimizer's kernels against the plain step: on a GPU, otherwise interpreted."""

import copy
import re
import warnings
import weakref

import pytest
import torch

from lowprec.optim import StableAdamW, fused, stable_adamw
from lowprec.optim.adamw_update import PlainStep, Tensors
from lowprec.optim.fused import AddressTables, FusedStep
from lowprec.optim.state import MOMENTS, TENSORS, zero_state
from lowprec.optim.statistics import STATISTICS, ShardReduction
from tests.optim.optimizers import assert_near, params_of

SHAPES = [(5, 7), (), (2500,), (2, 1024), (3, 1500), (1, 1), (0, 4), (41, 60)]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
KINDS = {  # dtypes of parameters and gradients, in turn; options
    "bfloat16": ([(BF16, BF16)], {}),
    "mixed": ([(F32, F32), (F16, F16), (F32, BF16)], {}),
    "mixed, unclipped": ([(F32, F32), (F16, F16), (F32, BF16)], {"clip_threshold": None}),
    "unaligned": ([(F32, F32)], {}),
    "8-bit moments": ([(F32, F32)], {"optim_bits": 8}),
    "8-bit moments, unclipped": ([(F32, F32)], {"optim_bits": 8, "clip_threshold": None}),
    "bfloat16, 8-bit moments": ([(BF16, BF16)], {"optim_bits": 8}),
}
pytestmark = [
    pytest.mark.usefixtures("right_interpreter"),
    pytest.mark.filterwarnings("ignore:invalid value"),  # numpy's, of the interpreter's inf - inf
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, device):
    """Several chunks a tensor and several parts a reduction, without large tensors."""
    for name, value in (("CHUNK", 1024), ("ROWS", 2), ("DEVICES", (device.type,))):
        monkeypatch.setattr(fused, name, value)
    fused._layout.cache_clear()
    yield
    fused._layout.cache_clear()


def make(kind, device, **options):
    """An optimizer of a tensor for each of SHAPES, with options of its own; always the same."""
    dtypes, changes = KINDS[kind]
    generator, groups = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(SHAPES):
        p_dtype, g_dtype = dtypes[i % len(dtypes)]
        x = torch.randn(shape, generator=generator).to(device, p_dtype)
        if shape == (41, 60):
            x = x.T.contiguous().T
        if kind == "unaligned":
            x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(shape)
        p, share = torch.nn.Parameter(x), i / len(SHAPES)
        p.grad_dtype = g_dtype
        own = {"lr": 1e-3 + 0.01 * share, "betas": (0.5 + 0.4 * share, 0.9 + 0.09 * share)}
        own |= {"eps": 0.1 if i == 4 else 1e-8 + 1e-6 * share}  # 0.1 is among values of sqrt(u)
        own |= {"weight_decay": 0.1 + 0.2 * share, "clip_weight_decay": bool(i % 2)}
        groups.append({"params": [p], "clip_threshold": 0.5 + 4 * share, **own})
    changes = dict(changes)
    if "clip_threshold" in changes:
        groups = [group | {"clip_threshold": changes["clip_threshold"]} for group in groups]
    return StableAdamW(groups, min_8bit_size=300, skip="tensor", **changes, **options)


def take(optimizer, step):
    """The gradients are twice as large as they should be, 30 times in step 3; not finite in 2."""
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params_of(optimizer)):
        grad = torch.randn(p.shape, generator=generator) * (60.0 if step == 3 else 2.0)
        if (step, i) == (2, 2):
            grad[1500] = torch.nan
        if (step, i) == (2, 3):
            grad[1, 7], grad[0, 9] = torch.inf, -torch.inf
        p.grad = torch.empty_like(p, dtype=p.grad_dtype).copy_(grad)
    optimizer.grad_scale = torch.full((), 2.0, device=p.device)
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_step_as_the_definition_does(device, kind):
    ours, plain = make(kind, device, fused=True), make(kind, device, fused=False)
    for step in (1, 2, 3):
        before = copy.deepcopy([(p, ours.state[p]) for p in params_of(ours)])
        plain.load_state_dict(ours.state_dict())
        for p, other in zip(params_of(ours), params_of(plain), strict=True):
            other.data.copy_(p)
        for optimizer in (ours, plain):
            take(optimizer, step)
        is_8bit = "8-bit" in kind
        share = 2e-3 if is_8bit else 0.0
        near = {"rtol": 1e-3 if is_8bit else 1e-4, "atol": 1e-7, "equal_nan": True}
        torch.testing.assert_close(ours.statistics, plain.statistics, **near)
        for p, other in zip(params_of(ours), params_of(plain), strict=True):
            state, expected = ours.state[p], plain.state[other]
            assert state.keys() == expected.keys() and p.dtype == other.dtype
            eps = torch.finfo(p.dtype).eps  # it may round to the other side
            assert_near(p, other, share, rtol=2 * eps, atol=1e-6)
            lost, other_lost = (s.get("compensation", torch.tensor(0)) for s in (state, expected))
            exact, other_exact = p.float() + lost.float(), other.float() + other_lost.float()
            # a compensation rounds to 2^-9 of half a unit of p: 2^-17 of p, in both
            assert_near(exact, other_exact, share, rtol=2.0**-16, atol=1e-6)
            for moment in MOMENTS if state else ():
                if state[moment].dtype == torch.uint8:
                    codes = state[moment].int(), expected[moment].int()
                    assert_near(*codes, share, rtol=0, atol=0.5)
                else:
                    near = {"rtol": 1e-6, "atol": 1e-7}
                    torch.testing.assert_close(state[moment], expected[moment], **near)
        for i in (2, 3):  # tensors whose gradient in step 2 is not finite
            p, (start, state) = params_of(ours)[i], before[i]
            kept = [torch.equal(x, ours.state[p][kind]) for kind, x in state.items()]
            assert {torch.equal(p, start), *kept} == {step == 2}
        rows = [dict(zip(STATISTICS, row, strict=True)) for row in ours.statistics.tolist()]
        counts = [(row["grad_inf"], row["grad_nan"]) for row in rows]
        assert counts[2:4] == ([(0, 1), (2, 0)] if step == 2 else [(0, 0)] * 2)
        if step == 1 and "unclipped" not in kind:
            ratios = [rows[i]["rms"] / g["clip_threshold"] for i, g in enumerate(ours.param_groups)]
            assert max(ratios) > 1.2 and min(ratios) < 0.8


def test_kernels_observe_moments_as_the_definition_does_and_leave_them(device):
    n, generator = len(SHAPES), torch.Generator().manual_seed(0)
    params, grads, exp_avgs, exp_avg_sqs = (
        [torch.randn(shape, generator=generator).to(device) for shape in SHAPES] for _ in range(4)
    )
    exp_avg_sqs = [u.square() * 0.1 for u in exp_avg_sqs]
    for i, dtype in ((1, BF16), (3, F16)):
        grads[i] = grads[i].to(dtype)
    columns = [params, grads, exp_avgs, exp_avg_sqs]
    for column in columns:
        column[-1] = column[-1].T.contiguous().T
        column[2] = torch.cat([column[2], column[2][:1]])[1:]  # not aligned
    before = copy.deepcopy(columns)
    lr, eps = torch.linspace(1e-3, 1e-2, n), torch.linspace(1e-8, 1e-6, n)
    eps[0], eps[4] = 0.0, 0.1  # among values of sqrt(u)
    values = torch.stack([lr, eps, torch.linspace(1, 5, n), torch.linspace(1, 50, n)], 1).to(device)
    tensors, shards = Tensors(*columns, *[[None] * n] * 3), ShardReduction([], str)
    assert fused.first_unfit(tensors) is None
    sums = FusedStep(tensors, shards, AddressTables()).observe(values)
    for value, expected in zip(sums, PlainStep(tensors, shards).observe(values), strict=True):
        assert value.shape == (n,) and value[:5].min() > 0
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=0)
    for column, kept in zip(columns, before, strict=True):
        assert all(map(torch.equal, column, kept))


@pytest.mark.parametrize("fused_option", [True, False])
def test_compensation_keeps_what_bfloat16_rounds_away(device, fused_option):
    p = torch.nn.Parameter(torch.ones(5, dtype=BF16, device=device))
    options = {"betas": (0.0, 0.0), "eps": 1e-12, "weight_decay": 0.0, "clip_threshold": None}
    optimizer = StableAdamW([p], lr=1e-3, fused=fused_option, **options)
    p.grad = torch.ones_like(p)
    for _ in range(10):
        optimizer.step()
    expected = 1 - 10 * 1e-3  # one step is a quarter of the distance of bfloat16 numbers below 1
    total = p.float() + optimizer.state[p]["compensation"].float()
    torch.testing.assert_close(total, torch.full_like(total, expected), rtol=2e-3, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("optim_bits", [32, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_on_another_device_than_the_current_one(dtype, optim_bits):
    torch.cuda.set_device(0)
    start, grads = torch.randn(300, 200).to(dtype), torch.randn(4, 300, 200).to(dtype)
    results = []
    for where in ("cuda:0", "cuda:1"):
        p = torch.nn.Parameter(start.to(where))
        optimizer = StableAdamW([p], lr=0.1, optim_bits=optim_bits, clip_norm=1.0, fused=True)
        for grad in grads:
            p.grad = grad.to(where)
            optimizer.step()
            p.grad = None
        results.append([x.cpu() for x in (p.detach(), optimizer.statistics, optimizer.grad_norm)])
    assert all(map(torch.equal, *results)) and torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_plain_torch_updates_tensors_that_no_kernel_takes(device):
    weight = torch.nn.Parameter(torch.randn(8, 6, device=device))
    twin = torch.nn.Parameter(weight.detach().clone())
    weight.grad = torch.randn(6, 8, device=device).T  # in another order than the weight
    twin.grad = weight.grad.contiguous()
    optimizer = StableAdamW([("head", weight)], lr=0.1)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"plain torch.*parameter 0 \(head\)"):
            optimizer.step()
    other = StableAdamW([twin], lr=0.1)
    for _ in range(2):
        other.step()
    torch.testing.assert_close(weight, twin)
    with pytest.raises(ValueError, match="fused=True"):
        StableAdamW([weight], fused=True).step()


def row_of(p, **changes):
    """What `Tensors` has of one parameter: its gradient and a new state."""
    row = {"grad": torch.zeros_like(p), **zero_state(p), **changes}
    return p, *(row.get(kind) for kind in ("grad", *TENSORS))


X = torch.zeros(8, 6)
HALF = X.bfloat16()
CODES = zero_state(torch.zeros(20, 30), is_8bit=True)
UNFIT = {  # what no kernel takes
    "gradient in another order": row_of(X, grad=torch.zeros(6, 8).T),
    "float64": row_of(X.double()),
    "gradient in float64": row_of(X, grad=X.double()),
    "not dense": row_of(torch.zeros(8, 12)[:, ::2], grad=torch.zeros(8, 12)[:, ::2]),
    "larger than its state": (torch.zeros(12, 6), torch.zeros(12, 6), *row_of(X)[2:]),
    "gradient of equal strides": row_of(X, grad=torch.zeros(4, 6)),
    "moment of equal strides": row_of(X, exp_avg_sq=torch.zeros(4, 6)),
    "moments elsewhere": row_of(X, exp_avg=X.to("meta"), exp_avg_sq=X.to("meta")),
    "gradient elsewhere": row_of(X, grad=X.to("meta")),
    "16-bit moments": row_of(X, exp_avg=HALF),
    "no compensation": row_of(HALF, compensation=None),
    "compensation of equal strides": row_of(HALF, compensation=HALF[:4]),
    "compensation in another dtype": row_of(HALF, compensation=X.half()),
    "compensation of float32": row_of(X, compensation=HALF),
    "codes without scales": row_of(torch.zeros(20, 30), exp_avg=CODES["exp_avg"]),
    "too few scales": row_of(torch.zeros(20, 30), **CODES | {"exp_avg_scale": torch.zeros(2)}),
    "scales elsewhere": row_of(
        torch.zeros(20, 30), **CODES | {"exp_avg_sq_scale": torch.zeros(3, device="meta")}
    ),
}


@pytest.mark.parametrize("unfit", UNFIT.values(), ids=UNFIT)
def test_first_unfit_names_the_first_tensor_that_no_kernel_takes(unfit, monkeypatch):
    weight = torch.zeros(5, 1, 3, 3).to(memory_format=torch.channels_last)  # depthwise
    rows = [row_of(X), row_of(HALF), row_of(torch.zeros(20, 30), **CODES)]
    rows += [row_of(weight, grad=torch.zeros(5, 1, 3, 3)), row_of(torch.zeros(6, 8).T), unfit]
    assert weight.stride() != rows[3][1].stride()
    tensors = Tensors(*map(list, zip(*rows, strict=True)))
    monkeypatch.setattr(fused, "DEVICES", ("cuda",))
    assert fused.first_unfit(tensors) == 0  # not a GPU
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    assert fused.first_unfit(tensors) == 5
    assert fused.first_unfit(Tensors(*(column[:5] for column in tensors))) is None


@pytest.mark.parametrize("fused_option", [None, True])
def test_a_state_that_no_longer_fits_stays(device, monkeypatch, fused_option):
    weight = torch.nn.Parameter(torch.ones(4, 6, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = StableAdamW([weight], fused=fused_option)
    optimizer.step()
    weight.data = torch.ones(6, 6, device=device)
    weight.grad = torch.ones(6, 6, device=device)
    kinds = {None: "must match the size", True: "fused=True: kernels need .* unlike parameter 0"}
    with warnings.catch_warnings(), pytest.raises((RuntimeError, ValueError)) as raised:
        warnings.simplefilter("ignore")  # that plain torch takes the step
        optimizer.step()
    assert re.search(kinds[fused_option], str(raised.value))


@pytest.mark.parametrize("optim_bits", [32, 8])
def test_what_a_captured_step_reads_stays_alive(device, monkeypatch, optim_bits):
    params = [torch.nn.Parameter(torch.ones(20, 30, device=device)) for _ in range(2)]
    rate = torch.full((), 0.5, device=device)
    options = {"optim_bits": optim_bits, "min_8bit_size": 1}
    optimizer = StableAdamW(params, lr=rate, fused=True, **options)

    def step(*params):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()

    step(*params)
    saved = copy.deepcopy(optimizer.state_dict())
    read, launch = [], fused._Launcher._launch
    monkeypatch.setattr(
        fused._Launcher,
        "_launch",
        lambda self, *args, **kwargs: read.extend(self.layout) or launch(self, *args, **kwargs),
    )
    with monkeypatch.context() as patch:
        patch.setattr(stable_adamw, "is_capturing", lambda device: True)
        step(params[0])
    read += [optimizer._update_counts, rate, *optimizer.state[params[0]].values()]
    read += [x for pair in optimizer._copies.values() for x in pair]
    refs = list(map(weakref.ref, read))
    read.clear()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    step(params[0])
    optimizer.load_state_dict(saved)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device=device))]})
    for size in range(1, 12):
        fused._layout((size,), device)
    optimizer.state.clear()
    read.clear()
    del rate
    assert len(refs) > 10 and all(ref() is not None for ref in refs)


def test_two_steps_in_one_capture_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="needs an equal one before, outside the capture"):
        AddressTables().on_device((1, 2), torch.device("cuda"), ("kind",))


@pytest.mark.gpu
def test_a_replayed_step_reads_the_current_gradients_and_a_missing_one(device):
    model, twin = (torch.nn.Linear(300, 200, device=device) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    batches = [torch.randn(8, 300, device=device) for _ in range(6)]
    x = batches[0].clone()
    rate = torch.full((), 1e-2, device=device)
    unused = torch.nn.Parameter(torch.ones(300, device=device))
    optimizer = StableAdamW([*model.named_parameters(), ("unused", unused)], lr=rate)
    optimizer.frozen = torch.ones((), dtype=torch.bool, device=device)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.frozen.fill_(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    other = StableAdamW(twin.named_parameters(), lr=1e-2, fused=False)
    for batch in batches:
        x.copy_(batch)
        graph.replay()
        twin(batch).square().mean().backward()
        other.step()
        other.zero_grad()
        statistics = optimizer.statistics[:2]
        torch.testing.assert_close(statistics, other.statistics, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-4, atol=1e-6)
    assert optimizer.steps == [6, 6, 0] and optimizer.statistics[2, 0].isnan()
    assert (unused == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("optim_bits", [32, 8])
def test_a_captured_step_goes_on_after_other_layouts(device, optim_bits):
    options = {"optim_bits": optim_bits, "fused": True}
    start = torch.randn(300, 200, device=device)
    weight, twin = (torch.nn.Parameter(start.clone()) for _ in range(2))
    ours = StableAdamW([weight], lr=torch.full((), 1e-2, device=device), **options)
    other = StableAdamW([twin], lr=1e-2, **options)
    weight.grad = torch.randn_like(weight)
    twin.grad = weight.grad  # the captured step reads it
    for optimizer in (ours, other):
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for size in range(1, 12):
        p = torch.nn.Parameter(torch.ones(size, device=device))
        p.grad = torch.ones_like(p)
        StableAdamW([p], fused=True).step()
    ours.param_groups[0]["lr"].fill_(2e-2)
    other.param_groups[0]["lr"] = 2e-2
    for _ in range(3):
        weight.grad.normal_()
        graph.replay()
        other.step()
    assert ours.steps == other.steps == [4]
    torch.testing.assert_close(weight, twin, rtol=1e-6, atol=1e-7)
