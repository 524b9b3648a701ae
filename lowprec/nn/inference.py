"""int8 inference: linear layers that store their weights in int8, forward only.

Recipe int8_inference: output = x W^T with row-wise int8 x and W. In the state dict of a converted
layer, `weight` (or `in_proj_weight`) is int8 and `weight_scale` (`in_proj_weight_scale`), float32
[out, 1], is added. Shape suffixes: M = batch * tokens, K = input, N = output features.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowprec import ops
from lowprec.formats import INT8
from lowprec.nn.attention import Attention, carry_hooks
from lowprec.nn.linear import compute_dtype
from lowprec.nn.mlp import unfuse
from lowprec.nn.replace import LAYERS, apply_recipe, is_plain, replace_attention, swap_modules

KIND = "int8_inference"  # in the metadata of a file
IN_PROJ = ".in_proj"  # the layer in an Attention


def int8_linear(input: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """`input @ (weight * weight_scale)^T + bias`: [..., in] -> [..., out], input row-wise int8.

    weight is int8 [out, in], weight_scale float32 [out, 1]. Returns the autocast dtype, or without
    autocast the input's dtype. Saves nothing for backward, which raises RuntimeError.
    """
    x_MK = input.reshape(-1, input.shape[-1]).to(compute_dtype(input))
    multiply = _ForwardOnly.apply if torch.is_grad_enabled() else _multiply
    return multiply(x_MK, weight, weight_scale, bias).view(*input.shape[:-1], weight.shape[0])


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
            self._buffers[name] = scale.to(self._buffers[name].device)
        return self


class Int8Linear(_KeepsScale):
    """A converted nn.Linear: int8 weight [out, in], float32 weight_scale [out, 1], bias, hooks."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.int8_original_dtype = linear.weight.dtype  # open_clip's blocks read it
        _store_int8(self, "weight", linear.weight)
        self.bias = linear.bias
        carry_hooks(linear, self)
        self.train(linear.training)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        probe = torch.empty(0, dtype=self.int8_original_dtype, device=self.weight.device)
        self.int8_original_dtype = fn(probe).dtype
        return self

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return int8_linear(input, self.weight, self.weight_scale, self.bias)

    def extra_repr(self) -> str:
        """The same as nn.Linear's."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class Int8Attention(_KeepsScale, Attention):
    """An Attention with an int8 projection of queries, keys and values."""

    def __init__(self, attention: Attention):
        super().__init__(attention)
        self.returns_pair, self.causal = attention.returns_pair, attention.causal
        del self.in_proj_weight
        _store_int8(self, "in_proj_weight", attention.in_proj_weight)
        self.train(attention.training)

    def in_proj(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> [batch, tokens, 3 width]: queries, keys, values."""
        return int8_linear(x, self.in_proj_weight, self.in_proj_weight_scale, self.in_proj_bias)


def _store_int8(module: nn.Module, name: str, weight: Tensor) -> None:
    q_NK, _, scale = ops.quantize(weight.detach(), INT8, "rowwise")
    module.register_buffer(name, q_NK)
    module.register_buffer(f"{name}_scale", scale)


def to_int8(model: nn.Module, where: Sequence[str] = LAYERS) -> nn.Module:
    """Converts the linear layers that match `where`, in place; returns the model.

    See `apply_recipe` for the patterns and errors.
    """
    _convert(model, [layer.name for layer in apply_recipe(model, "high", where)])
    return model


def _convert(model: nn.Module, layers: Sequence[str]) -> None:
    """Converts layers by name; an Attention's projection ends in `.in_proj`."""
    unfuse(model)
    modules, converted = dict(model.named_modules()), {}
    for name in layers:
        owner = name if name in modules else name.removesuffix(IN_PROJ)
        module = modules[owner]
        if isinstance(module, Attention) and not isinstance(module, Int8Attention):
            converted[module] = Int8Attention(module)
        elif isinstance(module, nn.Linear) and is_plain(module):
            converted[module] = Int8Linear(module)
    swap_modules(model, converted)


def memory_ratio(model: nn.Module) -> float:
    """Bytes of the converted layers (weight, scale, bias) divided by those of float32 originals.

    Raises ValueError if no layer is converted.
    """
    stored = original = 0
    for module in model.modules():
        if isinstance(module, Int8Linear):
            tensors = (module.weight, module.weight_scale, module.bias)
        elif isinstance(module, Int8Attention):
            tensors = (module.in_proj_weight, module.in_proj_weight_scale, module.in_proj_bias)
        else:
            continue
        weight, _, bias = tensors
        stored += sum(t.numel() * t.element_size() for t in tensors if t is not None)
        original += 4 * (weight.numel() + (0 if bias is None else bias.numel()))
    if not original:
        raise ValueError("no layer of the model is int8: call to_int8(model) first")
    return stored / original


def save_int8(model: nn.Module, path: Path | str) -> None:
    """Writes a converted model's state dict, with a digest, as .safetensors.

    Tied tensors are written under each of their names. Raises ValueError for another suffix, or if
    no layer is converted.
    """
    path = Path(path)
    memory_ratio(model)  # raises if no layer is converted
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: int8 weights must be written as .safetensors")
    state = {  # copies, because safetensors refuses tensors that share memory
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    save_file(state, temporary, metadata={"kind": KIND, "sha256": _digest(state)})
    temporary.rename(path)


def load_int8(model: nn.Module, path: Path | str) -> nn.Module:
    """Loads a file of `save_int8` into a model, in place; returns the model.

    Converts the layers that are int8 in the file, if they are not converted yet; other layers keep
    their recipe. Raises ValueError for a file that is damaged or not of this kind, and with the
    names of tensors that do not fit, in which case layers may be converted already.
    """
    state = _read(Path(path))
    scales = [name for name in state if name.endswith("weight_scale")]
    layers = [
        name.removesuffix(".weight_scale").replace(f"{IN_PROJ}_weight_scale", IN_PROJ)
        for name in scales
    ]
    if not {*scales} <= {*model.state_dict()}:
        replace_attention(model)
        known = {name for name, _ in model.named_modules()}
        _convert(model, [name for name in layers if name.removesuffix(IN_PROJ) in known])
    load_state(model, state, path)
    return model


def load_state(model: nn.Module, state: dict[str, Tensor], source: Path) -> None:
    """Loads a state dict; raises ValueError with the tensors whose shapes or int8 dtypes differ."""
    expected = model.state_dict()
    differing = [
        f"{name} is {_describe(state.get(name))}, not {_describe(expected.get(name))}"
        for name in sorted({*state, *expected})
        if _describe(state.get(name)) != _describe(expected.get(name))
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ValueError(f"{source} does not fit the model: {'; '.join(differing[:3])}{more}")
    model.load_state_dict(state)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    if metadata.get("kind") != KIND:
        raise ValueError(f"{path} is not an int8 model: use experiments.export precision={KIND}")
    if metadata.get("sha256") != _digest(state):
        raise ValueError(f"{path} is damaged: its tensors do not match its digest")
    return state


def _digest(state: dict[str, Tensor]) -> str:
    """sha256 of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _describe(tensor: Tensor | None) -> str:
    """A tensor's shape, followed by "int8" if it is; "absent" for None."""
    if tensor is None:
        return "absent"
    return f"{tuple(tensor.shape)}{' int8' if tensor.dtype == torch.int8 else ''}"
