"""Low precision in CLIP's towers: which layers, and attention that knows its mask."""

import torch
from torch import nn

from lowprec.config.schema import PrecisionConfig
from lowprec.nn.attention import Attention
from lowprec.nn.recipe import RECIPES, custom_recipe
from lowprec.nn.replace import Layer, NoLayerError, apply_recipe

TIMM_NAMES = {  # our name of a layer: its name in a tower of timm
    "in_proj": "attn.qkv",
    "out_proj": "attn.proj",
    "c_fc": "mlp.fc1",
    "c_proj": "mlp.fc2",
}


def set_precision(model: nn.Module, precision: PrecisionConfig) -> list[Layer]:
    """Gives the layers of `precision.where` in both towers the products of the recipe, in place.

    Returns what became of each; of a model without such layers, under recipe "high", nothing.
    Raises ValueError where another recipe finds no layer.
    """
    recipe = RECIPES.get(precision.recipe) or custom_recipe(precision.products)
    where = [*precision.where, *(TIMM_NAMES[name] for name in precision.where)]
    try:
        layers = apply_recipe(
            model,
            recipe,
            where,
            backend=precision.backend,
            outlier_threshold=precision.outlier_threshold,
            skip_slow=precision.skip_slow,
        )
    except NoLayerError:
        if recipe.function:
            raise
        layers = []
    text = getattr(model, "text", model)
    mask = getattr(text, "attn_mask", None)
    if mask is not None and _is_causal(mask) and getattr(text, "cls_emb", None) is None:
        for module in text.transformer.modules():
            if isinstance(module, Attention):
                module.causal = True
    return layers


def _is_causal(mask: torch.Tensor) -> bool:
    """Whether a mask adds -inf above the diagonal and 0 elsewhere."""
    return torch.equal(mask, torch.full_like(mask, float("-inf")).triu(1))
