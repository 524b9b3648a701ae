"""Reports which linear layers of a model are quantized, and finds those that are never called."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from lowprec.nn.attention import Attention
from lowprec.nn.blocks import find_blocks, is_checkpointed, is_linear
from lowprec.nn.linear import Settings
from lowprec.nn.mlp import LowPrecisionMLP
from lowprec.nn.recipe import GAINS_FROM, matches


@dataclass(frozen=True)
class Layer:
    """A linear layer that matches the patterns.

    `called`: whether a forward pass on the inputs calls it; None if no inputs were given. A layer
    that is not called is not swapped. `recipe`: the name of its recipe, also if it is not swapped.
    """

    name: str
    in_features: int
    out_features: int
    swapped: bool
    called: bool | None
    recipe: str


class Layers(list[Layer]):
    """The layers that match, in the model's order, and the state of the whole model.

    `print` shows the treatment of every linear layer, by block, and of attention. Layers include
    the fused projections of attention.

    Attributes:
        recipe: name of the recipe, or names of several, separated by commas.
        num_layers, num_quantized: linear layers of the whole model.
        treatments: by layer's name, its recipe, or "16 bit" and why. Where nothing has shown that
            the forward pass calls a layer, it is "unchecked".
        share: share of the multiply-adds per token that quantized layers compute, of those of all
            linear layers, Conv1D and experts (see `other_weights`). Of linear layers in an
            nn.ModuleList named `experts`, the share that a token meets counts.
        blocks: names of the model's repeated blocks.
        compiled, checkpointed: names of the blocks that are compiled, and checkpointed.
        fused: names of the MLPs that run as one function.
        attention: number of modules that became `Attention`, "replaced", and by type, of those that
            keep the attention of their library.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: str,
        replaceable: dict[str, nn.Module],
        layers: Sequence[Layer] = (),
    ):
        super().__init__(layers)
        modules, blocks = dict(model.named_modules()), find_blocks(model)
        names = {module: name for name, module in modules.items()}
        self.recipe = recipe
        self.blocks = [names[block] for block in blocks]
        self.compiled = [names[b] for b in blocks if b._compiled_call_impl is not None]
        self.checkpointed = [names[block] for block in blocks if is_checkpointed(block)]
        self.fused = [n for n, module in modules.items() if isinstance(module, LowPrecisionMLP)]
        self.treatments: dict[str, str] = {}
        by_name, linear = {layer.name: layer for layer in layers}, []
        supported = set(replaceable.values())
        for name, module in modules.items():
            if is_linear(module):
                linear.append(module)
                name = f"{name}.in_proj" if isinstance(module, Attention) else name
                settings = _settings_of(module)
                if name in by_name:
                    is_ours = isinstance(modules[name.rpartition(".")[0]], Attention)
                    self.treatments[name] = self._treatment(by_name[name], is_ours)
                elif settings and settings.recipe.function:
                    self.treatments[name] = f"{settings.recipe.name}, from an earlier call"
                else:
                    reason = "not in `where`" if module in supported else "not supported"
                    self.treatments[name] = f"16 bit, {reason}"
        self.num_layers, self.num_quantized = len(linear), sum(map(_is_quantized, linear))
        others, shares = other_weights(model), _shares_of_tokens(model)
        sizes = {module: _num_weights(module) * shares.get(module, 1) for module in linear}
        total = max(sum(sizes.values()) + sum(others.values()), 1)
        self.share = sum(size for m, size in sizes.items() if _is_quantized(m)) / total
        self._has_others = bool(others)
        text = f"{sum(others.values()) / total:.0%} of the multiply-adds per token"
        self.treatments |= dict.fromkeys(others, f"16 bit, no nn.Linear, {text}")
        projections = [layer.name for layer in self if matches(layer.name, ["in_proj"])]
        owners = {modules[name.rpartition(".")[0]] for name in projections}
        owners |= {m for m in modules.values() if isinstance(m, nn.MultiheadAttention)}
        kinds = (type(owner) for owner in owners)
        self.attention = Counter(
            "replaced" if kind is Attention else f"{kind.__name__} kept" for kind in kinds
        )

    def __repr__(self) -> str:
        groups = {name.rpartition(".")[0]: {} for name in self.blocks}  # None: outside blocks
        for name, treatment in self.treatments.items():
            block = self._block_of(name)
            group = groups.setdefault(block.rpartition(".")[0] if block else None, {})
            name = name.removeprefix(f"{block}.") if block else name
            group.setdefault(treatment, {})[name] = None  # a set in order
        share = f", {self.share:.0%} of the multiply-adds per token" if self._has_others else ""
        count = f"{self.num_quantized} of {self.num_layers} linear layers"
        lines = [f"{self.recipe}: {count}{share}"]
        for container, group in groups.items():
            lines.append(f"  {self._describe(container)}")
            lines += [f"    {text}: {', '.join(names)}" for text, names in group.items()]
        if self.attention:
            kinds = sorted(self.attention, key=lambda kind: (kind != "replaced", kind))
            counts = ", ".join(f"{self.attention[kind]} {kind}" for kind in kinds)
            lines.append(f"  attention: {counts}")
        return "\n".join(lines)

    def _block_of(self, layer: str) -> str:
        while layer and layer not in self.blocks:
            layer = layer.rpartition(".")[0]
        return layer

    def _treatment(self, layer: Layer, is_ours: bool) -> str:
        """A layer's entry in `treatments`; `is_ours`: of an Attention, which calls it."""
        if layer.swapped and layer.name.rpartition(".")[0] in self.fused:
            return f"{layer.recipe}, fused with GELU"
        if layer.swapped:
            is_known = layer.called or is_ours
            return layer.recipe if is_known else f"{layer.recipe}, unchecked without `inputs`"
        if layer.called is False:
            return "16 bit, because the forward pass does not call them"
        if layer.recipe == "high":
            return "16 bit"
        is_known = layer.recipe in GAINS_FROM
        reason = "faster at this size on Hopper" if is_known else "no known gain in 8 bits"
        return f"16 bit, {reason}; skip_slow=False converts them"

    def _describe(self, container: str | None) -> str:
        blocks = [name for name in self.blocks if name.rpartition(".")[0] == container]
        if not blocks:
            return "outside blocks"
        counts = {
            state: sum(name in blocks for name in names)
            for state, names in (("compiled", self.compiled), ("checkpointed", self.checkpointed))
        }
        texts = [state if n == len(blocks) else f"{n} {state}" for state, n in counts.items() if n]
        plural = "" if len(blocks) == 1 else "s"
        return ", ".join([f"{container or 'the model'}: {len(blocks)} block{plural}", *texts])


def other_weights(model: nn.Module) -> dict[str, int]:
    """Multiply-adds per token of each weight of a matrix product that is no linear layer's.

    By name, those of transformers' Conv1D and of experts: parameters [experts, ., .] of which a
    token meets `num_experts_per_tok`, as the config of a transformers model says, else all.
    """
    counts, per_token = {}, _experts_per_token(model)
    for name, module in model.named_modules():
        if type(module).__name__ == "Conv1D" and module.weight.ndim == 2:
            counts[name] = module.weight.numel()
        elif "expert" in f"{name} {type(module).__name__}".lower():
            for weight, p in module.named_parameters(recurse=False):
                if p.ndim == 3:
                    used = per_token or len(p)
                    counts[f"{name}.{weight}" if name else weight] = p[0].numel() * used
    return counts


def _experts_per_token(model: nn.Module) -> int | None:
    """How many experts a token meets, as the config of a transformers model says."""
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "num_experts_per_tok", None)


def _shares_of_tokens(model: nn.Module) -> dict[nn.Module, float]:
    """The share of tokens that each module of an nn.ModuleList named `experts` sees."""
    shares, per_token = {}, _experts_per_token(model)
    for name, module in model.named_modules():
        if per_token and isinstance(module, nn.ModuleList) and f".{name}".endswith(".experts"):
            shares |= dict.fromkeys(module.modules(), per_token / len(module))
    return shares


def _num_weights(module: nn.Module) -> int:
    """Elements of a linear layer's weight, or of an attention's fused projection."""
    parameters = module.named_parameters(recurse=False)
    return sum(p.numel() for name, p in parameters if name.endswith("weight"))


def _settings_of(module: nn.Module) -> Settings | None:
    if isinstance(module, Attention):
        return module.in_proj_settings
    settings = getattr(module, "settings", None)
    return settings if isinstance(settings, Settings) else None


def _is_quantized(module: nn.Module) -> bool:
    settings = _settings_of(module)
    if settings is None:
        return False
    weight = module.in_proj_weight if isinstance(module, Attention) else module.weight
    # torchao's quantize_ replaces the weight by a subclass
    return any(settings.recipe.products) and type(weight) is nn.Parameter


def call(model: nn.Module, inputs: Any) -> Any:
    """The output for a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def trace(model: nn.Module, inputs: Any) -> set[nn.Module]:
    """The modules that a model calls for inputs, in evaluation mode and without gradients.

    The layers of a fused MLP are called with it.
    """
    called: set[nn.Module] = set()

    def add(module, *_):
        called.update([module, *(module.children() if isinstance(module, LowPrecisionMLP) else ())])

    modes = {module: module.training for module in model.modules()}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # hides calls
    hook = register_module_forward_hook(add)
    try:
        model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            call(model, inputs)
    finally:
        hook.remove()
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, mode in modes.items():
            module.training = mode
    return called
