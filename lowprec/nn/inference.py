"""int8 inference: linear layers that store their weights in int8, forward only.

Recipe int8_inference: output = x W^T with row-wise int8 x and W. In the state dict of a converted
layer, `weight` (or `in_proj_weight`) is int8 and `weight_scale` (`in_proj_weight_scale`), float32
[out, 1], is added. Shape suffixes: M = batch * tokens, K = input, N = output features.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowprec import ops
from lowprec.formats import INT8
from lowprec.nn.attention import Attention
from lowprec.nn.linear import compute_dtype
from lowprec.nn.mlp import unfuse
from lowprec.nn.recipe import LINEAR_LAYERS
from lowprec.nn.replace import Where, apply_recipe, is_plain, replace_attention
from lowprec.ops import reference


def int8_linear(input: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """`input @ (weight * weight_scale)^T + bias`: [..., in] -> [..., out], input row-wise int8.

    weight is int8 [out, in], weight_scale float32 [out, 1]. Returns the autocast dtype, or without
    autocast the input's dtype. Saves nothing for backward, which raises RuntimeError.
    """
    x_MK = input.reshape(-1, input.shape[-1]).to(compute_dtype(input))
    multiply = _ForwardOnly.apply if torch.is_grad_enabled() else _multiply
    output = multiply(x_MK, weight, weight_scale, bias)
    return output.view(*input.shape[:-1], weight.shape[0])


def _multiply(x_MK: Tensor, w_NK: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    if x_MK.numel() == 0:
        return x_MK.new_empty(len(x_MK), len(w_NK))
    q_MK, _, x_scale = ops.quantize(x_MK, INT8, "rowwise")
    return ops.matmul(q_MK, w_NK, x_scale, w_scale, bias, x_MK.dtype)


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MK, w_NK, w_scale, bias):
        return _multiply(x_MK, w_NK, w_scale, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, g_MN):
        raise RuntimeError("an int8 inference layer has no backward: train before to_int8")


class _KeepsScale(nn.Module):
    """A module whose scales stay float32 when it is cast, for example by `model.half()`."""

    def _apply(self, fn, recurse=True):
        scales = {name: t for name, t in self._buffers.items() if name.endswith("_scale")}
        super()._apply(fn, recurse)
        for name, scale in scales.items():
            if self._buffers[name].dtype != scale.dtype:
                self._buffers[name] = scale.to(self._buffers[name].device)
        return self


class Int8Linear(_KeepsScale):
    """What nn.Linear becomes: int8 weight [out, in], float32 weight_scale [out, 1], bias, hooks."""

    extra_repr = nn.Linear.extra_repr

    @property
    def weight(self) -> Tensor:
        """The weight in 16 or 32 bits, for modules that read it without calling the layer."""
        weight, scale = self._buffers["weight"], self._buffers["weight_scale"]
        return reference.dequantize(weight, scale, self.original.dtype)

    @property
    def int8_original_dtype(self) -> torch.dtype:
        """The dtype in which open_clip's blocks expect their input."""
        return self.original.dtype

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return int8_linear(input, self._buffers["weight"], self.weight_scale, self.bias)


class Int8Attention(_KeepsScale, Attention):
    """An Attention with an int8 projection of queries, keys and values."""

    def in_proj(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> [batch, tokens, 3 width]: queries, keys, values."""
        return int8_linear(x, self.in_proj_weight, self.in_proj_weight_scale, self.in_proj_bias)


def _store_int8(module: nn.Module, name: str) -> None:
    weight = getattr(module, name).detach()
    delattr(module, name)
    q_NK, _, scale = ops.quantize(weight, INT8, "rowwise")
    module.register_buffer(name, q_NK)
    module.register_buffer(f"{name}_scale", scale)
    # has the weight's dtype, and is cast with the model
    module.register_buffer("original", weight.new_empty(0), persistent=False)


def to_int8(model: nn.Module, where: Where = LINEAR_LAYERS) -> nn.Module:
    """Converts the linear layers that match `where`, in place; returns the model.

    See `apply_recipe` for the patterns and errors.
    """
    _convert(model, [layer.name for layer in apply_recipe(model, "high", where)])
    return model


def _convert(model: nn.Module, layers: Sequence[str]) -> None:
    """Converts layers by name, an Attention's projection with or without `.in_proj`."""
    unfuse(model)
    modules = dict(model.named_modules())
    for name in layers:
        module = modules.get(name) or modules.get(name.removesuffix(".in_proj"))
        if type(module) is Attention:
            _store_int8(module, "in_proj_weight")
            module.__class__ = Int8Attention
        elif isinstance(module, nn.Linear) and is_plain(module):
            _store_int8(module, "weight")
            module.__class__ = Int8Linear


def memory_ratio(model: nn.Module) -> float:
    """Bytes of the converted layers (weight, scale, bias) divided by those of float32 originals.

    Raises ValueError if no layer is converted.
    """
    stored = original = 0
    for module in model.modules():
        if isinstance(module, Int8Linear | Int8Attention):
            tensors = dict(module.named_parameters(recurse=False))
            tensors |= dict(module.named_buffers(recurse=False))
            stored += sum(tensor.nbytes for tensor in tensors.values())
            originals = (t for name, t in tensors.items() if not name.endswith("_scale"))
            original += sum(4 * tensor.numel() for tensor in originals)
    if not original:
        raise ValueError("no layer of the model is int8: call to_int8(model) first")
    return stored / original


def save_int8(model: nn.Module, path: Path | str) -> None:
    """Writes a model's state dict as .safetensors, with tied tensors under each name.

    A failing write leaves an earlier file as it was. Raises ValueError for another suffix.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: int8 weights must be written as .safetensors")
    state = {  # copies, because safetensors refuses tensors that share memory
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
    write_safetensors(state, path)


def write_safetensors(state: dict[str, Tensor], path: Path, **facts: str) -> None:
    """Writes tensors with mode 0644; `facts` and the format are the file's metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(state, temporary, metadata={"format": "pt", **facts})
        temporary.chmod(0o644)  # safetensors lets only the owner read it
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_int8(model: nn.Module, path: Path | str) -> nn.Module:
    """Loads a file of `save_int8` into a model, in place; returns the model.

    Converts the layers that are int8 in the file; other layers keep their recipe. Raises ValueError
    for a damaged file, and with the names of tensors that do not fit, after the conversion.
    """
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    replace_attention(model)
    scales = [name for name in state if name.endswith("weight_scale")]
    _convert(model, [re.sub(r"[._]weight_scale$", "", name) for name in scales])
    load_state(model, state, path)
    return model


def load_state(model: nn.Module, state: dict[str, Tensor], source: Path) -> None:
    """Loads a state dict; raises ValueError with the tensors whose shapes or int8 dtypes differ."""
    expected = model.state_dict()
    facts = {name: [_describe(s.get(name)) for s in (state, expected)] for name in state | expected}
    differing = [f"{name} is {a}, not {b}" for name, (a, b) in sorted(facts.items()) if a != b]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ValueError(f"{source} does not fit the model: {'; '.join(differing[:3])}{more}")
    model.load_state_dict(state)


def _describe(tensor: Tensor | None) -> str:
    """A tensor's shape, followed by "int8" if it is; "absent" for None."""
    if tensor is None:
        return "absent"
    return f"{tuple(tensor.shape)}{' int8' if tensor.dtype == torch.int8 else ''}"
