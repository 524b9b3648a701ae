"""What the report of `apply_recipe` says: layers that run in 16 bit anyway, shares by tower."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from lowprec.clip import open_clip
from lowprec.nn import LowPrecisionLinear, apply_recipe, prepare_for_training
from lowprec.nn.inference import to_int8
from lowprec.nn.recipe import LINEAR_LAYERS, matches

timm = open_clip.timm_model.timm
SIZES = {"embed_dim": 32, "num_heads": 2, "depth": 1, "patch_size": 8}


def swin():
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 32, [2], [2], [4, 4])


def build(name, **sizes):
    return timm.create_model(name, img_size=32, **(sizes or SIZES)).eval()


READERS = {  # models whose attention reads the weights of layers that it does not call
    "timm beit": lambda: build("beit_base_patch16_224"),
    "timm eva01": lambda: build("eva_giant_patch14_224"),
    "timm swinv2": lambda: build(
        "swinv2_tiny_window8_256", embed_dim=32, num_heads=(2,), depths=(1,), window_size=4
    ),
    "torchvision swin": lambda: swin().eval(),
}


@pytest.mark.parametrize("name", READERS)
def test_layers_that_are_not_called_are_named_and_not_swapped(name):
    model, x = READERS[name](), torch.randn(1, 3, 32, 32)
    unchecked = copy.deepcopy(model)
    layers = apply_recipe(model, "switchback", inputs=(x,))
    uncalled = [layer.name for layer in layers if not layer.called]
    assert any(layer.endswith("attn.qkv") for layer in uncalled)
    for layer in layers:
        is_ours = isinstance(model.get_submodule(layer.name), LowPrecisionLinear)
        assert is_ours == layer.swapped == layer.called
    assert layers.treatments[uncalled[0]] == "16 bit, because the forward pass does not call them"
    apply_recipe(unchecked, "switchback")
    with pytest.warns(UserWarning, match=f"^not called, so their weights .*: {uncalled[0]}"):
        unchecked(x)
    unchecked(x)  # once


@pytest.mark.filterwarnings("error")
def test_forward_of_one_tower_says_nothing_about_the_other():
    model = open_clip.model.CLIP(
        32, dict(image_size=32, patch_size=8, width=64, layers=1),
        dict(context_length=8, vocab_size=64, width=64, layers=1, heads=1),
    )  # fmt: skip
    apply_recipe(model, "switchback")
    assert len(model._forward_pre_hooks) == 1
    model(image=torch.randn(1, 3, 32, 32))  # a warning would be an error
    assert not model._forward_pre_hooks  # it was checked


def test_a_layer_in_a_container_whose_weight_is_only_read_is_named():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({"c_fc": nn.Linear(8, 8)})

        def forward(self, x):
            return nn.functional.linear(x, self.layers["c_fc"].weight)

    model = nn.Sequential(Reader())
    apply_recipe(model, "switchback", ["c_fc"])
    with pytest.warns(UserWarning, match="^not called, .*layers.c_fc"):
        model(torch.randn(2, 8))


@pytest.mark.filterwarnings("error")
def test_recipes_in_a_row_check_the_first_forward_once():
    model, x = READERS["torchvision swin"](), torch.randn(1, 3, 32, 32)
    for recipe in ("switchback", "switchback"):
        apply_recipe(model, recipe, ["qkv", "attn.proj"])
        assert len(model._forward_pre_hooks) == 1
    unchecked = copy.deepcopy(model)
    apply_recipe(model, "switchback", ["mlp.0"])  # checks the layers of the earlier recipes, too
    assert len(model._forward_pre_hooks) == 1
    with pytest.raises(UserWarning, match="^not called, .*attn.qkv"):
        model(x)
    apply_recipe(unchecked, "high", ["qkv", "attn.proj"])
    unchecked(x)


@pytest.mark.parametrize("name", READERS)
def test_int8_weights_can_be_read_by_an_owner(name):
    model, x = READERS[name](), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(to_int8(model)(x), expected, atol=0.05, rtol=0.05)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("layers", [None, 2])
def test_pytorchs_encoder_calls_its_layers_in_evaluation(layers):
    model = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    if layers:
        model = nn.TransformerEncoder(model, layers)
    x, padding = torch.randn(2, 5, 64), torch.arange(5).repeat(2, 1) > 2
    with torch.no_grad():
        expected = model.eval()(x, src_key_padding_mask=padding)
        apply_recipe(model, "switchback", ["linear1", "linear2"])
        outputs = [model(x, src_key_padding_mask=padding)[:, :3] for _ in range(2)]
    assert torch.equal(*outputs)
    error = (outputs[0] - expected[:, :3]).norm() / expected[:, :3].norm()
    assert 1e-4 < error < 0.02


OTHERS = {  # library: (a model, linear layers that the defaults find)
    "timm vit": (
        lambda: build("vit_base_patch16_siglip_224"),
        "attn.qkv attn.proj mlp.fc1 mlp.fc2 attn_pool.q attn_pool.kv attn_pool.proj",
    ),
    "timm eva02": (
        lambda: build("eva02_large_patch14_224"),
        "attn.q_proj attn.k_proj attn.v_proj attn.proj mlp.fc1_g mlp.fc1_x mlp.fc2",
    ),
    "timm xcit": (
        lambda: timm.models.xcit.Xcit(img_size=32, embed_dim=64, depth=1, num_heads=2),
        "attn.qkv attn.proj attn.q attn.k attn.v mlp.fc1 mlp.fc2",
    ),
    "timm convnext": (
        lambda: timm.create_model("convnext_tiny", depths=(1,) * 4, dims=(8,) * 4),
        "mlp.fc1 mlp.fc2",
    ),
}
NAMES = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj mlp.fc1 mlp.fc2 "
NAMES += "mlp.w0 mlp.w1 mlp.w2 mlp.gate_proj mlp.up_proj mlp.down_proj"  # transformers, ViTamin


@pytest.mark.parametrize("name", OTHERS)
def test_defaults_find_the_layers_of_other_libraries(name):
    make, ends = OTHERS[name]
    model = make()
    names = {layer.name for layer in apply_recipe(model, "switchback")}
    blocks = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert names == {n for n in blocks if n.endswith(tuple(ends.split()))}
    assert {end for end in ends.split() if any(n.endswith(end) for n in names)} == {*ends.split()}
    assert all(matches(f"layers.0.{name}", LINEAR_LAYERS) for name in NAMES.split())


def test_report_names_the_attention_that_stays_in_16_bits():
    pooler = open_clip.transformer.AttentionalPooler(8, 8, n_head=2)
    model = nn.Sequential(OrderedDict(c_fc=nn.Linear(8, 8), attn_pool=pooler))
    lines = repr(apply_recipe(model, "switchback")).splitlines()
    text = "16 bit, not in `where` or not supported: attn, attn.out_proj"
    assert lines[-2:] == [f"    {text}", "  attention: 1 MultiheadAttention kept"]


def test_result_of_apply_recipe_is_readable_and_still_a_list():
    model = nn.Sequential(OrderedDict(c_fc=nn.Linear(8, 8), head=nn.Linear(8, 2)))
    layers = apply_recipe(model, "switchback")
    lines = ["switchback: 1 of 2 linear layers", "  outside blocks", "    switchback: c_fc"]
    other = "    16 bit, not in `where` or not supported: head"
    assert repr(layers).splitlines() == [*lines, other]
    assert [layer.name for layer in layers] == ["c_fc"] and len(layers) == 1
    assert repr(prepare_for_training(model, "high", compile=False)).startswith("high: 0 of 2")


def test_report_counts_layers_under_any_recipe():
    block = open_clip.transformer.ResidualAttentionBlock(64, 2)
    model = nn.Sequential(OrderedDict(tower=nn.Sequential(block), head=nn.Linear(64, 7)))
    inputs = (torch.randn(2, 5, 64),)
    for recipe in ("switchback", "fp8_rowwise", "switchback"):  # also of quantized layers
        layers = apply_recipe(model, recipe, inputs=inputs)
        assert (layers.num_quantized, layers.num_layers) == (4, 5)
        assert all(layer.called for layer in layers)
    to_int8(model, ["in_proj"])
    layers = apply_recipe(model, "switchback", ["c_fc"], inputs=inputs)  # others stay quantized
    assert (layers.num_quantized, layers.num_layers) == (4, 5)
    assert "tower.0.attn.in_proj" not in layers.treatments
    assert model.training and all(module.training for module in model.modules())


class Subclass(torch.Tensor):
    """A stand-in for torchao's quantized weights."""


def with_subclass_weight(layer):
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Subclass))
    return layer


def test_a_layer_whose_weight_became_a_tensor_subclass_is_not_reported_as_quantized():
    model = nn.Sequential(OrderedDict(c_fc=nn.Linear(8, 8), c_proj=nn.Linear(8, 8)))
    apply_recipe(model, "switchback")
    with_subclass_weight(model.c_fc)  # as torchao's quantize_ does
    assert apply_recipe(model, "switchback", ["c_proj"]).num_quantized == 1


def test_convert_weights_to_lp_covers_our_attention():
    models = [open_clip.model.CLIP(
        32, dict(image_size=32, patch_size=8, width=64, layers=1),
        dict(context_length=8, vocab_size=64, width=64, layers=1, heads=1),
    ) for _ in range(2)]  # fmt: skip
    apply_recipe(models[1], "switchback")
    dtypes = []
    for model in models:
        open_clip.model.convert_weights_to_lp(model, torch.bfloat16)
        dtypes.append({name: p.dtype for name, p in model.named_parameters()})
    assert dtypes[0] == dtypes[1]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch.compile itself
@pytest.mark.parametrize("compile_blocks", [False, True])
def test_model_with_unchecked_layers_compiles_to_one_graph(compile_blocks):
    model = nn.Sequential(nn.Sequential(OrderedDict(c_fc=nn.Linear(8, 8))))
    x = torch.randn(2, 8)
    apply_recipe(model, "switchback")
    (model[0] if compile_blocks else model).compile(fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        outputs = [model(x) for _ in range(3)]
    assert torch.equal(outputs[0], outputs[2])
    assert not (compile_blocks and model._forward_pre_hooks)  # nothing is left to do per forward
