"""Recipes on whole CLIP models: open_clip's own towers, timm's, and checkpoints to and fro."""

import dataclasses

import pytest
import torch

from lowprec.clip.model import build_model, set_precision
from lowprec.config.schema import ModelConfig, PrecisionConfig
from lowprec.nn.attention import Attention
from lowprec.nn.recipe import RECIPES

TINY = {"vocab_size": 128, "vision_layers": 1, "text_layers": 1, "context_length": 8}


def model_and_batch(intervention="none", **sizes):
    torch.manual_seed(0)
    model = build_model(ModelConfig(**(TINY | sizes)), intervention)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    images = torch.randn(4, 3, 32, 32)
    tokens = torch.randint(1, 126, (4, 8))
    tokens[:, -1] = 127
    return model, images, tokens


def features_and_gradients(model, images, tokens):
    model.zero_grad()
    found = model(images, tokens)
    logits = found["image_features"] @ found["text_features"].T
    (logits * torch.arange(16.0).view(4, 4)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found["image_features"].detach(), found["text_features"].detach(), gradients


@pytest.mark.parametrize("intervention", ["none", "zero_init", "kq_norm"])
def test_high_is_open_clip(intervention):
    model, *batch = model_and_batch(intervention)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    *expected, expected_gradients = features_and_gradients(model, *batch)
    names = [name for name, _ in model.named_parameters()]
    set_precision(model, PrecisionConfig())
    assert [name for name, _ in model.named_parameters()] == names
    model.load_state_dict(state)
    *found, gradients = features_and_gradients(model, *batch)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-6, rtol=0)
    assert gradients.keys() == expected_gradients.keys()
    for name, wanted in expected_gradients.items():
        torch.testing.assert_close(gradients[name], wanted, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {"high"}))
def test_every_recipe_is_near_open_clip_and_not_it(recipe):
    model, *batch = model_and_batch()
    image, text, gradients = features_and_gradients(model, *batch)
    layers = set_precision(model, PrecisionConfig(recipe=recipe))
    assert [layer.swapped for layer in layers] == [True] * 8
    near_image, near_text, near_gradients = features_and_gradients(model, *batch)
    bound = 0.1 if "fp8" in recipe else 0.04  # noise of a product: 3% and 0.7%, of some in a row
    for value, wanted in ((near_image, image), (near_text, text)):
        error = ((value - wanted).norm() / wanted.norm()).item()
        assert error < bound and (error > 1e-5) == (recipe != "autograd_high")
    name = "visual.transformer.resblocks.0.mlp.c_fc.weight"
    error = (near_gradients[name] - gradients[name]).norm() / gradients[name].norm()
    assert error < 3 * bound


def test_the_causal_mask_is_left_to_the_kernel_in_the_text_tower_alone():
    model, *_ = model_and_batch()
    set_precision(model, PrecisionConfig())
    causal = {name: m.causal for name, m in model.named_modules() if isinstance(m, Attention)}
    assert causal == {
        "visual.transformer.resblocks.0.attn": False,
        "transformer.resblocks.0.attn": True,
    }


def test_a_custom_recipe_is_its_products():
    products = {"output": {"format": "int8", "x": "rowwise", "w": "tensorwise"}}
    products["grad_input"] = {"format": "int8", "g": "rowwise", "w": "tensorwise"}
    results = []
    for config in (
        PrecisionConfig(recipe="custom", products=products),
        PrecisionConfig(recipe="switchback"),
    ):
        model, *batch = model_and_batch()
        set_precision(model, config)
        results.append(features_and_gradients(model, *batch))
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][2].items():
        assert torch.equal(gradient, results[1][2][name]), name


def test_layers_of_a_timm_tower_are_found_by_their_own_names():
    config = ModelConfig(
        **{field.name: None for field in dataclasses.fields(ModelConfig)}
        | {"name": "convnext_base", "patch_dropout": 0.0}
    )
    model = build_model(config)
    layers = set_precision(model, PrecisionConfig(recipe="switchback"))
    ends = {layer.name.rsplit(".", 1)[1] for layer in layers if layer.name.startswith("visual")}
    assert ends == {"fc1", "fc2"}


def test_a_recipe_without_a_layer_is_refused_and_high_is_not():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert set_precision(model, PrecisionConfig()) == []
    with pytest.raises(ValueError, match="no linear layer matches"):
        set_precision(model, PrecisionConfig(recipe="switchback"))
