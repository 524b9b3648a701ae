"""Linear layers whose three products follow a recipe: function, autograd, modules.

torchao's float8 training is the library to compare with. It writes quantization in plain torch,
multiplies with torch._scaled_mm and relies on torch.compile to fuse the two with their neighbors.
Here a layer is one autograd function that calls two kinds of operations, `ops.quantize` and
`ops.matmul`, and a recipe says with which formats and scales. What this gains:

- int8 and fp8, native and fake-quantized, are the same code, so that a comparison of recipes
  compares formats and nothing else.
- Every operation has a definition in plain torch for any device; tests compare kernels with it.
- It is fast without torch.compile: kernels quantize into both layouts in one pass, sum the bias
  gradient as they quantize g, and scale and add the bias as they store a product.
- Forward's quantized weight, 1 byte per element, serves backward as well (`Recipe.shares_weight`).

What one loses: torch.compile cannot fuse an operation that it does not see into, such as
quantization into the norm before it (`nn.mlp` fuses GELU by hand). fully_shard gathers weights in
the parameters' dtype, not in fp8. There are no scales from earlier steps (delayed scaling), no
sharding of the products themselves (tensor parallelism), no second derivatives, and kernels for
NVIDIA GPUs only.

Shape suffixes: M = batch * tokens, K = input features, N = output features; x_MK, w_NK, g_MN.
"""

import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowprec import ops
from lowprec.formats import parse_format
from lowprec.nearest import nearest
from lowprec.nn.recipe import SUMMED, Operand, Product, Recipe, find_recipe
from lowprec.ops import reference


@dataclass(frozen=True)
class Settings:
    """How a layer multiplies. Checked here, once, and not again in each forward.

    With an `outlier_threshold` above 0, input features that contain a larger magnitude are
    multiplied in 16 bits, in output and grad_weight, as in LLM.int8() (arXiv:2208.07339). This
    takes a second product of the full size, without a host sync.
    Raises ValueError for settings that are unknown or that do not fit together.
    """

    recipe: Recipe  # the formats of the three products
    backend: str = "auto"  # or "reference" or "triton"; see `lowprec.ops`
    outlier_threshold: float = 0.0

    @property
    def shares_input(self) -> bool:
        """Whether the layer saves the input as it is quantized for grad_weight."""
        recipe = self.recipe
        return recipe.shares_input and not (recipe.saves_int8 or self.outlier_threshold)

    def __post_init__(self):
        recipe, threshold = self.recipe, self.outlier_threshold
        if self.backend not in ops.BACKENDS:
            allowed, hint = ", ".join(ops.BACKENDS), nearest(str(self.backend), ops.BACKENDS)
            raise ValueError(f"backend {self.backend!r}: must be one of {allowed}{hint}")
        if not threshold >= 0:
            raise ValueError(f"outlier_threshold {threshold}: must be 0 or more")
        if threshold and recipe.saves_int8:
            raise ValueError(f"outlier_threshold needs the 16-bit input, which {recipe.name} drops")
        if threshold and not any(p and p.native for p in (recipe.output, recipe.grad_weight)):
            raise ValueError(
                f"outlier_threshold does nothing in {recipe.name}: no product of the input is 8-bit"
            )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    """`input @ weight^T + bias` with the products of a recipe: [..., in] -> [..., out].

    Computes in the autocast dtype, or without autocast in the input's dtype. The weight may be
    float32 in either case, except under recipe "high", which calls `F.linear`.
    Raises TypeError for integer input, ValueError for an input of another width, and RuntimeError
    in a backward with create_graph=True.
    Source: algorithms 1, 3, 4 and 5, arXiv:2304.13013.
    """
    dtype = compute_dtype(input)
    if not settings.recipe.function:
        return F.linear(input, weight, bias)
    if input.is_meta or not (input.numel() and weight.numel()):  # without a largest magnitude
        return F.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    # compared here, since torch.compile of torch 2.11 fails if a size turns out constant in _Linear
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(f"input {list(input.shape)}: must have {weight.shape[1]} features")
    if torch.is_grad_enabled():
        output = _Linear.apply(input, weight, bias, settings, dtype)
    else:
        x_MK = _cast(input.reshape(-1, input.shape[-1]), dtype)
        output = _forward(x_MK, weight, bias, settings, layout="rows")[0]
    return output.view(*input.shape[:-1], weight.shape[0])


def compute_dtype(input: Tensor) -> torch.dtype:
    """The dtype that a layer computes in: autocast's, or without autocast the input's.

    As in torch, autocast leaves float64 alone.
    Raises TypeError for integer input: the output would be integers too.
    """
    if not input.is_floating_point():
        raise TypeError(f"the input is {input.dtype}: must be a floating-point dtype")
    device = input.device.type
    if device == "meta" or input.dtype == torch.float64:  # no autocast
        return input.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype


def missing_format(recipe: Recipe, device: torch.device) -> str | None:
    """A native format of the recipe that a GPU does not multiply; a CPU computes the definition."""
    formats = recipe.native_formats if device.type == "cuda" else ()
    missing = (f for f in formats if ops.takes("auto", parse_format(f), device) == "reference")
    return next(missing, None)


def refuse_second_derivative() -> None:
    """Raises RuntimeError in a backward with create_graph=True, whose products are constants.

    torch.compile has an error of its own.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("a low-precision layer has no second derivative: use create_graph=False")


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # takes 1 to 2 us to find nothing to do


class _Linear(torch.autograd.Function):
    """One function for all recipes; lowprec/nn/README.md lists what each saves for backward."""

    @staticmethod
    def forward(ctx, input, w_NK, bias, settings, dtype):
        x_MK = _cast(input.reshape(-1, input.shape[-1]), dtype)
        recipe = settings.recipe
        needs_x, needs_w = ctx.needs_input_grad[:2]
        saves_q_weight = recipe.shares_weight and needs_x
        saves_q_input = needs_w and settings.shares_input
        layout = "both" if saves_q_weight else "rows"
        output, q_input, q_weight = _forward(x_MK, w_NK, bias, settings, layout, saves_q_input)
        saved_x = q_input if recipe.saves_int8 or saves_q_input else (x_MK, None)
        saved_w = q_weight if saves_q_weight else (w_NK, None)
        saved = (*(saved_x if needs_w else (None, None)), *(saved_w if needs_x else (None, None)))
        ctx.save_for_backward(*saved)
        ctx.settings, ctx.shape = settings, input.shape
        bias_dtype = None if bias is None else bias.dtype
        ctx.dtypes = (dtype, input.dtype, w_NK.dtype, bias_dtype)
        return output  # 2-d: callers could not change a view made here in place

    @staticmethod
    def backward(ctx, gradient):
        refuse_second_derivative()
        x_MK, x_scale, w, w_scale = ctx.saved_tensors
        settings, (dtype, input_dtype, weight_dtype, bias_dtype) = ctx.settings, ctx.dtypes
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        g_MN = _cast(gradient.reshape(-1, gradient.shape[-1]), dtype)
        grad_input = grad_weight = grad_bias = g_pair = None
        if needs_x:
            weight = w if w_scale is None else (w, w_scale)
            grad_input, grad_bias, g_pair = _grad_input(g_MN, weight, settings, needs_bias, needs_w)
            grad_input = _cast(grad_input.view(ctx.shape), input_dtype)
        if needs_bias and grad_bias is None:
            grad_bias = g_MN.sum(dim=0, dtype=torch.float32)
        if needs_w:
            if settings.recipe.saves_int8:
                x_MK = ops.dequantize(x_MK, x_scale, dtype, backend=settings.backend)
                x_scale = None
            x = x_MK if x_scale is None else (x_MK, x_scale)
            grad_weight = _cast(_grad_weight(g_MN, x, settings, g_pair), weight_dtype)
        if grad_bias is not None:
            grad_bias = _cast(grad_bias, bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None


def _forward(x_MK, w_NK, bias, settings, layout, saves_q_KM=False) -> tuple:
    """Output, (q_MK, scale) of the input, (q_KN, scale) of the weight if layout is "both".

    With `saves_q_KM`, the input's pair is (q_KM, scale), for grad_weight.
    """
    product, dtype, nothing = settings.recipe.output, x_MK.dtype, (None, None)
    if product is None or not product.native:
        x_hat, w_hat = x_MK, w_NK.to(dtype)
        if product is not None:
            x_hat, w_hat = fake_quantize_operands("output", product, x_MK, w_NK, dtype)
        output = F.linear(x_hat, w_hat, None if bias is None else bias.to(dtype))
        return output, nothing, nothing
    backend = settings.backend
    inliers, outliers = _split_outliers(x_MK, settings.outlier_threshold)
    if saves_q_KM:
        x_q, x_scale, *q_input, _ = _quantize_pair(x_MK, product.first, backend)
    else:
        x_q, _, x_scale = _quantize(inliers, product.first, backend, "rows")
        q_input = x_q, x_scale
    w_q, w_q_KN, w_scale = _quantize(w_NK, product.second, backend, layout)
    output = ops.matmul(x_q, w_q, x_scale, w_scale, bias, dtype, backend=backend)
    if outliers is not None:
        output = output + outliers @ w_NK.to(dtype).T
    return output, q_input, (w_q_KN, w_scale)


def _grad_input(g_MN, weight, settings, needs_bias, needs_w) -> tuple:
    """grad_input, then what the same pass over g gives, or None: grad_bias, (q_NM, scale) of g.

    weight: w_NK, or (q_KN, scale) if forward saved the quantized weight.
    """
    product, dtype, backend = settings.recipe.grad_input, g_MN.dtype, settings.backend
    if product is None:
        return g_MN @ weight.to(dtype), None, None
    if not product.native:
        g_hat, w_hat = fake_quantize_operands("grad_input", product, g_MN, weight, dtype)
        return g_hat @ w_hat, None, None
    grad_bias = g_pair = None
    if needs_w and settings.recipe.shares_gradient:
        g_q, g_scale, *g_pair, grad_bias = _quantize_pair(g_MN, product.first, backend, needs_bias)
    elif needs_bias and product.first.granularity == "rowwise":
        format = parse_format(product.first.format)
        g_q, g_scale, grad_bias = ops.quantize_rows_and_sum(g_MN, format, backend=backend)
    else:
        g_q, _, g_scale = _quantize(g_MN, product.first, backend, "rows")
    if isinstance(weight, tuple):
        w_q_KN, w_scale = weight
    else:
        _, w_q_KN, w_scale = _quantize(weight, product.second, backend, "transposed")
    grad_input = ops.matmul(g_q, w_q_KN, g_scale, w_scale.T, None, dtype, backend=backend)
    return grad_input, grad_bias, g_pair


def _grad_weight(g_MN, x, settings, g_pair) -> Tensor:
    """g^T x, in 16 bits unless the recipe quantizes it.

    x: x_MK, or (q_KM, scale) if forward saved it. g_pair: (q_NM, scale), or None.
    """
    product, dtype, backend = settings.recipe.grad_weight, g_MN.dtype, settings.backend
    if product is None:
        return g_MN.T @ x
    if not product.native:
        g_hat, x_hat = fake_quantize_operands("grad_weight", product, g_MN, x, dtype)
        return g_hat.T @ x_hat
    outliers = None
    if isinstance(x, tuple):
        q_KM, x_scale = x
    else:
        inliers, outliers = _split_outliers(x, settings.outlier_threshold)
        _, q_KM, x_scale = _quantize(inliers, product.second, backend, "transposed")
    q_NM, g_scale = g_pair or _quantize(g_MN, product.first, backend, "transposed")[1:]
    grad_weight = ops.matmul(q_NM, q_KM, g_scale.T, x_scale.T, None, dtype, backend=backend)
    return grad_weight if outliers is None else grad_weight + g_MN.T @ outliers


def _quantize_pair(x: Tensor, operand: Operand, backend: str, sums: bool = False) -> tuple:
    format = parse_format(operand.format)
    return ops.quantize_pair(x, format, operand.granularity, sums=sums, backend=backend)


def _quantize(x: Tensor, operand: Operand, backend: str, layout: str) -> tuple:
    format = parse_format(operand.format)
    return ops.quantize(x, format, operand.granularity, layout=layout, backend=backend)


def fake_quantize_operands(
    name: str, product: Product, first: Tensor, second: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """The operands of a fake-quantized product, as stored, after both roundings.

    With a Hadamard rotation, the summed dimension may be padded with zeros.
    """
    rounded = []
    both = zip((first, second), (product.first, product.second), SUMMED[name], strict=True)
    for tensor, operand, dim in both:
        if product.hadamard:
            tensor = reference.hadamard(tensor, dim)
        options = {"scale": operand.scale, "stochastic": operand.stochastic}
        format = parse_format(operand.format)
        tensor = reference.fake_quantize(tensor, format, operand.granularity, dtype, **options)
        rounded.append(tensor)
    return rounded


def _split_outliers(x_MK: Tensor, threshold: float) -> tuple[Tensor, Tensor | None]:
    """The input without its outlier features, and with nothing else (None for threshold 0)."""
    if threshold == 0:
        return x_MK, None
    is_outlier = (x_MK.abs() > threshold).any(dim=0)
    return x_MK.masked_fill(is_outlier, 0), x_MK.masked_fill(~is_outlier, 0)


class KeepsRecipe:
    """A module whose recipe's name goes with its weights, in the metadata of state dicts.

    torch.save keeps metadata. Keys and strict loading are those of a module without a recipe.
    """

    def recipe_name(self) -> str:
        """The name of the recipe of the layer's own weight."""
        return self.settings.recipe.name

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        getattr(destination, "_metadata", {}).get(prefix[:-1], {})["recipe"] = self.recipe_name()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        own, saved = self.recipe_name(), local_metadata.get("recipe")
        if saved not in (None, own):
            text = f"loading weights saved with recipe {saved} into layers with recipe {own}"
            warnings.warn(text, stacklevel=2)  # says the same for each layer, so it is shown once
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class LowPrecisionLinear(KeepsRecipe, nn.Linear):
    """nn.Linear whose three products follow a recipe; same parameters, names and initial values.

    Works under autocast or with 16-bit parameters. `set_recipe` changes the settings.

    Args:
        in_features, out_features, bias, device, dtype: as for nn.Linear.
        recipe: a name in `lowprec.nn.recipe.RECIPES`, or a Recipe.
        backend: see `lowprec.nn.linear.Settings`, also for outlier_threshold and errors.
    """

    settings: Settings

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "switchback",
        backend: str = "auto",
        outlier_threshold: float = 0.0,
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.set_recipe(recipe, backend, outlier_threshold)

    def set_recipe(
        self, recipe: str | Recipe, backend: str = "auto", outlier_threshold: float = 0.0
    ) -> None:
        """Replaces all settings; after an error (see `Settings`) nothing has changed."""
        self.settings = Settings(find_recipe(recipe), backend, outlier_threshold)

    @property
    def recipe(self) -> Recipe:
        """The formats of the three products."""
        return self.settings.recipe

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return linear(input, self.weight, self.bias, self.settings)

    def extra_repr(self) -> str:
        """nn.Linear's text, plus the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


class SwitchBackLinear(LowPrecisionLinear):
    """Drop-in for nn.Linear: int8 forward and input gradient, 16-bit weight gradient.

    `recipe`: "switchback" (algorithm 1), "switchback_m" (algorithm 3, saves int8 activations) or
    "switchback_q" (algorithm 4, row- and column-wise weight), arXiv:2304.13013.
    """
