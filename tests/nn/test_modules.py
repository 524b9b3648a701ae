"""The layers as modules: drop-ins for nn.Linear, also where open_clip puts them in."""

import pytest
import torch
from torch import nn

from lowprec.nn.linear import LowPrecisionLinear, SwitchBackLinear


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
    from lowprec.clip.torchvision_shim import open_clip

    blocks = open_clip.transformer.Transformer(width=64, layers=2, heads=2)
    x = torch.randn(2, 5, 64)
    before = blocks(x)
    open_clip.utils.replace_linear(blocks, SwitchBackLinear, include_modules=["c_fc", "c_proj"])
    swapped = [m for m in blocks.modules() if isinstance(m, SwitchBackLinear)]
    assert len(swapped) == 4
    after = blocks(x)
    assert not torch.equal(before, after)
    assert (after - before).norm() < 0.02 * before.norm()
