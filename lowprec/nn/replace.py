"""Swaps the linear layers of a model for low-precision ones, and says which."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lowprec.nn.attention import Attention, is_replaceable, low_precision
from lowprec.nn.linear import LowPrecisionLinear, find_recipe
from lowprec.nn.mlp import LowPrecisionMLP, can_fuse, unfuse
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
    "visual.*.out_proj". Self-attention of nn.MultiheadAttention and of open_clip is replaced by
    `Attention` under every recipe, "high" included; its fused projection is the layer "in_proj".
    Parameters, their names and their order stay, and another recipe may be applied later.
    `skip_slow` leaves layers 16-bit whose shape gains no speed. Returns every layer that matches;
    ValueError if none does.
    """
    recipe = find_recipe(recipe)
    settings = {"backend": backend, "outlier_threshold": outlier_threshold}
    if isinstance(model, nn.Linear | nn.MultiheadAttention):
        raise ValueError(
            f"a {type(model).__name__} has no owner to swap it in: wrap it in a module"
        )
    _replace_attention(model)
    unfuse(model)
    found = []
    for name, module in list(model.named_modules()):
        if isinstance(module, Attention):
            shape = module.in_proj_weight.shape[::-1]
            layer = f"{name}.in_proj"
        elif isinstance(module, nn.Linear) and not _is_read_by_its_owner(model, name):
            shape = (module.in_features, module.out_features)
            layer = name
        else:
            continue
        if not _matches(layer, where):
            continue
        gains = gains_speed(recipe, *shape)
        swapped = recipe.function and (gains or not skip_slow)
        found.append(Layer(layer, *shape, swapped, gains))
        if swapped and isinstance(module, Attention):
            module.set_in_proj_recipe(recipe, **settings)
        elif swapped:
            model.set_submodule(name, low_precision(module, recipe, **settings))
        elif isinstance(module, Attention):
            module.in_proj_settings = None
        elif isinstance(module, LowPrecisionLinear):
            module.set_recipe("high")
    for name, module in list(model.named_modules()):
        if can_fuse(module):
            model.set_submodule(name, LowPrecisionMLP(module))
    if not found:
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        few = ", ".join(linears[:4]) or "none"
        raise ValueError(f"no linear layer matches {', '.join(where)}; there are: {few}")
    return found


def _replace_attention(model: nn.Module) -> None:
    modules = [(name, module) for name, module in model.named_modules() if is_replaceable(module)]
    for name, module in modules:
        model.set_submodule(name, Attention(module).train(module.training))


def _is_read_by_its_owner(model: nn.Module, name: str) -> bool:
    """Whether the module around a linear layer takes its weight and never calls it."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return isinstance(owner, nn.MultiheadAttention) or type(owner).__name__ == "AttentionPool2d"


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
        text += f"; no faster than 16 bit by measurements on an H100: {shapes}"
    return text
