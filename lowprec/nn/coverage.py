"""Reports which linear layers are quantized, and their share of the multiply-adds."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lowprec.nn.attention import Attention
from lowprec.nn.mlp import LowPrecisionMLP

FLASH = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
FORMULAS = flop_registry | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: FLASH}


@dataclass
class Tower:
    """The linear layers in one child of the model, and its multiply-adds in one forward pass.

    Layers include the fused projections of attention; multiply-adds are 0 if nothing was traced.
    `others` lists the names of the layers that are not quantized.
    """

    layers: int = 0
    quantized: int = 0
    multiply_adds: int = 0
    quantized_multiply_adds: int = 0
    others: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Layer:
    """A linear layer that matches the patterns.

    `gains`: whether its shape is faster under the recipe than in 16 bits. `called`: whether a
    forward pass on the inputs calls it; None if no inputs were given. A layer that is not called is
    not swapped.
    """

    name: str
    in_features: int
    out_features: int
    swapped: bool
    gains: bool
    called: bool | None = None


class Layers(list[Layer]):
    """The layers that match, in the model's order, with counts of all layers by tower.

    `print` shows how many layers and multiply-adds are quantized, and which layers are not. It
    warns if a recipe that `quantizes` is applied to none.
    """

    def __init__(
        self, layers: Sequence[Layer] = (), towers: dict | None = None, quantizes: bool = False
    ):
        super().__init__(layers)
        self.towers, self.quantizes = towers or {}, quantizes

    def __repr__(self) -> str:
        towers = {name: tower for name, tower in self.towers.items() if name or tower.layers}
        has_any = any(tower.quantized for tower in towers.values())
        warning = " (warning: no layer is quantized)" * (self.quantizes and not has_any)
        lines = [total_share(self) + warning]
        lines += [f"  {name or 'the rest'}: {_share(tower)}" for name, tower in towers.items()]
        uncalled = [layer.name for layer in self if layer.called is False]
        if uncalled:
            lines.append(f"  {_never_called(uncalled)}")
        others = [name for t in towers.values() for name in t.others if name not in uncalled]
        if others and has_any:
            lines.append(f"  not quantized: {_first_three(others)}")
        return "\n".join(lines)


@dataclass
class Calls:
    """Multiply-adds of one forward pass: for each linear layer called, and for each tower."""

    layers: Counter[nn.Module]
    towers: Counter[str]


def trace(model: nn.Module, inputs: tuple) -> Calls:
    """Runs `model(*inputs)` once, in evaluation mode and without gradients."""
    calls = Calls(Counter(), Counter())
    tower_of = {module: name.partition(".")[0] for name, module in model.named_modules()}
    stack = [""]

    def leave(module, _, output):
        stack.pop()
        if isinstance(module, Attention):
            output = output[0] if module.returns_pair else output
            calls.layers[module] += output.numel() * module.in_proj_weight.shape[0]
        elif isinstance(module, nn.Linear) or is_int8(module):
            calls.layers[module] += output.numel() * module.in_features

    modes = {module: module.training for module in model.modules()}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # hides products and calls
    hooks = (
        register_module_forward_pre_hook(lambda module, _: stack.append(tower_of.get(module, ""))),
        register_module_forward_hook(leave),
    )
    try:
        model.eval()
        count = _CountProducts(lambda count: calls.towers.update({stack[-1]: count}))
        with count, torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, mode in modes.items():
            module.training = mode
    return calls


class _CountProducts(TorchDispatchMode):
    """Calls a function with the multiply-adds of each matrix product, convolution and attention.

    torch's FlopCounterMode also counts by module, but fails for views of parameters.
    """

    def __init__(self, add: Callable[[int], None]):
        super().__init__()
        self.add = add

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(func.overloadpacket)
        if formula:
            self.add(formula(*args, **(kwargs or {}), out_val=output) // 2)
        elif func.overloadpacket is torch.ops.lowprec.matmul:
            self.add(args[0].numel() * output.shape[1])
        elif func.overloadpacket is torch.ops.lowprec.attention:
            self.add(2 * output.numel() * output.shape[1])
        return output


def towers(model: nn.Module, calls: Calls | None) -> dict[str, Tower]:
    """Returns the children of a model that have linear layers or multiply-adds, by name."""
    by_name: dict[str, Tower] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.MultiheadAttention) or is_int8(module):
            tower = by_name.setdefault(name.partition(".")[0], Tower())
            tower.layers += 1
            if _is_quantized(module):
                tower.quantized += 1
                tower.quantized_multiply_adds += calls.layers.get(module, 0) if calls else 0
            else:
                tower.others.append(name)
    for name, multiply_adds in calls.towers.items() if calls else ():
        by_name.setdefault(name, Tower()).multiply_adds = multiply_adds
    return by_name


def is_int8(module: nn.Module) -> bool:
    """Returns whether `to_int8` has converted a layer."""
    return "weight_scale" in module._buffers or "in_proj_weight_scale" in module._buffers


def _is_quantized(module: nn.Module) -> bool:
    prefix = "in_proj_" if isinstance(module, Attention) else ""
    settings = getattr(module, f"{prefix}settings", None)
    if is_int8(module) or settings is None:
        return is_int8(module)
    weight = getattr(module, f"{prefix}weight")  # torchao's quantize_ replaces it with a subclass
    return any(settings.recipe.products) and type(weight) is nn.Parameter


def check_first_forward(model: nn.Module, layers: Sequence[str]) -> None:
    """Makes the model's next forward pass warn about the layers that it does not call."""
    model.register_forward_pre_hook(partial(_record_calls, layers=list(layers)))


def cancel_check(model: nn.Module) -> list[str]:
    """Removes the checks by `check_first_forward` that have not run yet; returns their layers."""
    layers = []
    for key, hook in list(model._forward_pre_hooks.items()):
        if getattr(hook, "func", None) is _record_calls:
            layers += hook.keywords["layers"]
            del model._forward_pre_hooks[key]
    return layers


def _record_calls(model: nn.Module, _, layers: list[str]) -> None:
    if torch.compiler.is_compiling():
        return
    modules = model.modules()
    if any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in modules):
        cancel_check(model)  # hooks on all modules would also be compiled
        return
    called = set()

    def add(module, *_):
        called.update(module.children() if isinstance(module, LowPrecisionMLP) else (module,))

    def finish(model, _, output):
        everywhere.remove()
        end.remove()
        if output is None:  # the forward pass has raised an exception
            return
        cancel_check(model)
        modules = dict(model.named_modules())
        uncalled = [name for name in layers if name in modules and modules[name] not in called]
        # only in modules that ran: a forward pass of one tower says nothing about the other
        uncalled = [name for name in uncalled if _owner(modules, name) in called]
        if uncalled:
            warnings.warn(_never_called(uncalled), stacklevel=2)

    everywhere = register_module_forward_hook(add)
    end = model.register_forward_hook(finish, always_call=True)


def _owner(modules: dict[str, nn.Module], name: str) -> nn.Module:
    """The nearest module above a layer that has a forward pass, as a ModuleList has not."""
    name = name.rpartition(".")[0]
    while name and type(modules[name]).forward is nn.Module.forward:
        name = name.rpartition(".")[0]
    return modules[name]


def _never_called(names: list[str]) -> str:
    return f"not called, so their weights are not quantized: {_first_three(names)}"


def _first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def summary(recipe: str, layers: Layers) -> str:
    """Says how many of each tower's layers and multiply-adds are quantized, and what is not."""
    return f"{recipe}: {layers}"


def total_share(layers: Layers) -> str:
    """How many of the model's linear layers and multiply-adds are quantized."""
    counts = [f.name for f in fields(Tower) if f.name != "others"]
    towers = layers.towers.values()
    return _share(Tower(**{name: sum(getattr(t, name) for t in towers) for name in counts}))


def _share(tower: Tower) -> str:
    text = f"{tower.quantized} of {tower.layers} linear layers"
    if tower.multiply_adds:
        text += f", {tower.quantized_multiply_adds / tower.multiply_adds:.0%} of the multiply-adds"
    return text
