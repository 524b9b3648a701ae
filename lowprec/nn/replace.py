"""Replaces the linear layers of a model by low-precision ones."""

import json
from collections.abc import Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lowprec.nn import attention, coverage
from lowprec.nn.attention import Attention, is_replaceable
from lowprec.nn.linear import LowPrecisionLinear, Settings, SwitchBackLinear
from lowprec.nn.mlp import fuse, unfuse
from lowprec.nn.recipe import LINEAR_LAYERS, Recipe, find_recipe

ALIASES = {  # open_clip's name: what timm, transformers and gated MLPs call the layer
    "in_proj": (
        *("attn.qkv", "token_mixer.qkv", "q_proj", "k_proj", "v_proj"),
        *("attn_pool.q", "attn_pool.kv", "attn.q", "attn.k", "attn.v", "attn.kv"),
    ),
    "out_proj": ("attn.proj", "token_mixer.proj", "attn_pool.proj"),
    "c_fc": ("mlp.fc1", "mlp.fc1_[gx]", "mlp.w[01]", "mlp.w12", "gate_proj", "up_proj"),
    "c_proj": ("mlp.fc2", "mlp.w[23]", "down_proj"),
}
GAINS_FROM = {  # recipe: min(in, out) from which it beats 16 bits, without launch times
    "switchback": 768,
    "switchback_m": 2048,
    "switchback_q": 768,
    "llm_int8": 1280,
    "hw_fp8_tensorwise": 1280,
    "hw_fp8_switchback": 768,
}
PLAIN = (  # nn.MultiheadAttention's out_proj has the second type
    nn.Linear,
    NonDynamicallyQuantizableLinear,
    LowPrecisionLinear,
    SwitchBackLinear,
)


class NoLayerError(ValueError):
    """No linear layer matches the patterns."""


def apply_recipe(
    model: nn.Module,
    recipe: str | Recipe,
    where: Sequence[str] = LINEAR_LAYERS,
    *,
    inputs: tuple | None = None,
    backend: str = "auto",
    outlier_threshold: float = 0.0,
    skip_slow: bool = False,
) -> coverage.Layers:
    """Applies a recipe to the linear layers that match `where`, in place.

    The self-attention of open_clip's blocks becomes `Attention` under every recipe, including
    "high"; its fused projection is the layer "in_proj". Any other nn.MultiheadAttention is left
    alone. Parameters keep their names and order, modules keep their hooks, and another recipe can
    be applied later. A layer whose owner reads its weight without calling it stays as it is. A
    forward on `inputs` finds such layers; without `inputs`, the next forward warns about them.

    Args:
        model: a module that contains the layers.
        recipe: a name in `lowprec.nn.recipe.RECIPES`, or a Recipe.
        where: one or several fnmatch patterns for a layer's name or its end: "c_fc", "mlp.*",
            "visual.*.out_proj". open_clip's four names stand for those of other libraries, too:
            see ALIASES.
        inputs: arguments of a small forward, to count calls and multiply-adds.
        backend: see `lowprec.nn.linear.Settings`, also for outlier_threshold.
        outlier_threshold: for recipes with native products.
        skip_slow: keep layers 16-bit if their shape is no faster under the recipe.

    Raises:
        NoLayerError: no layer matches, or a pattern other than open_clip's four names matches none.
        ValueError: unknown or contradictory settings, a layer that is already int8 (`to_int8`) or
            sharded (`fully_shard`), or a layer that is more than an nn.Linear: a foreign subclass,
            a weight that is parametrized (weight_norm, pruning) or a tensor subclass (torchao), a
            patched forward, a LoRA matrix. The model is unchanged.
    """
    recipe = find_recipe(recipe)
    settings = Settings(recipe, backend, outlier_threshold)
    matching = _find_layers(model, where)
    replace_attention(model)
    unchecked = [layer for layer in coverage.cancel_check(model) if layer not in matching]
    calls = None if inputs is None else coverage.trace(model, inputs)
    unfuse(model)
    layers = []
    for layer, name in matching.items():
        module = model.get_submodule(name)
        called = None if calls is None else module in calls.layers
        weight = module.in_proj_weight if isinstance(module, Attention) else module.weight
        shape = weight.shape[::-1]
        gains = gains_speed(recipe, *shape)
        swapped = recipe.function and called is not False and (gains or not skip_slow)
        layers.append(coverage.Layer(layer, *shape, swapped, gains, called))
        _set_settings(module, settings if swapped else None)
    fuse(model)
    _leave_fast_path(model)
    if calls is None:
        unchecked += [layer.name for layer in layers if layer.swapped]
    if unchecked:
        coverage.check_first_forward(model, unchecked)
    return coverage.Layers(layers, coverage.towers(model, calls), any(recipe.products))


def _set_settings(module: nn.Module, settings: Settings | None) -> None:
    """Makes a layer, or the fused projection of an Attention, low-precision; None: 16 bits."""
    if isinstance(module, Attention):
        module.in_proj_settings = settings
    elif settings is not None:
        if not isinstance(module, LowPrecisionLinear):
            module.__class__ = LowPrecisionLinear  # keeps parameters, hooks and mode
        module.settings = settings
    elif isinstance(module, LowPrecisionLinear):
        module.set_recipe("high")


def _find_layers(model: nn.Module, where: Sequence[str]) -> dict[str, str]:
    """Maps each layer that matches to the name of the module that holds its weight."""
    where, layers = [where] if isinstance(where, str) else where, {}
    for name, module in model.named_modules():
        if isinstance(module, Attention) or _is_block_attention(model, name):
            layers[f"{name}.in_proj"] = name
        elif coverage.is_int8(module):
            layers[name] = name
        elif isinstance(module, nn.Linear) and not _is_read_by_its_owner(model, name):
            layers[name] = name
    matching = {layer: name for layer, name in layers.items() if matches(layer, where)}
    idle = [p for p in where if not any(matches(layer, [p]) for layer in layers)]
    if not matching or not set(idle) <= set(LINEAR_LAYERS):  # no library has all four of these
        raise NoLayerError(
            f"no linear layer matches {', '.join(idle) or '[]'}; {_suggest(model, layers, idle)}"
        )
    for layer, name in matching.items():
        if fault := _fault(model.get_submodule(name), layer):
            raise ValueError(fault)
    return matching


def _suggest(model: nn.Module, layers: dict[str, str], patterns: Sequence[str]) -> str:
    """Names layers that can be replaced: those of numbered blocks, or all; the nearest first."""
    fit = [layer for layer, name in layers.items() if not _fault(model.get_submodule(name), layer)]
    inside = [layer for layer in fit if any(map(str.isdecimal, layer.split(".")[:-1]))] or fit
    examples = ", ".join(inside[:4]) + (", ..." if len(inside) > 4 else "") or "none that fits"
    endings = list(dict.fromkeys(layer.rpartition(".")[2] for layer in inside))
    words = [pattern.rpartition(".")[2] for pattern in patterns]
    alike = {x: [SequenceMatcher(None, x, word).ratio() for word in words] for x in endings}
    nearest = sorted(endings, key=lambda x: -max(alike[x], default=0))[:8]
    way_out = f"; name them: where={json.dumps(nearest)}" if any(inside) else ""
    return f"the model has: {examples}{way_out}"


def _fault(module: nn.Module, layer: str) -> str:
    """Why a linear layer cannot be replaced, or ""."""
    if coverage.is_int8(module):
        return f"{layer} is already int8: apply the recipe before to_int8"
    if type(getattr(module, "weight", None)).__name__ == "DTensor":
        return f"{layer} is sharded: apply the recipe before fully_shard"
    is_lora = any(part.lower().startswith("lora_") for part in layer.split("."))
    if isinstance(module, nn.Linear) and (is_lora or not is_plain(module)):
        kinds = f"{type(module).__name__} with {type(module.weight).__name__}"
        return (
            f"{layer} ({kinds}) is more than an nn.Linear: a subclass, a parametrization, a"
            " patched forward or LoRA would be lost; leave it out of `where`"
        )
    return ""


def is_plain(linear: nn.Linear) -> bool:
    """Whether a layer is nn.Linear or one of ours, unmodified except for hooks."""
    is_plain_weight = type(linear._parameters.get("weight")) is nn.Parameter
    return type(linear) in PLAIN and is_plain_weight and "forward" not in vars(linear)


def replace_attention(model: nn.Module) -> None:
    """Replaces self-attention that `Attention` computes exactly, in place.

    In a text tower with a causal mask, the kernel applies causality itself and adds no mask.
    """
    for name, module in list(model.named_modules()):
        if _is_block_attention(model, name):
            attention.replace(module)
    for tower in model.modules():
        mask, transformer = (getattr(tower, name, None) for name in ("attn_mask", "transformer"))
        adds_padding = getattr(tower, "cls_emb", None) is not None
        if isinstance(mask, Tensor) and not mask.is_meta and isinstance(transformer, nn.Module):
            is_causal = torch.equal(mask, torch.full_like(mask, float("-inf")).triu(1))
            for module in transformer.modules():
                if isinstance(module, Attention):
                    module.causal = is_causal and not adds_padding


def _leave_fast_path(model: nn.Module) -> None:
    """Lets PyTorch's encoders call their low-precision layers in evaluation, too."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
            if any(isinstance(child, LowPrecisionLinear) for child in module.modules()):
                module.activation_relu_or_gelu = 0  # a condition of a layer's fast path
                module.use_nested_tensor = False  # the encoder's


def _is_block_attention(model: nn.Module, name: str) -> bool:
    """Whether `Attention` can replace a module, given how its owner calls it.

    For an nn.MultiheadAttention the owner must be open_clip's block, and not for cross-attention,
    where the block has a norm for keys and values.
    """
    module, owner = model.get_submodule(name), _owner(model, name)
    if not isinstance(module, nn.MultiheadAttention):
        return is_replaceable(module)
    kind = f"{type(owner).__module__}.{type(owner).__qualname__}"  # others may pass other masks
    is_block = kind.endswith("open_clip.transformer.ResidualAttentionBlock")
    return is_block and not hasattr(owner, "ln_1_kv") and is_replaceable(module)


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _is_read_by_its_owner(model: nn.Module, name: str) -> bool:
    """Whether the module around a linear layer uses its weight without calling it."""
    owner = _owner(model, name)
    if isinstance(owner, nn.MultiheadAttention):
        is_ours = isinstance(owner, Attention)
        return not is_ours and not _is_block_attention(model, name.rpartition(".")[0])
    return type(owner).__name__ == "AttentionPool2d"


def matches(name: str, where: Sequence[str]) -> bool:
    """Whether a layer's name or its end matches one of the fnmatch patterns or its aliases."""
    patterns = [name for pattern in where for name in (pattern, *ALIASES.get(pattern, ()))]
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"*.{p}") for p in patterns)


def gains_speed(recipe: Recipe, in_features: int, out_features: int) -> bool:
    """Whether a layer of this shape is faster than nn.Linear on an H100; fake-quantized: never.

    Measured for dim to 4 dim and back, from dim 768, as CUDA graphs: experiments/PERFORMANCE.md.
    """
    least = GAINS_FROM.get(recipe.name)
    return least is not None and min(in_features, out_features) >= least
