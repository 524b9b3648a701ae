"""The choice of an implementation, and the contract that all of them keep."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowprec import ops
from lowprec.formats import E4M3, INT8, parse_format
from lowprec.ops import (
    reference,
    triton_attention,
    triton_dequantize,
    triton_gelu,
    triton_matmul,
    triton_quantize,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ALL = ("rowwise", "columnwise", "tensorwise", "1x128", "128x1", "128x128")


@pytest.mark.parametrize(
    "capability, supported",
    [((7, 5), set()), ((8, 0), {"int8", "e5m2"}), ((8, 9), {"int8", "e4m3", "e5m2"})],
)
def test_gpu_uses_kernels_for_supported_formats(monkeypatch, capability, supported):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    for name in ("int8", "e4m3", "e5m2", "e2m1"):
        expected = "triton" if name in supported else "reference"
        assert ops.takes("auto", parse_format(name), GPU) == expected
        assert ops.takes("reference", parse_format(name), GPU) == "reference"


@pytest.mark.parametrize("name", ["int8", "e4m3", "e2m1"])
def test_cpu_uses_the_reference(name):
    assert ops.takes("auto", parse_format(name), CPU) == "reference"
    with pytest.raises(ValueError, match="backend=triton"):
        ops.takes("triton", parse_format(name), CPU)


def test_long_rows_use_the_reference(monkeypatch):
    monkeypatch.setattr(ops, "_is_reference", lambda *_: False)
    x = torch.randn(2, 20_000)
    q, _, scale = ops.quantize(x, INT8, "rowwise")
    assert all(map(torch.equal, (q, scale), reference.quantize(x, INT8, "rowwise")))
    for results in (ops.gelu_quantize(x, INT8), ops.gelu_backward_quantize(x, x, INT8)):
        assert results[-1].isfinite().all()
    assert ops.quantize_rows_and_sum(x, INT8)[2].shape == (20_000,)


def assert_fake_is_true(op, kernel, *arguments):
    """Compares shapes, dtypes and strides of the fake op with those of the host function."""
    real = kernel(*arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        fake = op(*fakes)
    real, fake = ((r,) if isinstance(r, torch.Tensor) else r for r in (real, fake))
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype, r.stride(), r.device) == (f.shape, f.dtype, f.stride(), f.device)


@pytest.mark.parametrize("rows, transposed", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("granularity", ALL)
@pytest.mark.parametrize("format", ["int8", "e5m2"])
def test_fake_quantize_op_matches_the_kernel(device, format, granularity, rows, transposed):
    x = torch.randn(63, 100, device=device).T
    arguments = (x, format, granularity, rows, transposed)
    assert_fake_is_true(ops._quantize, ops._quantize_kernel, *arguments)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("granularity", reference.PAIRED)
def test_fake_pair_op_matches_the_kernel(device, granularity, sums):
    for x in (
        torch.randn(132, 100, device=device),
        torch.randn(132, 100, device=device).bfloat16(),
    ):
        arguments = (x, "e4m3", granularity, sums)
        assert_fake_is_true(ops._quantize_pair, ops._pair_kernel, *arguments)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("granularity", reference.PAIRED)
def test_pairs_of_compiled_code_are_those_of_eager_code(
    device, monkeypatch, by_kernels, granularity, sums
):
    x = torch.randn(132, 100, device=device).bfloat16()
    eager = ops.quantize_pair(x, E4M3, granularity, sums=sums)
    monkeypatch.setattr(ops, "_is_eager", lambda _: False)
    for e, c in zip(eager, ops.quantize_pair(x, E4M3, granularity, sums=sums), strict=True):
        assert e is c is None or torch.equal(e.float(), c.float())


def test_other_fake_ops_match_the_kernels(device):
    x = torch.randn(7, 20, device=device, dtype=torch.bfloat16)
    q, scale = reference.quantize(x, INT8, "rowwise")
    for op, kernel, arguments in (
        (ops._quantize_rows_and_sum, triton_quantize.quantize_rows_and_sum, (x,)),
        (ops._gelu_quantize, triton_gelu.gelu_quantize, (x,)),
        (ops._gelu_backward_quantize, triton_gelu.gelu_backward_quantize, (x, x)),
    ):
        assert_fake_is_true(
            lambda *operands, op=op: op(*operands, "int8"),
            lambda *operands, kernel=kernel: kernel(*operands, INT8),
            *arguments,
        )
    arguments = (q, q[:4], scale, scale[:1], None, torch.bfloat16)
    assert_fake_is_true(ops._matmul, triton_matmul.matmul, *arguments)
    arguments = (q.T.contiguous().T, scale, torch.bfloat16)
    assert_fake_is_true(ops._dequantize, triton_dequantize.dequantize, *arguments)


def test_fake_attention_ops_match_the_kernels(device):
    qkv, g = torch.randn(2, 72, 7, device=device).mT, torch.randn(2, 24, 7, device=device).mT
    assert_fake_is_true(ops.attention, triton_attention.attention, qkv, 3, True)
    backward = triton_attention.attention_backward
    assert_fake_is_true(ops.attention_backward, backward, g, qkv, 3, True)


def test_operands_with_the_negative_bit_are_read_with_their_sign(device, by_kernels):
    positive = torch.randn(8, 64, device=device)
    x = torch._neg_view(positive)  # as of the imaginary part of conjugates
    for granularity in ("rowwise", "tensorwise"):
        q, _, scale = ops.quantize(x, INT8, granularity)
        expected = reference.quantize(-positive, INT8, granularity)
        assert torch.equal(q, expected[0]) and torch.equal(scale, expected[1])


@pytest.mark.parametrize("shape", [(1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("granularity", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("by", ["kernels", "definition"])
def test_both_layouts_share_no_memory(device, monkeypatch, by, granularity, shape):
    monkeypatch.setattr(ops, "_is_reference", lambda *_: by == "definition")
    x = torch.randn(shape, device=device)
    q_MK, q_KM, _ = ops.quantize(x, INT8, granularity, layout="both")
    assert torch.equal(q_MK.T, q_KM) and q_MK.data_ptr() != q_KM.data_ptr()
    assert q_KM.stride() == torch.empty(q_KM.shape).stride()


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)])
def test_attention_takes_short_16_bit_sequences_on_a_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    is_ampere, is_large, is_hopper = (
        capability >= (8, 0),
        capability in ((9, 0), (10, 0)),
        capability == (9, 0),
    )
    with FakeTensorMode():
        for tokens, width, dtype, device, takes in (
            (64, 128, torch.bfloat16, GPU, is_ampere),
            (1, 32, torch.float16, GPU, is_ampere),
            (64, 256, torch.bfloat16, GPU, is_large),
            (96, 128, torch.bfloat16, GPU, is_large),
            (97, 128, torch.bfloat16, GPU, False),
            (65, 130, torch.bfloat16, GPU, False),
            (129, 160, torch.bfloat16, GPU, is_hopper),
            (129, 162, torch.bfloat16, GPU, False),
            (64, 258, torch.bfloat16, GPU, False),
            (64, 128, torch.float32, GPU, False),
            (64, 128, torch.bfloat16, CPU, False),
            (0, 128, torch.bfloat16, GPU, False),
        ):
            qkv = torch.empty(2, tokens, 3 * width, dtype=dtype, device=device)
            assert ops.takes_attention(qkv, 2, is_causal=False) == takes
            assert ops.takes_attention(qkv, 2, is_causal=True) == (takes and tokens < 129)


def test_all_ops_are_compared_with_their_fakes():
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("lowprec::")}
    tried = "quantize quantize_rows_and_sum gelu_quantize gelu_backward_quantize matmul attention "
    tried += "attention_backward dequantize quantize_pair"
    assert ours == {f"lowprec::{name}" for name in tried.split()}
