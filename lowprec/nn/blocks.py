"""The repeated blocks of a model: finds, compiles and checkpoints them, in place."""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lowprec import ops  # noqa: F401, registers torch.ops.lowprec
from lowprec.nn.recipe import LINEAR_LAYERS, matches

MAX_ROW = 2048  # elements that a compiled reduction keeps in registers
_FLAGS = ("grad_checkpointing", "gradient_checkpointing")  # open_clip and timm, transformers
_KEPT = (  # results of attention kernels are small and expensive to recompute
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.lowprec.attention.default,
)


def is_linear(module: nn.Module) -> bool:
    """Whether a module holds the weight of a linear layer, or of several."""
    return isinstance(module, nn.Linear | nn.MultiheadAttention)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of Sequentials and ModuleLists that contain linear layers, in order.

    If elements are nested, such as the blocks of a stage, the inner ones are returned, unless they
    are parts of a block: none has both attention and MLP projections, and the outer one has more.
    """
    linear = {
        module: {pattern for pattern in LINEAR_LAYERS if matches(name, [pattern])}
        for name, module in model.named_modules()
        if is_linear(module)
    }
    return list(dict.fromkeys(_blocks_in(model, linear)))


def _blocks_in(module: nn.Module, linear: dict[nn.Module, set[str]]) -> list[nn.Module]:
    """The blocks in a module; `linear` maps linear layers to the LINEAR_LAYERS that match them."""
    blocks = []
    for child in module.children():
        inner = _blocks_in(child, linear)
        within = {part for block in inner for part in block.modules()}
        others = [part for part in child.modules() if part in linear and part not in within]
        is_element = isinstance(module, nn.Sequential | nn.ModuleList)
        is_part = child in linear or isinstance(child, nn.ModuleList | nn.ModuleDict)
        is_whole = any(linear[layer] for layer in others) if inner else bool(others)
        is_whole = is_whole and not any(_is_complete(block, linear) for block in inner)
        blocks += [child] if is_element and not is_part and is_whole else inner
    return blocks


def _is_complete(block: nn.Module, linear: dict[nn.Module, set[str]]) -> bool:
    """Whether a block has both attention and MLP projections."""
    found = set().union(*(linear.get(part, ()) for part in block.modules()))
    return bool(found & {"in_proj", "out_proj"}) and bool(found & {"c_fc", "c_proj"})


def compile_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Compiles each block with torch.compile, in place; parameter names do not change.

    Gradient checkpointing that is on moves into the blocks (`checkpoint_blocks`).
    """
    blocks = list(blocks)
    checkpoint_blocks(model, blocks)
    for block in blocks:
        block.compile(dynamic=False, backend=_inductor)


def _inductor(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    """torch.compile's default backend, with `rows_in_registers` for this graph alone.

    If `torch._inductor.config.inductor_choices_class` is set, its choices are left alone.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.virtualized import V

    if config.inductor_choices_class is not None:
        return compile_fx(graph, inputs)

    def compile_inner(*args: Any, **options: Any) -> Any:
        with V.set_choices_handler(rows_in_registers()):  # a thread keeps those of its first graph
            return compile_fx_inner(*args, **options)

    # part of the key of torch's caches; the backward pass is compiled later, by another thread
    patches = {"inductor_choices_class": rows_in_registers}
    return compile_fx(graph, inputs, inner_compile=compile_inner, config_patches=patches)


def rows_in_registers() -> Any:
    """Inductor's choices, but reductions keep rows of up to 2,048 elements in registers.

    Inductor's limit is 1,024. Beyond it, a kernel reads a row once per pass: layer norms of ViT-H,
    1,280 wide, take up to four times the time of their reads and writes.
    """
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices, ReductionHint
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        def uuid(self) -> str:
            return f"lowprec, rows of {MAX_ROW}"

        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            default = InductorChoices.should_use_persistent_reduction
            # a thread may keep these choices for graphs that are not compiled by `_inductor`
            is_ours = config.inductor_choices_class is rows_in_registers
            is_row = features.get_reduction_hint() == ReductionHint.INNER
            fits = V.graph.sizevars.statically_known_leq(features.reduction_numel, MAX_ROW)
            if is_ours and is_row and fits and not cooperative_reduction:
                return config.triton.persistent_reductions
            return default(features, cooperative_reduction)

    return Choices()


def checkpoint_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], on: bool | None = None
) -> None:
    """Moves gradient checkpointing into the blocks of a model, in place.

    A block saves its input, its attention output and, on a GPU, weights quantized for both of their
    products; the backward pass recomputes the rest. The model's own checkpointing is turned off: it
    recomputes a compiled block as a whole, and open_clip's fails for blocks with KQ norm. It stays
    as it is where it also recomputes blocks of convolutions, which would fill the memory otherwise.

    `on`: True checkpoints all blocks but these, False none. None checkpoints the blocks under the
    model's own checkpointing and keeps those that are checkpointed already.
    """
    blocks = list(blocks)
    names = {module: name for name, module in model.named_modules()}
    is_on = {m for m in names if any(getattr(m, flag, False) for flag in _FLAGS)}
    kept = {m for m in is_on if on is not False and _has_convolutional_blocks(m, blocks)}
    for block in blocks:
        owners = set(_with_parents(model, names[block]))
        is_kept = bool(owners & kept)
        if not is_kept and (on or on is None and owners & is_on):
            if not is_checkpointed(block):
                block.forward = partial(_checkpointed, block, vars(block).get("forward"))
        elif (is_kept or on is False) and is_checkpointed(block):
            patched = block.forward.args[1]
            del block.forward
            if patched is not None:
                block.forward = patched
        for module in () if is_kept else owners:
            for flag in _FLAGS:
                if getattr(module, flag, False):
                    setattr(module, flag, False)


def _has_convolutional_blocks(module: nn.Module, blocks: list[nn.Module]) -> bool:
    """Whether the checkpointing of a module recomputes more than blocks, as in NextViT.

    These are beside them, have several convolutions and no checkpointing of their own.
    """
    for container in module.modules():
        if isinstance(container, nn.Sequential | nn.ModuleList):
            elements = [set(element.modules()) for element in container]
            without = [parts for parts in elements if parts.isdisjoint(blocks)]
            if len(without) < len(elements) and any(map(_is_convolutional, without)):
                return True
    return False


def _is_convolutional(parts: set[nn.Module]) -> bool:
    num_convolutions = sum(isinstance(part, nn.modules.conv._ConvNd) for part in parts)
    return num_convolutions > 1 and not any(hasattr(p, flag) for p in parts for flag in _FLAGS)


def _with_parents(model: nn.Module, name: str) -> list[nn.Module]:
    """The module of this name and all modules that contain it."""
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)]


def is_checkpointed(block: nn.Module) -> bool:
    """Whether `checkpoint_blocks` has turned on the checkpointing of a block."""
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

    The type's forward is looked up here, because fusing an MLP changes the type. In training, a
    decoder's block does not see an empty cache of keys and values, to which the recomputation would
    append them again; in evaluation, a block with a cache is not checkpointed. Raises ValueError in
    training if the cache holds something, such as the prefixes of prefix tuning.
    """
    forward = patched or partial(type(block).forward, block)
    caches = [x for x in (*args, *kwargs.values()) if _is_cache(x)]
    if torch.is_grad_enabled() and caches:
        if not block.training:
            return forward(*args, **kwargs)
        numbers = (getattr(module, "layer_idx", None) for module in block.modules())
        number = next((n for n in numbers if n is not None), 0)
        if any(cache.get_seq_length(number) for cache in caches):
            raise ValueError(
                "a checkpointed block cannot train with a cache that holds keys and values, such "
                "as those of prefix tuning: prepare_for_training(..., checkpointing=False)"
            )
        args = tuple(None if _is_cache(x) else x for x in args)
        kwargs = {name: None if _is_cache(x) else x for name, x in kwargs.items()}
    keep = partial(create_selective_checkpoint_contexts, _is_kept)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=keep, **kwargs)


def _is_cache(x: Any) -> bool:
    """Whether an argument is a cache of keys and values, of transformers."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(x, module.Cache)
