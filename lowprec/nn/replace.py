"""Replaces the linear layers of a model by low-precision ones and reports which."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lowprec.nn import attention
from lowprec.nn.attention import Attention, is_replaceable
from lowprec.nn.linear import LowPrecisionLinear, Settings, SwitchBackLinear
from lowprec.nn.mlp import fuse, unfuse
from lowprec.nn.recipe import Recipe, find_recipe

LAYERS = ("in_proj", "out_proj", "c_fc", "c_proj")  # low-precision in arXiv:2304.13013
GAINS_FROM = {  # recipe: min(in, out) from which it is faster than 16 bit, without launch times
    "switchback": 768,
    "switchback_m": 1024,
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


@dataclass(frozen=True)
class Layer:
    """A linear layer that matches; `gains`: the recipe makes its shape faster than 16 bit."""

    name: str
    in_features: int
    out_features: int
    swapped: bool
    gains: bool


def apply_recipe(
    model: nn.Module,
    recipe: str | Recipe,
    where: Sequence[str] = LAYERS,
    *,
    backend: str = "auto",
    outlier_threshold: float = 0.0,
    skip_slow: bool = False,
) -> list[Layer]:
    """Applies a recipe to the linear layers that match `where`, in place.

    The self-attention of open_clip's blocks becomes `Attention` under every recipe, including
    "high"; its fused projection is the layer "in_proj". Any other nn.MultiheadAttention is left
    alone. Parameters keep their names and order, modules keep their hooks, and another recipe can
    be applied later. Layers whose owner reads their weight without calling them are ignored.

    Args:
        model: a module that contains the layers.
        recipe: a name in `RECIPES`, or a Recipe.
        where: fnmatch patterns for a layer's name or its end: "c_fc", "mlp.*",
            "visual.*.out_proj".
        backend: see `lowprec.nn.linear.Settings`, also for outlier_threshold.
        outlier_threshold: for recipes with native products.
        skip_slow: keep layers 16-bit if their shape is no faster under the recipe.

    Returns:
        The layers that match, in the order of the model.

    Raises:
        NoLayerError: no layer matches.
        ValueError: unknown or contradictory settings, a layer that is already int8 (`to_int8`), or
            a layer that is more than an nn.Linear: a foreign subclass (LoRA), a parametrized weight
            (weight_norm, pruning) or a patched forward. The model is unchanged.
    """
    recipe = find_recipe(recipe)
    settings = Settings(recipe, backend, outlier_threshold)
    matching = _find_layers(model, where)
    replace_attention(model)
    unfuse(model)
    layers = []
    for layer, name in matching.items():
        module = model.get_submodule(name)
        weight = module.in_proj_weight if isinstance(module, Attention) else module.weight
        shape = weight.shape[::-1]
        gains = gains_speed(recipe, *shape)
        swapped = recipe.function and (gains or not skip_slow)
        layers.append(Layer(layer, *shape, swapped, gains))
        if isinstance(module, Attention):
            module.in_proj_settings = settings if swapped else None
        elif swapped:
            if not isinstance(module, LowPrecisionLinear):
                module.__class__ = LowPrecisionLinear  # keeps parameters, hooks and mode
            module.settings = settings
        elif isinstance(module, LowPrecisionLinear):
            module.set_recipe("high")
    fuse(model)
    return layers


def _find_layers(model: nn.Module, where: Sequence[str]) -> dict[str, str]:
    """Maps each layer that matches to the name of the module that holds its weight."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention) or _is_block_attention(model, name):
            layers[f"{name}.in_proj"] = name
        elif _is_int8(module):
            layers[name] = name
        elif isinstance(module, nn.Linear) and not _is_read_by_its_owner(model, name):
            layers[name] = name
    matching = {layer: name for layer, name in layers.items() if _matches(layer, where)}
    if not matching:
        few = ", ".join(list(layers)[:4]) or "none"
        raise NoLayerError(f"no linear layer matches {', '.join(where)}; the model has: {few}")
    for layer, name in matching.items():
        module = model.get_submodule(name)
        if _is_int8(module):
            raise ValueError(f"{layer} is already int8: apply the recipe before to_int8")
        if isinstance(module, nn.Linear) and not is_plain(module):
            raise ValueError(
                f"{layer} ({type(module).__name__}) is more than an nn.Linear: a subclass, a"
                " parametrization or a patched forward would be lost; leave it out of `where`"
            )
    return matching


def _is_int8(module: nn.Module) -> bool:
    return "weight_scale" in module._buffers or "in_proj_weight_scale" in module._buffers


def is_plain(linear: nn.Linear) -> bool:
    """Whether a layer is nn.Linear or one of ours, unmodified except for hooks."""
    has_weight = linear._parameters.get("weight") is not None
    return type(linear) in PLAIN and has_weight and "forward" not in vars(linear)


def replace_attention(model: nn.Module) -> None:
    """Replaces self-attention that `Attention` computes exactly, in place."""
    for name, module in list(model.named_modules()):
        if _is_block_attention(model, name):
            attention.replace(module)


def _is_block_attention(model: nn.Module, name: str) -> bool:
    """Whether `Attention` can replace a module, judging also by how its owner calls it.

    For an nn.MultiheadAttention the owner must be open_clip's block, and not for cross-attention,
    where the block has a norm for keys and values.
    """
    module, owner = model.get_submodule(name), _owner(model, name)
    if not isinstance(module, nn.MultiheadAttention):
        return is_replaceable(module)
    is_block = type(owner).__name__ == "ResidualAttentionBlock" and not hasattr(owner, "ln_1_kv")
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


def _matches(name: str, where: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for pattern in where)


def gains_speed(recipe: Recipe, in_features: int, out_features: int) -> bool:
    """Whether a layer of this shape is faster than nn.Linear on an H100; fake-quantized: never.

    Measured for dim to 4 dim and back, from dim 768, as CUDA graphs: experiments/PERFORMANCE.md.
    """
    least = GAINS_FROM.get(recipe.name)
    return least is not None and min(in_features, out_features) >= least


def summary(recipe: str, layers: Sequence[Layer]) -> str:
    """One line: how many layers are low-precision, and the shapes that gain no speed."""
    swapped = [layer for layer in layers if layer.swapped]
    text = f"{recipe}: {len(swapped)} of {len(layers)} layers"
    slow = Counter(
        f"{layer.in_features} to {layer.out_features}" for layer in layers if not layer.gains
    )
    if slow:
        shapes = ", ".join(f"{count} x {shape}" for shape, count in slow.items())
        text += f"; too small to be faster than in 16 bit (measured on an H100): {shapes}"
    return text
