"""The optimizer's kernels against the plain step: on a GPU, otherwise interpreted."""

import contextlib
import copy
import re
import warnings
import weakref

import pytest
import torch

from lowprec.optim import StableAdamW, fused, stable_adamw
from lowprec.optim.adamw_update import Hyperparameters, PlainStep, Tensors
from lowprec.optim.fused import AddressTables, FusedStep
from lowprec.optim.state import TENSORS, zero_state
from lowprec.optim.statistics import ShardReduction

SHAPES = [(5, 7), (), (2500,), (2, 1024), (3, 1500), (1, 1), (0, 4)]
pytestmark = pytest.mark.usefixtures("right_interpreter")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks a tensor and several parts a reduction, without large tensors."""
    for name, value in (("CHUNK", 1024), ("ROWS", 2)):
        monkeypatch.setattr(fused, name, value)
    fused._layout.cache_clear()
    yield
    fused._layout.cache_clear()


def make(device, dtypes):
    generator = torch.Generator().manual_seed(0)
    columns = [[], [], [], [], []]
    for i, shape in enumerate(SHAPES):
        p_dtype, g_dtype = dtypes[i % len(dtypes)]
        values = [torch.randn(shape, generator=generator) for _ in range(5)]
        values[2] *= 0.1
        values[3] = values[3].square() * 0.1
        values[4] = values[4] * 1e-3
        kinds = (p_dtype, g_dtype, torch.float32, torch.float32, p_dtype)
        for column, value, kind in zip(columns, values, kinds, strict=True):
            column.append(value.to(kind).to(device))
        if p_dtype == torch.float32:
            columns[4][-1] = None
    return Tensors(*columns, [None] * len(SHAPES), [None] * len(SHAPES))


def make_hyperparameters(device, is_clipped, skipped=()):
    n = len(SHAPES)
    apply = torch.ones(n, device=device)
    apply[list(skipped)] = 0

    def spread(first, last):
        return torch.linspace(first, last, n, device=device)

    eps = spread(1e-8, 1e-6)
    eps[4] = 0.1  # among values of sqrt(u), so that its place in the formula matters
    return Hyperparameters(
        apply,
        spread(1e-3, 1e-2) * apply,
        torch.where(apply > 0, spread(0.5, 0.9), 1.0),
        torch.where(apply > 0, spread(0.9, 0.99), 1.0),
        eps,
        spread(0.1, 0.3),
        spread(0.5, 5.0) if is_clipped else torch.full_like(apply, torch.inf),
        torch.arange(n, device=device) % 2.0,
    )


def update(kind, tensors, h, is_clipped, factor=0.5):
    """One update by `FusedStep` or `PlainStep`: RMS_t and sums."""
    shards = ShardReduction([], str)
    step = kind(tensors, shards, AddressTables()) if kind is FusedStep else kind(tensors, shards)
    sizes = torch.tensor([max(1.0, p.numel()) for p in tensors.params], device=h.lr.device)
    return step.update(h, torch.tensor(factor, device=h.lr.device), sizes, is_clipped)


def exact(tensors):
    """Parameters with their compensation."""
    pairs = zip(tensors.params, tensors.compensations, strict=True)
    return [p.float() + (0 if lost is None else lost.float()) for p, lost in pairs]


def assert_same(actual, expected):
    """Equal to the rounding of a multiply-add, 16-bit parameters with their compensation."""
    torch.testing.assert_close(actual[2:4], expected[2:4], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(exact(actual), exact(expected), rtol=1e-5, atol=1e-6)
    for a, e in zip(actual.params, expected.params, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        eps = torch.finfo(a.dtype).eps  # it may round to the other side
        torch.testing.assert_close(a, e, rtol=2 * eps, atol=1e-6)


KINDS = {
    "bfloat16": [(torch.bfloat16, torch.bfloat16)],
    "mixed": [(torch.float32, torch.float32), (torch.float16, torch.float16),
              (torch.float32, torch.bfloat16)],
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, is_clipped", [("mixed", True), ("mixed", False), ("bfloat16", True)]
)
def test_kernels_update_as_the_definition_does(device, kind, is_clipped):
    dtypes = KINDS[kind]
    ours, theirs, before = (make(device, dtypes) for _ in range(3))
    h = make_hyperparameters(device, is_clipped, skipped=[3])
    rms, sums = update(FusedStep, ours, h, is_clipped)
    expected_rms, expected_sums = update(PlainStep, theirs, h, is_clipped)
    assert_same(ours, theirs)
    torch.testing.assert_close(rms, expected_rms, rtol=1e-4, atol=1e-9)
    for value, expected in zip(sums, expected_sums, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-9)
    if is_clipped:
        ratios = (rms / h.clip_threshold)[[0, 1, 2, 4, 5]]
        assert ratios.max() > 1.2 and ratios.min() < 0.8
    for column in ("params", "exp_avgs", "exp_avg_sqs", "compensations"):
        value, kept = getattr(ours, column)[3], getattr(before, column)[3]
        assert value is kept or torch.equal(value, kept), column  # it is skipped
    assert not torch.equal(ours.params[4], before.params[4])


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter's inf - inf
def test_gradient_sums_count_non_finite_elements(device):
    tensors = make(device, KINDS["mixed"])
    tensors.grads[2][1500] = torch.nan
    tensors.grads[3][1, 7] = torch.inf
    tensors.grads[3][0, 9] = -torch.inf
    factor = torch.full((), 0.5, device=device)
    shards = ShardReduction([], str)
    sums = FusedStep(tensors, shards, AddressTables()).gradients(factor)
    expected = PlainStep(tensors, shards).gradients(factor)
    for field in ("squares", "num_inf", "num_nan"):
        pair = getattr(sums, field), getattr(expected, field)
        torch.testing.assert_close(*pair, rtol=1e-5, atol=0, equal_nan=True)
    without_nan = [i for i in range(len(SHAPES)) if i != 2]
    assert torch.equal(sums.abs_max[without_nan], expected.abs_max[without_nan])
    assert sums.squares[2].isnan() and sums.num_nan[2] == 1 and sums.num_inf[2] == 0
    assert sums.num_inf[3] == 2 and sums.num_nan[3] == 0 and sums.abs_max[3] == torch.inf
    square_sum = (tensors.grads[0].float() / 2).square().sum().item()
    assert sums.squares[0].item() == pytest.approx(square_sum)


@pytest.mark.parametrize("kind", [FusedStep, PlainStep])
def test_compensation_keeps_what_bfloat16_rounds_away(device, kind):
    steps, lr = 10, 1e-3
    tensors = Tensors(
        [torch.ones(5, dtype=torch.bfloat16, device=device)],
        [torch.ones(5, dtype=torch.bfloat16, device=device)],
        [torch.zeros(5, device=device)],
        [torch.zeros(5, device=device)],
        [torch.zeros(5, dtype=torch.bfloat16, device=device)],
        *([None], [None]),
    )
    values = (1, lr, 0, 0, 1e-12, 0, torch.inf, 1)
    h = Hyperparameters(*(torch.full((1,), float(value), device=device) for value in values))
    for _ in range(steps):
        update(kind, tensors, h, is_clipped=False, factor=1.0)
    expected = 1 - steps * lr  # one step is a quarter of the distance of bfloat16 numbers below 1
    total = tensors.params[0].float() + tensors.compensations[0].float()
    torch.testing.assert_close(total, torch.full_like(total, expected), rtol=2e-3, atol=0)


def test_unaligned_and_transposed_tensors(device):
    base = torch.randn(4097, device=device)
    columns = [[base[1:].clone()], [base[1:]]]
    columns = [[*column, torch.randn(41, 60, device=device).T] for column in columns]
    columns += [[torch.zeros_like(p) for p in columns[0]] for _ in range(2)] + [[None, None]] * 3
    assert columns[1][0].data_ptr() % 16 and not columns[2][1].is_contiguous()
    tensors, twin = Tensors(*columns), Tensors(*copy.deepcopy(columns))
    h = Hyperparameters(*(value[:2] for value in make_hyperparameters(device, is_clipped=True)))
    update(FusedStep, tensors, h, is_clipped=True)
    update(PlainStep, twin, h, is_clipped=True)
    assert_same(tensors, twin)


def test_kernels_launch_while_their_device_is_the_current_one(device, monkeypatch):
    current, seen = [], []

    @contextlib.contextmanager
    def guard(device):
        current.append(device)
        yield
        current.pop()

    def note(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, **k: seen.append([*current]) or function(*a, **k)
        )

    monkeypatch.setattr(fused, "DEVICES", (device.type,))
    monkeypatch.setattr(stable_adamw, "on_device", guard)
    note(fused._Launcher, "_launch")
    note(AddressTables, "on_device")
    weight = torch.nn.Parameter(torch.randn(8, 6, device=device))
    weight.grad = torch.randn(8, 6, device=device)
    StableAdamW([weight], fused=True).step()
    assert seen == [[weight.device]] * 4 and not current


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
    assert fused.first_unfit(tensors) == 0  # not a GPU
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    assert fused.first_unfit(tensors) == 5
    assert fused.first_unfit(Tensors(*(column[:5] for column in tensors))) is None


@pytest.mark.parametrize("fused_option", [None, True])
def test_a_state_that_no_longer_fits_its_parameter_is_not_written_to(
    device, monkeypatch, fused_option
):
    monkeypatch.setattr(fused, "DEVICES", (device.type,))
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
def test_what_a_captured_step_reads_outlives_loads_other_layouts_and_options(
    device, monkeypatch, optim_bits
):
    monkeypatch.setattr(fused, "DEVICES", (device.type,))
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
