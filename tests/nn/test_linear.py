"""Linear layers: numbers of all recipes against float64, drop-in for nn.Linear, refused uses."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowprec import ops
from lowprec.nn.linear import LowPrecisionLinear, Settings, SwitchBackLinear
from lowprec.nn.recipe import RECIPES, Operand, Product, custom_recipe
from lowprec.nn.replace import apply_recipe
from tests.nn.models import block

TOKENS, IN, OUT = 37, 48, 70
# SUMS: error of float32 sums, relative to the sum of magnitudes; EPS: rounding of the result.
EPS = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
SUMS = 4e-6
MODES = {  # how a layer is run: (autocast dtype or None, dtype of parameters and input)
    "fp32": (None, torch.float32),
    "autocast_bf16": (torch.bfloat16, torch.float32),
    "autocast_fp16": (torch.float16, torch.float32),
    "pure_bf16": (None, torch.bfloat16),
}
# a format that no other test parses first
UNUSED = custom_recipe({"grad_weight": {"format": "e6m7", "g": "columnwise", "x": "32x1"}})
# torch.compile instantiates autograd functions, which torch itself deprecates.
INSTANTIATED = pytest.mark.filterwarnings("ignore:.*should not be instantiated")
all_recipes = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture(autouse=True)
def rounded_to_nearest(monkeypatch):
    """Stochastic rounding is in test_block_scaling.py."""
    monkeypatch.setattr("lowprec.formats._round_stochastically", torch.round)


def make(name, mode="fp32", bias=True, layer=LowPrecisionLinear, shape=(TOKENS,), **settings):
    """A layer, its input and the gradient of its output; some rows and columns are zero."""
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


def assert_near(results, expected, magnitude, eps):
    bound = eps * expected.abs() + SUMS * magnitude.abs().max()
    assert ((results.double() - expected).abs() <= bound).all()


@all_recipes
@pytest.mark.parametrize(
    ("mode", "bias", "shape"),
    [
        ("fp32", True, (TOKENS,)),
        ("fp32", False, (1,)),
        ("autocast_bf16", True, (3, 5)),
        ("autocast_fp16", False, (TOKENS,)),
        ("pure_bf16", True, (2, 3, 4)),
    ],
    ids=str,
)
def test_output_and_gradients_match_the_oracle(oracle, name, mode, bias, shape):
    module, x, g = make(name, mode, bias, shape=shape)
    results = run(module, x, g, mode)
    dtype = MODES[mode][0] or MODES[mode][1]
    assert results[0].dtype == dtype and results[1].dtype == x.dtype
    assert results[2].dtype == module.weight.dtype
    flat, flat_g = x.detach().reshape(-1, IN), g.reshape(-1, OUT)
    b = module.bias.detach() if bias else None
    if b is not None and not (RECIPES[name].output and RECIPES[name].output.native):
        b = b.to(dtype)
    expected = oracle.expected_of(name, flat, module.weight.detach(), b, flat_g, dtype)
    w_norm = module.weight.norm()
    magnitudes = (flat.norm(dim=1).max() * w_norm, flat_g.norm() * w_norm,
                  flat_g.norm() * flat.norm(), flat_g.abs().sum(dim=0))  # fmt: skip
    for f, e, magnitude in zip(results, expected, magnitudes, strict=True):
        if f is not None:
            assert_near(f.reshape(e.shape), e, magnitude.detach(), EPS[dtype])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["high", "autograd_high"])
def test_16_bit_recipes_equal_nn_linear(name, mode):
    results = run(*make(name, mode), mode)
    expected = run(*make(name, mode, layer=nn.Linear), mode)
    for f, e in zip(results[:3], expected[:3], strict=True):
        assert f.dtype == e.dtype and torch.equal(f, e)
    eps = EPS[MODES[mode][0] or MODES[mode][1]]
    torch.testing.assert_close(results[3], expected[3], rtol=2 * eps, atol=1e-6)


@all_recipes
@torch.autocast("cpu", torch.bfloat16)
def test_autocast_leaves_float64_alone(name):
    layer = LowPrecisionLinear(IN, OUT, dtype=torch.float64, recipe=name)
    assert layer(torch.randn(TOKENS, IN, dtype=torch.float64)).dtype == torch.float64


def saved_by(module, x, autocast=None):
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        module(x)
    return saved


def test_switchback_m_saves_int8_input():
    module, x, _ = make("switchback_m")
    saved = saved_by(module, x, torch.bfloat16)
    big = {t.dtype for t in saved if t.numel() > max(TOKENS, IN, OUT)}
    assert big == {torch.int8}
    assert sum(t.nbytes for t in saved) == TOKENS * IN + IN * OUT + 4 * (TOKENS + 1)


PAIRED = [name for name, recipe in RECIPES.items() if recipe.shares_input]


@pytest.mark.parametrize("name", PAIRED)
def test_recipes_whose_products_share_the_input_save_it_in_fp8(name):
    module, x, _ = make(name)
    saved = saved_by(module, x, torch.bfloat16)
    assert [t.itemsize for t in saved if t.shape in {(TOKENS, IN), (IN, TOKENS)}] == [1]
    module.weight.requires_grad_(False)
    assert not any(t.shape in {(TOKENS, IN), (IN, TOKENS)} for t in saved_by(module, x))


def test_a_recipe_that_saves_its_input_in_the_layout_of_the_output_dequantizes_it():
    own = replace(RECIPES["hw_fp8_tensorwise"], name="own", saves_int8=True)
    results = [run(*make(recipe, shape=(IN,))) for recipe in (own, "hw_fp8_tensorwise")]
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("format", "is_shared"), [("int8", True), ("e4m3", False)])
def test_only_native_products_in_one_format_share_an_operand(format, is_shared):
    products = dict.fromkeys(("output", "grad_input", "grad_weight"))
    for name, (first, second) in {"output": "xw", "grad_input": "gw", "grad_weight": "gx"}.items():
        products[name] = {"format": format, first: "tensorwise", second: "tensorwise"}
    recipe = custom_recipe(products)
    assert recipe.shares_input is recipe.shares_gradient is is_shared
    mixed = Product(Operand("e5m2", "tensorwise"), Operand("e5m2", "tensorwise"), native=True)
    mixed = replace(RECIPES["hw_fp8_tensorwise"], output=mixed, grad_input=mixed)
    assert not mixed.shares_input and mixed.shares_gradient


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if name not in ("high", "switchback_m", *PAIRED)]
)
def test_other_recipes_save_the_16_bit_input_once(name):
    module, x, _ = make(name)
    saved = saved_by(module, x, torch.bfloat16)
    inputs = [t for t in saved if t.shape == (TOKENS, IN)]
    assert [t.dtype for t in inputs] == [torch.bfloat16]
    weights = {t.data_ptr() for t in saved if t.dtype == torch.float32 and t.numel() == IN * OUT}
    assert weights <= {module.weight.data_ptr()}  # no copy of the weight in 16 or 32 bits


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "high"])
def test_no_weight_is_saved_for_an_input_without_gradient(name):
    module, x, _ = make(name)
    assert not any(t.shape in {(OUT, IN), (IN, OUT)} for t in saved_by(module, x.detach()))


@all_recipes
def test_frozen_tensors_and_checkpointing_change_no_other_gradient(name):
    expected = run(*make(name))
    module, x, g = make(name)
    with torch.no_grad():
        assert torch.equal(module(x), expected[0])
    module.weight.requires_grad_(False)
    assert not any(t.shape == (TOKENS, IN) for t in saved_by(module, x))
    frozen = run(module, x, g)
    module, x, g = make(name)
    first = run(module, x.detach(), g)
    assert frozen[2] is None and torch.equal(frozen[1], expected[1])
    assert first[1] is None and torch.equal(first[2], expected[2])
    torch.testing.assert_close((frozen[3], first[3]), (expected[3], expected[3]))
    module, x, g = make(name)
    checkpoint(module, x, use_reentrant=False).backward(g)
    gradients = (x.grad, module.weight.grad, module.bias.grad)
    assert all(map(torch.equal, gradients, expected[1:]))


@all_recipes
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_nan_and_inf_propagate(name, bad):
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


@pytest.mark.parametrize("outlier", [60.0, -60.0])  # alone in its feature
@pytest.mark.parametrize("name", ["llm_int8", "hw_fp8_tensorwise"])
def test_outlier_features_are_multiplied_in_16_bit(oracle, name, outlier):
    threshold = 6.0
    module, x, g = make(name, outlier_threshold=threshold)
    with torch.no_grad():
        x[1, 3], x[:, 9] = outlier, x[:, 9] * 40
    results = run(module, x, g)
    is_outlier = (x.detach().abs() > threshold).any(dim=0)
    assert 2 <= is_outlier.sum() < 8
    w, inliers = module.weight.detach(), x.detach().masked_fill(is_outlier, 0)
    outliers = x.detach().masked_fill(~is_outlier, 0).double()
    y, grad_input, grad_weight, _ = oracle.expected_of(
        name, inliers, w, module.bias.detach(), g, torch.float32
    )
    magnitude = x.detach().norm() * w.norm()
    assert_near(results[0], y + outliers @ w.double().T, magnitude, EPS[torch.float32])
    assert_near(results[1], grad_input, g.norm() * w.norm(), EPS[torch.float32])
    expected = grad_weight + g.double().T @ outliers
    assert_near(results[2], expected, g.norm() * x.detach().norm(), EPS[torch.float32])
    plain = run(*make(name))
    assert torch.equal(plain[0], run(*make(name, outlier_threshold=1e9))[0])


def assert_compiled_as_eager(layer, rows, backend, dynamic=None):
    """Outputs and gradients of inputs of these numbers of rows; compiles once unless dynamic."""
    torch._dynamo.reset()
    compilations = []

    def counting(graph, inputs):
        compilations.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=counting)
    for number in rows:
        x = torch.randn(number, layer.in_features, requires_grad=True)
        g, results = torch.randn(number, layer.out_features), []
        for module in (layer, compiled):
            output = module(x)
            results.append((output, *torch.autograd.grad(output, (x, *layer.parameters()), g)))
        for eager, other in zip(*results, strict=True):
            # a q at a tie may fall to the other side when sums are added in another order
            assert (other - eager).norm() <= 1e-3 * eager.norm()
    assert dynamic or len(compilations) == 1


@INSTANTIATED
@pytest.mark.parametrize(
    "name",
    [
        "switchback",
        "switchback_m",
        "llm_int8",
        "fp8_switchback_blocks",
        pytest.param(UNUSED, id="e6m7"),
    ],
)
def test_layer_compiles_once_to_one_graph(name):
    assert_compiled_as_eager(make(name)[0], [TOKENS] * 3, "aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
@pytest.mark.parametrize(
    ("name", "rows", "shape", "threshold"),
    [
        *((name, [TOKENS] * 3, (IN, OUT), 0.0) for name in RECIPES),
        # Inductor wrote slices of 8-bit tiles wrongly on a CPU, or raised AssertionError
        ("hw_fp8_blockwise", [231], (203, 320), 0.0),
        # for up to 128 rows of a dynamic number, hw_fp8_blockwise had given NaN
        *((name, [33, 64, 130], (IN, OUT), 0.0) for name in ("switchback", "hw_fp8_blockwise")),
        ("llm_int8", [33, 64, 130], (IN, OUT), 2.0),
    ],
)
def test_inductor_code_equals_eager(name, rows, shape, threshold):
    layer = LowPrecisionLinear(*shape, recipe=name, outlier_threshold=threshold)
    assert_compiled_as_eager(layer, rows, "inductor", dynamic=len(rows) > 1 or None)


def test_layer_has_parameters_and_initial_values_of_nn_linear():
    torch.manual_seed(0)
    ours = SwitchBackLinear(48, 70)
    torch.manual_seed(0)
    theirs = nn.Linear(48, 70)
    assert isinstance(ours, nn.Linear) and list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    assert "recipe=switchback" in repr(ours)


@pytest.mark.parametrize(("shape", "autocast"), [((0, 48), True), ((2, 0, 48), False)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_empty_batch_gives_empty_output_and_zero_gradients(recipe, shape, autocast):
    layer, x = LowPrecisionLinear(48, 70, recipe=recipe), torch.randn(shape, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(x)
        with torch.no_grad():
            assert layer(x).shape == output.shape
    assert output.shape == (*shape[:-1], 70)
    assert output.dtype == (torch.bfloat16 if autocast else torch.float32)
    output.sum().backward()
    assert x.grad.shape == shape
    assert (layer.weight.grad == 0).all() and (layer.bias.grad == 0).all()


@pytest.mark.parametrize("recipe", ["switchback", "llm_int8", "fp8_rowwise"])
def test_empty_batch_passes_a_block_without_launches(monkeypatch, recipe):
    for name in ("quantize", "matmul", "quantize_rows_and_sum", "gelu_quantize"):
        monkeypatch.setattr(ops, name, None)
    model = block()
    apply_recipe(model, recipe)
    output = model(torch.randn(0, 5, 64))
    output.sum().backward()
    assert output.shape == (0, 5, 64) and not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("switchbak", {}, "recipe 'switchbak'.*nearest: switchback"),
        ("bf16", {}, "recipe .bf16.*; high leaves the products in the precision"),
        ("switchback", {"backend": "trtion"}, "backend 'trtion'.*nearest: triton"),
        ("switchback_m", {"outlier_threshold": 6.0}, "needs the 16-bit input"),
        ("fp8_rowwise", {"outlier_threshold": 6.0}, "fp8_rowwise"),
        ("llm_int8", {"outlier_threshold": -1.0}, "-1.0"),
        ("llm_int8", {"outlier_threshold": float("nan")}, "nan"),
    ],
)
def test_invalid_settings_are_refused_and_change_nothing(recipe, settings, message):
    model, layer = block(), SwitchBackLinear(4, 4)
    before = [type(module) for module in model.modules()]
    for change in (
        lambda: apply_recipe(model, recipe, **settings),
        lambda: layer.set_recipe(recipe, **settings),
        lambda: LowPrecisionLinear(4, 4, recipe=recipe, **settings),
    ):
        with pytest.raises(ValueError, match=message):
            change()
    assert [type(module) for module in model.modules()] == before
    assert layer.settings == Settings(RECIPES["switchback"])


@all_recipes
@pytest.mark.parametrize("shape", [(TOKENS,), (3, 5)])
def test_an_output_may_be_changed_in_place(name, shape):
    layer, x, g = make(name, shape=shape)
    parameters = (x, *layer.parameters())
    expected = torch.autograd.grad(layer(x).relu(), parameters, g)
    assert all(map(torch.equal, torch.autograd.grad(layer(x).relu_(), parameters, g), expected))


def test_integers_and_second_derivatives_are_refused():
    model, x = block(), torch.randn(2, 5, 64, requires_grad=True)
    apply_recipe(model, "switchback")
    layers = [LowPrecisionLinear(64, 4, recipe=name) for name in RECIPES if name != "high"]
    for layer in (*layers, model.block.mlp):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    high = LowPrecisionLinear(64, 4, recipe="high")
    for layer in (*layers, model.block.mlp, high):
        with pytest.raises(TypeError, match="torch.int64"):
            layer(x.long())
