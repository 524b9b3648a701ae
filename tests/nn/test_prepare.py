"""prepare_for_training on models of open_clip, timm and transformers, against `apply_recipe`."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec.clip import open_clip
from lowprec.nn import apply_recipe, prepare_for_training
from lowprec.nn.attention import Attention
from lowprec.nn.blocks import find_blocks

timm = open_clip.timm_model.timm
VISION = dict(image_size=32, patch_size=8, width=64, layers=2, head_width=32)
TEXT = dict(context_length=8, vocab_size=64, width=64, heads=2, layers=2)
TIMM = dict(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2)


def clip_inputs():
    torch.manual_seed(1)
    tokens = torch.randint(1, 63, (4, 8))
    tokens[:, -1] = 63
    return torch.randn(4, 3, 32, 32), tokens


def open_clips():
    model = open_clip.model.CLIP(32, VISION, TEXT)
    return model, lambda: open_clip.loss.ClipLoss()(*model(*clip_inputs()))


def open_clips_with_trunk():
    model = open_clip.model.CLIP(32, VISION, TEXT)
    model.visual = timm.models.VisionTransformer(**TIMM, num_classes=32)

    def set_grad_checkpointing(on):
        model.visual.set_grad_checkpointing(on)
        model.transformer.grad_checkpointing = on

    model.set_grad_checkpointing = set_grad_checkpointing
    return model, lambda: open_clip.loss.ClipLoss()(*model(*clip_inputs()))


def timms():
    model = timm.models.VisionTransformer(**TIMM, num_classes=5)
    return model, lambda: model(clip_inputs()[0]).square().mean()


def transformers_clip(activation="gelu"):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(hidden_act=activation, projection_dim=32)
    vision, text = dict(image_size=32, patch_size=8), dict(vocab_size=64, eos_token_id=63)
    config = transformers.CLIPConfig(vision_config=sizes | vision, text_config=sizes | text)
    model = transformers.CLIPModel(config)
    model.set_grad_checkpointing = lambda on: model.gradient_checkpointing_enable()
    images, tokens = clip_inputs()
    return model, lambda: model(tokens, images, return_loss=True).loss


BUILDERS = [open_clips, open_clips_with_trunk, timms, transformers_clip]


def make(build):
    torch.manual_seed(0)
    model, loss_of = build()
    return model.train(), loss_of


def gradients(model, loss_of):
    model.zero_grad()
    loss = loss_of()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_near(results, expected):
    assert results.keys() == expected.keys()
    for name, result in results.items():
        torch.testing.assert_close(
            result, expected[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def graphs(monkeypatch):
    """torch.compile records graphs, but runs them as they are, which takes far less time."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
@pytest.mark.parametrize("build", BUILDERS)
def test_prepared_model_equals_apply_recipes(build, graphs):
    model, loss_of = make(build)
    apply_recipe(model, "switchback")
    names = list(model.state_dict())
    expected = gradients(model, loss_of)
    for compile, checkpointing in ((False, False), (False, True), (True, "own")):
        model, loss_of = make(build)
        if checkpointing == "own":
            model.set_grad_checkpointing(True)
        options = {"checkpointing": checkpointing} if checkpointing != "own" else {}
        layers = prepare_for_training(
            model, "switchback", compile=compile, skip_slow=False, **options
        )
        assert all(layer.swapped for layer in layers)
        assert len(layers.fused) == len(layers.blocks) == (2 if build is timms else 4)
        assert layers.compiled == (layers.blocks if compile else [])
        assert layers.checkpointed == (layers.blocks if checkpointing else [])
        flags = ("grad_checkpointing", "gradient_checkpointing")
        assert not any(getattr(m, flag, False) for m in model.modules() for flag in flags)
        assert list(model.state_dict()) == names
        assert_near(gradients(model, loss_of), expected)


@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
@pytest.mark.parametrize(
    ("recipe", "checkpointing"), [("high", True), ("switchback", True), ("switchback_m", False)]
)
def test_blocks_of_a_tower_share_one_compilation(recipe, checkpointing, graphs):
    torch.compiler.reset()
    counters.clear()
    model = open_clip.model.CLIP(32, VISION | {"layers": 4}, TEXT | {"layers": 3})
    options = {} if recipe == "high" else {"skip_slow": False}
    layers = prepare_for_training(model, recipe, checkpointing=checkpointing, **options)
    assert len(layers.compiled) == 7
    open_clip.loss.ClipLoss()(*model(*clip_inputs())).backward()
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
@pytest.mark.parametrize("build", [open_clips, timms])
@pytest.mark.parametrize("recipe", ["high", "switchback", "hw_fp8_switchback"])
def test_compiled_and_checkpointed_model_equals_the_eager_one_on_a_gpu(build, recipe):
    results = []
    for prepare in (apply_recipe, prepare_for_training):
        with torch.device("cuda"):
            model, loss_of = make(build)
        model.cuda().set_grad_checkpointing(True)
        prepare(model, recipe, skip_slow=False)
        with torch.device("cuda"), torch.autocast("cuda", torch.bfloat16):
            loss, *rest = gradients(model, loss_of).values()
        results.append((loss, torch.cat([gradient.flatten() for gradient in rest])))
    (loss, gradient), (expected_loss, expected) = results
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2, atol=1e-2)
    bound = 0.3 if "fp8" in recipe else 0.1  # e5m2 gradients have two bits after the first
    assert (gradient - expected).norm() < bound * expected.norm()


class Count(TorchDispatchMode):
    """Counts calls of operations whose name contains a word."""

    def __init__(self, *words):
        super().__init__()
        self.counts = dict.fromkeys(words, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for word in self.counts:
            self.counts[word] += word in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("build", [open_clips, timms])
def test_recomputation_keeps_the_attention_output(build):
    counts = []
    for checkpointing in (False, True):
        model, loss_of = make(build)
        layers = prepare_for_training(model, "high", compile=False, checkpointing=checkpointing)
        with Count("gelu", "attention") as mode:
            loss_of().backward()
        counts.append(mode.counts)
    blocks = len(layers.blocks)
    assert counts[0] == {"gelu": blocks, "attention": blocks}
    assert counts[1] == {"gelu": 2 * blocks, "attention": blocks}


@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
def test_later_call_replaces_all_of_the_earlier_one(graphs):
    model, loss_of = make(timms)
    expected = gradients(model, loss_of)
    prepare_for_training(model, "switchback", skip_slow=False, checkpointing=True)
    quantized = gradients(model, loss_of)
    assert not torch.equal(quantized["loss"], expected["loss"])
    layers = prepare_for_training(model, "high")
    assert layers.compiled == layers.checkpointed == layers.blocks and not layers.fused
    assert_near(gradients(model, loss_of), expected)
    layers = prepare_for_training(model, "high", compile=False, checkpointing=False)
    assert layers.compiled == layers.checkpointed == []
    assert not any("forward" in vars(module) for module in model.modules())
    for _ in range(2):  # the second time, the forward on the inputs runs compiled blocks
        inputs = clip_inputs()[:1]
        layers = prepare_for_training(model, "switchback", inputs=inputs, skip_slow=False)
        assert all(layer.called for layer in layers) and len(layers.compiled) == 2
    assert_near(gradients(model, loss_of), quantized)


def test_patched_forward_of_a_block_survives():
    model, _ = make(timms)
    model.blocks[0].forward = patched = lambda x: x
    for checkpointing in (True, False):
        prepare_for_training(model, "high", compile=False, checkpointing=checkpointing)
    assert model.blocks[0].forward is patched and "forward" not in vars(model.blocks[1])


def test_mlps_as_checkpointed_blocks_take_another_recipe():
    model = nn.Sequential(sequential(), sequential())
    x = torch.randn(2, 64, requires_grad=True)
    options = {"compile": False, "skip_slow": False}
    layers = prepare_for_training(model, "switchback", "*", checkpointing=True, **options)
    assert layers.fused == layers.checkpointed == ["0", "1"]
    quantized = model(x)
    for recipe in ("high", "switchback"):
        assert prepare_for_training(model, recipe, "*", **options).checkpointed == ["0", "1"]
        assert torch.equal(model(x), quantized) == (recipe == "switchback")
        model(x).sum().backward()


def test_failing_forward_on_the_inputs_leaves_mlps_fused():
    model, _ = make(open_clips)
    prepare_for_training(model, "switchback", compile=False, skip_slow=False)
    before = [type(module) for module in model.modules()]
    with pytest.raises((RuntimeError, TypeError)):
        prepare_for_training(model, "high", inputs=(torch.zeros(1),), compile=False)
    assert [type(module) for module in model.modules()] == before


def test_copy_of_a_prepared_model_is_independent():
    model, loss_of = make(open_clips)
    prepare_for_training(model, "switchback", compile=False, checkpointing=True, skip_slow=False)
    copied, before = copy.deepcopy(model), loss_of().item()
    for parameter in copied.parameters():
        nn.init.zeros_(parameter)
    assert loss_of().item() == before
    assert not torch.equal(copied(*clip_inputs())[0], model(*clip_inputs())[0])


def sequential():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def names_of_blocks(model):
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in find_blocks(model)]


def test_blocks_are_the_elements_that_contain_layers():
    model, _ = make(open_clips)
    expected = [f"{tower}transformer.resblocks.{i}" for tower in ("visual.", "") for i in range(2)]
    assert names_of_blocks(model) == expected
    assert names_of_blocks(nn.Sequential(model, nn.Linear(4, 4))) == [f"0.{n}" for n in expected]
    with torch.device("meta"):
        stages = timm.create_model("swin_tiny_patch4_window7_224")
    expected = [f"layers.{i}.blocks.{j}" for i, n in enumerate((2, 2, 6, 2)) for j in range(n)]
    assert names_of_blocks(stages) == expected
    pair = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), nn.LayerNorm(4)])
    assert names_of_blocks(nn.ModuleList([pair, copy.deepcopy(pair)])) == ["0.0", "1.0"]
    assert names_of_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []


def test_report_names_what_stays_in_16_bit(graphs):
    model, _ = make(open_clips)
    model.visual.transformer.grad_checkpointing = True
    nothing = r"converts none of the 16 layers in `where` \(16 bit, no known gain in 8 bits; skip_"
    with pytest.warns(UserWarning, match=f"^fp8_switchback {nothing}") as caught:
        report = str(prepare_for_training(model, "fp8_switchback"))  # of "switchback": README
    assert caught[0].filename == __file__
    assert report.count("16 bit, no known gain in 8 bits; skip_slow=False") == 2
    assert "  visual.transformer.resblocks: 2 blocks, compiled, checkpointed\n" in report
    assert "  transformer.resblocks: 2 blocks, compiled\n" in report


def test_report_names_layers_outside_of_blocks_and_foreign_attention():
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_siglip_224")
    text = str(prepare_for_training(model, "switchback", ["c_fc", "in_proj"], compile=False))
    assert text.splitlines() == [
        "switchback: 27 of 53 linear layers",
        "  blocks: 12 blocks",
        "    switchback: attn.qkv, mlp.fc1",
        "    16 bit, not in `where` or not supported: attn.proj, mlp.fc2",
        "  outside blocks",
        "    switchback: attn_pool.q, attn_pool.kv, attn_pool.mlp.fc1",
        "    16 bit, not in `where` or not supported: attn_pool.proj, attn_pool.mlp.fc2",
        "  attention: 12 Attention kept, 1 AttentionPoolLatent kept",
    ]


def test_report_names_layers_of_an_earlier_call_and_a_root_container():
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    model = nn.Sequential(block, copy.deepcopy(block))
    prepare_for_training(model, "switchback", "*", compile=False, skip_slow=False)
    report = prepare_for_training(model, "high", "*.0", compile=False, checkpointing=True)
    assert str(report).splitlines() == [
        "high: 2 of 4 linear layers",
        "  the model: 2 blocks, checkpointed",
        "    16 bit: 0",
        "    switchback, from an earlier call: 2",
    ]


def test_attention_masks_causally_only_in_the_text_tower():
    model, loss_of = make(open_clips)
    expected = gradients(model, loss_of)
    prepare_for_training(model, "high", compile=False)
    towers = (model.visual, model.transformer)
    modules = [[m for m in tower.modules() if isinstance(m, Attention)] for tower in towers]
    assert [[m.causal for m in tower] for tower in modules] == [[False] * 2, [True] * 2]
    assert_near(gradients(model, loss_of), expected)
