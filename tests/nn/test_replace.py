"""Swapping the layers of a model, and the MLP that runs as one function."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lowprec.clip import open_clip
from lowprec.nn import LowPrecisionLinear, apply_recipe
from lowprec.nn.attention import Attention
from lowprec.nn.mlp import LowPrecisionMLP
from lowprec.nn.recipe import RECIPES
from lowprec.nn.replace import LAYERS, gains_speed, summary


def block(width=64, custom=False):
    torch.manual_seed(0)
    kind = open_clip.transformer.CustomResidualAttentionBlock if custom else None
    kind = kind or open_clip.transformer.ResidualAttentionBlock
    return nn.Sequential(OrderedDict(block=kind(width, 2)))


@pytest.mark.parametrize("custom", [False, True])
def test_every_layer_of_a_block_runs_its_recipe(custom):
    model = block(custom=custom)
    names = [name for name, _ in model.named_parameters()]
    parameters = [id(parameter) for parameter in model.parameters()]
    found = apply_recipe(model, "switchback")
    assert [layer.name.rsplit(".", 1)[1] for layer in found] == ["in_proj", "out_proj"] + [
        "c_fc", "c_proj",
    ]  # fmt: skip
    assert all(layer.swapped for layer in found)
    assert [name for name, _ in model.named_parameters()] == names
    assert [id(parameter) for parameter in model.parameters()] == parameters
    calls = []
    for name, module in model.named_modules():
        if isinstance(module, LowPrecisionLinear):
            assert module.recipe is RECIPES["switchback"]
            calls.append(name.rsplit(".", 1)[1])
    assert calls == ["out_proj", "c_fc", "c_proj"]
    assert model.block.attn.in_proj_settings.recipe is RECIPES["switchback"]


def test_out_proj_is_not_bypassed_as_within_multihead_attention():
    model = block()
    apply_recipe(model, "switchback", ["out_proj"])
    seen = []
    model.block.attn.out_proj.register_forward_hook(lambda *_: seen.append(True))
    model(torch.randn(1, 3, 64))
    assert seen


@pytest.mark.parametrize("recipe", ["switchback", "hw_fp8_switchback", "switchback_m", "llm_int8"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_fused_mlp_is_the_three_modules(recipe, dtype):
    model = block()
    apply_recipe(model, recipe)
    fused = model.block.mlp
    assert isinstance(fused, LowPrecisionMLP) == (recipe in ("switchback", "hw_fp8_switchback"))
    plain = nn.Sequential(OrderedDict(fused.named_children()))
    x = torch.randn(2, 5, 64, requires_grad=True)
    g = torch.randn(2, 5, 64)
    results = []
    for module in (plain, fused):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            output = module(x)
        inputs = [x, *plain.parameters()]
        results.append([output, *torch.autograd.grad(output, inputs, g.to(output.dtype))])
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)
    with torch.no_grad():
        assert torch.equal(fused(x), plain(x))


def test_the_fused_mlp_keeps_its_input_and_that_of_gelu_alone():
    model = block()
    apply_recipe(model, "switchback")
    saved = []
    x = torch.randn(2, 5, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model.block.mlp(x)
    kept = sorted((t.numel(), str(t.dtype)) for t in saved if t.is_floating_point())
    assert kept == [(1, "torch.float32")] * 2 + [(640, "torch.float32"), (2560, "torch.float32")]
    assert sorted(t.numel() for t in saved if t.dtype == torch.int8) == [64 * 256] * 2


INPUTS = ("x", "c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias")


def backward_of_mlp(wanted):
    """Gradients of some inputs of a fused MLP, products of the backward, numbers that it kept."""
    model, x, saved = block(), torch.randn(2, 5, 64), []
    apply_recipe(model, "switchback")
    mlp = model.block.mlp
    tensors = dict(mlp.named_parameters()) | {"x": x}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in wanted)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = mlp(x)
    with FlopCounterMode(display=False) as counter:
        output.backward(torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)))
    kept = {t.numel() for t in saved if t.is_floating_point() and t.numel() > 1}
    int8 = sum(t.dtype == torch.int8 for t in saved)
    gradients = {name: tensor.grad for name, tensor in tensors.items()}
    return gradients, counter.get_total_flops() // (2 * 10 * 64 * 256), kept, int8


@pytest.mark.parametrize(
    ("wanted", "products", "kept", "int8"),  # products in 16 bit: those in int8 are not counted
    [
        (INPUTS, 2, {640, 2560}, 2),
        (("x",), 0, {2560}, 2),
        (("c_fc.weight",), 1, {640, 2560}, 1),
        (("c_fc.bias",), 0, {2560}, 1),
        (("c_proj.weight",), 1, {2560}, 0),
        (("c_proj.bias",), 0, set(), 0),
        (("x", "c_proj.weight"), 1, {2560}, 2),
    ],
)
def test_the_fused_mlp_computes_and_keeps_what_the_wanted_gradients_need(
    wanted, products, kept, int8
):
    found, *costs = backward_of_mlp(wanted)
    assert costs == [products, kept, int8]
    expected = backward_of_mlp(INPUTS)[0]
    for name, gradient in found.items():
        assert gradient is None if name not in wanted else torch.equal(gradient, expected[name])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch.compile itself
def test_the_fused_mlp_is_one_graph():
    model, x = block(), torch.randn(2, 5, 64)
    apply_recipe(model, "switchback")
    compiled = torch.compile(model.block.mlp, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model.block.mlp(x))


def test_high_swaps_attention_alone():
    model = block()
    found = apply_recipe(model, "high")
    assert isinstance(model.block.attn, Attention) and not any(layer.swapped for layer in found)
    assert not any(isinstance(module, LowPrecisionLinear) for module in model.modules())


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (["c_fc"], ["c_fc"]),
        (["mlp.*"], ["c_fc", "c_proj"]),
        (["block.attn.*"], ["in_proj", "out_proj"]),
        (["*_proj"], ["in_proj", "out_proj", "c_proj"]),
    ],
)
def test_a_pattern_is_a_name_or_its_end(where, expected):
    found = apply_recipe(block(), "switchback", where)
    assert [layer.name.rsplit(".", 1)[1] for layer in found] == expected


def test_high_undoes_another_recipe():
    model, x = block(), torch.randn(2, 5, 64)
    expected = model(x)
    apply_recipe(model, "switchback")
    assert not torch.equal(model(x), expected)
    apply_recipe(model, "high")
    torch.testing.assert_close(model(x), expected, atol=1e-6, rtol=0)


def test_skip_slow_leaves_losing_shapes_alone_and_the_report_lists_them_either_way():
    for skip_slow in (False, True):
        found = apply_recipe(block(), "switchback", skip_slow=skip_slow)
        assert all(layer.swapped is not skip_slow and not layer.gains for layer in found)
        line = summary("switchback", found)
        assert ("0 of 4" if skip_slow else "4 of 4") in line and "1 x 64 to 192" in line
    wide = apply_recipe(block(4096), "switchback", ["c_fc"], skip_slow=True)
    assert [(layer.swapped, layer.gains) for layer in wide] == [(True, True)]


def test_simulated_recipes_gain_no_speed():
    for name, recipe in RECIPES.items():
        gains = gains_speed(recipe, 4096, 16384)
        assert gains == (recipe.is_native and recipe.output is not None), name


def test_training_mode_is_kept():
    model = block().eval()
    apply_recipe(model, "switchback", LAYERS)
    assert not any(module.training for module in model.modules())


def test_a_changed_child_of_the_fused_mlp_counts():
    model, x = block(), torch.randn(2, 5, 64)
    apply_recipe(model, "switchback")
    for name in ("c_fc", "c_proj"):
        getattr(model.block.mlp, name).set_recipe("high")
    plain = nn.Sequential(OrderedDict(model.block.mlp.named_children()))
    assert torch.equal(model.block.mlp(x), plain(x))
