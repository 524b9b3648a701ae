"""Layers and optimizers of other libraries, as the benchmarks build them.

Libraries are imported when a peer is built: one that is not installed or does not run here raises,
and its line says so.
"""

import copy
import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.cuda import libdevice

PACKAGES = ("bitsandbytes", "torchao", "torch-optimi")


def library_optimizer(module: str, name: str, **options: object) -> Callable:
    """Returns `build(params)`, which imports a library and makes its optimizer."""

    def build(params: list[Tensor]) -> torch.optim.Optimizer:
        return getattr(importlib.import_module(module), name)(params, **options)

    return build


@dataclass(frozen=True)
class LinearPeer:
    """A low-precision linear layer: `build(linear)` has the same parameters, of type `dtype`.

    Its error is compared with that of our recipe `like`. `compiled`: as its library recommends.
    """

    build: Callable
    like: str
    compiled: bool
    dtype: str = "bf16"


def _bitsandbytes(linear: nn.Linear) -> nn.Module:
    """SwitchBack of the paper's first author, in bitsandbytes < 0.50; works in fp16 alone."""
    _restore_libdevice()
    from bitsandbytes.nn.triton_based_modules import SwitchBackLinear

    layer = SwitchBackLinear(linear.in_features, linear.out_features, linear.bias is not None)
    layer = layer.to(linear.weight.device, linear.weight.dtype)
    layer.load_state_dict(linear.state_dict())
    return layer


def _restore_libdevice() -> None:
    """Gives Triton back the `tl.libdevice.llrint` that bitsandbytes' kernels call.

    Triton moved libdevice to `triton.language.extra`, where llrint takes float32 and no longer
    converts. Must run before bitsandbytes is imported.
    """

    @triton.jit
    def llrint(x):
        return libdevice.llrint(x.to(tl.float32))

    if not hasattr(tl, "libdevice"):
        tl.libdevice = types.ModuleType("triton.language.libdevice")
        tl.libdevice.llrint = llrint
        sys.modules["triton.language.libdevice"] = tl.libdevice


def _torchao(recipe: str, linear: nn.Linear) -> nn.Module:
    """A recipe of torchao's float8 training; "rowwise_with_gw_hp" has grad_weight in 16 bits."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(nn.Sequential(copy.deepcopy(linear)), config=config)


class Dinov3Linear(nn.Linear):
    """The arithmetic of DINOv3's `Fp8Linear`, whose license keeps its code out of this project.

    SwitchBack with e4m3 gradients, and with a scale for each row of the weight in output.
    """

    @classmethod
    def like(cls, linear: nn.Linear) -> nn.Module:
        """A copy of a linear layer with this arithmetic."""
        layer = copy.deepcopy(linear)
        layer.__class__ = cls
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """[M, in_features] -> [M, out_features]."""
        return _Dinov3.apply(input, self.weight, self.bias)


class _Dinov3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MK, w_NK, bias):
        ctx.save_for_backward(x_MK, w_NK)
        return _scaled_after(x_MK, w_NK, w_NK.abs().amax(dim=1, keepdim=True)) + bias

    @staticmethod
    def backward(ctx, g_MN):
        x_MK, w_NK = ctx.saved_tensors
        grad_input = _scaled_after(g_MN, w_NK.T, w_NK.abs().amax().reshape(1, 1))
        return grad_input, g_MN.T @ x_MK, g_MN.sum(dim=0)


def _scaled_after(a_MK: Tensor, b_NK: Tensor, b_amax: Tensor) -> Tensor:
    """An e4m3 product by cuBLAS, without fast accumulation; scales multiply its 16-bit result."""
    e4m3, one = torch.float8_e4m3fn, torch.ones(1, 1, device=a_MK.device)
    amax = a_MK.abs().amax(dim=1, keepdim=True), b_amax
    a_scale, b_scale = (m.float().clamp(min=1e-12) / torch.finfo(e4m3).max for m in amax)
    a_q, b_q = (a_MK / a_scale).to(e4m3), (b_NK / b_scale).to(e4m3).contiguous()
    product = torch._scaled_mm(a_q, b_q.T, one, one, out_dtype=torch.bfloat16)
    return (product * a_scale * b_scale.T).to(torch.bfloat16)


LINEAR_PEERS = {
    "bnb_switchback": LinearPeer(_bitsandbytes, "switchback", compiled=False, dtype="fp16"),
    "dinov3": LinearPeer(Dinov3Linear.like, "hw_fp8_switchback", compiled=True),
}
LINEAR_PEERS |= {
    f"torchao_{recipe}": LinearPeer(partial(_torchao, recipe), like, compiled=True)
    for recipe, like in (
        ("tensorwise", "hw_fp8_tensorwise"),
        ("rowwise", "fp8_rowwise"),
        ("rowwise_with_gw_hp", "hw_fp8_switchback"),
    )
}
