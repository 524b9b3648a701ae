"""The MLP of a transformer block as one function that quantizes GELU's result as it computes it.

Shape suffixes: M = batch * tokens, K = features of the block, N = hidden features.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lowprec import ops
from lowprec.formats import parse_format
from lowprec.nn import linear

CALLS = {  # MLPs besides nn.Sequential: their children in call order
    "timm.layers.mlp.Mlp": ("fc1", "act", "drop1", "norm", "fc2", "drop2"),
    "transformers.models.clip.modeling_clip.CLIPMLP": ("fc1", "activation_fn", "fc2"),
}


class LowPrecisionMLP(nn.Sequential):
    """A linear layer, exact GELU and a linear layer, run as one function.

    `fuse` converts an nn.Sequential or a module in CALLS to it. The result equals that of the three
    modules up to the rounding of GELU. For backward it saves its input, GELU's input and transposed
    8-bit copies of the weights. The children are called instead if one is changed or has a hook, or
    if not all gradients are needed.

    Attributes:
        original: the module's type before `fuse`.
    """

    original: type[nn.Module] = nn.Sequential  # also of a slice, which has no attribute of its own

    def forward(self, x: Tensor) -> Tensor:
        """[..., features] -> the same shape."""
        children = _in_order(self)
        is_fused = torch.is_grad_enabled() and x.numel() and not _has_any_global_hook()
        if is_fused and _is_fusible(children):
            fc, _, proj = filter(_does_something, children)
            parameters = (fc.weight, fc.bias, proj.weight, proj.bias)
            fits = x.shape[-1] == fc.in_features  # as in `linear`: fc raises the error
            if fits and x.requires_grad and all(p.requires_grad for p in parameters):
                x_MK = x.reshape(-1, x.shape[-1]).to(linear.compute_dtype(x))
                output = _MLP.apply(x_MK, *parameters, fc.settings)
                return output.view(*x.shape[:-1], proj.out_features)
        for child in children:
            x = child(x)
        return x


def fuse(model: nn.Module) -> None:
    """Fuses MLPs (linear layer, exact GELU, linear layer) whose settings allow it, in place."""
    for module in model.modules():
        is_known = type(module) is nn.Sequential or _full_name(type(module)) in CALLS
        if is_known and "forward" not in vars(module) and _is_fusible(_in_order(module)):
            module.original = type(module)
            module.__class__ = LowPrecisionMLP  # the same children, hooks and mode


def unfuse(model: nn.Module) -> None:
    """Restores the original type of fused MLPs, in place."""
    for module in model.modules():
        if isinstance(module, LowPrecisionMLP):
            module.__class__ = module.original
            vars(module).pop("original", None)


def _in_order(mlp: nn.Module) -> list[nn.Module]:
    """The children of an MLP in the order in which it calls them."""
    kind = mlp.original if isinstance(mlp, LowPrecisionMLP) else type(mlp)
    names = CALLS.get(_full_name(kind), mlp._modules)
    return [getattr(mlp, name) for name in names]


def _is_fusible(children: Sequence[nn.Module]) -> bool:
    """Whether modules called in this order can run as one function."""
    modules = list(filter(_does_something, children))
    if len(modules) != 3:
        return False
    fc, gelu, proj = modules
    kinds = (linear.LowPrecisionLinear, linear.SwitchBackLinear)
    return (
        _is_gelu(gelu)
        and all(type(layer) in kinds and layer.bias is not None for layer in (fc, proj))
        and fc.settings == proj.settings
        and _has_fused_products(fc.settings)
        and not any(_has_hooks(child) or "forward" in vars(child) for child in children)
    )


def _does_something(module: nn.Module) -> bool:
    is_dropout = type(module) is nn.Dropout and module.p == 0
    return not is_dropout and type(module) is not nn.Identity


def _is_gelu(module: nn.Module) -> bool:
    """Whether a module is exact GELU, from torch or transformers."""
    if type(module) is nn.GELU:
        return module.approximate == "none"
    name = _full_name(type(module))
    return name == "transformers.activations.GELUActivation" and module.act is F.gelu


def _full_name(kind: type[nn.Module]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs hooks besides its forward."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def _has_fused_products(settings: linear.Settings) -> bool:
    """Native products with row-wise x and g and a tensor-wise W, 16-bit weight gradient."""
    recipe = settings.recipe
    return (
        recipe.shares_weight
        and settings.outlier_threshold == 0
        and recipe.grad_weight is None
        and not recipe.saves_int8
        and recipe.output.first.granularity == recipe.grad_input.first.granularity == "rowwise"
    )


class _MLP(torch.autograd.Function):
    """The products of a SwitchBack recipe with GELU in between."""

    @staticmethod
    def forward(ctx, x_MK, w1_NK, bias1, w2_KN, bias2, settings):
        recipe, backend = settings.recipe, settings.backend
        x_format = parse_format(recipe.output.first.format)
        both = {"granularity": "tensorwise", "layout": "both", "backend": backend}
        w_format, dtype = parse_format(recipe.output.second.format), x_MK.dtype
        w1_q, w1_q_KN, w1_scale = ops.quantize(w1_NK, w_format, **both)
        w2_q, w2_q_NK, w2_scale = ops.quantize(w2_KN, w_format, **both)
        x_q, _, x_scale = ops.quantize(x_MK, x_format, "rowwise", backend=backend)
        h_MN = ops.matmul(x_q, w1_q, x_scale, w1_scale, bias1, dtype, backend=backend)
        a_q, a_scale = ops.gelu_quantize(h_MN, x_format, backend=backend)
        output = ops.matmul(a_q, w2_q, a_scale, w2_scale, bias2, dtype, backend=backend)
        ctx.save_for_backward(x_MK, h_MN, w1_q_KN, w1_scale, w2_q_NK, w2_scale)
        ctx.settings = (parse_format(recipe.grad_input.first.format), backend)
        ctx.dtypes = [tensor.dtype for tensor in (x_MK, w1_NK, bias1, w2_KN, bias2)]
        return output

    @staticmethod
    def backward(ctx, g_MK):
        linear.refuse_second_derivative()
        x_MK, h_MN, w1_q_KN, w1_scale, w2_q_NK, w2_scale = ctx.saved_tensors
        (format, backend), dtype = ctx.settings, ctx.dtypes[0]
        g_MK = g_MK.to(dtype)
        g_q, g_scale, grad_bias2 = ops.quantize_rows_and_sum(g_MK, format, backend=backend)
        g_MN = ops.matmul(g_q, w2_q_NK, g_scale, w2_scale, None, dtype, backend=backend)
        a_MN, g_MN, g_q, g_scale, grad_bias1 = ops.gelu_backward_quantize(
            h_MN, g_MN, format, backend=backend
        )
        grad_x = ops.matmul(g_q, w1_q_KN, g_scale, w1_scale, None, dtype, backend=backend)
        gradients = (grad_x, g_MN.T @ x_MK, grad_bias1, g_MK.T @ a_MN, grad_bias2)
        return *(g.to(kind) for g, kind in zip(gradients, ctx.dtypes, strict=True)), None
