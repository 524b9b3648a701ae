"""open_clip's CLIP models, built from the config schema with open_clip's parameter names."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowprec.clip import open_clip, vision
from lowprec.clip.vision import PatchDropout
from lowprec.config.schema import PRESETS, ModelConfig, PrecisionConfig
from lowprec.formats import parse_format
from lowprec.nn.coverage import Layers
from lowprec.nn.recipe import RECIPES, custom_recipe
from lowprec.nn.replace import NoLayerError, apply_recipe, replaceable_layers
from lowprec.ops import takes

TEXT_HEAD_WIDTH = 64


class CLIP(open_clip.model.CLIP):
    """open_clip's CLIP; on a GPU, `ln_final` normalizes only the pooled tokens, [batch, width]."""

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """int64 [batch, context_length] -> [batch, embed_dim]."""
        if not vision.is_fast(text) or isinstance(self.text_projection, nn.Linear):
            return super().encode_text(text, normalize)
        dtype = self.transformer.get_cast_dtype()
        x = self.token_embedding(text).to(dtype) + self.positional_embedding.to(dtype)
        x = self.transformer(x, attn_mask=self.attn_mask)
        end = getattr(self, "text_eos_id", None)
        pool = open_clip.transformer.text_global_pool
        x = self.ln_final(pool(x, text, self.text_pool_type, eos_token_id=end))
        x = x if self.text_projection is None else x @ self.text_projection
        return F.normalize(x, dim=-1) if normalize else x


def build_model(config: ModelConfig, intervention: str = "none") -> nn.Module:
    """A newly initialized model; `model(images, tokens)` returns a dict of features and scale.

    images: normalized, float [batch, 3, image_size, image_size]; tokens: int64 [batch,
    context_length]. `image_features` and `text_features`: [batch, embed_dim] with norm 1.
    `intervention`: "none", "zero_init" (layer scale 0.0) or "kq_norm" (norm of keys and queries).
    """
    sizes = model_config(config, intervention)
    if config.name in PRESETS:
        model = CLIP(**sizes, output_dict=True)
    else:
        model = open_clip.create_model(
            config.name,
            load_weights=False,
            pretrained_text=False,
            output_dict=True,
            **{key: sizes[key] for key in ("embed_dim", "vision_cfg", "text_cfg")},
        )
    vision.replace(model.visual)
    if config.patch_dropout:
        model.visual.patch_dropout = PatchDropout(config.patch_dropout)
    return model


def model_config(config: ModelConfig, intervention: str = "none") -> dict[str, Any]:
    """The model in open_clip's own terms, as in its files of `model_configs`."""
    changes = {"zero_init": {"ls_init_value": 0.0}, "kq_norm": {"qk_norm": True}}
    changes = changes.get(intervention, {})
    if config.name not in PRESETS:
        return _named_config(config, changes)
    return {
        "embed_dim": config.embed_dim,
        "vision_cfg": {
            "image_size": config.image_size,
            "patch_size": config.patch_size,
            "width": config.vision_width,
            "layers": config.vision_layers,
            "head_width": config.heads,
            **changes,
        },
        "text_cfg": {
            "context_length": config.context_length,
            "vocab_size": config.vocab_size,
            "width": config.text_width,
            "layers": config.text_layers,
            "heads": config.text_width // TEXT_HEAD_WIDTH,
            **changes,
        },
    }


def _named_config(config: ModelConfig, changes: dict) -> dict[str, Any]:
    named = open_clip.get_model_config(config.name)

    def sizes(tower: str, *names: str) -> dict:
        configured = {name: getattr(config, name) for name in names}
        configured = {name: value for name, value in configured.items() if value is not None}
        return {**named[tower], **changes, **configured}

    return {
        **named,
        "embed_dim": config.embed_dim or named["embed_dim"],
        "vision_cfg": sizes("vision_cfg", "image_size", "patch_size"),
        "text_cfg": sizes("text_cfg", "context_length", "vocab_size"),
    }


def set_precision(model: nn.Module, precision: PrecisionConfig) -> Layers:
    """Applies a recipe to the layers in `precision.where` of both towers, in place.

    Returns the layers, or nothing for recipe "high" and a model without such layers.
    Raises ValueError if there are no such layers for another recipe, see `apply_recipe`, or if the
    device cannot run the backend.
    """
    recipe = RECIPES.get(precision.recipe) or custom_recipe(precision.products)
    options = {k: getattr(precision, k) for k in ("backend", "outlier_threshold", "skip_slow")}
    inputs, device = None, next(model.parameters()).device
    if precision.backend == "triton":
        for name in recipe.native_formats:
            takes("triton", parse_format(name), device)
    if recipe.function and hasattr(model, "visual"):  # a blank image and caption
        like, side = next(model.visual.parameters()), image_size(model)
        tokens = torch.zeros(1, model.context_length, dtype=torch.int64, device=device)
        inputs = like.new_zeros(1, 3, side, side), tokens
    try:
        return apply_recipe(model, recipe, precision.where, inputs=inputs, **options)
    except NoLayerError:
        if recipe.function:
            raise
        return Layers(model, recipe.name, replaceable_layers(model))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The residual attention blocks of open_clip's own towers, vision first; no others."""
    towers = (model.visual, getattr(model, "text", model))
    transformers = [getattr(tower, "transformer", None) for tower in towers]
    return [block for t in transformers for block in getattr(t, "resblocks", ())]


def image_size(model: nn.Module) -> int:
    """Width and height, in pixels, of the images that the model expects."""
    size = model.visual.image_size
    return size[0] if isinstance(size, (tuple, list)) else size


def contrastive_loss(rank: int = 0, world_size: int = 1) -> nn.Module:
    """open_clip's symmetric cross entropy over the batch: `loss(**model(images, tokens))`, 0-d.

    With several processes, features are gathered with their gradients, and each rank computes only
    its own rows of the loss.
    """
    return open_clip.loss.ClipLoss(
        local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size
    )


class Normalize(nn.Module):
    """uint8 [batch, 3, height, width] -> float32, with CLIP's mean and standard deviation."""

    def __init__(self):
        super().__init__()
        mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
        self.register_buffer("mean", torch.tensor(mean)[:, None, None] * 255)
        self.register_buffer("std", torch.tensor(std)[:, None, None] * 255)

    def forward(self, images: Tensor) -> Tensor:
        """Normalizes images on the module's device."""
        return (images - self.mean).div_(self.std)
