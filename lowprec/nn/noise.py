"""Errors that quantization adds to tensors and to their products.

Shape suffixes: M = batch * tokens, K = features in, N = features out; x[M, K], W[N, K], g[M, N].
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from lowprec.formats import Format, exponent_of, power_of_two
from lowprec.nn.attention import Attention
from lowprec.nn.linear import compute_dtype, fake_quantize_operands
from lowprec.nn.recipe import PRODUCTS, SUMMED, Product, Recipe
from lowprec.ops import reference


def sqnr_db(exact: Tensor, approximate: Tensor) -> float:
    """`10 log10(sum(exact^2) / sum((exact - approximate)^2))`: signal to quantization noise.

    inf if they are equal, -inf if only the signal is 0, NaN if either contains NaN or inf.
    """
    signal = exact.double().square().sum()
    noise = (exact.double() - approximate.double()).square().sum()
    if noise == 0:
        return math.inf
    return 10 * (signal / torch.where(noise.isfinite(), noise, torch.nan)).log10().item()


def operand_noise(x: Tensor, x_hat: Tensor) -> dict[str, float]:
    """Statistics of an operand that quantization has changed to x_hat, of the same shape.

    `sqnr_db` of the quantized operand; `underflowed`, the share of non-zero elements that become 0;
    `peak`, the largest magnitude of x divided by its root mean square.
    """
    is_nonzero = x != 0
    lost = (is_nonzero & (x_hat == 0)).sum() / is_nonzero.sum().clamp(min=1)
    peak = x.abs().max() / x.square().mean().sqrt()
    return {"sqnr_db": sqnr_db(x, x_hat), "underflowed": lost.item(), "peak": peak.item()}


def product(name: str, first: Tensor, second: Tensor) -> Tensor:
    """A product of a linear layer, computed from its stored operands in their dtype.

    "output": x W^T; "grad_input": g W; "grad_weight": g^T x.
    """
    if name == "output":
        return first @ second.T
    return first @ second if name == "grad_input" else first.T @ second


def inner_dim(name: str, first: Tensor) -> int:
    """Number of terms in each element's sum: K for output, N for grad_input, M for grad_weight."""
    return first.shape[0] if name == "grad_weight" else first.shape[1]


def product_rows(name: str, how: Product | None, first: Tensor, second: Tensor) -> Iterator[dict]:
    """A row of plain numbers for each operand of a product; None: both are rounded to bf16.

    `sqnr_db` is the operand's. `product_sqnr_db` is the product's, without the errors of its own
    sums and rounding.
    """
    exact = [first.float(), second.float()]
    facts = {"product": name, "inner_dim": inner_dim(name, first)}
    if how is None:
        used = [tensor.bfloat16().float() for tensor in exact]
        formats = [{"format": "bf16", "granularity": None}] * 2
    else:
        used = fake_quantize_operands(name, how, *exact, torch.float32)
        both = (how.first, how.second)
        formats = [{"format": o.format, "granularity": o.granularity} for o in both]
        if how.hadamard:
            exact = list(map(reference.hadamard, exact, SUMMED[name]))
    facts["product_sqnr_db"] = sqnr_db(product(name, *exact), product(name, *used))
    for operand, format, x, x_hat in zip(PRODUCTS[name], formats, exact, used, strict=True):
        yield {**facts, "operand": operand, **format, **operand_noise(x, x_hat)}


def layer_rows(tensors: dict[str, Tensor], recipe: Recipe) -> Iterator[dict]:
    """`product_rows` of the three products of a layer with tensors x, w and g under a recipe."""
    for name, operands in PRODUCTS.items():
        yield from product_rows(name, getattr(recipe, name), *(tensors[o] for o in operands))


@contextlib.contextmanager
def recorded(
    layers: Mapping[str, nn.Module], keep: Callable[[str, Tensor, Tensor, Tensor], None]
) -> Iterator[None]:
    """Calls `keep(name, x, w, g)` for each call with elements, once backward has computed its g.

    `layers` are linear layers, and an Attention stands for its fused projection. x and g are 2-d,
    x is in the dtype that the layer computes in and w as stored.
    """

    def attach(name: str, weight: Tensor, x: Tensor, output: Tensor) -> None:
        if output.requires_grad and x.numel() and output.numel():
            x_MK = x.reshape(-1, x.shape[-1]).to(compute_dtype(x))
            rows = len(x_MK), -1
            output.register_hook(lambda g: keep(name, x_MK, weight.detach(), g.reshape(rows)))

    def after(name: str, module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
        attach(name, module.weight, (*args, *kwargs.values())[0], output)

    def in_proj(name: str, attention: Attention, x: Tensor) -> Tensor:
        output = Attention.in_proj(attention, x)
        attach(name, attention.in_proj_weight, x, output)
        return output

    with contextlib.ExitStack() as stack:
        for name, module in layers.items():
            if isinstance(module, Attention):
                module.in_proj = partial(in_proj, name, module)
                stack.callback(delattr, module, "in_proj")
            else:
                hook = partial(after, name)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def error_variance(x: Tensor, format: Format, granularity: str) -> float:
    """The predicted mean square of `x - quantize(x)`: `mean(step^2) / 12`, x 2-d.

    `step` is the scale times the distance between the two numbers of the format that enclose an
    element: an error that is uniform over half a step to either side has variance step^2 / 12. For
    int8 each step is the scale. For a format with Y mantissa bits it is scale 2^(exponent - Y),
    with the exponent of x / scale but not below the smallest one: the error is proportional to the
    element until it underflows.
    """
    x = x.float()
    _, scale = reference.quantize(x, format, granularity)
    step = scale.expand(x.shape).double()
    if format.exponent_bits:
        magnitude = (x / torch.where(scale > 0, scale, 1.0)).abs()
        exponent = exponent_of(magnitude).clamp(min=format.min_exponent)
        step = step * power_of_two(exponent - format.mantissa_bits)
    return step.square().mean().item() / 12


def dot_error_variance(
    x_MK: Tensor, w_NK: Tensor, formats: tuple[Format, Format], granularities: tuple[str, str]
) -> tuple[float, float]:
    """Measured and predicted error variance of the dot products between rows of x and of w.

    With x_hat = x + d and w_hat = w + e, the error of a sum of K terms is

        sum(x_hat w_hat) - sum(x w) = sum(x e + d w + d e).

    If d and e have mean 0 and are independent of each other, of both operands and from term to
    term, the K terms are uncorrelated and so are their three parts:

        variance = K (mean(x^2) var_e + mean(w^2) var_d + var_d var_e),

    which is linear in the inner dimension K; var_d and var_e come from `error_variance`. Where
    large x meet large w, and for int8 where outliers make the step coarse for most elements, the
    true variance is larger. Source: appendix C, arXiv:2304.13013, for int8.
    """
    x, w = x_MK.float(), w_NK.float()
    cases = list(zip((x, w), formats, granularities, strict=True))
    x_hat, w_hat = (reference.fake_quantize(*case, torch.float32).double() for case in cases)
    error = x_hat @ w_hat.T - x.double() @ w.double().T
    var_d, var_e = (error_variance(*case) for case in cases)
    square_x, square_w = (t.double().square().mean().item() for t in (x, w))
    predicted = x.shape[1] * (square_x * var_e + square_w * var_d + var_d * var_e)
    return error.square().mean().item(), predicted
