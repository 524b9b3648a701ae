"""Products that run at the same time do not share a counter and leave theirs at 0."""

import itertools

import pytest
import torch

from lowprec.formats import INT8
from lowprec.ops import counters, reference, triton_matmul


def test_tensors_off_the_gpu_get_a_zero():
    assert counters.next_counter(torch.ones(3)).tolist() == [0]
    assert counters.next_counter(torch.ones(3, device="meta")).dtype == torch.int32


@pytest.fixture
def product():
    """A function that computes 780 tiles, and its result by the plain twin."""
    generator = torch.Generator("cuda").manual_seed(0)

    def quantized(rows):
        x = torch.randn(rows, 256, device="cuda", generator=generator)
        return reference.quantize(x, INT8, "rowwise")

    (a, a_scale), (b, b_scale) = quantized(16512), quantized(1536)
    arguments = (a, b, a_scale, b_scale, None, torch.float32)
    return lambda: triton_matmul.matmul(*arguments), reference.matmul(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [counters.CAPTURED, 3], ids=["own", "used up"])
def test_products_on_streams_and_in_graphs_at_the_same_time(product, monkeypatch, captured):
    multiply, expected = product
    monkeypatch.setattr(counters, "CAPTURED", captured)
    monkeypatch.setattr(counters, "_unused", {})
    streams = [torch.cuda.Stream() for _ in range(4)]
    graphs, results = [], []
    multiply()
    for _ in range(2):  # captured on one stream
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=streams[0]):
            results += [multiply() for _ in range(4)]
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
def test_a_graph_in_which_the_first_product_runs_clears_its_counter(product, monkeypatch):
    multiply, expected = product
    multiply()
    monkeypatch.setattr(counters, "_unused", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = multiply()
    for _ in range(2):
        result.zero_()
        graph.replay()
        assert torch.allclose(result, expected, rtol=1e-5, atol=0)
