"""What the low-precision layers refuse, so that all of them refuse it alike."""

import torch
from torch import Tensor

from lowprec import ops
from lowprec.nearest import nearest
from lowprec.nn.recipe import RECIPES, Recipe


def find_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of a name; ValueError lists the names."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe {recipe!r}: one of {', '.join(RECIPES)} is expected")
    return RECIPES[recipe]


def check_settings(recipe: Recipe, backend: str, outlier_threshold: float) -> None:
    """ValueError for a backend that is none, and for outliers that the recipe cannot tell apart."""
    if backend not in ops.BACKENDS:
        known = ", ".join(ops.BACKENDS)
        hint = nearest(str(backend), ops.BACKENDS)
        raise ValueError(f"backend {backend!r}: one of {known} is expected{hint}")
    if not outlier_threshold >= 0:
        raise ValueError(f"outlier_threshold {outlier_threshold}: 0 or more is expected")
    if outlier_threshold == 0:
        return
    if recipe.saves_int8:
        raise ValueError(f"outlier_threshold needs the 16-bit input, which {recipe.name} drops")
    if not any(product and product.real for product in (recipe.output, recipe.grad_weight)):
        raise ValueError(
            f"outlier_threshold does nothing in {recipe.name}, which multiplies no input in 8 bits"
        )


def compute_dtype(input: Tensor) -> torch.dtype:
    """The dtype that a layer computes in: that of autocast, or the input's without.

    TypeError for an input of integers, which would become those of its output.
    """
    if not input.is_floating_point():
        raise TypeError(f"the input is {input.dtype}: a floating-point dtype is expected")
    device = input.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype


def refuse_second_derivative() -> None:
    """To be called by a backward: its products are not differentiated, and would count as constant.

    torch.compile refuses one itself.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("a low-precision layer has no second derivative: create_graph=False")
