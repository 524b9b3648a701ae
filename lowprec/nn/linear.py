"""Linear layers whose three products follow a recipe: function, autograd, modules.

Shape suffixes: M = batch * tokens, K = features in, N = features out; x_MK, w_NK, g_MN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowprec import ops
from lowprec.formats import parse_format
from lowprec.nn.checks import (
    check_settings,
    compute_dtype,
    find_recipe,
    refuse_second_derivative,
)
from lowprec.nn.recipe import Operand, Recipe
from lowprec.ops import reference


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    backend: str = "auto",
    outlier_threshold: float = 0.0,
) -> Tensor:
    """`input @ weight^T + bias` with the products of a recipe, [..., in] -> [..., out].

    Computes in the autocast dtype, or the input's without autocast. Under a recipe with a
    function of its own the weight may be float32 then too.
    `outlier_threshold` > 0: features of the input that hold a magnitude above it are multiplied in
    16 bit, in output and grad_weight, as LLM.int8() (arXiv:2208.07339) does; here by a second
    product of the full size, without a host sync.
    There is no second derivative: RuntimeError in a backward with create_graph.
    Source: algorithms 1, 3, 4 and 5, arXiv:2304.13013.
    """
    check_settings(recipe, backend, outlier_threshold)
    dtype = compute_dtype(input)
    if not recipe.function:
        return F.linear(input, weight, bias)
    if input.numel() == 0:  # without a largest magnitude
        return F.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    x_MK = input.reshape(-1, input.shape[-1]).to(dtype)
    settings = (recipe, backend, outlier_threshold)
    if torch.is_grad_enabled():
        output = _Linear.apply(x_MK, weight, bias, *settings)
    else:
        output = _forward(x_MK, weight, bias, *settings, layout="rows")[0]
    return output.view(*input.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """One function for every recipe; what it saves is in the table of lowprec/nn/README.md."""

    @staticmethod
    def forward(ctx, x_MK, w_NK, bias, recipe, backend, outlier_threshold):
        shares_weight = _shares_weight(recipe) and ctx.needs_input_grad[0]
        layout = "both" if shares_weight else "rows"
        output, (q_MK, x_scale), (q_KN, w_scale) = _forward(
            x_MK, w_NK, bias, recipe, backend, outlier_threshold, layout=layout
        )
        needs_x = ctx.needs_input_grad[1]
        saved_x = (q_MK, x_scale) if recipe.saves_int8 else (x_MK, None)
        saved_w = (q_KN, w_scale) if shares_weight else (w_NK, None)
        ctx.save_for_backward(*(saved_x if needs_x else (None, None)), *saved_w)
        ctx.settings = (recipe, backend, outlier_threshold, shares_weight)
        ctx.dtypes = (x_MK.dtype, w_NK.dtype, None if bias is None else bias.dtype)
        return output

    @staticmethod
    def backward(ctx, g_MN):
        refuse_second_derivative()
        x_MK, x_scale, w, w_scale = ctx.saved_tensors
        recipe, backend, outlier_threshold, shares_weight = ctx.settings
        dtype, weight_dtype, bias_dtype = ctx.dtypes
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        g_MN = g_MN.to(dtype)
        grad_input = grad_weight = grad_bias = None
        if needs_x:
            weight = (w, w_scale) if shares_weight else w
            grad_input, grad_bias = _grad_input(g_MN, weight, recipe, backend, needs_bias)
        if needs_bias and grad_bias is None:
            grad_bias = g_MN.sum(dim=0, dtype=torch.float32)
        if needs_w:
            if x_scale is not None:
                x_MK = ops.dequantize_rows(x_MK, x_scale, dtype, backend=backend)
            grad_weight = _grad_weight(g_MN, x_MK, recipe, backend, outlier_threshold)
            grad_weight = grad_weight.to(weight_dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


def _shares_weight(recipe: Recipe) -> bool:
    """Whether output and grad_input multiply by the same quantized weight, once transposed."""
    output, grad_input = recipe.output, recipe.grad_input
    if output is None or grad_input is None or not (output.real and grad_input.real):
        return False
    return output.second == grad_input.second and output.second.granularity == "tensorwise"


def _forward(x_MK, w_NK, bias, recipe, backend, outlier_threshold, layout) -> tuple:
    """Output, the quantized input, and the transposed quantized weight if layout is "both"."""
    product, dtype, nothing = recipe.output, x_MK.dtype, (None, None)
    if product is None or not product.real:
        x_hat, w_hat = x_MK, w_NK.to(dtype)
        if product is not None:
            x_hat = _simulate(x_MK, product.first, dtype)
            w_hat = _simulate(w_NK, product.second, dtype)
        output = F.linear(x_hat, w_hat, None if bias is None else bias.to(dtype))
        return output, nothing, nothing
    inliers, outliers = _split_outliers(x_MK, outlier_threshold)
    x_q, _, x_scale = _quantize(inliers, product.first, backend, "rows")
    w_q, w_q_KN, w_scale = _quantize(w_NK, product.second, backend, layout)
    output = ops.matmul(x_q, w_q, x_scale, _as_rows(w_scale), bias, dtype, backend=backend)
    if outliers is not None:
        output = output + outliers @ w_NK.to(dtype).T
    return output, (x_q, x_scale), (w_q_KN, w_scale)


def _grad_input(g_MN, weight, recipe, backend, needs_bias) -> tuple[Tensor, Tensor | None]:
    """grad_input, and the bias gradient where one pass over g yields both."""
    product, dtype = recipe.grad_input, g_MN.dtype
    if product is None:
        return g_MN @ weight.to(dtype), None
    if not product.real:
        g_hat = _simulate(g_MN, product.first, dtype)
        return g_hat @ _simulate(weight, product.second, dtype), None
    grad_bias = None
    if needs_bias and product.first.granularity == "rowwise":
        format = parse_format(product.first.format)
        g_q, g_scale, grad_bias = ops.quantize_rows_and_sum(g_MN, format, backend=backend)
    else:
        g_q, _, g_scale = _quantize(g_MN, product.first, backend, "rows")
    if isinstance(weight, tuple):
        w_q_KN, w_scale = weight
    else:
        _, w_q_KN, w_scale = _quantize(weight, product.second, backend, "transposed")
    scale = _as_rows(w_scale, transposed=True)
    return ops.matmul(g_q, w_q_KN, g_scale, scale, None, dtype, backend=backend), grad_bias


def _grad_weight(g_MN, x_MK, recipe, backend, outlier_threshold) -> Tensor:
    """g^T x: 16 bit unless the recipe says otherwise."""
    product, dtype = recipe.grad_weight, g_MN.dtype
    if product is None:
        return g_MN.T @ x_MK
    if not product.real:
        g_hat = _simulate(g_MN, product.first, dtype)
        return g_hat.T @ _simulate(x_MK, product.second, dtype)
    inliers, outliers = _split_outliers(x_MK, outlier_threshold)
    _, g_q_NM, g_scale = _quantize(g_MN, product.first, backend, "transposed")
    _, x_q_KM, x_scale = _quantize(inliers, product.second, backend, "transposed")
    g_scale, x_scale = (_as_rows(scale, transposed=True) for scale in (g_scale, x_scale))
    grad_weight = ops.matmul(g_q_NM, x_q_KM, g_scale, x_scale, None, dtype, backend=backend)
    return grad_weight if outliers is None else grad_weight + g_MN.T @ outliers


def _quantize(x: Tensor, operand: Operand, backend: str, layout: str) -> tuple:
    format = parse_format(operand.format)
    return ops.quantize(x, format, operand.granularity, layout=layout, backend=backend)


def _simulate(x: Tensor, operand: Operand, dtype: torch.dtype) -> Tensor:
    return reference.simulate(x, parse_format(operand.format), operand.granularity, dtype)


def _as_rows(scale: Tensor, transposed: bool = False) -> Tensor:
    """A scale of a stored tensor as one of the rows that the product contracts along."""
    return scale.reshape(-1, 1) if transposed else scale


def _split_outliers(x_MK: Tensor, threshold: float) -> tuple[Tensor, Tensor | None]:
    """The input without and with only the features that hold a magnitude above the threshold."""
    if threshold == 0:
        return x_MK, None
    is_outlier = (x_MK.abs() > threshold).any(dim=0)
    return x_MK.masked_fill(is_outlier, 0), x_MK.masked_fill(~is_outlier, 0)


class LowPrecisionLinear(nn.Linear):
    """nn.Linear whose three products follow a recipe; same parameters, names and initial values.

    `recipe`: a name in RECIPES or a Recipe. Works wherever nn.Linear does: autocast or pure dtypes,
    any leading dimensions, with or without bias.
    """

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
        """Changes the products; ValueError for an unknown name and what makes no sense."""
        recipe = find_recipe(recipe)
        check_settings(recipe, backend, outlier_threshold)
        self.recipe = recipe
        self.backend = backend
        self.outlier_threshold = outlier_threshold

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return linear(
            input,
            self.weight,
            self.bias,
            self.recipe,
            backend=self.backend,
            outlier_threshold=self.outlier_threshold,
        )

    def extra_repr(self) -> str:
        """nn.Linear's, and the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


class SwitchBackLinear(LowPrecisionLinear):
    """Drop-in for nn.Linear: int8 forward and input gradient, 16-bit weight gradient.

    `recipe`: "switchback", "switchback_m" (saves int8 activations) or "switchback_q" (row- and
    column-wise weight).
    Source: algorithms 1, 3 and 4, arXiv:2304.13013.
    """
