"""What every low-precision layer refuses: settings, integers, second derivatives."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from lowprec.clip import open_clip
from lowprec.nn import LowPrecisionLinear, SwitchBackLinear, apply_recipe
from lowprec.nn.inference import Int8Linear
from lowprec.nn.linear import Settings
from lowprec.nn.recipe import RECIPES


def block():
    torch.manual_seed(0)
    kind = open_clip.transformer.ResidualAttentionBlock
    return nn.Sequential(OrderedDict(block=kind(64, 2)))


@pytest.mark.parametrize(
    ("recipe", "settings", "told"),
    [
        ("switchback", {"backend": "trtion"}, "backend 'trtion'.*nearest: triton"),
        ("switchback_m", {"outlier_threshold": 6.0}, "needs the 16-bit input"),
        ("fp8_rowwise", {"outlier_threshold": 6.0}, "fp8_rowwise"),
        ("llm_int8", {"outlier_threshold": -1.0}, "-1.0"),
        ("llm_int8", {"outlier_threshold": float("nan")}, "nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_changed(recipe, settings, told):
    model, layer = block(), SwitchBackLinear(4, 4)
    before = [type(module) for module in model.modules()]
    for change in (
        lambda: apply_recipe(model, recipe, **settings),
        lambda: layer.set_recipe(recipe, **settings),
        lambda: Settings(RECIPES[recipe], **settings),
    ):
        with pytest.raises(ValueError, match=told):
            change()
    assert [type(module) for module in model.modules()] == before
    assert layer.settings == Settings(RECIPES["switchback"])


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "high"])
def test_the_gradient_of_a_gradient_is_refused_rather_than_zero(name):
    x = torch.randn(3, 8, requires_grad=True)
    output = LowPrecisionLinear(8, 4, recipe=name)(x)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(output.sum(), x, create_graph=True)


@pytest.mark.parametrize("name", RECIPES)
def test_integers_are_refused_rather_than_given_out(name):
    with pytest.raises(TypeError, match="torch.int64"):
        LowPrecisionLinear(4, 4, recipe=name)(torch.ones(2, 4, dtype=torch.int64))


def test_an_int8_layer_refuses_integers():
    with pytest.raises(TypeError, match="torch.int32"):
        Int8Linear(nn.Linear(4, 4))(torch.ones(2, 4, dtype=torch.int32))


def test_the_fused_mlp_refuses_integers_and_a_second_derivative():
    model, x = block(), torch.randn(2, 5, 64, requires_grad=True)
    apply_recipe(model, "switchback")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(model.block.mlp(x).sum(), x, create_graph=True)
    with pytest.raises(TypeError, match="torch.int64"):
        model.block.mlp(x.long())
