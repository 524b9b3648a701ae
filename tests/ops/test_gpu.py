"""Tests that need a GPU: compiled and captured steps, large tensors, hardware casts and sums."""

import copy
import itertools

import pytest
import torch
from torch import nn

from lowprec import ops
from lowprec.formats import E4M3, E5M2, INT8
from lowprec.nn.attention import replace
from lowprec.nn.linear import LowPrecisionLinear
from lowprec.nn.recipe import RECIPES
from lowprec.nn.replace import prepare_for_training
from lowprec.ops import reference, triton_quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from torch 2.11 itself
]
NATIVE = [name for name, recipe in RECIPES.items() if recipe.output and recipe.output.native]
# Relative to the norm: a multiply-add or another order of sums can change a value to the next
# bfloat16, and fp8 is added in 22 bits.
TOLERANCE = {"int8": 1e-3, "e4m3": 4e-3}


def tolerance_of(name):
    return TOLERANCE[RECIPES[name].output.first.format]


def skip_without(name_or_format):
    fp8 = "fp8" in str(name_or_format) or name_or_format is E4M3
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 on this GPU")


def make(recipe, backend="auto", width=(256, 512), tokens=300):
    torch.manual_seed(0)
    layer = LowPrecisionLinear(*width, device="cuda", recipe=recipe, backend=backend)
    x = torch.randn(tokens, width[0], device="cuda", requires_grad=True)
    return layer, x, torch.randn(tokens, width[1], device="cuda", dtype=torch.bfloat16) * 1e-3


def step(layer, x, g):
    """One forward and backward under autocast: (output, gradients of input, weight, bias)."""
    x.grad = layer.weight.grad = layer.bias.grad = None
    with torch.autocast("cuda", torch.bfloat16):
        output = layer(x)
    output.backward(g)
    return [t.detach().clone() for t in (output, x.grad, layer.weight.grad, layer.bias.grad)]


def assert_near(results, expected, tolerance):
    for f, e in zip(results, expected, strict=True):
        assert f.dtype == e.dtype and f.isfinite().all()
        assert (f.double() - e.double()).norm() <= tolerance * e.double().norm()


@pytest.mark.parametrize("width", [(256, 512), (100, 63)], ids=["aligned", "odd"])
@pytest.mark.parametrize("name", NATIVE)
def test_kernels_match_reference_gradients(name, width):
    skip_without(name)
    results = step(*make(name, "triton", width))
    assert_near(results, step(*make(name, "reference", width)), tolerance_of(name))


@pytest.mark.parametrize("name", NATIVE)
def test_layer_compiles_once_to_one_graph(name):
    skip_without(name)
    torch._dynamo.reset()
    layer, x, g = make(name)
    x = x.detach().bfloat16().requires_grad_()  # a graph quantizes float32 before it is rounded
    expected = step(layer, x, g)
    compiled = torch.compile(layer, fullgraph=True)
    compiled.weight, compiled.bias = layer.weight, layer.bias
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            results = step(compiled, x, g)
    assert_near(results, expected, 3 * tolerance_of(name))


@pytest.mark.parametrize("tokens, is_causal", [(33, False), (32, True), (50, False), (77, True)])
def test_attention_compiles_to_one_graph_and_repeats_bits(tokens, is_causal):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.MultiheadAttention(128, 2, batch_first=True, device="cuda", dtype=torch.bfloat16)
    replace(module)
    module.causal = is_causal
    x = torch.randn(9, tokens, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn_like(x)

    def step(call):
        return torch.autograd.grad(call(x, x, x)[0], [x, *module.parameters()], g)

    results = step(torch.compile(module, fullgraph=True))
    assert_near(results, step(module), 5e-3)
    assert all(map(torch.equal, step(module), step(module)))


@pytest.mark.parametrize("name", NATIVE)
def test_captured_step_replays_on_new_data(name):
    skip_without(name)
    layer, x, g = make(name)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(layer, x, g)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, x, g)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        g.copy_(torch.randn_like(g))
    graph.replay()
    results = [t.clone() for t in captured]
    assert_near(results, step(layer, x, g), 1e-6)


@pytest.mark.parametrize("format", [INT8, E4M3, E5M2], ids=lambda format: format.name)
@pytest.mark.parametrize(
    "granularity", ["rowwise", "columnwise", "tensorwise", "1x128", "128x1", "128x128"]
)
def test_random_large_tensors_match_reference_bits(granularity, format):
    skip_without(format)
    generator = torch.Generator().manual_seed(0)
    for dtype, align in itertools.product((torch.bfloat16, torch.float32), (1, 1, 16, 128)):
        m, k = (torch.randint(1, 9000 // align, (2,), generator=generator) * align).tolist()
        x = torch.randn(m, k, device="cuda", dtype=dtype) * 3
        results = ops.quantize(x, format, granularity, layout="both", backend="triton")
        q, scale = reference.quantize(x, format, granularity)
        assert torch.equal(results[2], scale), (m, k)
        assert torch.equal(results[0].view(torch.uint8), q.view(torch.uint8)), (m, k)
        assert torch.equal(results[1].view(torch.uint8), q.T.contiguous().view(torch.uint8)), (m, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_random_large_products_match_reference(dtype):
    generator = torch.Generator().manual_seed(0)
    for align in (1, 1, 16, 16, 16):
        m, n, k = (torch.randint(1, 3000, (3,), generator=generator) // align + 1).tolist()
        m, n, k = m * align, n * align, k * align
        a, b = (torch.randint(-127, 128, (r, k), dtype=torch.int8, device="cuda") for r in (m, n))
        a_scale, b_scale = (torch.rand(r, 1, device="cuda") * 1e-3 for r in (m, n))
        bias = torch.randn(n, device="cuda")
        results = ops.matmul(a, b, a_scale, b_scale, bias, dtype, backend="triton")
        expected = reference.matmul(a, b, a_scale, b_scale, bias, dtype)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(results, expected, rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize(
    "shape",
    [(5000, 2584, 1296), (1, 8, 16), (9000, 264, 4112), (384, 384, 33792), (256, 1000, 20000)]
    + [(255, 999, 20001)],
    ids=str,
)
@pytest.mark.parametrize("formats", [(INT8, INT8), (E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_sums_of_small_integers_are_exact(formats, shape):
    skip_without(formats[1])
    m, n, k = shape
    a, b = (
        torch.randint(-3, 4, (rows, k), device="cuda").to(format.dtype)
        for rows, format in zip((m, n), formats, strict=True)
    )
    one = torch.ones(1, 1, device="cuda")
    exact = a.double() @ b.double().T
    for dtype in (torch.float32, torch.bfloat16):
        out = ops.matmul(a, b, one, one, None, dtype, backend="triton")
        assert torch.equal(out, exact.to(dtype))


def test_offsets_beyond_int32():
    m, k = 70_000, 32_768  # 2.3e9 elements
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("less than 20 GiB of GPU memory")
    x = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(4, k, device="cuda", dtype=torch.bfloat16)
    x[-4:] = rows
    for granularity in ("rowwise", "tensorwise"):
        q, _, scale = ops.quantize(x, INT8, granularity, backend="triton")
        expected, _ = reference.quantize(rows, INT8, granularity)
        assert torch.equal(q[-4:], expected) and not q[:8].any()
    w = torch.randint(-127, 128, (16, k), dtype=torch.int8, device="cuda")
    one = torch.ones(1, 1, device="cuda")
    for part in (q, q[:, : k - 8].contiguous()):  # one for each kernel
        out = ops.matmul(part, w[:, : part.shape[1]].contiguous(), one, one, None, torch.bfloat16)
        last = part[-4:].double() @ w[:, : part.shape[1]].double().T
        assert torch.equal(out[-4:], last.to(torch.bfloat16)) and not out[:8].any()


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_checkpointed_block_quantizes_its_weights_once(monkeypatch, compile):
    torch._dynamo.reset()
    block = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, activation="gelu", dropout=0)
    model = nn.Sequential(block, copy.deepcopy(block)).cuda()
    names = ["linear1", "linear2"]
    options = {"checkpointing": True, "compile": compile, "skip_slow": False}
    prepare_for_training(model, "switchback", names, **options)
    x = torch.randn(8, 10, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        model(x).sum().backward()  # compiles
    weights = []
    quantize_tiles = triton_quantize._quantize_tiles
    monkeypatch.setattr(
        triton_quantize,
        "_quantize_tiles",
        lambda w, *args: weights.append(w) or quantize_tiles(w, *args),
    )
    with torch.autocast("cuda", torch.bfloat16):
        model(x).sum().backward()
    assert len(weights) == 2 * len(names)
