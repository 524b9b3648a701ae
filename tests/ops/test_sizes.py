"""Operands whose sizes do not fit are refused: kernels would read past their ends, in silence."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowprec import ops
from lowprec.formats import E4M3, INT8
from lowprec.nn.linear import LowPrecisionLinear
from lowprec.nn.recipe import custom_recipe
from lowprec.ops import reference, triton_attention, triton_matmul

M, N, K = 8, 32, 64
FITTING = {"a": (M, K), "b": (N, K), "a_scale": (M, 1), "b_scale": (N, 1), "bias": (N,)}
TILED = {"a": (M, 300), "b": (200, 300), "a_scale": (M, 3), "b_scale": (2, 3), "bias": (200,)}
WRONG = [
    {"a": (M, 80)},
    {"bias": (N + 1,)},
    {"bias": (1, N)},
    {"a_scale": (M + 1, 1)},
    {"a_scale": (0, 1)},
    {"b_scale": (N - 1, 1)},
    *(TILED | wrong for wrong in [{"a_scale": (1, 3)}, {"a_scale": (M, 2)}, {"b_scale": (200, 1)}]),
    *(TILED | wrong for wrong in [{"b_scale": (3, 3)}, {"b_scale": (2, 4)}, {"bias": (2,)}]),
]
PADDED = custom_recipe(
    {"output": {"format": "e4m3", "x": "rowwise", "w": "rowwise", "hadamard": True}}
)
MESSAGE = r"product of a \[8, \d+\] and b .*: must be \[M, K\] and \[N, K\]"


def product_of(sizes, device):
    """The operands of a product."""
    sizes = FITTING | sizes
    kind = torch.int8 if sizes["a_scale"][1] == 1 else E4M3.dtype  # in tiles
    kinds = {"a": kind, "b": kind}
    made = [torch.ones(sizes[x], dtype=kinds.get(x), device=device) for x in sizes]
    return *made, torch.float32


def as_fakes(operands):
    with FakeTensorMode() as mode:
        return [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in operands]


def refuses(function, operands, message):
    with pytest.raises(ValueError, match=message):
        function(*operands)


@pytest.mark.parametrize("sizes", WRONG, ids=str)
def test_sizes_of_products_must_fit(device, sizes):
    operands = product_of(sizes, device)
    for multiply in (reference.matmul, triton_matmul.matmul):
        refuses(multiply, operands, MESSAGE)


@pytest.mark.parametrize(
    "sizes", [{}, {"a_scale": (1, 1)}, {"b_scale": (1, 1)}, TILED, TILED | {"b_scale": (200, 3)}]
)
def test_sizes_that_fit_are_taken(device, sizes):
    operands = product_of(sizes, device)
    expected = reference.matmul(*operands)
    assert torch.equal(triton_matmul.matmul(*operands), expected)


@pytest.mark.parametrize("name", ["a_scale", "b_scale"])
def test_scales_must_be_float32(device, name):
    operands = list(product_of({}, device))
    number = list(FITTING).index(name)
    for dtype in (torch.bfloat16, torch.float64):
        operands[number] = operands[number].to(dtype)
        for multiply in (reference.matmul, triton_matmul.matmul):
            refuses(multiply, operands, f"scales must be float32, not .*{dtype}")


def test_sizes_of_other_operations_must_fit(device):
    h, qkv = torch.randn(M, K, device=device), torch.randn(2, 5, 3 * K, device=device)
    for g in (h[:4], h[:, :32], h[0]):
        refuses(ops.gelu_backward_quantize, (h, g, INT8), "g .* must have the size of h")
    for wide, heads in ((qkv, 5), (qkv[:, :, 1:], 1), (qkv[0], 1)):
        operands = (wide, heads, False)
        refuses(triton_attention.attention, operands, "3 times a multiple")
        refuses(ops.attention, as_fakes(operands), "3 times a multiple")
    fitting = qkv[:, :, :K]
    for g in (fitting[:1], fitting[:, :4], fitting[:, :, : K - 4], fitting.bfloat16()):
        operands = (g, qkv, 4, False)
        refuses(triton_attention.attention_backward, operands, "g must be")
        refuses(ops.attention_backward, as_fakes(operands), "g must be")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute")
@pytest.mark.parametrize("recipe", ["switchback", "mxfp8", PADDED], ids=["int8", "mxfp8", "padded"])
def test_layers_refuse_an_input_of_another_width(device, recipe):
    torch._dynamo.reset()
    with device:
        layer = LowPrecisionLinear(K, N, recipe=recipe)
    compiled = torch.compile(layer, backend="aot_eager")
    for features, grad in ((50, True), (80, False)):
        x = torch.randn(M, features, device=device, requires_grad=grad)
        for call in (layer, compiled):
            message = rf"input \[8, {features}\]: must have 64 features"
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=message):
                call(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute")
@pytest.mark.parametrize("path", ["by_kernels", "by_definition"])
def test_a_layer_refuses_a_bias_of_another_size(device, path, request):
    if path == "by_kernels":
        request.getfixturevalue(path)
    torch._dynamo.reset()
    with device:
        layer = LowPrecisionLinear(K, N)
    layer.bias = nn.Parameter(torch.zeros(1, device=device))
    compiled = torch.compile(layer, backend="aot_eager")
    for grad in (True, False):
        x = torch.randn(M, K, device=device, requires_grad=grad)
        for call in (layer, compiled):
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"bias \[1\]: must"):
                call(x)
