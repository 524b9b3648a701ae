"""The optimizer's kernels against their definition: on a GPU, else interpreted."""

import copy

import pytest
import torch

from lowprec.optim import fused
from lowprec.optim.fused import Addresses, Fused
from lowprec.optim.reference import Coefficients, Reference, Tensors

SHAPES = [(5, 7), (), (3000,), (2, 4096), (3, 5000), (1, 1), (0, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


pytestmark = pytest.mark.usefixtures("right_interpreter")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks a tensor and several parts a reduction, without large tensors."""
    for name, value in (("CHUNK", 1024), ("ROWS", 2)):
        monkeypatch.setattr(fused, name, value)
    fused._layout.cache_clear()
    yield
    fused._layout.cache_clear()


def make(device, dtypes, seed=0):
    generator = torch.Generator().manual_seed(seed)
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
    return Tensors(*columns)


def make_coefficients(device, skipped=()):
    n = len(SHAPES)
    apply = torch.ones(n, device=device)
    apply[list(skipped)] = 0
    of = {"device": device}
    beta1 = torch.where(apply > 0, torch.linspace(0.5, 0.9, n, **of), 1.0)
    beta2 = torch.where(apply > 0, torch.linspace(0.9, 0.99, n, **of), 1.0)
    rate = torch.linspace(1e-3, 1e-2, n, **of) * apply
    factor, eps = torch.linspace(0.5, 1.5, n, **of), torch.linspace(1e-8, 1e-6, n, **of)
    eps[4] = 0.1  # among values of sqrt(u), so that it shows where it stands
    return Coefficients(apply, factor, beta1, beta2, eps, rate, 1 - rate * 0.2)


def assert_same(found, expected):
    """To the rounding of a multiply-add: a 16-bit parameter with what its rounding lost."""
    for column in ("exp_avgs", "exp_avg_sqs"):
        for f, e in zip(getattr(found, column), getattr(expected, column), strict=True):
            torch.testing.assert_close(f, e, rtol=1e-6, atol=1e-7)
    for f, e in zip(whole_params(found), whole_params(expected), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-6)
    for f, e in zip(found.params, expected.params, strict=True):
        assert f.dtype == e.dtype and f.shape == e.shape
        eps = torch.finfo(f.dtype).eps  # it may round to the other side
        torch.testing.assert_close(f, e, rtol=2 * eps, atol=1e-6)


def whole_params(tensors):
    """Parameters with their compensation, float32."""
    columns = zip(tensors.params, tensors.compensations, strict=True)
    return [p.float() + (0 if lost is None else lost.float()) for p, lost in columns]


KINDS = {
    "float32": [(torch.float32, torch.float32)],
    "bfloat16": [(torch.bfloat16, torch.bfloat16)],
    "mixed": [(torch.float32, torch.float32), (torch.float16, torch.float16),
              (torch.float32, torch.bfloat16)],
}  # fmt: skip
each_kind = pytest.mark.parametrize("dtypes", list(KINDS.values()), ids=list(KINDS))


@each_kind
@pytest.mark.parametrize("in_one", [False, True], ids=["two passes", "one pass"])
def test_kernels_step_as_the_definition(device, dtypes, in_one):
    ours, theirs = make(device, dtypes), make(device, dtypes)
    c = make_coefficients(device, skipped=[3])
    results = []
    for passes in (Fused(ours, Addresses()), Reference(theirs)):
        if in_one:
            results.append(passes.moments_and_update(c))
        else:
            results.append((*passes.moments(c), passes.update(c)))
    assert_same(ours, theirs)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9)
    before = make(device, dtypes)
    for column in ("params", "exp_avgs", "exp_avg_sqs", "compensations"):
        found, kept = getattr(ours, column)[3], getattr(before, column)[3]
        assert found is kept or torch.equal(found, kept), column  # it was skipped
    assert not torch.equal(ours.params[4], before.params[4])


@each_kind
@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter's inf - inf
def test_gradients_are_summed_and_what_is_not_finite_is_counted(device, dtypes):
    tensors = make(device, dtypes)
    tensors.grads[2][1500] = torch.nan
    tensors.grads[3][1, 7] = torch.inf
    tensors.grads[3][0, 9] = -torch.inf
    factor = torch.full((), 0.5, device=device)
    sums, maxima = Fused(tensors, Addresses()).gradients(factor)
    expected_sums, expected_maxima = Reference(tensors).gradients(factor)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-5, atol=0, equal_nan=True)
    without_nan = [i for i in range(len(SHAPES)) if i != 2]
    assert torch.equal(maxima[without_nan], expected_maxima[without_nan])
    assert sums[2].isnan()[0] and sums[2, 2] == 1 and sums[3, 1:].tolist() == [2, 0]
    assert maxima[3] == torch.inf
    assert sums[0, 0].item() == pytest.approx((tensors.grads[0].float() / 2).square().sum().item())


def test_kahans_sum_keeps_what_bfloat16_rounds_away(device):
    steps, size = 40, 1e-3
    tensors = Tensors(
        [torch.ones(5, dtype=torch.bfloat16, device=device)],
        [torch.ones(5, dtype=torch.bfloat16, device=device)],
        [torch.zeros(5, device=device)],
        [torch.zeros(5, device=device)],
        [torch.zeros(5, dtype=torch.bfloat16, device=device)],
    )
    twin = copy.deepcopy(tensors)
    of = {"device": device}
    one, zero = torch.ones(1, **of), torch.zeros(1, **of)
    rate = torch.full((1,), size, **of)
    c = Coefficients(one, one, zero, zero, zero + 1e-12, rate, one)
    for passes in (Fused(tensors, Addresses()), Reference(twin)):
        for _ in range(steps):
            passes.moments_and_update(c)
    wanted = 1 - steps * size  # a step alone is a quarter of what bfloat16 resolves below 1
    for t in (tensors, twin):
        total = t.params[0].float() + t.compensations[0].float()
        torch.testing.assert_close(total, torch.full_like(total, wanted), rtol=2e-3, atol=0)


def test_a_tensor_alone_takes_the_same_step_as_among_others(device):
    dtypes = KINDS["float32"]
    together, alone = make(device, dtypes), make(device, dtypes)
    c = make_coefficients(device)
    Fused(together, Addresses()).moments_and_update(c)
    one = Tensors(*([column[4]] for column in vars(alone).values()))
    picked = Coefficients(*(value[4:5] for value in vars(c).values()))
    Fused(one, Addresses()).moments_and_update(picked)
    assert torch.equal(one.params[0], together.params[4])


def test_unaligned_and_transposed_tensors(device):
    base = torch.randn(4097, device=device)
    columns = [[base[1:].clone()], [base[1:]]]
    columns = [[*column, torch.randn(41, 60, device=device).T] for column in columns]
    columns += [[torch.zeros_like(p) for p in columns[0]] for _ in range(2)] + [[None, None]]
    assert columns[1][0].data_ptr() % 16 and not columns[2][1].is_contiguous()
    tensors, twin = Tensors(*columns), Tensors(*copy.deepcopy(columns))
    c = make_coefficients(device)
    c = Coefficients(*(value[:2] for value in vars(c).values()))
    Fused(tensors, Addresses()).moments_and_update(c)
    Reference(twin).moments_and_update(c)
    assert_same(tensors, twin)


@pytest.mark.gpu
def test_tensors_that_no_kernel_takes_go_by_the_definition(device):
    from lowprec.optim import StableAdamW

    weight = torch.nn.Parameter(torch.randn(8, 6, device=device))
    twin = torch.nn.Parameter(weight.detach().clone())
    weight.grad = torch.randn(6, 8, device=device).T  # in another order than the weight
    twin.grad = weight.grad.contiguous()
    optimizer = StableAdamW([("head", weight)], lr=0.1)
    with pytest.warns(UserWarning, match=r"plain torch: no kernel takes parameter 0 \(head\)"):
        optimizer.step()
    optimizer.step()  # said once
    other = StableAdamW([twin], lr=0.1)
    for _ in range(2):
        other.step()
    torch.testing.assert_close(weight, twin)
    with pytest.raises(ValueError, match="fused=True: dense"):
        StableAdamW([weight], fused=True).step()


ODD = {  # what no kernel takes
    "gradient in another order": lambda p: (p, torch.zeros(6, 8).T),
    "strange dtype": lambda p: (p.double(), torch.zeros(8, 6)),
    "not dense": lambda p: (torch.zeros(8, 12)[:, ::2], torch.zeros(8, 12)[:, ::2]),
}


@pytest.mark.parametrize("odd", [None, *ODD])
def test_the_first_tensor_that_no_kernel_takes_is_found(odd, monkeypatch):
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    ordinary = torch.zeros(8, 6)
    weight = torch.zeros(5, 1, 3, 3).to(memory_format=torch.channels_last)  # depthwise
    pairs = [(ordinary, torch.zeros(8, 6)), (weight, torch.zeros(5, 1, 3, 3))]
    assert weight.stride() != pairs[1][1].stride()
    if odd is not None:
        pairs.append(ODD[odd](ordinary))
    params, grads = map(list, zip(*pairs, strict=True))
    moments = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    tensors = Tensors(params, grads, moments, moments, [None] * len(params))
    assert fused.first_unfit(tensors) == (None if odd is None else 2)
    monkeypatch.undo()
    assert fused.first_unfit(tensors) == 0  # it is no GPU


@pytest.mark.gpu
def test_a_step_is_captured_where_gradients_are_missing(device):
    from lowprec.optim import StableAdamW

    params = [torch.nn.Parameter(torch.ones(300, device=device)) for _ in range(3)]
    rate = torch.full((), 1e-2, device=device)
    optimizer = StableAdamW(params, lr=rate)
    params[0].grad, params[2].grad = torch.ones(300, device=device), torch.ones(300, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
    assert optimizer.steps == [4, 0, 4] and optimizer.statistics[1, 0].isnan()
    assert params[2][0] < 1 and params[1][0] == 1


@pytest.mark.gpu
def test_a_captured_step_reads_the_gradients_of_each_replay(device):
    from lowprec.optim import StableAdamW

    torch.manual_seed(0)
    model, twin = (torch.nn.Linear(300, 200, device=device) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    batches = [torch.randn(8, 300, device=device) for _ in range(6)]
    x = batches[0].clone()
    rate = torch.full((), 1e-2, device=device)
    optimizer = StableAdamW(model.named_parameters(), lr=rate)
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
        torch.testing.assert_close(optimizer.statistics, other.statistics, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-4, atol=1e-6)
