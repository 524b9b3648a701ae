"""Prepared launches compute what ordinary launches compute, also at other addresses."""

import contextlib
from unittest.mock import MagicMock

import pytest
import torch
import triton
import triton.language as tl

from lowprec.formats import INT8
from lowprec.nn.linear import LowPrecisionLinear
from lowprec.ops import reference, triton_matmul, triton_quantize
from lowprec.ops.launch import Launch


@triton.jit
def _add_kernel(x_ptr, out_ptr, N, stride, AMOUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at * stride, mask=at < N)
    tl.store(out_ptr + at, x + AMOUNT, mask=at < N)


def test_launches_at_any_address(device):
    launch = Launch(_add_kernel, (2,), (100, 1), AMOUNT=5, BLOCK=64)
    for offset in (0, 4, 0, 1, 2, 4):  # aligned to 16 bytes or not
        x = torch.randn(200, device=device)[offset:]
        out = torch.full((200,), torch.nan, device=device)[offset:]
        launch(x, out)
        assert torch.equal(out[:100], x[:100] + 5) and out[100:].isnan().all()


def test_tensors_on_several_devices_are_refused(device):
    launch = Launch(_add_kernel, (1,), (64, 1), AMOUNT=1, BLOCK=64)
    x, elsewhere = torch.zeros(64, device=device), MagicMock(get_device=lambda: 7, device="cuda:7")
    with pytest.raises(ValueError, match=f"one device, not on {x.device}, cuda:7"):
        launch(x, elsewhere)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_layer_refuses_a_weight_on_the_cpu():
    layer = LowPrecisionLinear(64, 32, device="cuda")
    x = torch.randn(8, 64, device="cuda")
    for where in ("cuda", "cuda", "cpu", "cuda"):  # prepared by the first call
        layer.weight.data = layer.weight.data.to(where)
        refused = pytest.raises(ValueError, match="tensors must be on one device")
        with refused if where == "cpu" else contextlib.nullcontext():
            assert layer(x).isfinite().all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_later_launches_skip_triton(monkeypatch):
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones(1, 1, device="cuda")

    def multiply():
        """At new addresses each time."""
        q, q_scale, _ = triton_quantize.quantize_rows_and_sum(x.clone(), INT8)
        return q, q_scale, triton_matmul.matmul(q, q, q_scale, scale, None, torch.float32)

    kept = [multiply()]

    def fail(*args, **kwargs):
        raise AssertionError("bound again")

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", fail)
    kept += [multiply() for _ in range(5)]
    for q, q_scale, product in kept:
        torch.testing.assert_close(
            product, reference.matmul(q, q, q_scale, scale, None, torch.float32)
        )


@pytest.mark.gpu
def test_launch_uses_the_current_stream():
    launch = Launch(_add_kernel, (1,), (64, 1), AMOUNT=1, BLOCK=64)
    x, out = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    launch(x, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # captures a stream of its own
        launch(x, out)
    x.fill_(7)
    graph.replay()
    assert torch.equal(out, x + 1)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_on_another_device_than_the_current_one():
    launch = Launch(_add_kernel, (1,), (64, 1), AMOUNT=1, BLOCK=64)
    x, out = torch.zeros(64, device="cuda:1"), torch.zeros(64, device="cuda:1")
    with torch.cuda.device(0):
        for number in range(3):  # the last two are prepared
            launch(x.fill_(number), out)
            assert (out == number + 1).all() and torch.cuda.current_device() == 0
