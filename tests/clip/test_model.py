"""Our models are open_clip's: same names, same numbers, weights to and fro."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from lowprec.clip import open_clip
from lowprec.clip.export import read_weights, write_weights
from lowprec.clip.model import (
    Normalize,
    PatchDropout,
    _checkpointed,
    blocks,
    build_model,
    compile_blocks,
    contrastive_loss,
)
from lowprec.config.schema import ModelConfig

TINY = dict(vision_width=64, vision_layers=2, text_width=64, text_layers=2, vocab_size=512)


def batch(context=16):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 510, (4, context), generator=generator)
    tokens[:, -1] = 511
    return torch.randn(4, 3, 32, 32, generator=generator), tokens


@pytest.mark.parametrize("intervention", ["none", "zero_init", "kq_norm"])
def test_outputs_and_gradients_equal_open_clip(intervention):
    extra = {"none": {}, "zero_init": {"ls_init_value": 0.0}, "kq_norm": {"qk_norm": True}}
    torch.manual_seed(0)
    ours = build_model(ModelConfig(**TINY), intervention)
    theirs = open_clip.model.CLIP(
        128,
        dict(image_size=32, patch_size=8, width=64, layers=2, head_width=64, **extra[intervention]),
        dict(context_length=16, vocab_size=512, width=64, layers=2, heads=1, **extra[intervention]),
        output_dict=True,
    )
    theirs.load_state_dict(ours.state_dict())
    losses = []
    for model in (ours, theirs):
        loss = contrastive_loss()(**model(*batch()))
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_zero_init_makes_every_block_the_identity_in_both_towers():
    model = build_model(ModelConfig(**TINY), "zero_init")
    assert len(blocks(model)) == 4
    for block in blocks(model):
        x = torch.randn(2, 5, 64)
        assert torch.equal(block(x), x)


def test_kq_norm_is_in_every_block_of_both_towers():
    names = [name for name, _ in build_model(ModelConfig(**TINY), "kq_norm").named_parameters()]
    assert sum("attn.ln_q.weight" in name for name in names) == 4
    assert sum("attn.ln_k.weight" in name for name in names) == 4


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_patch_dropout_keeps_the_class_token_and_a_share_of_patches(share):
    torch.manual_seed(0)
    x = torch.arange(65.0)[None, :, None].expand(3, 65, 2)
    dropped = PatchDropout(share).train()(x)
    assert dropped.shape == (3, 1 + max(1, int(64 * (1 - share))), 2)
    assert (dropped[:, 0] == 0).all() and (dropped[:, 1:] > 0).all()
    assert all(len(row.unique()) == len(row) for row in dropped[:, :, 0])
    assert not torch.equal(dropped[0], dropped[1])
    assert torch.equal(PatchDropout(share).eval()(x), x)


def test_patch_dropout_keeps_every_patch_equally_often():
    torch.manual_seed(0)
    x = torch.arange(17.0)[None, :, None].expand(4000, 17, 1)
    kept = PatchDropout(0.5).train()(x)[:, 1:].flatten().long()
    counts = torch.bincount(kept, minlength=17)[1:]
    assert ((counts - 2000).abs() < 5 * (4000 * 0.25) ** 0.5).all()


def test_an_open_clip_model_by_name_with_other_sizes():
    config = ModelConfig(name="ViT-B-32", image_size=64, context_length=12, vocab_size=512)
    for name in ("patch_size", "vision_width", "vision_layers", "text_width", "text_layers"):
        setattr(config, name, None)
    config.heads = config.embed_dim = None
    model = build_model(config, "zero_init")
    assert model.visual.positional_embedding.shape == (5, 768)
    assert model.token_embedding.weight.shape == (512, 512)
    assert model.visual.transformer.resblocks[11].ls_1.gamma.shape == (768,)


@pytest.mark.parametrize("size", ["b32", "l14", "h14"])
def test_presets_have_the_shapes_of_open_clips_models(size):
    from omegaconf import OmegaConf

    from lowprec.config.compose import CONF

    name = {"b32": "ViT-B-32", "l14": "ViT-L-14", "h14": "ViT-H-14"}[size]
    config = ModelConfig(**OmegaConf.load(CONF / "model" / f"vit_{size}.yaml"))
    with torch.device("meta"):
        ours = build_model(config)
        theirs = open_clip.create_model(name, load_weights=False, device="meta")
    shapes = {key: tensor.shape for key, tensor in ours.state_dict().items()}
    assert shapes == {key: tensor.shape for key, tensor in theirs.state_dict().items()}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_go_to_open_clip_and_back_unchanged(tmp_path, suffix):
    model = build_model(ModelConfig(**TINY))
    write_weights(model.state_dict(), tmp_path / f"w{suffix}")
    other = build_model(ModelConfig(**TINY))
    open_clip.load_checkpoint(other, str(tmp_path / f"w{suffix}"))
    back = read_weights(tmp_path / f"w{suffix}")
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, back[key]) and torch.equal(tensor, other.state_dict()[key])


def test_a_pickle_with_code_is_not_executed(tmp_path):
    canary = tmp_path / "canary"

    class Payload:
        def __reduce__(self):
            return (canary.write_text, ("executed",))

    torch.save({"state_dict": Payload()}, tmp_path / "bad.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        read_weights(tmp_path / "bad.pt")
    assert not canary.exists()


def test_weights_that_do_not_fit_are_named(tmp_path):
    from lowprec.clip.export import load_weights

    write_weights(build_model(ModelConfig(**TINY)).state_dict(), tmp_path / "w.safetensors")
    other = build_model(ModelConfig(**{**TINY, "vision_width": 128}))
    with pytest.raises(ValueError, match=r"visual.class_embedding is \(64,\), not \(128,\)"):
        load_weights(other, tmp_path / "w.safetensors")


def test_normalize_is_open_clips_preprocessing():
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
    expected = (pixels / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(Normalize()(pixels), expected)


def products_and_gradients(model, monkeypatch):
    """Products of each graph that a compiled step makes, forward first, and all gradients."""
    counts = []

    def count(graph, _):
        mm = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        counts.append(sum(node.target in mm for node in graph.graph.nodes))
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    plain = torch.nn.Module.compile
    torch.compiler.reset()
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", lambda self, **_: plain(self, backend=backend))
        compile_blocks(model)
    contrastive_loss()(**model(*batch())).backward()
    return counts, {name: p.grad for name, p in model.named_parameters()}


def test_checkpointing_is_taken_over_once_however_often_blocks_are_compiled(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    model = build_model(ModelConfig(**TINY))
    for _ in range(2):
        model.set_grad_checkpointing(True)
        compile_blocks(model)
    for block in blocks(model):
        assert block.forward.func is _checkpointed
        assert block.forward.args[0].__func__ is type(block).forward


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own ways
def test_a_compiled_block_recomputes_only_what_a_gradient_needs(monkeypatch):
    torch.manual_seed(0)
    model = build_model(ModelConfig(**TINY | {"vision_layers": 1, "text_layers": 1}))
    checkpointed = copy.deepcopy(model)
    checkpointed.set_grad_checkpointing(True)
    counts, expected = products_and_gradients(model, monkeypatch)
    assert counts == [4, 4, 8, 8]  # forward of two towers; backward: of inputs and of weights
    counts, found = products_and_gradients(checkpointed, monkeypatch)
    assert counts == [4, 4, 11, 11]  # again all but the last
    assert list(found) == list(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
