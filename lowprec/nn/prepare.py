"""Prepares a model for training: a recipe, compiled blocks, checkpointing inside them."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lowprec.nn.attention import Attention
from lowprec.nn.coverage import Layer, Layers, is_int8, total_share
from lowprec.nn.linear import LowPrecisionLinear
from lowprec.nn.mlp import LowPrecisionMLP
from lowprec.nn.recipe import LINEAR_LAYERS, Recipe, find_recipe
from lowprec.nn.replace import GAINS_FROM, apply_recipe, matches

_FLAGS = ("grad_checkpointing", "gradient_checkpointing")  # open_clip and timm, transformers
_KEPT = (  # results of attention kernels are small and expensive to recompute
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.lowprec.attention.default,
)


class Prepared(Layers):
    """The matching layers, as from `apply_recipe`, and what was done to the rest of the model.

    `print` shows a summary.

    Attributes:
        recipe: name of the recipe.
        blocks: names of the model's repeated blocks.
        compiled, checkpointed: names of the blocks that are compiled, and checkpointed.
        fused: names of the MLPs that run as one function.
        earlier: layers that are not in `where` and keep the recipe of an earlier call, by name.
        attention: names of the modules that became `Attention`.
        other_attention: number of modules, by type, that keep the attention of their library.
    """

    def __init__(self, layers: Layers, recipe: str, model: nn.Module, blocks: Sequence[nn.Module]):
        super().__init__(layers, layers.towers)
        modules = dict(model.named_modules())
        names = {module: name for name, module in modules.items()}
        self.recipe = recipe
        self.blocks = [names[block] for block in blocks]
        self.compiled = [names[b] for b in blocks if b._compiled_call_impl is not None]
        self.checkpointed = [names[block] for block in blocks if _is_checkpointed(block)]
        self.fused = [n for n, module in modules.items() if isinstance(module, LowPrecisionMLP)]
        self.attention = [n for n, module in modules.items() if isinstance(module, Attention)]
        in_where = {layer.name for layer in layers}
        self.earlier = {n: r for n, r in _recipes(modules).items() if n not in in_where}
        projections = [layer.name for layer in layers if matches(layer.name, ["in_proj"])]
        others = {name.rpartition(".")[0] for name in projections}
        others |= {n for n, module in modules.items() if isinstance(module, nn.MultiheadAttention)}
        others -= set(self.attention)
        kinds = (type(module).__name__ for name, module in modules.items() if name in others)
        self.other_attention = Counter(kinds)

    def __repr__(self) -> str:
        names = {layer.name.removesuffix(".in_proj") for layer in self}
        others = [name for t in self.towers.values() for name in t.others if name not in names]
        treatments = [(layer.name, self._treatment(layer)) for layer in self]
        treatments += [(n, f"{name}, from an earlier call") for n, name in self.earlier.items()]
        treatments += [(name, "16 bit, not in `where` or not supported") for name in others]
        groups = {name.rpartition(".")[0]: {} for name in self.blocks}
        for name, treatment in treatments:
            block = self._block_of(name)
            group = groups.setdefault(block.rpartition(".")[0], {})
            name = name.removeprefix(f"{block}.") if block else name
            group.setdefault(treatment, {})[name] = None  # a set in order
        lines = [f"{self.recipe}: {total_share(self)}"]
        for container, group in groups.items():
            lines.append(f"  {self._describe(container)}")
            lines += [f"    {text}: {', '.join(names)}" for text, names in group.items()]
        kept = [f"{count} {kind} kept" for kind, count in self.other_attention.items()]
        ours = [f"{len(self.attention)} replaced"] if self.attention else []
        if ours or kept:
            lines.append(f"  attention: {', '.join(ours + kept)}")
        return "\n".join(lines)

    def _block_of(self, layer: str) -> str:
        while layer and layer not in self.blocks:
            layer = layer.rpartition(".")[0]
        return layer

    def _treatment(self, layer: Layer) -> str:
        if layer.swapped:
            is_fused = layer.name.rpartition(".")[0] in self.fused
            return f"{self.recipe}, fused with GELU" if is_fused else self.recipe
        if layer.called is False:
            return "16 bit, because the forward pass does not call them"
        if layer.gains or self.recipe == "high":
            return "16 bit"
        is_measured = self.recipe in GAINS_FROM
        reason = "faster at this size" if is_measured else "no known gain in 8 bits"
        return f"16 bit, {reason}; skip_slow=False converts them"

    def _describe(self, container: str) -> str:
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


def _recipes(modules: dict[str, nn.Module]) -> dict[str, str]:
    """The recipe of each low-precision layer, by the layer's name."""
    layers = {}
    for name, module in modules.items():
        if isinstance(module, LowPrecisionLinear):
            layers[name] = module.settings
        elif isinstance(module, Attention) and module.in_proj_settings is not None:
            layers[f"{name}.in_proj"] = module.in_proj_settings
    return {name: s.recipe.name for name, s in layers.items() if s.recipe.function}


def prepare_for_training(
    model: nn.Module,
    recipe: str | Recipe = "switchback",
    where: Sequence[str] = LINEAR_LAYERS,
    *,
    inputs: tuple | None = None,
    compile: bool = True,
    checkpointing: bool | None = None,
    skip_slow: bool = True,
    **settings: Any,
) -> Prepared:
    """Prepares a model for fast training, in place, with 8-bit layers and compiled blocks.

    Applies a recipe to the layers in `where` (see `apply_recipe`, also for the errors), moves
    gradient checkpointing into the blocks and compiles each block on its own. A block is an element
    of an nn.Sequential or nn.ModuleList that contains linear layers, such as the residual blocks of
    open_clip, timm and transformers. Parameter names do not change. Call it before DDP or
    `fully_shard`. A later call replaces the compiled code and the recipe of the layers in its
    `where`. Warns if no layer is converted.

    Args:
        model: the model, such as `open_clip.create_model(...)`.
        recipe: as for `apply_recipe`; "high" keeps all layers 16-bit.
        where: patterns for layers.
        inputs: arguments for a small forward pass, which detects layers that are never called
            although their weight is read.
        compile: whether blocks run under torch.compile. The first forward compiles them.
            Models that were compiled before are compiled again at their next forward.
        checkpointing: whether the backward pass recomputes the blocks, except their attention
            kernel. None keeps the choice of an earlier call and replaces the model's own
            checkpointing if that is on.
        skip_slow: whether layers stay 16-bit if the recipe is no faster for their shape.
            Fake-quantized recipes are never faster.
        settings: `backend` and `outlier_threshold` of `apply_recipe`.
    """
    recipe, blocks = find_recipe(recipe), find_blocks(model)
    layers = apply_recipe(model, recipe, where, inputs=inputs, skip_slow=skip_slow, **settings)
    checkpoint_blocks(model, blocks, checkpointing)
    for block in blocks:
        block._compiled_call_impl = None
    if compile:
        torch.compiler.reset()  # its recompilation limit counts over all models of a process
        compile_blocks(model, blocks)
    prepared = Prepared(layers, recipe.name, model, blocks)
    if recipe.function and not any(layer.swapped for layer in layers):
        reasons = dict.fromkeys(prepared._treatment(layer) for layer in layers)
        text = f"{recipe.name} converts none of the {len(layers)} layers in `where`"
        warnings.warn(f"{text} ({'; '.join(reasons)})", stacklevel=2)
    return prepared


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of Sequentials and ModuleLists that contain linear layers, in order.

    If elements are nested, such as the blocks of a stage, the inner ones are returned, unless the
    outer one has attention or MLP projections besides them.
    """
    kinds = nn.Linear | nn.MultiheadAttention
    linear = {
        module: matches(name, LINEAR_LAYERS)
        for name, module in model.named_modules()
        if isinstance(module, kinds) or is_int8(module)
    }
    return list(dict.fromkeys(_blocks_in(model, linear)))


def _blocks_in(module: nn.Module, linear: dict[nn.Module, bool]) -> list[nn.Module]:
    """The blocks in a module; `linear` maps linear layers to whether LINEAR_LAYERS match them."""
    blocks = []
    for child in module.children():
        inner = _blocks_in(child, linear)
        within = {part for block in inner for part in block.modules()}
        others = [part for part in child.modules() if part in linear and part not in within]
        is_element = isinstance(module, nn.Sequential | nn.ModuleList)
        is_part = child in linear or isinstance(child, nn.ModuleList | nn.ModuleDict)
        is_whole = any(linear[layer] for layer in others) if inner else bool(others)
        blocks += [child] if is_element and not is_part and is_whole else inner
    return blocks


def compile_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Compiles each block with torch.compile, in place; parameter names do not change.

    Gradient checkpointing that is on moves into the blocks (`checkpoint_blocks`).
    """
    blocks = list(blocks)
    checkpoint_blocks(model, blocks)
    for block in blocks:
        block.compile(dynamic=False)


def checkpoint_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], on: bool | None = None
) -> None:
    """Moves gradient checkpointing into the blocks of a model, in place.

    A block saves its input, its attention output and, on a GPU, weights quantized for both of their
    products; the backward pass recomputes the rest. The model's own checkpointing is turned off: it
    recomputes a compiled block as a whole, and open_clip's fails for blocks with KQ norm.

    `on`: True checkpoints all blocks, False none. None checkpoints the blocks under the model's own
    checkpointing and keeps those that are checkpointed already.
    """
    names = {module: name for name, module in model.named_modules()}
    owners = {block: _with_parents(model, names[block]) for block in blocks}
    is_on = {b: any(getattr(m, flag, False) for m in owners[b] for flag in _FLAGS) for b in owners}
    for block, modules in owners.items():
        if on or on is None and is_on[block]:
            if not _is_checkpointed(block):
                block.forward = partial(_checkpointed, block, vars(block).get("forward"))
        elif on is False and _is_checkpointed(block):
            patched = block.forward.args[1]
            del block.forward
            if patched is not None:
                block.forward = patched
        for module in modules:
            for flag in _FLAGS:
                if getattr(module, flag, False):
                    setattr(module, flag, False)


def _with_parents(model: nn.Module, name: str) -> list[nn.Module]:
    """The module of this name and all modules that contain it."""
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)]


def _is_checkpointed(block: nn.Module) -> bool:
    return getattr(block.forward, "func", None) is _checkpointed


def _is_kept(context: Any, op: Callable, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps attention results and weights quantized in both layouts, two bytes per weight."""
    is_kept = op in _KEPT
    if op is torch.ops.lowprec.quantize.default:
        rows, transposed = args[3:]
        is_kept = rows and transposed
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(block: nn.Module, patched: Callable | None, *args: Any, **kwargs: Any) -> Any:
    """Runs a block's forward, or its patched forward if it has one, under checkpointing.

    The type's forward is looked up here, because fusing an MLP changes the type.
    """
    forward = patched or partial(type(block).forward, block)
    keep = partial(create_selective_checkpoint_contexts, _is_kept)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=keep, **kwargs)
