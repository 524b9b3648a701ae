"""Swaps the linear layers of a model for low-precision ones, and says which."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lowprec.nn.attention import Attention, is_replaceable
from lowprec.nn.checks import check_settings, find_recipe
from lowprec.nn.linear import LowPrecisionLinear, SwitchBackLinear
from lowprec.nn.mlp import fuse, unfuse
from lowprec.nn.recipe import Recipe

LAYERS = ("in_proj", "out_proj", "c_fc", "c_proj")  # of arXiv:2304.13013
GAINS_FROM = {  # recipe: the smaller of in and out from which it beat 16 bit, launches left out
    "switchback": 768,
    "switchback_m": 1024,
    "switchback_q": 768,
    "llm_int8": 1280,
    "hw_fp8_tensorwise": 1280,
    "hw_fp8_switchback": 768,
}
PLAIN = (  # nn.MultiheadAttention's out_proj is of the second
    nn.Linear,
    NonDynamicallyQuantizableLinear,
    LowPrecisionLinear,
    SwitchBackLinear,
)


class NoLayerError(ValueError):
    """No linear layer matches."""


@dataclass(frozen=True)
class Layer:
    """What became of one linear layer; `gains`: whether its shape is faster so than in 16 bit."""

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
    """Gives the linear layers that match `where` the products of a recipe, in place.

    A pattern, as of fnmatch, stands for a layer's name or its end: "c_fc", "mlp.*",
    "visual.*.out_proj". The self-attention of open_clip's blocks is replaced by `Attention` under
    every recipe, "high" included; its fused projection is the layer "in_proj". Any other
    nn.MultiheadAttention stays: who calls it may ask for what `Attention` does not compute.
    Parameters, their names and their order stay, hooks too, and another recipe may be applied
    later. `skip_slow` leaves layers 16-bit whose shape gains no speed. Returns every layer that
    matches.

    ValueError names what is wrong, and nothing is changed then: an unknown recipe or backend, an
    `outlier_threshold` that the recipe has no use for, no layer matches (NoLayerError),
    one is int8 already (`to_int8`), or one is more than an nn.Linear, which the swap would lose: a
    subclass of others (LoRA), a parametrized weight (weight_norm, pruning), a patched forward.
    Layers whose weight their owner reads without calling them are not looked at.
    """
    recipe = find_recipe(recipe)
    check_settings(recipe, backend, outlier_threshold)
    settings = {"backend": backend, "outlier_threshold": outlier_threshold}
    if isinstance(model, nn.Linear | nn.MultiheadAttention):
        raise ValueError(
            f"a {type(model).__name__} has no owner to swap it in: wrap it in a module"
        )
    matching = _find_layers(model, where)
    replace_attention(model)
    unfuse(model)
    found = []
    for layer, name in matching.items():
        module = model.get_submodule(name)
        weight = module.in_proj_weight if isinstance(module, Attention) else module.weight
        shape = weight.shape[::-1]
        gains = gains_speed(recipe, *shape)
        swapped = recipe.function and (gains or not skip_slow)
        found.append(Layer(layer, *shape, swapped, gains))
        if swapped and isinstance(module, Attention):
            module.set_in_proj_recipe(recipe, **settings)
        elif swapped:
            if not isinstance(module, LowPrecisionLinear):
                module.__class__ = LowPrecisionLinear  # all that it holds stays, hooks too
            module.set_recipe(recipe, **settings)
        elif isinstance(module, Attention):
            module.in_proj_settings = None
        elif isinstance(module, LowPrecisionLinear):
            module.set_recipe("high")
    fuse(model)
    return found


def _find_layers(model: nn.Module, where: Sequence[str]) -> dict[str, str]:
    """The layers that match, each with the name of the module that holds its weight."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention) or _is_block_attention(model, name):
            layers[f"{name}.in_proj"] = name
        elif _is_int8(module):
            layers[name] = name
        elif isinstance(module, nn.Linear) and not _is_read_by_its_owner(model, name):
            layers[name] = name
    found = {layer: name for layer, name in layers.items() if _matches(layer, where)}
    if not found:
        few = ", ".join(list(layers)[:4]) or "none"
        raise NoLayerError(f"no linear layer matches {', '.join(where)}; there are: {few}")
    for layer, name in found.items():
        module = model.get_submodule(name)
        if _is_int8(module):
            raise ValueError(f"{layer} is int8 already: start from the model before to_int8")
        if isinstance(module, nn.Linear) and not is_plain(module):
            raise ValueError(
                f"{layer}, a {type(module).__name__}, is more than an nn.Linear, and what a"
                " subclass, a parametrization or a patched forward adds would be lost: choose"
                " other layers by `where`"
            )
    return found


def _is_int8(module: nn.Module) -> bool:
    return "weight_scale" in module._buffers or "in_proj_weight_scale" in module._buffers


def is_plain(linear: nn.Linear) -> bool:
    """Whether a layer is what nn.Linear or ours is, with a weight of its own; hooks are fine."""
    has_weight = linear._parameters.get("weight") is not None
    return type(linear) in PLAIN and has_weight and "forward" not in vars(linear)


def replace_attention(model: nn.Module) -> None:
    """Puts `Attention` in the place of self-attention that it computes exactly."""
    swap_modules(
        model,
        {
            module: Attention(module).train(module.training)
            for name, module in model.named_modules()
            if _is_block_attention(model, name)
        },
    )


def swap_modules(model: nn.Module, new: dict[nn.Module, nn.Module]) -> None:
    """Puts modules in the place of others, under every name that these have in the model."""
    for owner in [*model.modules(), *new.values()]:
        for name, module in list(owner._modules.items()):
            if module in new:
                setattr(owner, name, new[module])


def _is_block_attention(model: nn.Module, name: str) -> bool:
    """Whether a module is self-attention that `Attention` computes, called as it can be called.

    Of an nn.MultiheadAttention nothing says so but its owner: open_clip's own block, without the
    norm of keys and values that it has for cross-attention.
    """
    module, owner = model.get_submodule(name), _owner(model, name)
    if not isinstance(module, nn.MultiheadAttention):
        return is_replaceable(module)
    is_block = type(owner).__name__ == "ResidualAttentionBlock" and not hasattr(owner, "ln_1_kv")
    return is_block and is_replaceable(module)


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _is_read_by_its_owner(model: nn.Module, name: str) -> bool:
    """Whether the module around a linear layer takes its weight and never calls it."""
    owner = _owner(model, name)
    is_kept = not _is_block_attention(model, name.rpartition(".")[0])
    reads = isinstance(owner, nn.MultiheadAttention) and is_kept
    return reads or type(owner).__name__ == "AttentionPool2d"


def _matches(name: str, where: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for pattern in where)


def gains_speed(recipe: Recipe, in_features: int, out_features: int) -> bool:
    """Whether such a layer was faster than nn.Linear on an H100; simulated: never.

    Of dim to 4 dim and back, from 768 on, as CUDA graphs: experiments/PERFORMANCE.md.
    """
    least = GAINS_FROM.get(recipe.name)
    return least is not None and min(in_features, out_features) >= least


def summary(recipe: str, layers: Sequence[Layer]) -> str:
    """One line: how many layers are low-precision, and how many of them gain no speed."""
    swapped = [layer for layer in layers if layer.swapped]
    text = f"{recipe}: {len(swapped)} of {len(layers)} layers"
    slow = Counter(
        f"{layer.in_features} to {layer.out_features}" for layer in layers if not layer.gains
    )
    if slow:
        shapes = ", ".join(f"{count} x {shape}" for shape, count in slow.items())
        text += f"; too small to be faster than in 16 bit (measured on an H100): {shapes}"
    return text
