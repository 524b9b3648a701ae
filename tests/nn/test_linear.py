"""Linear layers against the products of every recipe in float64, and against nn.Linear."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowprec.nn.linear import LowPrecisionLinear
from lowprec.nn.recipe import RECIPES

TOKENS, IN, OUT = 37, 48, 70
# Beside the rounding of the result: float32 sums, as a share of the sum of magnitudes.
EPS = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
SUMS = 4e-6
MODES = {  # how a layer is run: (autocast dtype or None, dtype of parameters and input)
    "fp32": (None, torch.float32),
    "autocast_bf16": (torch.bfloat16, torch.float32),
    "autocast_fp16": (torch.float16, torch.float32),
    "pure_bf16": (None, torch.bfloat16),
}
# torch.compile itself makes an object of an autograd function, which torch calls deprecated.
INSTANTIATED = pytest.mark.filterwarnings("ignore:.*should not be instantiated")
every_recipe = pytest.mark.parametrize("name", RECIPES)


def make(name, mode="fp32", bias=True, layer=LowPrecisionLinear, shape=(TOKENS,), **settings):
    """A layer, its input and the gradient of its output; some rows and columns are dead."""
    torch.manual_seed(0)
    dtype = MODES[mode][1]
    settings |= {} if layer is nn.Linear else {"recipe": name}
    module = layer(IN, OUT, bias=bias, **settings)
    x, g = torch.randn(*shape, IN), torch.randn(*shape, OUT) * 1e-3
    if len(shape) == 1 and shape[0] > 3:
        x[2], x[:, 5], g[3] = 0, 0, 0
    return module.to(dtype), x.to(dtype).requires_grad_(), g.to(MODES[mode][0] or dtype)


def run(module, x, g, mode="fp32"):
    """(output, grad_input, grad_weight, grad_bias or None)."""
    autocast = MODES[mode][0]
    with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
        output = module(x)
    output.backward(g)
    bias = module.bias
    return output.detach(), x.grad, module.weight.grad, None if bias is None else bias.grad


def assert_near(found, expected, magnitude, eps):
    bound = eps * expected.abs() + SUMS * magnitude.abs().max()
    assert ((found.double() - expected).abs() <= bound).all()


def check(oracle, name, mode, bias=True, shape=(TOKENS,)):
    module, x, g = make(name, mode, bias, shape=shape)
    found = run(module, x, g, mode)
    dtype = MODES[mode][0] or MODES[mode][1]
    assert found[0].dtype == dtype and found[1].dtype == x.dtype
    assert found[2].dtype == module.weight.dtype
    flat, flat_g = x.detach().reshape(-1, IN), g.reshape(-1, OUT)
    b = module.bias.detach() if bias else None
    if b is not None and not (RECIPES[name].output and RECIPES[name].output.native):
        b = b.to(dtype)
    expected = oracle.expected_of(name, flat, module.weight.detach(), b, flat_g, dtype)
    w_norm = module.weight.norm()
    magnitudes = (flat.norm(dim=1).max() * w_norm, flat_g.norm() * w_norm,
                  flat_g.norm() * flat.norm(), flat_g.abs().sum(dim=0))  # fmt: skip
    for f, e, magnitude in zip(found, expected, magnitudes, strict=True):
        if f is not None:
            assert_near(f.reshape(e.shape), e, magnitude.detach(), EPS[dtype])


@every_recipe
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_output_and_gradients_are_those_of_the_table(oracle, name, mode, bias):
    check(oracle, name, mode, bias)


@every_recipe
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 4)], ids=str)
def test_any_leading_dimensions_are_tokens(oracle, name, shape):
    check(oracle, name, "autocast_bf16", shape=shape)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["high", "autograd_high"])
def test_16_bit_recipes_are_nn_linear(name, mode):
    found = run(*make(name, mode), mode)
    expected = run(*make(name, mode, layer=nn.Linear), mode)
    for f, e in zip(found[:3], expected[:3], strict=True):
        assert f.dtype == e.dtype and torch.equal(f, e)
    eps = EPS[MODES[mode][0] or MODES[mode][1]]
    torch.testing.assert_close(found[3], expected[3], rtol=2 * eps, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["switchback", "switchback_q", "fp8_switchback", "hw_fp8_switchback"]
)
def test_the_weight_gradient_that_switches_back_is_the_16_bit_product(name, mode):
    found = run(*make(name, mode), mode)
    expected = run(*make(name, mode, layer=nn.Linear), mode)
    assert torch.equal(found[2], expected[2])
    assert not torch.equal(found[0], expected[0]) and not torch.equal(found[1], expected[1])


def saved_by(module, x, autocast=None):
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        module(x)
    return saved


def test_switchback_m_keeps_its_input_in_8_bits():
    module, x, _ = make("switchback_m")
    saved = saved_by(module, x, torch.bfloat16)
    big = {t.dtype for t in saved if t.numel() > max(TOKENS, IN, OUT)}
    assert big == {torch.int8}
    assert sum(t.nbytes for t in saved) == TOKENS * IN + IN * OUT + 4 * (TOKENS + 1)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("high", "switchback_m")])
def test_other_recipes_keep_the_16_bit_input_once(name):
    module, x, _ = make(name)
    saved = saved_by(module, x, torch.bfloat16)
    inputs = [t for t in saved if t.shape == (TOKENS, IN)]
    assert [t.dtype for t in inputs] == [torch.bfloat16]
    weights = {t.data_ptr() for t in saved if t.dtype == torch.float32 and t.numel() == IN * OUT}
    assert weights <= {module.weight.data_ptr()}  # no copy of the weight in 16 or 32 bits


@every_recipe
def test_a_frozen_weight_gets_no_gradient_and_keeps_no_input(name):
    module, x, g = make(name)
    expected = run(*make(name))
    module.weight.requires_grad_(False)
    assert not any(t.shape == (TOKENS, IN) for t in saved_by(module, x))
    found = run(module, x, g)
    assert found[2] is None
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[3], expected[3])


@every_recipe
def test_an_input_without_gradient_leaves_the_others_as_they_were(name):
    module, x, g = make(name)
    found = run(module, x.detach(), g)
    expected = run(*make(name))
    assert found[1] is None and torch.equal(found[2], expected[2])
    torch.testing.assert_close(found[3], expected[3])


@every_recipe
def test_without_gradients_the_output_is_the_same(name):
    module, x, _ = make(name)
    with torch.no_grad():
        output = module(x)
    assert not output.requires_grad and torch.equal(output, module(x))


@every_recipe
def test_activation_checkpointing_changes_no_gradient(name):
    module, x, g = make(name)
    expected = run(*make(name))
    output = checkpoint(module, x, use_reentrant=False)
    output.backward(g)
    gradients = (x.grad, module.weight.grad, module.bias.grad)
    for found, wanted in zip(gradients, expected[1:], strict=True):
        assert torch.equal(found, wanted)


@every_recipe
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_a_number_that_is_none_stays_visible(name, bad):
    module, x, g = make(name)
    with torch.no_grad():
        x[4, 7] = bad
    output, grad_input, grad_weight, _ = run(module, x, g)
    assert (~output[4].isfinite()).all()
    assert grad_input.isfinite().all()
    assert not grad_weight[:, 7].isfinite().any() or name == "switchback_m" or bad == torch.inf
    assert not grad_weight.isfinite().all()
    module, x, g = make(name)
    g[4, 7] = bad
    _, grad_input, grad_weight, grad_bias = run(module, x, g)
    assert (~grad_input[4].isfinite()).all()
    assert not grad_weight.isfinite().all() and not grad_bias[7].isfinite()


def test_outlier_features_are_multiplied_in_16_bit(oracle):
    threshold = 6.0
    module, x, g = make("llm_int8", outlier_threshold=threshold)
    with torch.no_grad():
        x[1, 3], x[:, 9] = 60.0, x[:, 9] * 40
    found = run(module, x, g)
    is_outlier = (x.detach().abs() > threshold).any(dim=0)
    assert 2 <= is_outlier.sum() < 8
    w, inliers = module.weight.detach(), x.detach().masked_fill(is_outlier, 0)
    outliers = x.detach().masked_fill(~is_outlier, 0).double()
    y, grad_input, grad_weight, _ = oracle.expected_of(
        "llm_int8", inliers, w, module.bias.detach(), g, torch.float32
    )
    magnitude = x.detach().norm() * w.norm()
    assert_near(found[0], y + outliers @ w.double().T, magnitude, EPS[torch.float32])
    assert_near(found[1], grad_input, g.norm() * w.norm(), EPS[torch.float32])
    expected = grad_weight + g.double().T @ outliers
    assert_near(found[2], expected, g.norm() * x.detach().norm(), EPS[torch.float32])
    plain = run(*make("llm_int8"))
    assert torch.equal(plain[0], run(*make("llm_int8", outlier_threshold=1e9))[0])


def compiled_gradients(name, backend):
    torch._dynamo.reset()
    module, x, _ = make(name)
    compilations = []

    def counting(graph, inputs):
        compilations.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(module, fullgraph=True, backend=counting)
    for step in range(3):
        torch.manual_seed(step)
        x, g = torch.randn(TOKENS, IN, requires_grad=True), torch.randn(TOKENS, OUT)
        module.zero_grad()
        compiled(x).backward(g)
        found = (x.grad, module.weight.grad.clone(), module.bias.grad.clone())
        x = x.detach().requires_grad_()
        module.zero_grad()
        module(x).backward(g)
        for f, e in zip(found, (x.grad, module.weight.grad, module.bias.grad), strict=True):
            # a q at a tie may fall to the other side when sums are added in another order
            assert (f - e).norm() <= 1e-3 * e.norm()
    assert len(compilations) == 1


@INSTANTIATED
@every_recipe
def test_a_layer_is_one_graph_that_is_not_compiled_again(name):
    compiled_gradients(name, "aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own ways
@every_recipe
def test_a_layer_compiles_to_code_with_the_same_gradients(name):
    compiled_gradients(name, "inductor")
