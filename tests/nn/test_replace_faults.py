"""What is refused or left alone when layers are swapped, and hooks, which stay."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from lowprec.clip import open_clip
from lowprec.nn import SwitchBackLinear, apply_recipe
from lowprec.nn.attention import Attention, is_replaceable
from lowprec.nn.mlp import LowPrecisionMLP
from lowprec.nn.replace import NoLayerError, replace_attention


def block():
    torch.manual_seed(0)
    kind = open_clip.transformer.ResidualAttentionBlock
    return nn.Sequential(OrderedDict(block=kind(64, 2)))


def test_a_pattern_without_a_layer_is_refused_with_the_names_there_are():
    with pytest.raises(NoLayerError, match=r"matches c_fcc; .*block.attn.in_proj, "):
        apply_recipe(block(), "switchback", ["c_fcc"])
    with pytest.raises(ValueError, match="recipe 'switchbak'"):
        apply_recipe(block(), "switchbak")


@pytest.mark.parametrize("earlier", [None, "switchback"])
def test_an_error_leaves_the_model_as_it_was(earlier):
    model = block()
    if earlier:
        apply_recipe(model, earlier)
    before = [(id(module), type(module)) for module in model.modules()]
    with pytest.raises(NoLayerError):
        apply_recipe(model, "high", ["c_fcc"])
    assert [(id(module), type(module)) for module in model.modules()] == before


def test_a_layer_that_its_owner_reads_without_calling_it_is_not_reported():
    model = nn.TransformerEncoderLayer(64, 4, batch_first=True)  # its dropout keeps the attention
    with pytest.raises(ValueError, match="no linear layer matches out_proj"):
        apply_recipe(model, "switchback", ["out_proj"])


def test_a_lone_layer_is_refused():
    with pytest.raises(ValueError, match="wrap it"):
        apply_recipe(nn.Linear(4, 4), "switchback", ["*"])


class Scaled(nn.Linear):
    """As LoRA: an nn.Linear that computes something else."""

    def forward(self, x):
        return super().forward(x) * 3


class Halved(SwitchBackLinear):
    """A subclass of ours by others."""

    def forward(self, x):
        return super().forward(x) / 2


def patched():
    layer = nn.Linear(64, 256)
    layer.forward = lambda x: x.repeat(1, 1, 4)
    return layer


MORE_THAN_LINEAR = {
    "subclass": lambda: Scaled(64, 256),
    "subclass of ours": lambda: Halved(64, 256),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(64, 256)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(64, 256), "weight", 0.5),
    "patched forward": patched,
}


@pytest.mark.parametrize("kind", MORE_THAN_LINEAR)
def test_a_layer_that_is_more_than_linear_is_refused_by_name_unless_left_out(kind):
    model, x = block(), torch.randn(2, 5, 64)
    model.block.mlp.c_fc = MORE_THAN_LINEAR[kind]()
    expected, before = model(x), [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="block.mlp.c_fc .* is more than an nn.Linear"):
        apply_recipe(model, "switchback")
    assert [type(module) for module in model.modules()] == before
    apply_recipe(model, "switchback", ["in_proj", "out_proj", "c_proj"])
    assert (model(x) - expected).norm() < 0.02 * expected.norm()


def test_attention_that_is_more_than_its_class_is_left_alone():
    kinds = [type("Own", (nn.MultiheadAttention,), {})(8, 2, batch_first=True)]
    kinds += [nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)]
    assert is_replaceable(kinds[2])
    parametrize.register_parametrization(kinds[1], "in_proj_weight", nn.Identity())
    kinds[2].forward = lambda *x: x
    assert not any(is_replaceable(module) for module in kinds)


def test_hooks_stay_on_every_module_that_is_swapped_and_can_be_removed():
    model, x, called = block(), torch.randn(2, 5, 64), []
    handles, expected = [], []
    for name in ("attn", "attn.out_proj", "mlp", "mlp.c_fc", "mlp.gelu"):
        module = model.block.get_submodule(name)
        kinds = ["forward", "forward_pre", "full_backward", "full_backward_pre"]
        for kind in kinds[: 2 if name == "attn" else 4]:
            expected.append((name, kind))
            register = getattr(module, f"register_{kind}_hook")
            handles.append(register(lambda *_, which=expected[-1]: called.append(which)))
    for recipe in ("switchback", "high", "switchback"):
        apply_recipe(model, recipe)
        called.clear()
        model(x).sum().backward()
        assert sorted(called) == sorted(expected)
    for handle in handles:
        handle.remove()
    called.clear()
    model(x).sum().backward()
    assert not called


def test_a_hook_on_a_child_of_a_fused_mlp_is_called():
    model, x, seen = block(), torch.randn(2, 5, 64), []
    apply_recipe(model, "switchback")
    expected = model(x)
    handle = model.block.mlp.gelu.register_forward_hook(lambda *_: seen.append(True))
    assert isinstance(model.block.mlp, LowPrecisionMLP)
    assert torch.equal(model(x), expected) and seen
    handle.remove()
    model(x)
    assert len(seen) == 1


class Attends(nn.Module):
    """Calls attention as open_clip's block does not: for its weights, without a batch."""

    def __init__(self):
        super().__init__()
        self.attn, self.fc = nn.MultiheadAttention(64, 2, batch_first=True), nn.Linear(64, 64)

    def forward(self, x):
        output, weights = self.attn(x, x, x)
        return self.fc(output), weights


def encoder():
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True), 1
    )


def cross_attending():
    return open_clip.transformer.ResidualAttentionBlock(64, 2, is_cross_attention=True)


def pooling():
    return open_clip.transformer.AttentionalPooler(64, 64, n_head=2, n_queries=4)


@pytest.mark.parametrize(
    ("build", "inputs", "where"),
    [
        (Attends, [(5, 64)], ["fc"]),
        (encoder, [(2, 5, 64)], ["linear1"]),
        (cross_attending, [(2, 5, 64), (2, 7, 64), (2, 7, 64)], ["c_fc"]),
        (pooling, [(2, 5, 64)], ["c_fc"]),
    ],
)
def test_attention_outside_of_open_clips_blocks_runs_as_before(build, inputs, where):
    torch.manual_seed(0)
    model, x = nn.Sequential(block().block, build()), [torch.randn(shape) for shape in inputs]
    expected = model[1](*x)
    apply_recipe(model, "high", [*where, "0.*.c_fc"])
    replace_attention(model)
    assert isinstance(model[0].attn, Attention)
    torch.testing.assert_close(model[1](*x), expected)


def test_attention_of_two_names_becomes_one_module():
    model = nn.Sequential(block().block, block().block)
    model[1].attn = model[0].attn
    apply_recipe(model, "switchback")
    assert isinstance(model[0].attn, Attention) and model[1].attn is model[0].attn
