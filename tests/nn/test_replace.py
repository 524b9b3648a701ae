"""Replacing the layers of a model: what is replaced, refused or left alone; the fused MLP."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, prune

from lowprec.clip import open_clip
from lowprec.nn import LowPrecisionLinear, SwitchBackLinear, apply_recipe
from lowprec.nn.attention import Attention
from lowprec.nn.recipe import LINEAR_LAYERS, RECIPES, gains_speed
from lowprec.nn.replace import NoLayerError, replace_attention
from tests.nn.models import block, with_subclass_weight


@pytest.fixture
def one_process():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fused_mlp_saves_its_input_and_gelus_input():
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


@pytest.mark.parametrize("requested", [INPUTS[:1], INPUTS[1:], ("c_proj.bias",)], ids=str)
def test_mlp_computes_only_requested_gradients(requested):
    def gradients(names):
        model, x = block(), torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
        apply_recipe(model, "switchback")
        tensors = dict(model.block.mlp.named_parameters()) | {"x": x}
        for name, tensor in tensors.items():
            tensor.requires_grad_(name in names)
        model.block.mlp(x).square().sum().backward()
        return {name: tensor.grad for name, tensor in tensors.items()}

    expected = gradients(INPUTS)
    for name, gradient in gradients(requested).items():
        assert gradient is None if name not in requested else torch.equal(gradient, expected[name])


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (["c_fc"], ["c_fc"]),
        (["mlp.*"], ["c_fc", "c_proj"]),
        (["block.attn.*"], ["in_proj", "out_proj"]),
        (["*_proj"], ["in_proj", "out_proj", "c_proj"]),
    ],
)
def test_pattern_matches_a_name_or_its_end(where, expected):
    layers = apply_recipe(block(), "switchback", where)
    assert [layer.name.rsplit(".", 1)[1] for layer in layers] == expected


def test_a_filter_of_module_and_name_chooses_layers():
    model, seen = block(), {}

    def is_meant(module, name):
        seen[name] = type(module)
        return isinstance(module, nn.MultiheadAttention) or module.out_features == 256

    layers = apply_recipe(model, "switchback", is_meant)
    assert [layer.name for layer in layers] == ["block.attn.in_proj", "block.mlp.c_fc"]
    assert len(seen) == 4 and seen["block.attn.in_proj"] is nn.MultiheadAttention
    with pytest.raises(NoLayerError, match="^no linear layer matches the filter; the model has: "):
        apply_recipe(model, "switchback", lambda module, name: False)


def test_high_makes_layers_linear_again():
    model, x = block(), torch.randn(2, 5, 64)
    apply_recipe(model, "high")
    expected, before = model(x), [(type(m), set(vars(m))) for m in model.modules()]
    model.block.mlp.c_proj.__class__ = SwitchBackLinear
    model.block.mlp.c_proj.set_recipe("switchback_m")
    apply_recipe(model, "switchback")
    assert not torch.equal(model(x), expected)
    apply_recipe(model, "high")
    after = [(type(m), set(vars(m))) for m in model.modules()]
    plain = [(nn.Linear, names) if issubclass(k, nn.Linear) else (k, names) for k, names in before]
    assert torch.equal(model(x), expected) and after == plain
    assert type(model.block.attn.out_proj) is nn.Linear


def test_a_state_dict_keeps_recipes_and_loading_says_where_they_differ(tmp_path):
    model, same, plain = block(), block(), block()
    apply_recipe(model, "switchback")
    apply_recipe(same, "switchback")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(state) == list(plain.state_dict())
    for loads in (same, plain):  # without a word
        loads.load_state_dict(state)
    model.load_state_dict(plain.state_dict())
    model.load_state_dict(dict(state))  # as from safetensors, without metadata
    for recipe, layers in (("switchback_m", ["c_fc"]), ("high", ["in_proj"])):
        apply_recipe(same, recipe, layers)
        said = f"^loading weights saved with recipe switchback into layers with recipe {recipe}$"
        with pytest.warns(UserWarning, match=said):
            same.load_state_dict(state)
        apply_recipe(same, "switchback")


def test_recipes_are_kept_by_compiled_and_sharded_models(one_process):
    for wrap in (torch.compile, lambda model: fully_shard(model, mesh=one_process)):
        model = block()
        apply_recipe(model, "switchback")
        facts = wrap(model).state_dict()._metadata
        kept = {name.removeprefix("_orig_mod.") for name in facts if "recipe" in facts[name]}
        assert kept == {f"block.{x}" for x in ("attn", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")}
    with pytest.raises(ValueError, match="is sharded: apply the recipe before fully_shard"):
        apply_recipe(model, "switchback")


def test_skip_slow_keeps_slow_shapes_in_16_bit():
    for skip_slow in (False, True):
        layers = apply_recipe(block(), "switchback", skip_slow=skip_slow)
        assert all(layer.swapped is not skip_slow for layer in layers)
        assert ("0 of 4" if skip_slow else "4 of 4") in repr(layers)
    with torch.device("meta"):
        wide = apply_recipe(block(4096), "switchback", ["c_fc"], skip_slow=True)
    assert [layer.swapped for layer in wide] == [True]


def test_fake_quantized_recipes_gain_no_speed():
    gaining = {name for name, recipe in RECIPES.items() if gains_speed(recipe, 4096, 16384)}
    native = {name for name, r in RECIPES.items() if r.output and r.output.native}
    assert gaining == native


@pytest.mark.parametrize("earlier", ["high", "switchback"])
def test_pattern_without_match_is_refused_and_changes_nothing(earlier):
    model, x = block(), torch.randn(2, 5, 64)
    apply_recipe(model, earlier)
    before = [(id(module), type(module)) for module in model.modules()]
    expected = model(x)
    for where, named in ((["c_fcc"], "c_fcc"), (["c_fc", "c_fcc"], "c_fcc"), ([], r"\[\]")):
        with pytest.raises(NoLayerError, match=rf"matches {named}; .*block.attn.in_proj, "):
            apply_recipe(model, "llm_int8", where)
    assert [(id(module), type(module)) for module in model.modules()] == before
    assert torch.equal(model(x), expected)


def test_layer_that_its_owner_never_calls_is_ignored():
    model = nn.TransformerEncoderLayer(64, 4, batch_first=True)  # has dropout: not replaceable
    suggested = '; for example where=["linear1", "linear2"]'
    with pytest.raises(NoLayerError, match=f"matches out_proj; .*{re.escape(suggested)}$"):
        apply_recipe(model, "switchback", ["out_proj"])
    report = str(apply_recipe(model, "switchback", ["linear1"])).splitlines()
    assert "    16 bit, not supported: self_attn, self_attn.out_proj" in report


class Scaled(nn.Linear):
    """A subclass, as in LoRA, that computes something else."""

    def forward(self, x):
        return super().forward(x) * 3


def patched():
    layer = nn.Linear(64, 256)
    layer.forward = lambda x: x.repeat(1, 1, 4)
    return layer


MORE_THAN_LINEAR = {
    "tensor subclass": lambda: with_subclass_weight(nn.Linear(64, 256)),
    "subclass": lambda: Scaled(64, 256),
    "subclass of ours": lambda: type("Own", (SwitchBackLinear,), {})(64, 256),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(64, 256)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(64, 256), "weight", 0.5),
    "patched forward": patched,
}


@pytest.mark.parametrize("kind", MORE_THAN_LINEAR)
def test_modified_linear_is_refused_unless_left_out(kind):
    model, x = block(), torch.randn(2, 5, 64)
    model.block.mlp.c_fc = MORE_THAN_LINEAR[kind]()
    model.lora_A = nn.Linear(64, 2)
    with pytest.raises(ValueError, match=r"lora_A \(.*\) is more than an nn.Linear"):
        apply_recipe(model, "switchback", ["lora_A"])
    model.lora_A = nn.Identity()
    expected, before = model(x), [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="block.mlp.c_fc .* is more than an nn.Linear"):
        apply_recipe(model, "switchback")
    assert [type(module) for module in model.modules()] == before
    apply_recipe(model, "switchback", ["in_proj", "out_proj", "c_proj"])
    assert (model(x) - expected).norm() < 0.02 * expected.norm()


def test_apply_recipe_keeps_removable_hooks():
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


def cross_attending():
    return open_clip.transformer.ResidualAttentionBlock(64, 2, is_cross_attention=True)


class ResidualAttentionBlock(nn.Module):
    """Has the name of open_clip's block, but calls attention with another argument."""

    def __init__(self):
        super().__init__()
        self.attn, self.c_fc = nn.MultiheadAttention(64, 2, batch_first=True), nn.Linear(64, 64)

    def forward(self, x):
        return self.c_fc(self.attn(x, x, x, key_padding_mask=x[:, :, 0].isnan())[0])


@pytest.mark.parametrize(
    ("build", "inputs", "where"),
    [
        (ResidualAttentionBlock, [(2, 5, 64)], ["c_fc"]),
        (cross_attending, [(2, 5, 64), (2, 7, 64), (2, 7, 64)], ["c_fc"]),
    ],
)
def test_attention_outside_open_clips_blocks_is_unchanged(build, inputs, where):
    torch.manual_seed(0)
    model, x = nn.Sequential(block().block, build()), [torch.randn(shape) for shape in inputs]
    first, expected = model[0](x[0]), model[1](*x)
    apply_recipe(model, "high", [*where, "0.*.c_fc"])
    replace_attention(model)
    assert isinstance(model[0].attn, Attention)
    torch.testing.assert_close(model[0](x[0]), first)
    torch.testing.assert_close(model[1](*x), expected)


def test_attention_that_no_block_calls_is_left_alone():
    pooler = nn.ModuleDict({"attn": open_clip.transformer.Attention(64, 2)})  # open_clip 4's, say
    with pytest.raises(NoLayerError):
        apply_recipe(pooler, "switchback", ["in_proj"])
    assert type(pooler["attn"]) is open_clip.transformer.Attention


def test_a_dict_gives_each_layer_the_recipe_of_its_last_pattern():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    before = repr(model)
    for recipe, where, message in (
        ({"0": "switchback", "1": "swichback"}, LINEAR_LAYERS, "recipe 'swichback'"),
        ({"0": "switchback", "9": "high"}, LINEAR_LAYERS, "no linear layer matches 9"),
        ({"0": "switchback"}, ["0"], "leave out `where`"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_recipe(model, recipe, where)
    assert repr(model) == before
    report = apply_recipe(model, {"[012]": "switchback", "1": "fp8_rowwise", "2": "high"})
    assert report.recipe == "switchback, fp8_rowwise, high"
    assert [(layer.recipe, layer.swapped) for layer in report] == [
        ("switchback", True),
        ("fp8_rowwise", True),
        ("high", False),
    ]
    assert [getattr(m, "settings", m).__class__.__name__ for m in model[2:]] == ["Linear"] * 2
    assert [m.settings.recipe.name for m in model[:2]] == ["switchback", "fp8_rowwise"]
    text = (
        "switchback, unchecked without `inputs`: 0\n    fp8_rowwise, unchecked without `inputs`: 1"
    )
    assert text in repr(report) and "16 bit: 2" in repr(report)
    assert apply_recipe(model, {"0": "switchback", "[012]": "high"}).recipe == "high"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_outputs_and_on_meta_have_the_shapes_of_nn_linear():
    x = torch.randn(3, 8, requires_grad=True)
    for recipe in ("switchback", "fp8_rowwise", "mxfp8"):
        layer = LowPrecisionLinear(8, 0, recipe=recipe)
        layer(x).sum().backward()
        assert x.grad.eq(0).all() and layer(x).shape == (3, 0) and layer.weight.grad.shape == (0, 8)
        layer = LowPrecisionLinear(8, 16, device="meta", recipe=recipe)
        output = layer(torch.empty(3, 8, device="meta", dtype=torch.bfloat16))
        assert (output.device.type, output.shape, output.dtype) == ("meta", (3, 16), torch.bfloat16)
