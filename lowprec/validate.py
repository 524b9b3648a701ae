"""Checks a composed config against the schema: all faults at once, each with a way out.

A fault is one sentence that names the key, what is allowed and the nearest valid name. Nothing
here touches data, a GPU or torch, so a typo costs a second and never a queue slot.
"""

import difflib
import importlib.util
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from lowprec.config import LEGAL_SCALERS, PRESETS, Config, ModelConfig

MISSING = "???"


class ConfigError(ValueError):
    """One or more faults of a config; `faults` is a list of sentences.

    `config` is the config itself if each of its values is fine alone, else None.
    """

    def __init__(self, faults: Iterable[str], config: Any = None):
        self.faults = list(dict.fromkeys(faults))
        self.config = config
        super().__init__("\n".join(f"  - {fault}" for fault in self.faults))


def check(raw: dict, schema: type = Config) -> Any:
    """Builds `schema` from nested plain data or raises ConfigError with every fault."""
    faults: list[str] = []
    known = list(keys(schema))
    config = _build(schema, raw, "", known, faults)
    if not faults and schema is Config:
        faults.extend(_combination_faults(config))
    if faults:
        raise ConfigError(faults, config)
    return config


def keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Every key of a schema, groups and leaves, dotted."""
    for f in fields(schema):
        path = prefix + public_name(f.name)
        if is_dataclass(f.type):
            yield path
            yield from keys(f.type, path + ".")
        else:
            yield path


def public_name(attribute: str) -> str:
    """The config key of a dataclass attribute: `from_` is written `from`, a Python keyword."""
    return attribute.removesuffix("_")


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`; nearest: x` for the most similar of the allowed names, or nothing.

    A dotted key is also compared by its last part, so that `lr` finds `optimizer.lr`.
    """
    names = [str(choice) for choice in allowed]
    by_leaf = {choice.rpartition(".")[2]: choice for choice in reversed(names)}
    leaf = name.rpartition(".")[2]
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    found = found or [by_leaf[n] for n in difflib.get_close_matches(leaf, by_leaf, 1, 0.6)]
    found = found or difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"; nearest: {found[0]}" if found else ""


def unknown_key(path: str, known: Iterable[str]) -> str:
    """The fault of a key that the schema does not have."""
    group = path.rpartition(".")[0]
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == group]
    allowed = f" ({group or 'the root'} has {', '.join(siblings)})" if siblings else ""
    return f"{path}: no such key{allowed}{nearest(path, known)}"


def _build(schema: type, raw: Any, prefix: str, known: list[str], faults: list[str]) -> Any:
    if not isinstance(raw, dict):
        inside = ", ".join(public_name(f.name) for f in fields(schema))
        faults.append(f"{prefix[:-1]}={_written(raw)}: a group of keys is expected here ({inside})")
        return None
    names = {public_name(f.name): f for f in fields(schema)}
    faults.extend(unknown_key(f"{prefix}{name}", known) for name in raw if name not in names)
    values = {}
    for name, f in names.items():
        path = prefix + name
        if is_dataclass(f.type):
            values[f.name] = _build(f.type, raw.get(name, {}), path + ".", known, faults)
        elif name in raw:
            values[f.name] = _value(path, raw[name], f, faults)
    return None if faults else schema(**values)


def _value(path: str, value: Any, f: Any, faults: list[str]) -> Any:
    """One value, converted where that is exact (int to float), or a fault."""
    if value == MISSING:
        faults.append(f"{path} is required: {f.metadata['doc']}")
        return None
    kinds = typing.get_args(f.type) if isinstance(f.type, types.UnionType) else (f.type,)
    if value is None and type(None) in kinds:
        return None
    kind = next(k for k in kinds if k is not type(None))
    items = value if typing.get_origin(kind) is list and isinstance(value, list) else [value]
    element = typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind
    if typing.get_origin(kind) is list and not isinstance(value, list):
        faults.append(f"{path}={_written(value)}: {_expectation(f, kinds)} is expected")
        return None
    converted = [_element(path, item, element, f, kinds, faults) for item in items]
    return converted if typing.get_origin(kind) is list else converted[0]


def _element(path: str, item: Any, kind: type, f: Any, kinds: tuple, faults: list[str]) -> Any:
    choices, planned = f.metadata["choices"], f.metadata["planned"]
    if kind is float and isinstance(item, int) and not isinstance(item, bool):
        item = float(item)
    right_type = isinstance(item, kind) and not (isinstance(item, bool) and kind is not bool)
    if right_type and kind is float and not math.isfinite(item):
        right_type = False
    if right_type and item in choices:
        return item
    if item in planned or (right_type and "*" in planned):
        built = ", ".join(_written(choice).strip("'") for choice in choices) or "null"
        given = f"{path}={_written(item)}".replace("'", "")
        faults.append(f"{given} is planned and does not exist yet; it can be: {built}")
    elif choices:
        allowed = ", ".join(_written(choice).strip("'") for choice in choices)
        near = nearest(str(item), (*choices, *planned))
        faults.append(f"{path}={_written(item)}: one of {allowed}{near}")
    elif not right_type or not _within(item, f.metadata["bounds"]):
        meaning = f" ({f.metadata['doc']})" if item is None else ""
        faults.append(f"{path}={_written(item)}: {_expectation(f, kinds)} is expected{meaning}")
    return item


def _written(value: Any) -> str:
    """A value as a command line has it: `null`, `true`, text in quotes."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _within(item: Any, bounds: dict[str, float]) -> bool:
    return (
        item >= bounds.get("least", item)
        and item <= bounds.get("most", item)
        and ("above" not in bounds or item > bounds["above"])
        and ("below" not in bounds or item < bounds["below"])
    )


def _expectation(f: Any, kinds: tuple) -> str:
    """What a field may hold, in words: `a number > 0 or null`."""
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    signs = {"least": ">=", "above": ">", "most": "<=", "below": "<"}
    kind = next(k for k in kinds if k is not type(None))
    text = words.get(kind, "a list such as [a,b]" if typing.get_origin(kind) is list else "a map")
    limits = " and ".join(f"{signs[n]} {bound}" for n, bound in f.metadata["bounds"].items())
    return f"{text} {limits}".strip() + (" or null" if type(None) in kinds else "")


def _combination_faults(config: Config) -> Iterator[str]:
    """Faults between keys that are each fine alone."""
    for name in ("name", "experiment"):
        folder = getattr(config, name)
        if folder is not None and (folder != Path(folder).name or folder in ("", ".", "..")):
            yield f"{name}={folder}: a plain folder name is expected, without /"
    autocast, scaler = config.precision.autocast, config.scaler.name
    if scaler not in LEGAL_SCALERS[autocast]:
        legal = " or ".join(f"scaler={name}" for name in LEGAL_SCALERS[autocast])
        yield f"precision.autocast={autocast} does not go with scaler={scaler}; use {legal}"
    if (config.schedule.warmup_steps or 0) > config.num_steps:
        yield (
            f"schedule.warmup_steps={config.schedule.warmup_steps} is more than "
            f"num_steps={config.num_steps}"
        )
    yield from _idle_faults(config)
    optimizer = config.optimizer
    for option, owner in (("clip_norm", "adamw_clip"), ("clip_threshold", "stable_adamw")):
        value = getattr(optimizer, option)
        if value is not None and optimizer.name != owner:
            yield f"optimizer.{option}={value} needs optimizer={owner}, not {optimizer.name}"
        if value is None and optimizer.name == owner:
            yield f"optimizer={owner} needs optimizer.{option}, a number > 0"
    if config.evaluation.name != "none" and config.data.val is None:
        yield f"evaluation={config.evaluation.name} needs data.val; or set evaluation=none"
    yield from _model_faults(config.model, config.intervention.name)


def _idle_faults(config: Config) -> Iterator[str]:
    """Keys that would change a run's identity and nothing else."""
    idle = (
        ("scaler", "init_scale", config.scaler.name != "none", "a scaler (dynamic or fixed)"),
        ("scaler", "max_skips", config.scaler.name != "none", "a scaler (dynamic or fixed)"),
        ("precision", "where", config.precision.recipe != "high", "a recipe other than high"),
        ("optimizer", "clip_weight_decay", config.optimizer.name == "stable_adamw",
         "optimizer=stable_adamw"),
    )  # fmt: skip
    for group, name, used, owner in idle:
        value, default = (getattr(getattr(c, group), name) for c in (config, Config()))
        if value != default and not used:
            yield f"{group}.{name}={value} does nothing without {owner}"


def _model_faults(model: ModelConfig, intervention: str) -> Iterator[str]:
    if model.name in PRESETS:
        empty = [name for name, value in vars(model).items() if value is None]
        for name in sorted(set(empty) - {"init_from"}):
            yield f"model.{name}=null: the preset {model.name} needs a number"
        if not set(empty) - {"init_from"}:
            yield from _preset_faults(model)
        return
    known = open_clip_models()
    if model.name not in known:
        choices = [*PRESETS, *known]
        yield (
            f"model.name={model.name}: neither a preset ({', '.join(PRESETS)}) nor one of "
            f"open_clip's {len(known)} models (with model=open_clip){nearest(model.name, choices)}"
        )
        return
    for name in ("vision_width", "vision_layers", "text_width", "text_layers", "heads"):
        if getattr(model, name) is not None:
            yield f"model.{name} is fixed by open_clip's model {model.name}; leave it null"
    towers = json.loads(known[model.name].read_text())
    foreign = {"timm_model_name", "hf_model_name"} & {*towers["vision_cfg"], *towers["text_cfg"]}
    if {"hf_model_name", "hf_tokenizer_name"} & {*towers["text_cfg"]}:
        yield f"model.name={model.name} needs a tokenizer that must be downloaded; use another"
    if "multimodal_cfg" in towers:
        yield f"model.name={model.name} has a caption decoder, which this harness does not train"
    size = model.image_size or towers["vision_cfg"].get("image_size")
    patch = model.patch_size or towers["vision_cfg"].get("patch_size", 1)
    if isinstance(size, int) and isinstance(patch, int) and (size % patch or size < patch):
        yield f"model.image_size={size} is not a multiple of the patch size {patch}"
    plain_vit = not foreign and isinstance(towers["vision_cfg"]["layers"], int)
    if intervention != "none" and not plain_vit:
        yield f"intervention={intervention} needs open_clip's own towers; {model.name} has others"
    if model.patch_dropout and not plain_vit:
        yield f"model.patch_dropout needs open_clip's own ViT; {model.name} has another tower"


def _preset_faults(model: ModelConfig) -> Iterator[str]:
    for size, part in (("image_size", "patch_size"), ("vision_width", "heads")):
        whole, piece = getattr(model, size), getattr(model, part)
        if whole % piece:
            below, above = whole // piece * piece, -(-whole // piece) * piece
            options = " or ".join(str(value) for value in (below, above) if value)
            yield (
                f"model.{size}={whole} is not a multiple of model.{part}={piece}; "
                f"nearest: model.{size}={options}"
            )
    if model.text_width % 64:
        near = max(64, round(model.text_width / 64) * 64)
        yield (
            f"model.text_width={model.text_width} is not a multiple of 64, the width of a text "
            f"head; nearest: model.text_width={near}"
        )


def open_clip_models() -> dict[str, Path]:
    """Names of open_clip's model configs and their files, found without importing it."""
    spec = importlib.util.find_spec("open_clip")
    folder = Path(spec.submodule_search_locations[0]) / "model_configs" if spec else Path()
    return {path.stem: path for path in sorted(folder.glob("*.json"))}
