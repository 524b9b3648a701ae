"""Low-precision linear layers of other libraries, built from an nn.Linear, for `bench_layer`.

A peer that is not installed or does not run here raises, and the benchmark says so by name.
"""

import copy
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass

PACKAGES = ("bitsandbytes", "torchao")


@dataclass(frozen=True)
class Peer:
    """`build(linear)` is the peer's layer with the same parameters, of dtype `dtype`.

    Its error is held against that of our recipe `like`. `compiled`: as its library recommends.
    """

    build: Callable
    like: str
    compiled: bool
    dtype: str = "bf16"


def _bitsandbytes(linear):
    """SwitchBack of the first author, of bitsandbytes < 0.50; works in fp16 alone."""
    _mend_libdevice()
    from bitsandbytes.nn.triton_based_modules import SwitchBackLinear

    layer = SwitchBackLinear(linear.in_features, linear.out_features, linear.bias is not None)
    layer = layer.to(linear.weight.device, linear.weight.dtype)
    layer.load_state_dict(linear.state_dict())
    return layer


def _mend_libdevice() -> None:
    """Gives Triton back the `tl.libdevice.llrint` that those kernels call.

    Triton moved libdevice to `triton.language.extra` and takes float32 there; before, it converted.
    Must run before bitsandbytes is imported, and nothing else of the package is changed.
    """
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import libdevice

    @triton.jit
    def llrint(x):
        return libdevice.llrint(x.to(tl.float32))

    if not hasattr(tl, "libdevice"):
        tl.libdevice = types.ModuleType("triton.language.libdevice")
        tl.libdevice.llrint = llrint
        sys.modules["triton.language.libdevice"] = tl.libdevice


def _torchao_int8(linear):
    """Row- and column-wise int8 output and grad_input: what our `switchback_q` computes.

    By module swap: the default, a tensor subclass, computes in 16 bit in torchao 0.17.
    """
    import torch
    from torchao import quantize_
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig

    layer = torch.nn.Sequential(copy.deepcopy(linear))
    config = Int8MixedPrecisionTrainingConfig(grad_weight=False, module_swap=True)
    quantize_(layer, config)
    return layer


def _torchao_float8(linear, recipe: str):
    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(torch.nn.Sequential(copy.deepcopy(linear)), config=config)


PEERS = {
    "bnb_switchback": Peer(_bitsandbytes, like="switchback", compiled=False, dtype="fp16"),
    "torchao_int8": Peer(_torchao_int8, like="switchback_q", compiled=True),
    "torchao_fp8_rowwise": Peer(
        lambda linear: _torchao_float8(linear, "rowwise_with_gw_hp"),
        like="hw_fp8_switchback",
        compiled=True,
    ),
    "torchao_fp8_tensorwise": Peer(
        lambda linear: _torchao_float8(linear, "tensorwise"),
        like="hw_fp8_tensorwise",
        compiled=True,
    ),
}
