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


def _torchao_fp8_rowwise(linear: nn.Linear) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")  # grad_weight in 16 bits
    return convert_to_float8_training(nn.Sequential(copy.deepcopy(linear)), config=config)


LINEAR_PEERS = {
    "bnb_switchback": LinearPeer(_bitsandbytes, "switchback", compiled=False, dtype="fp16"),
    "torchao_fp8_rowwise": LinearPeer(_torchao_fp8_rowwise, "hw_fp8_switchback", compiled=True),
}
