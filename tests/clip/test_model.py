"""Models equal open_clip's in names and numbers; recipes, weights and compilation."""

import dataclasses
from functools import partial

import pytest
import torch
from omegaconf import OmegaConf

from lowprec.clip import open_clip, vision
from lowprec.clip.export import read_weights, write_weights
from lowprec.clip.model import Normalize, build_model, contrastive_loss, set_precision
from lowprec.clip.vision import PatchDropout
from lowprec.config.compose import CONF
from lowprec.config.schema import ModelConfig, PrecisionConfig

TINY = dict(vision_width=64, vision_layers=2, text_width=64, text_layers=2, vocab_size=512)


def build_by_name(name, intervention="none", **sizes):
    """An open_clip model without memory, with its own sizes except for some."""
    own = {field.name: None for field in dataclasses.fields(ModelConfig)}
    config = ModelConfig(**own | {"name": name, "patch_dropout": 0.0} | sizes)
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_clip, "create_model", partial(open_clip.create_model, device="meta"))
        return build_model(config, intervention)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_patch_dropout_keeps_the_class_token_and_a_fraction_of_patches(share):
    torch.manual_seed(0)
    x = torch.arange(65.0)[None, :, None].expand(3, 65, 2)
    dropped = PatchDropout(share).train()(x)
    assert dropped.shape == (3, 1 + max(1, int(64 * (1 - share))), 2)
    assert (dropped[:, 0] == 0).all() and (dropped[:, 1:] > 0).all()
    assert all(len(row.unique()) == len(row) for row in dropped[:, :, 0])
    assert not torch.equal(dropped[0], dropped[1])
    assert torch.equal(PatchDropout(share).eval()(x), x)


def compare_paths(monkeypatch, module, run, hooked, unused=()):
    """Compares output and gradients of both paths of `vision.is_fast` in float64.

    Returns the shapes of the inputs of the hooked modules, by path.
    """
    parameters = [p for name, p in module.double().named_parameters() if name not in unused]
    results, shapes = [], {}
    for fast in (False, True):
        monkeypatch.setattr(vision, "is_fast", lambda x, fast=fast: fast)
        torch.manual_seed(1)
        seen = shapes.setdefault(fast, [])
        hooks = [
            each.register_forward_hook(lambda _, x, y, seen=seen: seen.append(tuple(x[0].shape)))
            for each in hooked
        ]
        output = run(module.train())
        results.append([output, *torch.autograd.grad(output.sin().sum(), parameters)])
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)
    return shapes


@pytest.mark.parametrize("size, dropout", [((32, 32), 0.5), ((32, 48), 0.5), ((32, 48), 0.0)])
def test_vision_tower_on_a_gpu_computes_what_open_clip_does(monkeypatch, size, dropout):
    tower = open_clip.transformer.VisionTransformer(size, 8, 64, 1, 2, 4.0)
    vision.replace(tower)
    if dropout:
        tower.patch_dropout = PatchDropout(dropout)
    images = torch.randn(4, 3, *size, dtype=torch.float64)
    hooked = tower.conv1, tower.ln_post
    shapes = compare_paths(monkeypatch, tower, lambda tower: tower(images), hooked)
    tokens = 1 + int(size[0] * size[1] // 64 * (1 - dropout))
    assert shapes == {False: [(4, 3, *size), (4, tokens, 64)], True: [(4, 64)]}


def test_text_tower_on_a_gpu_computes_what_open_clip_does(monkeypatch):
    model, _, tokens = model_and_batch()
    unused = [name for name, _ in model.named_parameters() if name.startswith("visual.")]
    unused.append("logit_scale")

    def run(model):
        return model.encode_text(tokens, normalize=True)

    shapes = compare_paths(monkeypatch, model, run, [model.ln_final], unused)
    assert shapes == {False: [(4, 8, 128)], True: [(4, 128)]}


def test_open_clip_model_by_name_with_other_sizes():
    model = build_by_name("ViT-B-32", "zero_init", image_size=64, context_length=12, vocab_size=512)
    assert model.visual.positional_embedding.shape == (5, 768)
    assert model.token_embedding.weight.shape == (512, 512)
    assert model.visual.transformer.resblocks[11].ls_1.gamma.shape == (768,)


@pytest.mark.parametrize("size", ["b32", "l14", "h14"])
def test_presets_have_open_clips_shapes(size):
    name = {"b32": "ViT-B-32", "l14": "ViT-L-14", "h14": "ViT-H-14"}[size]
    config = ModelConfig(**OmegaConf.load(CONF / "model" / f"vit_{size}.yaml"))
    with torch.device("meta"):
        ours = build_model(config)
        theirs = open_clip.create_model(name, load_weights=False, device="meta")
    shapes = {key: tensor.shape for key, tensor in ours.state_dict().items()}
    assert shapes == {key: tensor.shape for key, tensor in theirs.state_dict().items()}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_round_trip_through_open_clip(tmp_path, suffix):
    model = build_model(ModelConfig(**TINY))
    write_weights(model.state_dict(), tmp_path / f"w{suffix}")
    other = build_model(ModelConfig(**TINY))
    open_clip.load_checkpoint(other, str(tmp_path / f"w{suffix}"))
    back = read_weights(tmp_path / f"w{suffix}")
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, back[key]) and torch.equal(tensor, other.state_dict()[key])


def test_normalize_is_open_clips_preprocessing():
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
    expected = (pixels / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(Normalize()(pixels), expected)


SMALL = {"vocab_size": 128, "vision_layers": 1, "text_layers": 1, "context_length": 8}


def model_and_batch(intervention="none", **sizes):
    torch.manual_seed(0)
    model = build_model(ModelConfig(**(SMALL | sizes)), intervention)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    images = torch.randn(4, 3, 32, 32)
    tokens = torch.randint(1, 126, (4, 8))
    tokens[:, -1] = 127
    return model, images, tokens


def features_and_gradients(model, images, tokens):
    model.zero_grad()
    outputs = model(images, tokens)
    logits = outputs["image_features"] @ outputs["text_features"].T
    (logits * torch.arange(16.0).view(4, 4)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return outputs["image_features"].detach(), outputs["text_features"].detach(), gradients


@pytest.mark.parametrize("intervention", ["none", "zero_init", "kq_norm"])
def test_open_clip_equals_our_model_and_recipe_high(intervention):
    extra = {"none": {}, "zero_init": {"ls_init_value": 0.0}, "kq_norm": {"qk_norm": True}}
    model, *batch = model_and_batch(intervention, **TINY)
    vision = dict(image_size=32, patch_size=8, width=64, layers=2, head_width=64)
    text = dict(context_length=8, vocab_size=512, width=64, layers=2, heads=1)
    towers = [tower | extra[intervention] for tower in (vision, text)]
    theirs = open_clip.model.CLIP(128, *towers, output_dict=True)
    theirs.load_state_dict(model.state_dict())
    losses = [contrastive_loss()(**each(*batch)) for each in (model, theirs)]
    assert torch.equal(*losses)
    *expected, expected_gradients = features_and_gradients(theirs, *batch)
    *exact, gradients = features_and_gradients(model, *batch)
    assert all(map(torch.equal, exact, expected)) and [*gradients] == [*expected_gradients]
    assert all(map(torch.equal, gradients.values(), expected_gradients.values()))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    set_precision(model, PrecisionConfig())
    model.load_state_dict(state)
    *features, gradients = features_and_gradients(model, *batch)
    for value, target in zip(features, expected, strict=True):
        torch.testing.assert_close(value, target, atol=1e-6, rtol=0)
    assert [*gradients] == [*expected_gradients]
    for name, target in expected_gradients.items():
        torch.testing.assert_close(gradients[name], target, atol=2e-5, rtol=1e-4, msg=name)


def test_recipe_without_layers_is_refused_except_high():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert set_precision(model, PrecisionConfig()) == []
    with pytest.raises(ValueError, match="no linear layer matches"):
        set_precision(model, PrecisionConfig(recipe="switchback"))
