"""What figures, tables and verdicts call things in print: models, recipes, optimizers, settings."""

import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from analysis import comparison

PRECISIONS = {  # label in a run's name: (in print, color); bf16's color is its optimizer's
    "fp32": ("fp32", "#7A82B8"),
    "bf16": ("bf16", None),
    "fp16": ("fp16", "#327934"),
    "pure_bf16": ("pure bf16", "#D7CD4C"),
    "pure_fp16": ("pure fp16", "#DCBD64"),
    "switchback": ("SwitchBack int8", "#D55E00"),
    "switchback_m": ("SwitchBackM int8", "#873800"),
    "switchback_q": ("SwitchBackQ int8", "#AE69DA"),
    "llm_int8": ("LLM.int8()", "#009E73"),
    "fp8_tensorwise": ("fp8 tensor-wise", "#E69F00"),
    "fp8_rowwise": ("fp8 row-wise", "#A61C4B"),
    "fp8_switchback": ("SwitchBack fp8", "#B03A8C"),
    "fp8_switchback_blocks": ("SwitchBack fp8, blocks", "#F6BCCD"),
    "fp8_blockwise": ("fp8 in blocks", "#89B14E"),
    "mxfp8": ("MXFP8", "#4A6FD0"),
    "mxfp4": ("MXFP4", "#F08FA8"),
    "nvfp4": ("NVFP4", "#B07CC6"),
    "nvfp4_rht_sr": ("NVFP4, rotation, stochastic rounding", "#7A3E96"),
    "nvfp4_then_bf16": ("NVFP4, then bf16", "#2A1AE6"),
    "hw_fp8_tensorwise": ("hardware fp8 tensor-wise", "#56B4E9"),
    "hw_fp8_switchback": ("SwitchBack hardware fp8", "#5A0F45"),
    "hw_fp8_blockwise": ("hardware fp8 in blocks", "#623B00"),
    "code_books": ("fp8 tensor-wise, released code books", "#332288"),
    "autograd_high": ("autograd function", "#392994"),
}
NARROW = {"output": "#B9A3DB", "grad_input": "#8663BD", "grad_weight": "#4B2E83"}  # one product
OPTIMIZERS = {  # optimizer.name, with its rule: (in print, line style, color under bf16)
    "stable_adamw": ("StableAdamW", "-", "#0072B2"),
    "stable_adamw_8bit": ("8-bit StableAdamW", (0, (8, 1.2)), "#2A1AE6"),
    "adamw": ("AdamW", (0, (3.2, 1.2)), "#000000"),
    "adamw_clip": ("AdamW + gradient clipping", (0, (1.2, 1.0)), "#E69F00"),
    "adamw_zclip": ("AdamW + ZClip", (0, (2, 1, 1, 1)), "#D55E00"),
    "adamw_skip_step": ("AdamW + SkipStep", (0, (4, 1, 2, 1)), "#56B4E9"),
    "adamw_on_warning_clip": ("AdamW + clip on warning", (0, (6, 2)), "#CCBF6A"),
    "adamw_on_warning_skip": ("AdamW + skip on warning", (0, (3, 1, 1, 1)), "#5C4A12"),
    "adamw_on_warning_beta2": ("AdamW + beta2 0.9 on warning", (0, (2, 2)), "#7F6BFF"),
    "muon": ("Muon", (0, (6, 1, 1, 1)), "#009E73"),
    "adagc": ("AdaGC", (0, (1, 2.5)), "#CC79A7"),
    "stable_spam": ("StableSPAM", (0, (3, 1, 1, 1, 1, 1)), "#6D8C2B"),
    "adamw8bit_bnb": ("8-bit AdamW (bitsandbytes)", (0, (5, 1, 1, 1)), "#751952"),
    "adamw8bit_torchao": ("8-bit AdamW (torchao)", (0, (5, 1, 1, 1, 1, 1)), "#9D2F8E"),
}
INTERVENTIONS = {  # intervention.name: (in print, color where the figure is about it)
    "none": ("no change", "#4D4D4D"),
    "zero_init": ("zero-init layer-scale", "#DC267F"),
    "kq_norm": ("KQ layer norm", "#873800"),
}
TENSORS = {  # parts of a tensor's name: in words
    r"^visual\.transformer\.resblocks\.(\d+)\.": r"vision block \1, ",
    r"^transformer\.resblocks\.(\d+)\.": r"text block \1, ",
    r"^visual\.conv1\.weight$": "patch embedding",
    r"^visual\.proj$": "vision projection",
    r"^visual\.": "vision ",
    r"embedding\.weight": "embedding",
    r"ln_pre\.": "layer norm before the blocks, ",
    r"ln_(post|final)\.": "layer norm after the blocks, ",
    r"ln_(\d)\.": r"layer norm \1, ",
    r"attn\.ln_q\.": "layer norm of queries, ",
    r"attn\.ln_k\.": "layer norm of keys, ",
    r"ls_(\d)\.gamma": r"layer scale \1",
    r"attn\.in_proj_": "queries, keys and values, ",
    r"attn\.out_proj\.": "attention output, ",
    r"mlp\.c_fc\.": "MLP input, ",
    r"mlp\.c_proj\.": "MLP output, ",
    "_": " ",
}
MODELS = {  # model.name: in print, small to large
    "nano": "nano",
    "mini_b": "mini_b",
    "mini_l": "mini_l",
    "mini_h": "mini_h",
    "vit_b14": "ViT-B/14",
    "vit_b32": "ViT-B/32",
    "vit_l14": "ViT-L/14",
    "vit_h14": "ViT-H/14",
}
TABLES = {
    "model.name": MODELS,
    "precision.label": PRECISIONS,
    "optimizer.name": OPTIMIZERS,
    "intervention.name": INTERVENTIONS,
}  # by config key


def model(name: str) -> str:
    """A model in print."""
    return MODELS.get(name, name)


def tensor(name: str) -> str:
    """A tensor of CLIP in words: `vision block 6, layer norm 1, bias`."""
    for pattern, words in TENSORS.items():
        name = re.sub(pattern, words, name)
    return name


def precision(label: str) -> str:
    """A precision in print: `NVFP4, then bf16 from step 1,001` for `nvfp4_then_bf16@1001`.

    Narrow products are `int8 weight gradient only` for `grad_weight int8`.
    """
    if " " in label:
        narrow = re.sub(r"(\w+) (\w+)", r"\2 \1 only", label)
        return narrow.replace("grad_weight", "weight gradient").replace(
            "grad_input", "input gradient"
        )
    name, _, step = label.partition("@")
    return PRECISIONS.get(name, (name,))[0] + (f" from step {int(step):,}" if step else "")


def method(label: str, optimizer: str) -> str:
    """`SwitchBack int8, StableAdamW`: a method in print."""
    return f"{precision(label)}, {optimizer_name(optimizer)}"


def optimizer_name(name: str) -> str:
    """An optimizer in print, with its rule: `8-bit StableAdamW` for `stable_adamw_8bit`."""
    return OPTIMIZERS.get(name, (name,))[0]


def order(key: str) -> Callable[[Any], Any]:
    """The sort key of values of a config key: the order of its table above, then other names."""
    table = TABLES.get(key)
    return (lambda name: rank(name, table)) if table else lambda value: value


def rank(name: str, table: Collection[str]) -> tuple[int, str]:
    """Sort key: the order of a table, then other names."""
    return (list(table).index(name) if name in table else len(table), name)


def join(items) -> str:
    """`a, b and c`."""
    words = [f"{item:,}" if isinstance(item, (int, np.integer)) else str(item) for item in items]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def span(values, form: str = "{:.1f}") -> str:
    """The smallest and the largest of some values: `2.3 to 2.7`, or `2.7` if both read so."""
    low, high = (in_minus(form.format(end)) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def in_minus(text: str) -> str:
    """A number in print, with a minus sign in place of a hyphen."""
    return text.replace("-", "\N{MINUS SIGN}")


def number(value: float) -> str:
    """A number such as a learning rate: `0.02`, and below 1e-2 `2e-3`."""
    if not 0 < abs(value) < 1e-2:
        return f"{value:.12g}"
    digits, _, exponent = f"{value:.12e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"


def setting(key: str, value: object) -> str:
    """A value of a config key: `ViT-B/32`, `SwitchBack int8`, `learning rate 2e-3`."""
    printed = {"model.name": model, "precision.label": precision, "label": str, "": str}
    if key in printed:
        return printed[key](value)
    if key == "optimizer.lr" and isinstance(value, float):
        return f"learning rate {number(value)}"
    if value in TABLES.get(key, {}):
        return TABLES[key][value][0]
    return f"{comparison.short(key).replace('_', ' ')} {comparison.written(value)}"
