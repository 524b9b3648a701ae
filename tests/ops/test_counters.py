"""Products that run at the same time do not share a counter and leave theirs at 0."""

import itertools
from unittest import mock

import pytest
import torch

from lowprec.formats import INT8
from lowprec.nn.linear import LowPrecisionLinear
from lowprec.ops import counters, launch, reference, triton_matmul


def test_tensors_off_the_gpu_get_a_zero():
    assert counters.next_counter(torch.ones(3)).tolist() == [0]
    assert counters.next_counter(torch.ones(3, device="meta")).dtype == torch.int32


@pytest.fixture
def product():
    """A function that computes 774 tiles, and its result by the plain twin."""
    generator = torch.Generator("cuda").manual_seed(0)

    def quantized(rows):
        x = torch.randn(rows, 256, device="cuda", generator=generator)
        return reference.quantize(x, INT8, "rowwise")

    (a, a_scale), (b, b_scale) = quantized(16512), quantized(1536)
    arguments = (a, b, a_scale, b_scale, None, torch.float32)
    return lambda: triton_matmul.matmul(*arguments), reference.matmul(*arguments)


def test_a_stream_and_each_captured_launch_have_counters_that_no_other_has(monkeypatch):
    rows, state = iter([torch.zeros(1) for _ in range(4)]), {}
    monkeypatch.setattr(counters, "_unused", {})
    monkeypatch.setattr(
        counters, "_make_counters", lambda gpu: counters._unused.update({gpu: rows})
    )
    raw_stream = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, raw_stream, lambda gpu: state["stream"], raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["captures"])
    like, taken = mock.Mock(get_device=lambda: 0, device="cpu"), []
    counters._of_stream.cache_clear()
    for stream, captures in ((7, False), (8, False), (7, False), (7, True), (7, True), (7, True)):
        state.update(stream=stream, captures=captures)
        taken.append(counters.next_counter(like))
    counters._of_stream.cache_clear()
    assert taken[0] is taken[2]
    assert len({id(counter) for counter in taken}) == 5
    assert taken[-1].tolist() == [0] and taken[-1].dtype == torch.int32  # none was left


@pytest.fixture
def counted(monkeypatch):
    """The counters of the launches in a test."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no kernel counts on this GPU")
    counted, next_counter = [], launch.next_counter
    monkeypatch.setattr(counters, "_unused", {})
    counters._of_stream.cache_clear()
    monkeypatch.setattr(
        launch, "next_counter", lambda like: counted.append(next_counter(like)) or counted[-1]
    )
    yield counted
    counters._of_stream.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("number", [2**16, 3], ids=["own", "used up"])
def test_products_on_streams_and_in_graphs_at_the_same_time(product, counted, monkeypatch, number):
    multiply, expected = product
    monkeypatch.setattr(counters, "COUNTERS", number)
    streams = [torch.cuda.Stream() for _ in range(4)]
    graphs, results = [], []
    multiply()
    counted.clear()
    for _ in range(2):  # captured on one stream
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=streams[0]):
            results += [multiply() for _ in range(4)]
    if number > 8:
        assert len({counter.data_ptr() for counter in counted}) == 8
        assert len({counter.untyped_storage().data_ptr() for counter in counted}) == 1
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _, (number, stream) in itertools.product(range(3), enumerate(streams)):
        with torch.cuda.stream(stream):
            if number < 2:
                graphs[number].replay()
            results += [multiply() for _ in range(3)]
    torch.cuda.synchronize()
    assert all(torch.allclose(result, expected, rtol=1e-5, atol=0) for result in results)
    assert all(torch.equal(result, results[0]) for result in results)
    for stream in streams:
        with torch.cuda.stream(stream):
            assert counters.next_counter(expected).item() == 0


@pytest.mark.gpu
def test_a_graph_for_which_no_counter_is_left_clears_one(product, counted, monkeypatch):
    multiply, expected = product
    multiply()
    counted.clear()
    monkeypatch.setattr(counters, "_unused", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = multiply()
    for _ in range(2):
        counted[0].fill_(99)
        result.zero_()
        graph.replay()
        assert torch.allclose(result, expected, rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures one
def test_layers_that_torch_compiles_with_graphs_of_its_own(counted):
    """Its warm-ups, on a stream of its own, refuse memory in their pool that they do not know."""
    torch._dynamo.reset()
    layers = [LowPrecisionLinear(256, 256, device="cuda", recipe="switchback") for _ in range(2)]
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    for layer in layers:
        with torch.autocast("cuda", torch.bfloat16):
            compiled = torch.compile(layer, mode="reduce-overhead")
            for _ in range(4):
                layer.zero_grad()
                torch.compiler.cudagraph_mark_step_begin()
                output = compiled(x)
                output.backward(torch.ones_like(output))
            expected = layer(x)
        torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
    assert counted
