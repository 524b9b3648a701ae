"""The layers as modules: drop-ins for nn.Linear, also where open_clip puts them in."""

import pytest
import torch
from torch import nn

from lowprec import ops
from lowprec.clip import open_clip
from lowprec.nn.linear import LowPrecisionLinear, SwitchBackLinear
from lowprec.nn.recipe import RECIPES
from lowprec.nn.replace import apply_recipe


def test_unknown_recipes_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="switchback_q"):
        LowPrecisionLinear(4, 4, recipe="switchbak")


def test_the_layer_is_nn_linear_in_parameters_names_and_first_values():
    torch.manual_seed(0)
    ours = SwitchBackLinear(48, 70)
    torch.manual_seed(0)
    theirs = nn.Linear(48, 70)
    assert isinstance(ours, nn.Linear) and list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    assert "recipe=switchback" in repr(ours)


def test_open_clip_replaces_its_linears_by_ours():
    blocks = open_clip.transformer.Transformer(width=64, layers=2, heads=2)
    x = torch.randn(2, 5, 64)
    before = blocks(x)
    open_clip.utils.replace_linear(blocks, SwitchBackLinear, include_modules=["c_fc", "c_proj"])
    swapped = [m for m in blocks.modules() if isinstance(m, SwitchBackLinear)]
    assert len(swapped) == 4
    after = blocks(x)
    assert not torch.equal(before, after)
    assert (after - before).norm() < 0.02 * before.norm()


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_empty_batch_gives_an_empty_output_and_zero_gradients(recipe, shape, autocast):
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_empty_batch_passes_a_whole_block_and_launches_nothing(monkeypatch, recipe):
    for name in ("quantize", "matmul", "quantize_rows_and_sum", "gelu_quantize"):
        monkeypatch.setattr(ops, name, None)
    block = nn.Sequential(open_clip.transformer.ResidualAttentionBlock(64, 2))
    apply_recipe(block, recipe)
    output = block(torch.randn(0, 5, 64))
    assert output.shape == (0, 5, 64)
    output.sum().backward()
    assert all((parameter.grad == 0).all() for parameter in block.parameters())
