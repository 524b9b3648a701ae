"""Rules for combinations of keys: a config may be wrong even if each of its values is allowed."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from lowprec.config.schema import (
    AUTOCAST,
    CLIPPING,
    LEGAL_SCALERS,
    PRESETS,
    TORCH_OPTIMIZERS,
    Config,
    ModelConfig,
    PrecisionConfig,
)
from lowprec.nearest import nearest
from lowprec.nn.recipe import LINEAR_LAYERS, custom_recipe

DEFAULTS = Config()


def combination_faults(config: Config) -> Iterator[str]:
    """A sentence for each broken rule, with the keys and what to use instead."""
    for key in ("name", "experiment"):
        name = getattr(config, key)
        is_plain = name is None or ("/" not in name and name.strip(".") and name.isprintable())
        if not is_plain or name == "sweeps" or len((name or "").encode(errors="replace")) > 100:
            yield f"{key}={name[:100]}: must be a folder name without '/', and not 'sweeps'"
    if not config.run_dir:
        yield f"run_dir={config.run_dir}: a folder is expected, such as run_dir=runs"
    if (config.schedule.warmup_steps or 0) > config.num_steps:
        yield (
            f"schedule.warmup_steps={config.schedule.warmup_steps} is more than "
            f"num_steps={config.num_steps}"
        )
    if config.batch_size % config.accumulate:
        yield (
            f"batch_size={config.batch_size} is not a multiple of accumulate={config.accumulate}, "
            "its number of micro-batches"
        )
    if config.evaluation.name != "none" and config.data.val is None:
        yield f"evaluation={config.evaluation.name} needs data.val; or set evaluation=none"
    for group, precision in _precisions(config).items():
        sets, autocast, scaler = getattr(config, group), precision.autocast, config.scaler.name
        if sets.autocast and scaler not in LEGAL_SCALERS[autocast]:
            legal = " or ".join(f"scaler={name}" for name in LEGAL_SCALERS[autocast])
            yield f"{group}.autocast={autocast} does not work with scaler={scaler}; use {legal}"
        yield from _recipe_faults(group, precision) if sets.recipe else ()
    yield from _precision_change_faults(config)
    yield from _optimizer_faults(config)
    yield from _conflicts(config)
    yield from _idle_faults(config)
    if config.model.name in PRESETS:
        yield from _preset_faults(config.model)
    else:
        yield from _open_clip_faults(config.model, config.intervention.name)


def _precisions(config: Config) -> dict[str, PrecisionConfig]:
    """The precision of the run and, by the group that sets it, the changed one."""
    changed = {"precision_change": config.precision_at(config.num_steps)}
    has_change = config.precision_change.step is not None
    return {"precision": config.precision, **(changed if has_change else {})}


def _precision_change_faults(config: Config) -> Iterator[str]:
    change, before = config.precision_change, config.precision
    if change.step is None:
        names = [name for name in ("recipe", "autocast") if getattr(change, name) is not None]
        for name in names:
            yield f"precision_change.{name}={getattr(change, name)} needs precision_change.step"
        return
    step = f"precision_change.step={change.step}"
    if change.step > config.num_steps:
        yield f"{step} is more than num_steps={config.num_steps}"
    elif config.precision_at(change.step) == before:
        yield (
            f"{step} changes nothing: precision has recipe={before.recipe} and "
            f"autocast={before.autocast} already; set another precision_change.recipe or .autocast"
        )
    conflicts = {
        "distributed=fsdp2, which shards the layers; use ddp": config.distributed.name == "fsdp2",
        "precision.outlier_threshold, which only one recipe has": before.outlier_threshold > 0,
        f"precision.autocast={before.autocast}, whose weights are 16-bit; "
        "leave precision_change.autocast=null": (
            change.autocast is not None and before.autocast not in AUTOCAST
        ),
    }
    for conflict, applies in conflicts.items():
        if applies:
            yield f"{step} does not work with {conflict}"


def _recipe_faults(group: str, precision: PrecisionConfig) -> Iterator[str]:
    if not precision.where:
        yield f"precision.where=[]: at least one of {', '.join(LINEAR_LAYERS)} is expected"
    if precision.recipe != "custom":
        return
    if not precision.products:
        yield (
            f"{group}.recipe=custom needs precision.products, such as "
            "{output: {format: int8, x: rowwise, w: tensorwise}}"
        )
    try:
        custom_recipe(precision.products or {})
    except ValueError as error:
        yield f"precision.products: {error}"


def _optimizer_faults(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    for option, owner in (*CLIPPING.items(), ("clip_threshold", "stable_adamw")):
        value = getattr(optimizer, option)
        others = ("stable_adamw", *TORCH_OPTIMIZERS) if option in CLIPPING else ()
        if value is not None and optimizer.name not in (owner, *others):
            allowed = " or ".join([f"optimizer={owner}", *others])
            yield f"optimizer.{option}={value} needs {allowed}, not {optimizer.name}"
        if value is None and optimizer.name == owner:
            yield f"optimizer={owner} needs optimizer.{option}, a number > 0"
    used = [name for name in CLIPPING if getattr(optimizer, name) is not None]
    if len(used) > 1:
        yield f"optimizer.{', optimizer.'.join(used)}: only one of them can be set"


def _conflicts(config: Config) -> Iterator[str]:
    """Pairs of choices that do not work together, each with the reason or the remedy."""
    optimizer, autocast = f"optimizer={config.optimizer.name}", config.precision.autocast
    is_torchs, fsdp2 = config.optimizer.name in TORCH_OPTIMIZERS, config.distributed.name == "fsdp2"
    recipes = [precision.recipe for precision in _precisions(config).values()]
    recorder = config.diagnostics.recorder.enabled
    sharded = "does not work with distributed=fsdp2, which shards the state; use ddp"
    conflicts = {
        f"{optimizer} {sharded}": is_torchs and fsdp2,
        f"optimizer.optim_bits=8 {sharded}": config.optimizer.optim_bits == 8 and fsdp2,
        f"optimizer.paged=true {sharded}": config.optimizer.paged and fsdp2,
        "optimizer.paged=true does not work with device=cpu: only a GPU's moments are paged": (
            config.optimizer.paged and config.device == "cpu"
        ),
        f"scaler=dynamic {sharded}": config.scaler.name == "dynamic" and fsdp2,
        f"diagnostics.recorder.enabled=true {sharded}": recorder and fsdp2,
        f"{optimizer} does not work with precision.autocast={autocast}: it does not compensate "
        "for the rounding of 16-bit parameters; use bf16 or fp16": (
            is_torchs and autocast.startswith("pure_")
        ),
        "data.cache keeps decoded images, which data.augment=crop_flip cannot use; leave one of "
        "them out": config.data.cache and config.data.augment == "crop_flip",
        f"data.cache={config.data.cache}: a local folder is expected, not a URL": (
            "://" in (config.data.cache or "")
        ),
        "precision.skip_slow=true: the speed of recipe=custom is not known": (
            config.precision.skip_slow and "custom" in recipes
        ),
    }
    yield from (sentence for sentence, applies in conflicts.items() if applies)


def _idle_faults(config: Config) -> Iterator[str]:
    """Keys that differ from the schema's default, but change nothing beside the run's identity."""
    scaled, streamed = config.scaler.name != "none", config.data.name == "stream"
    recipes = {precision.recipe for precision in _precisions(config).values()}
    high = recipes == {"high"}
    rule, is_ours = config.optimizer, config.optimizer.name not in TORCH_OPTIMIZERS
    owners = {  # key: whether it is used, and what uses it
        "scaler.init_scale": (scaled, "a scaler (dynamic or fixed)"),
        "scaler.max_skips": (scaled, "a scaler (dynamic or fixed)"),
        "precision.where": (not high, "a recipe other than high"),
        "precision.products": ("custom" in recipes, "recipe=custom"),
        "precision.outlier_threshold": ("llm_int8" in recipes, "recipe=llm_int8"),
        "precision.backend": (not high, "a recipe other than high"),
        "data.allow_remote": (streamed, "data=stream"),
        "data.cache": (not streamed, "data=shards or shapes: a stream reads each pair once"),
        "data.resampled": (not streamed, "data=shards or shapes: a stream has its own order"),
        "data.window": (not streamed, "data=shards or shapes: a stream has its own order"),
        "optimizer.beta2": (rule.beta2_decay is None, "optimizer.beta2_decay=null"),
        "optimizer.beta2_decay": (is_ours, "optimizer=adamw or stable_adamw"),
        "optimizer.clip_weight_decay": (rule.name == "stable_adamw", "optimizer=stable_adamw"),
        "optimizer.optim_bits": (is_ours, "optimizer=adamw or stable_adamw"),
        "optimizer.paged": (is_ours, "optimizer=adamw or stable_adamw"),
        "optimizer.min_8bit_size": (rule.optim_bits == 8, "optimizer.optim_bits=8"),
        "optimizer.override_32bit": (rule.optim_bits == 8, "optimizer.optim_bits=8"),
    }
    for key, (is_used, owner) in owners.items():
        group, _, name = key.partition(".")
        value, default = (getattr(getattr(c, group), name) for c in (config, DEFAULTS))
        if value != default and not is_used:
            yield f"{key}={value} does nothing without {owner}"


def _preset_faults(model: ModelConfig) -> Iterator[str]:
    empty = {name for name, value in vars(model).items() if value is None} - {"init_from"}
    for name in sorted(empty):
        yield f"model.{name}=null: the preset {model.name} needs a number"
    if empty:
        return
    for size, part, piece in (
        ("image_size", "model.patch_size=", model.patch_size),
        ("vision_width", "model.heads=", model.heads),
        ("text_width", "the width of a text head, ", 64),
    ):
        whole = getattr(model, size)
        if whole % piece:
            near = max(1, round(whole / piece)) * piece
            yield (
                f"model.{size}={whole} is not a multiple of {part}{piece}; "
                f"nearest: model.{size}={near}"
            )


def _open_clip_faults(model: ModelConfig, intervention: str) -> Iterator[str]:
    models = open_clip_models()
    if model.name not in models:
        choices = [*PRESETS, *models]
        yield (
            f"model.name={model.name}: neither a preset ({', '.join(PRESETS)}) nor one of "
            f"open_clip's {len(models)} models (with model=open_clip){nearest(model.name, choices)}"
        )
        return
    for name in ("vision_width", "vision_layers", "text_width", "text_layers", "heads"):
        if getattr(model, name) is not None:
            yield f"model.{name} is fixed by open_clip's model {model.name}; leave it null"
    towers = json.loads(models[model.name].read_text())
    vision, text = towers["vision_cfg"], towers["text_cfg"]
    if {"hf_model_name", "hf_tokenizer_name"} & set(text):
        yield f"model.name={model.name} needs a tokenizer to be downloaded; use another model"
    if "multimodal_cfg" in towers:
        yield f"model.name={model.name} has a caption decoder, which lowprec does not train"
    size = model.image_size or vision.get("image_size")
    patch = model.patch_size or vision.get("patch_size", 1)
    if isinstance(size, int) and isinstance(patch, int) and (size % patch or size < patch):
        yield f"model.image_size={size} is not a multiple of the patch size {patch}"
    is_foreign = {"timm_model_name", "hf_model_name"} & {*vision, *text}
    if is_foreign or not isinstance(vision["layers"], int):
        for key, value in (("intervention", intervention), ("patch_dropout", model.patch_dropout)):
            if value not in ("none", 0.0):
                yield f"{key}={value} needs open_clip's own ViT, which {model.name} does not have"


def open_clip_models() -> dict[str, Path]:
    """The config file of each open_clip model, by name; open_clip is not imported."""
    spec = importlib.util.find_spec("open_clip")
    folder = Path(spec.submodule_search_locations[0]) / "model_configs" if spec else Path()
    return {path.stem: path for path in sorted(folder.glob("*.json"))}
