"""prepare_for_training on models of open_clip, timm and transformers, against `apply_recipe`."""

import copy
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import sympy
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices, ReductionHint, V
from torch._inductor.graph import GraphLowering
from torch._inductor.sizevars import SizeVarAllocator
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec.nn import apply_recipe, prepare_for_training
from lowprec.nn.attention import Attention
from lowprec.nn.blocks import compile_blocks, find_blocks, rows_in_registers
from tests.nn.models import MODELS, clip, clip_loss, images, pair, timm

CLIP, VIT = MODELS["open_clip"], MODELS["timm vit"]


def assert_near(results, expected):
    assert results.keys() == expected.keys()
    for name, result in results.items():
        torch.testing.assert_close(
            result, expected[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
@pytest.mark.parametrize(
    ("recipe", "checkpointing"), [("high", True), ("switchback", True), ("switchback_m", False)]
)
def test_blocks_of_a_tower_share_one_compilation(recipe, checkpointing, graphs):
    torch.compiler.reset()
    counters.clear()
    model = clip({"layers": 4}, {"layers": 3})
    options = {} if recipe == "high" else {"skip_slow": False}
    layers = prepare_for_training(model, recipe, checkpointing=checkpointing, **options)
    assert len(layers.compiled) == 7
    clip_loss(model, pair()).backward()
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
@pytest.mark.parametrize("row", [CLIP, VIT], ids=["open_clip", "timm"])
@pytest.mark.parametrize("recipe", ["high", "switchback", "hw_fp8_switchback", "hw_fp8_tensorwise"])
def test_compiled_and_checkpointed_model_equals_the_eager_one_on_a_gpu(row, recipe):
    results = []
    for prepare in (apply_recipe, prepare_for_training):
        model = row.build().cuda().train()
        model.set_grad_checkpointing(True)
        prepare(model, recipe, skip_slow=False)
        with torch.autocast("cuda", torch.bfloat16):
            loss, *rest = row.gradients(model).values()
        results.append((loss, torch.cat([gradient.flatten() for gradient in rest])))
    (loss, gradient), (expected_loss, expected) = results
    # fp8: on an H200, weights changed by 2^-9 move the loss by up to 0.02, and the compiled blocks,
    # whose layer norms do not round to bfloat16 first, by 0.03; e5m2 gradients have two bits
    atol, bound = (0.04, 0.3) if "fp8" in recipe else (0.01, 0.1)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2, atol=atol)
    assert (gradient - expected).norm() < bound * expected.norm()


class Block(nn.Sequential):
    """A block, since torch.compile skips the forward of torch's own modules."""

    def forward(self, x):
        return super().forward(x)


def keeps(hint, length, cooperative=False):
    """Whether the current choices keep rows of this length in registers."""
    features = SimpleNamespace(
        get_reduction_hint=lambda: ReductionHint[hint],
        reduction_numel=sympy.Integer(length),
        numel=sympy.Integer(64),
    )
    return bool(V.choices.should_use_persistent_reduction(features, cooperative))


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """For each graph that Inductor lowers, whether rows of 1,280 elements stay in registers."""
    kept, lower = [], GraphLowering.__init__

    def lowered(graph, *args, **options):
        lower(graph, *args, **options)
        with V.set_graph_handler(graph):
            kept.append(keeps("INNER", 1280))

    monkeypatch.setattr(GraphLowering, "__init__", lowered)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # no earlier result
    torch.compiler.reset()
    return kept


def compiled_block():
    model = nn.Sequential(Block(nn.Linear(8, 8, bias=False)))
    compile_blocks(model, [model[0]])
    return model[0]


@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
@pytest.mark.parametrize("is_first", [True, False], ids=["block first", "block last"])
def test_rows_stay_in_registers_in_blocks_alone(is_first, kept):
    eye = torch.eye(8)  # products alone need no C++ compiler
    block, other = compiled_block(), torch.compile(lambda x: x @ eye)
    functions = (block, other) if is_first else (other, block)
    with ThreadPoolExecutor(1) as forward, ThreadPoolExecutor(1) as backward:
        for function in functions:  # a GPU's backward pass runs in another thread
            output = forward.submit(function, torch.randn(4, 8, requires_grad=True)).result()
            backward.submit(output.sum().backward).result()
    assert kept == ([True] * 2 + [False] * 2)[:: 1 if is_first else -1]


class OwnChoices(InductorChoices):
    def uuid(self):
        return "own"


@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
def test_choices_of_the_user_are_left_alone(kept):
    with inductor_config.patch(inductor_choices_class=OwnChoices):
        compiled_block()(torch.randn(4, 8))
    assert kept == [False]


@pytest.mark.parametrize(
    ("hint", "length", "cooperative", "expected"),
    [
        ("INNER", 2048, False, True),
        ("INNER", 2049, False, False),
        ("INNER", 2048, True, False),  # Inductor's own choice
        ("DEFAULT", 1280, False, False),
    ],
)
@pytest.mark.parametrize("is_allowed", [True, False])
def test_rows_of_up_to_2048_elements_stay_in_registers(
    hint, length, cooperative, expected, is_allowed
):
    graph = SimpleNamespace(sizevars=SizeVarAllocator())
    patch = {"inductor_choices_class": rows_in_registers}
    with (
        V.set_graph_handler(graph),
        V.set_choices_handler(rows_in_registers()),
        inductor_config.patch(patch | {"triton.persistent_reductions": is_allowed}),
    ):
        assert keeps(hint, length, cooperative) is (expected and is_allowed)


class Count(TorchDispatchMode):
    """Counts calls of operations whose name contains a word."""

    def __init__(self, *words):
        super().__init__()
        self.counts = dict.fromkeys(words, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for word in self.counts:
            self.counts[word] += word in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("row", [CLIP, VIT], ids=["open_clip", "timm"])
def test_recomputation_keeps_the_attention_output(row):
    counts = []
    for checkpointing in (False, True):
        model = row.build().train()
        layers = prepare_for_training(model, "high", compile=False, checkpointing=checkpointing)
        with Count("gelu", "attention") as mode:
            row.gradients(model)
        counts.append(mode.counts)
    blocks = len(layers.blocks)
    assert counts[0] == {"gelu": blocks, "attention": blocks}
    assert counts[1] == {"gelu": 2 * blocks, "attention": blocks}


@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
def test_later_call_replaces_all_of_the_earlier_one(graphs):
    model = VIT.build().train()
    expected = VIT.gradients(model)
    prepare_for_training(model, "switchback", skip_slow=False, checkpointing=True)
    quantized = VIT.gradients(model)
    assert not torch.equal(quantized["loss"], expected["loss"])
    layers = prepare_for_training(model, "high")
    assert layers.compiled == layers.checkpointed == layers.blocks and not layers.fused
    assert_near(VIT.gradients(model), expected)
    layers = prepare_for_training(model, "high", compile=False, checkpointing=False)
    assert layers.compiled == layers.checkpointed == []
    assert not any("forward" in vars(module) for module in model.modules())
    for _ in range(2):  # the second time, the forward on the inputs runs compiled blocks
        inputs = images()
        layers = prepare_for_training(model, "switchback", inputs=inputs, skip_slow=False)
        assert all(layer.called for layer in layers) and len(layers.compiled) == 2
    assert_near(VIT.gradients(model), quantized)


def num_saved(model, images):
    """Elements that a forward pass saves for the backward pass, without parameters."""
    kept = {p.untyped_storage().data_ptr(): None for p in model.parameters()}

    def pack(x):
        kept.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = model(images)
    return output, sum(storage.size() for storage in kept.values() if storage)


@pytest.mark.parametrize("checkpointing", [None, True])
def test_checkpointing_that_also_recomputes_convolutions_stays(checkpointing):
    torch.manual_seed(0)
    model, x = timm.create_model("mobilevit_xxs").train(), torch.randn(2, 3, 64, 64)
    options = {"compile": False, "checkpointing": checkpointing}
    without = num_saved(model, x)[1]
    model.set_grad_checkpointing(True)
    expected, least = num_saved(model, x)
    assert least < without / 10
    layers = prepare_for_training(model, "high", **options)
    output, saved = num_saved(model, x)
    assert torch.equal(output, expected) and saved == least and layers.checkpointed == []
    prepare_for_training(model, "high", compile=False, checkpointing=False)
    assert num_saved(model, x)[1] == without
    layers = prepare_for_training(model, "high", **options)  # the model's own is off
    assert layers.checkpointed == (layers.blocks if checkpointing else [])
    model.set_grad_checkpointing(True)  # no block is checkpointed twice
    assert prepare_for_training(model, "high", **options).checkpointed == []
    assert num_saved(model, x)[1] == least


def test_patched_forward_of_a_block_survives():
    model = VIT.build().train()
    model.blocks[0].forward = patched = lambda x: x
    for checkpointing in (True, False):
        prepare_for_training(model, "high", compile=False, checkpointing=checkpointing)
    assert model.blocks[0].forward is patched and "forward" not in vars(model.blocks[1])


class Cache:
    """As transformers' caches: keeps what a block appends."""

    def __init__(self):
        self.kept = []

    def update(self, x):
        self.kept.append(x.detach())
        return torch.cat([*self.kept[:-1], x], dim=1)

    def get_seq_length(self, layer_idx=0):
        assert layer_idx == 3
        return sum(x.shape[1] for x in self.kept)


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.layer_idx = 3

    def forward(self, x, first=None, *, past=None):
        for cache in (first, past):
            x = x if cache is None else cache.update(x)
        return self.fc1(x).tanh()


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("compile", [False, True])
def test_recomputation_appends_nothing_to_a_cache(monkeypatch, graphs, by_name, compile):
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", SimpleNamespace(Cache=Cache))
    model = nn.Sequential(Caching(), Caching())
    options = {"compile": compile, "checkpointing": True}
    prepare_for_training(model, "high", "fc1", **options)
    block, x, cache = model[0], torch.randn(2, 3, 8), Cache()
    given = {"past": cache} if by_name else {"first": cache}
    expected = block(x).square().sum()
    block(x, **given).square().sum().backward()
    assert not cache.kept
    torch.testing.assert_close(block(x, **given).square().sum(), expected)
    with torch.no_grad():  # generation
        assert [block(x, **given).shape[1] for _ in range(2)] == [3, 6]
    with pytest.raises(ValueError, match="a cache that holds keys and values"):
        block(x, **given)
    model.eval()
    block(x, **given).sum().backward()
    assert len(cache.kept) == 3


def test_failing_forward_on_the_inputs_leaves_mlps_fused():
    model = CLIP.build().train()
    prepare_for_training(model, "switchback", compile=False, skip_slow=False)
    before = [type(module) for module in model.modules()]
    with pytest.raises((RuntimeError, TypeError)):
        prepare_for_training(model, "high", inputs=(torch.zeros(1),), compile=False)
    assert [type(module) for module in model.modules()] == before


def names_of_blocks(model):
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in find_blocks(model)]


def test_blocks_are_the_elements_that_contain_layers():
    model = CLIP.build().train()
    expected = [f"{tower}transformer.resblocks.{i}" for tower in ("visual.", "") for i in range(2)]
    assert names_of_blocks(model) == expected
    assert names_of_blocks(nn.Sequential(model, nn.Linear(4, 4))) == [f"0.{n}" for n in expected]
    with torch.device("meta"):
        stages = timm.create_model("swin_tiny_patch4_window7_224")
    expected = [f"layers.{i}.blocks.{j}" for i, n in enumerate((2, 2, 6, 2)) for j in range(n)]
    assert names_of_blocks(stages) == expected
    sizes = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}
    pooled = timm.create_model("vit_base_patch16_siglip_224", **sizes)  # by attention
    expected = ["0.blocks.0", "0.blocks.1"]
    assert names_of_blocks(nn.Sequential(pooled, nn.Linear(4, 4))) == expected
    experts = [nn.Sequential(OrderedDict(down_proj=nn.Linear(4, 4))) for _ in range(2)]
    block = nn.Sequential(OrderedDict(o_proj=nn.Linear(4, 4), experts=nn.ModuleList(experts)))
    assert names_of_blocks(nn.Sequential(block, nn.Linear(4, 4))) == ["0"]  # with its experts
    pair = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), nn.LayerNorm(4)])
    assert names_of_blocks(nn.ModuleList([pair, copy.deepcopy(pair)])) == ["0.0", "1.0"]
    assert names_of_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []


def test_a_model_of_narrow_layers_is_told_why_none_is_converted():
    model = nn.ModuleDict({"c_fc": nn.Linear(64, 256), "c_proj": nn.Linear(256, 64)})
    why = r"\(16 bit, faster at this size on Hopper; skip_slow=False converts them\)$"
    with pytest.warns(UserWarning, match=f"^switchback converts none of 2 linear layers {why}"):
        prepare_for_training(model, "switchback", compile=False)


def test_report_names_layers_outside_of_blocks_and_foreign_attention():
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_siglip_224")
    text = str(prepare_for_training(model, "switchback", ["c_fc", "in_proj"], compile=False))
    assert text.splitlines() == [
        "switchback: 27 of 53 linear layers",
        "  blocks: 12 blocks",
        "    switchback, unchecked without `inputs`: attn.qkv, mlp.fc1",
        "    16 bit, not in `where`: attn.proj, mlp.fc2",
        "  outside blocks",
        "    switchback, unchecked without `inputs`: attn_pool.q, attn_pool.kv, attn_pool.mlp.fc1",
        "    16 bit, not in `where`: attn_pool.proj, attn_pool.mlp.fc2",
        "  attention: 12 Attention kept, 1 AttentionPoolLatent kept",
    ]


def test_attention_masks_causally_only_in_the_text_tower():
    model = CLIP.build().train()
    expected = CLIP.gradients(model)
    prepare_for_training(model, "high", compile=False)
    towers = (model.visual, model.transformer)
    modules = [[m for m in tower.modules() if isinstance(m, Attention)] for tower in towers]
    assert [[m.causal for m in tower] for tower in modules] == [[False] * 2, [True] * 2]
    assert_near(CLIP.gradients(model), expected)
