"""Replaces the linear layers of a model by low-precision ones, and prepares it for training."""

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lowprec.nn import attention, coverage
from lowprec.nn.attention import Attention, is_replaceable
from lowprec.nn.blocks import checkpoint_blocks, compile_blocks, find_blocks
from lowprec.nn.coverage import Layer, Layers
from lowprec.nn.linear import LowPrecisionLinear, Settings, SwitchBackLinear
from lowprec.nn.mlp import fuse, unfuse
from lowprec.nn.recipe import LINEAR_LAYERS, Recipe, find_recipe, gains_speed, matches

PLAIN = (  # nn.MultiheadAttention's out_proj has the second type
    nn.Linear,
    NonDynamicallyQuantizableLinear,
    LowPrecisionLinear,
    SwitchBackLinear,
)
BLOCKS = tuple(f"open_clip.transformer.{x}ResidualAttentionBlock" for x in ("", "Custom"))

Where = Sequence[str] | Callable[[nn.Module, str], bool]


class NoLayerError(ValueError):
    """No linear layer matches the patterns."""


def apply_recipe(
    model: nn.Module,
    recipe: str | Recipe | Mapping[str, str | Recipe],
    where: Where = LINEAR_LAYERS,
    *,
    inputs: Any = None,
    backend: str = "auto",
    outlier_threshold: float = 0.0,
    skip_slow: bool = False,
) -> Layers:
    """Applies a recipe to the linear layers that match `where`, in place.

    The self-attention of open_clip's blocks becomes `Attention` under every recipe, including
    "high"; its fused projection is the layer "in_proj". Any other nn.MultiheadAttention is left
    alone. All other layers become nn.Linear again under "high". Parameters keep their names and
    order, modules keep their hooks, and another recipe can be applied later. A layer whose owner
    reads its weight without calling it stays as it is. A forward on `inputs` finds such layers.

    Args:
        model: a module that contains the layers.
        recipe: a name in `lowprec.nn.recipe.RECIPES`, or a Recipe; or a dict of these by patterns,
            which replaces `where`, and of which the last that matches a layer counts.
        where: one or several fnmatch patterns for a layer's name or its end: "c_fc", "mlp.*",
            "visual.*.out_proj". open_clip's four names stand for those of other libraries, too:
            see ALIASES. Or a function of a layer's module and name, which says whether it is meant,
            as torchao's filters; the module of "in_proj" is the attention.
        inputs: a small batch: a tensor, a tuple of arguments or a dict of keyword arguments. Its
            forward finds layers that are never called.
        backend: see `lowprec.nn.linear.Settings`, also for outlier_threshold.
        outlier_threshold: for recipes with native products.
        skip_slow: keep layers 16-bit if their shape is no faster under the recipe.

    Raises:
        NoLayerError: no layer matches, or a pattern other than open_clip's four names matches none.
        ValueError: unknown or contradictory settings, a list as `inputs`, a layer that is sharded
            (`fully_shard`), or a layer that is more than an nn.Linear: a foreign subclass, a weight
            that is parametrized (weight_norm, pruning) or a tensor subclass (torchao), a patched
            forward, a LoRA matrix. The model is unchanged.
    """
    if isinstance(inputs, list):
        text = "must be a tensor, a tuple of arguments or a dict of keyword arguments"
        raise ValueError(f"inputs: a list; {text}")
    if isinstance(recipe, Mapping) and where is not LINEAR_LAYERS:
        raise ValueError("a dict of recipes has the patterns: leave out `where`")
    recipes = recipe if isinstance(recipe, Mapping) else {None: recipe}
    settings = {p: Settings(find_recipe(r), backend, outlier_threshold) for p, r in recipes.items()}
    matching = _find_layers(model, list(recipe) if isinstance(recipe, Mapping) else where)
    replace_attention(model)
    calls = None if inputs is None else coverage.trace(model, inputs)
    unfuse(model)
    layers = []
    for name, owner in matching.items():
        module = model.get_submodule(owner)
        called = None if calls is None else module in calls
        own = next(s for p, s in reversed(settings.items()) if p is None or matches(name, [p]))
        layers.append(_apply(module, name, own, called, skip_slow))
    fuse(model)
    _set_fast_path(model)
    names = ", ".join(dict.fromkeys(layer.recipe for layer in layers))
    return Layers(model, names, replaceable_layers(model), layers)


def prepare_for_training(
    model: nn.Module,
    recipe: str | Recipe | Mapping[str, str | Recipe] = "switchback",
    where: Where = LINEAR_LAYERS,
    *,
    inputs: Any = None,
    compile: bool = True,
    checkpointing: bool | None = None,
    skip_slow: bool = True,
    **settings: Any,
) -> Layers:
    """Prepares a model for fast training, in place, with 8-bit layers and compiled blocks.

    Applies a recipe to the layers in `where` (see `apply_recipe`, also for the errors), moves
    gradient checkpointing into the blocks and compiles each block on its own. A block is an element
    of an nn.Sequential or nn.ModuleList that contains linear layers, such as the residual blocks of
    open_clip, timm and transformers. Parameter names do not change. Call it before DDP or
    `fully_shard`. A later call replaces the compiled code and the recipe of the layers in its
    `where`. Warns if no layer is converted.

    Args:
        model: the model, such as `open_clip.create_model(...)`.
        recipe: as for `apply_recipe`; "high" keeps all layers 16-bit.
        where: patterns for layers, or a function, as for `apply_recipe`.
        inputs: a small batch: a tensor, a tuple of arguments or a dict of keyword arguments. Its
            forward pass detects layers that are never called although their weight is read.
        compile: whether blocks run under torch.compile. The first forward compiles them.
            Models that were compiled before are compiled again at their next forward.
        checkpointing: whether the backward pass recomputes the blocks, except their attention
            kernel. None keeps the choice of an earlier call and replaces the model's own
            checkpointing if that is on. Unless False, the model's own stays if it also recomputes
            blocks of convolutions.
        skip_slow: whether layers stay 16-bit if the recipe is no faster for their shape.
            Fake-quantized recipes are never faster.
        settings: `backend` and `outlier_threshold` of `apply_recipe`.
    """
    blocks = find_blocks(model)
    layers = apply_recipe(model, recipe, where, inputs=inputs, skip_slow=skip_slow, **settings)
    checkpoint_blocks(model, blocks, checkpointing)
    for block in blocks:
        block._compiled_call_impl = None
    if compile:
        torch.compiler.reset()  # its recompilation limit counts over all models of a process
        compile_blocks(model, blocks)
    layers = Layers(model, layers.recipe, replaceable_layers(model), layers)
    if layers.recipe != "high" and not any(layer.swapped for layer in layers):
        reasons = dict.fromkeys(layers.treatments[layer.name] for layer in layers)
        text = f"{layers.recipe} converts none of {len(layers)} linear layers"
        warnings.warn(f"{text} ({'; '.join(reasons)})", stacklevel=2)
    return layers


def _apply(
    module: nn.Module, name: str, settings: Settings, called: bool | None, skip_slow: bool
) -> Layer:
    """Makes a layer low-precision, unless it is never called or `skip_slow` keeps it 16-bit."""
    weight = module.in_proj_weight if isinstance(module, Attention) else module.weight
    shape, recipe = weight.shape[::-1], settings.recipe
    is_wanted = not skip_slow or gains_speed(recipe, *shape)
    swapped = recipe.function and called is not False and is_wanted
    _set_settings(module, settings if swapped else None)
    return Layer(name, *shape, swapped, called, recipe.name)


def _set_settings(module: nn.Module, settings: Settings | None) -> None:
    """Makes a layer, or the fused projection of an Attention, low-precision; None: 16 bits."""
    if isinstance(module, Attention):
        module.in_proj_settings = settings
    elif settings is not None:
        if not isinstance(module, LowPrecisionLinear):
            module.__class__ = LowPrecisionLinear  # keeps parameters, hooks and mode
        module.settings = settings
    elif isinstance(module, LowPrecisionLinear):
        module.__class__ = nn.Linear
        del module.settings


def linear_layers(model: nn.Module) -> dict[str, str]:
    """Maps each linear layer that its owner calls to the name of the module with its weight."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention) or _is_block_attention(model, name):
            layers[f"{name}.in_proj"] = name
        elif isinstance(module, nn.Linear) and not _is_read_by_its_owner(model, name):
            layers[name] = name
    return layers


def replaceable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Maps each linear layer that a recipe can be applied to, to the module with its weight."""
    modules = {layer: model.get_submodule(name) for layer, name in linear_layers(model).items()}
    return {layer: module for layer, module in modules.items() if not find_fault(module, layer)}


def _find_layers(model: nn.Module, where: Where) -> dict[str, str]:
    """Maps each layer that matches to the name of the module that holds its weight."""
    where, layers = [where] if isinstance(where, str) else where, linear_layers(model)
    idle: list[str] = []
    if callable(where):
        is_meant = {
            layer: where(model.get_submodule(name), layer) for layer, name in layers.items()
        }
        matching, meant = (
            {layer: layers[layer] for layer in layers if is_meant[layer]},
            "the filter",
        )
    else:
        matching = {layer: name for layer, name in layers.items() if matches(layer, where)}
        idle = [p for p in where if not any(matches(layer, [p]) for layer in layers)]
        meant = ", ".join(idle) or "[]"
    if not matching or not set(idle) <= set(LINEAR_LAYERS):  # no library has all four of these
        raise NoLayerError(f"no linear layer matches {meant}; {_suggest(model, idle)}")
    for layer, name in matching.items():
        if fault := find_fault(model.get_submodule(name), layer):
            raise ValueError(fault)
    return matching


def _suggest(model: nn.Module, patterns: Sequence[str]) -> str:
    """Names all layers that can be replaced, and patterns for those of blocks, nearest first."""
    fit = list(replaceable_layers(model))
    inside = [layer for layer in fit if any(map(str.isdecimal, layer.split(".")[:-1]))] or fit
    names = ", ".join(dict.fromkeys(re.sub(r"\b\d+(?=\.)", "*", layer) for layer in fit))
    endings = list(dict.fromkeys(layer.rpartition(".")[2] for layer in inside))
    words = [pattern.rpartition(".")[2] for pattern in patterns]
    alike = {x: [SequenceMatcher(None, x, word).ratio() for word in words] for x in endings}
    nearest = sorted(endings, key=lambda x: -max(alike[x], default=0))[:8]
    hint = f"; for example where={json.dumps(nearest)}" if any(inside) else ""
    others = list(coverage.other_weights(model))
    more = f"; {others[0]} and {len(others) - 1} more are no nn.Linear" if others else ""
    return f"the model has: {names or 'none that fits'}{hint}{more}"


def find_fault(module: nn.Module, layer: str) -> str:
    """Why a linear layer cannot be replaced, or ""."""
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


def _set_fast_path(model: nn.Module) -> None:
    """Lets PyTorch's encoders call their low-precision layers in evaluation, too.

    An encoder without such layers gets back the fast path that an earlier recipe took from it.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            condition, off = "activation_relu_or_gelu", 0
        elif isinstance(module, nn.TransformerEncoder):
            condition, off = "use_nested_tensor", False
        else:
            continue
        before = f"_{condition}_before"
        if any(isinstance(child, LowPrecisionLinear) for child in module.modules()):
            vars(module).setdefault(before, getattr(module, condition))
            setattr(module, condition, off)
        elif before in vars(module):
            setattr(module, condition, vars(module).pop(before))


def _is_block_attention(model: nn.Module, name: str) -> bool:
    """Whether `Attention` can replace a module, given how its owner calls it.

    The owner must be open_clip's block, and not for cross-attention, where the block has a norm for
    keys and values.
    """
    module, owner = model.get_submodule(name), _owner(model, name)
    kind = f"{type(owner).__module__}.{type(owner).__qualname__}"  # others may pass other masks
    is_block = kind.endswith(BLOCKS) and not hasattr(owner, "ln_1_kv")
    return is_block and is_replaceable(module)


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _is_read_by_its_owner(model: nn.Module, name: str) -> bool:
    """Whether the module around a linear layer uses its weight without calling it."""
    owner = _owner(model, name)
    if isinstance(owner, nn.MultiheadAttention):
        is_ours = isinstance(owner, Attention)
        return not is_ours and not _is_block_attention(model, name.rpartition(".")[0])
    return type(owner).__name__ == "AttentionPool2d"
