"""Which implementation an operation takes, and that every one keeps the same contract."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowprec import ops
from lowprec.formats import E4M3, E5M2, INT8, parse_format
from lowprec.ops import reference, triton_gelu, triton_matmul, triton_quantize

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ALL = ("rowwise", "columnwise", "tensorwise")


@pytest.mark.parametrize("format", [INT8, E4M3, E5M2, parse_format("e2m1")], ids=lambda f: f.name)
def test_the_definition_is_taken_on_a_cpu(format):
    assert ops.takes("auto", format, CPU) == "reference"
    assert ops.takes("reference", format, CPU) == "reference"


@pytest.mark.parametrize(
    "capability, taken",
    [((8, 0), {"int8", "e5m2"}), ((8, 6), {"int8", "e5m2"})]
    + [(c, {"int8", "e4m3", "e5m2"}) for c in ((8, 9), (9, 0), (10, 0))],
)
def test_a_gpu_takes_the_kernels_for_what_it_can_write(monkeypatch, capability, taken):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    for name in ("int8", "e4m3", "e5m2", "e2m1"):
        expected = "triton" if name in taken else "reference"
        assert ops.takes("auto", parse_format(name), GPU) == expected
        assert ops.takes("reference", parse_format(name), GPU) == "reference"


@pytest.mark.parametrize("name", ["int8", "e4m3", "e2m1"])
def test_insisting_on_triton_where_it_cannot_run_is_refused(name):
    with pytest.raises(ValueError, match="backend=triton"):
        ops.takes("triton", parse_format(name), CPU)


@pytest.mark.parametrize("granularity", ALL)
@pytest.mark.parametrize("format", [INT8, E4M3], ids=lambda f: f.name)
def test_layouts_hold_the_same_numbers(device, format, granularity):
    x = torch.randn(63, 100, generator=torch.Generator().manual_seed(0)).to(device)
    expected, expected_scale = reference.quantize(x, format, granularity)
    for layout, given in {"rows": (1, 0), "transposed": (0, 1), "both": (1, 1)}.items():
        q, q_transposed, scale = ops.quantize(x, format, granularity, layout=layout)
        assert (q is not None, q_transposed is not None) == given
        assert torch.equal(scale, expected_scale)
        if q is not None:
            assert torch.equal(q.float(), expected.float()) and q.is_contiguous()
        if q_transposed is not None:
            assert torch.equal(q_transposed.float(), expected.float().T)
            assert q_transposed.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantized_products_approach_the_product(device, dtype):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(40, 96, generator=generator).to(device) for _ in range(2))
    for format, tolerance in ((INT8, 0.02), (E4M3, 0.06), (E5M2, 0.12)):
        q_x, _, x_scale = ops.quantize(x, format, "rowwise")
        q_w, _, w_scale = ops.quantize(w, format, "tensorwise")
        product = ops.matmul(q_x, q_w, x_scale, w_scale, None, dtype)
        assert product.dtype == dtype
        error = (product.double() - x.double() @ w.double().T).norm() / (x @ w.T).norm()
        assert error < tolerance


def test_sums_come_with_the_rows_of_quantize(device):
    g = torch.randn(63, 100, generator=torch.Generator().manual_seed(0)).to(device)
    q, scale, sums = ops.quantize_rows_and_sum(g, INT8)
    expected, expected_scale = reference.quantize(g, INT8, "rowwise")
    assert torch.equal(q, expected) and torch.equal(scale, expected_scale)
    torch.testing.assert_close(sums, g.sum(dim=0), rtol=1e-5, atol=1e-5)


def assert_fake_is_true(op, kernel, *arguments):
    """Shapes, dtypes and strides that torch.compile is told, against those of the host function."""
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
def test_the_fakes_of_quantize_tell_the_truth(device, format, granularity, rows, transposed):
    x = torch.randn(63, 100, device=device).T
    arguments = (x, format, granularity, rows, transposed)
    assert_fake_is_true(ops._quantize, ops._quantize_kernel, *arguments)


def test_the_fakes_of_the_other_operations_tell_the_truth(device):
    x = torch.randn(63, 100, device=device, dtype=torch.bfloat16)
    q, scale = reference.quantize(x, INT8, "rowwise")
    for op, kernel, arguments in (
        (ops._quantize_rows_and_sum, triton_quantize.quantize_rows_and_sum, (x,)),
        (ops._gelu_quantize, triton_gelu.gelu_quantize, (x,)),
        (ops._gelu_backward_quantize, triton_gelu.gelu_backward_quantize, (x, x)),
    ):
        assert_fake_is_true(
            lambda *given, op=op: op(*given, "int8"),
            lambda *given, kernel=kernel: kernel(*given, INT8),
            *arguments,
        )
    assert_fake_is_true(
        ops._dequantize_rows, triton_quantize.dequantize_rows, q, scale, torch.float16
    )
    arguments = (q, q[:40], scale, scale[:1], None, torch.bfloat16)
    assert_fake_is_true(ops._matmul, triton_matmul.matmul, *arguments)


def test_every_operation_has_its_fake_tried_above():
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("lowprec::")}
    tried = ("_quantize", "_quantize_rows_and_sum", "_dequantize_rows", "_gelu_quantize")
    tried += ("_gelu_backward_quantize", "_matmul")
    assert ours == {f"lowprec::{name[1:]}" for name in tried}
