"""Rules for combinations of keys: a config may be wrong even if each of its values is allowed."""

import dataclasses
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

from lowprec.config.schema import (
    EIGHT_BIT,
    LEGAL_SCALERS,
    LINEAR_LAYERS,
    OF_SECOND_MOMENT,
    PRESETS,
    REMOTE_SCHEMES,
    Config,
    DataConfig,
    ModelConfig,
    PrecisionConfig,
)
from lowprec.nearest import nearest
from lowprec.nn.recipe import RECIPES, custom_recipe


def combination_faults(config: Config) -> Iterator[str]:
    """A sentence for each broken rule, with the keys and what to use instead."""
    for name in ("name", "experiment"):
        folder = getattr(config, name)
        if folder is not None and (folder != Path(folder).name or folder in ("", ".", "..")):
            yield f"{name}={folder}: a plain folder name is expected, without /"
    autocast, scaler = config.precision.autocast, config.scaler.name
    if scaler not in LEGAL_SCALERS[autocast]:
        legal = " or ".join(f"scaler={name}" for name in LEGAL_SCALERS[autocast])
        yield f"precision.autocast={autocast} does not work with scaler={scaler}; use {legal}"
    if (config.schedule.warmup_steps or 0) > config.num_steps:
        yield (
            f"schedule.warmup_steps={config.schedule.warmup_steps} is more than "
            f"num_steps={config.num_steps}"
        )
    yield from _idle_faults(config)
    yield from _recipe_faults(config.precision)
    if config.checkpointing and config.intervention.name == "kq_norm":
        yield (
            "checkpointing=true does not work with intervention=kq_norm, whose blocks open_clip "
            "cannot recompute; leave one of them out"
        )
    optimizer = config.optimizer
    for option, owner in (("clip_norm", "adamw_clip"), ("clip_threshold", "stable_adamw")):
        value = getattr(optimizer, option)
        if value is not None and optimizer.name != owner:
            yield f"optimizer.{option}={value} needs optimizer={owner}, not {optimizer.name}"
        if value is None and optimizer.name == owner:
            yield f"optimizer={owner} needs optimizer.{option}, a number > 0"
    yield from _eight_bit_faults(config)
    yield from _distributed_faults(config)
    if config.evaluation.name != "none" and config.data.val is None:
        yield f"evaluation={config.evaluation.name} needs data.val; or set evaluation=none"
    yield from _model_faults(config.model, config.intervention.name)
    yield from _stream_faults(config.data)


def _eight_bit_faults(config: Config) -> Iterator[str]:
    rule, statistics = config.optimizer, config.diagnostics.statistics
    if rule.stable_embedding and config.model.init_from:
        yield (
            "optimizer.stable_embedding=true draws a new token embedding, which would overwrite "
            "that of model.init_from; leave one of them out"
        )
    if rule.name not in EIGHT_BIT:
        return
    unknown = [name for name in statistics if name in OF_SECOND_MOMENT]
    if unknown:
        known = ",".join(name for name in statistics if name not in unknown)
        yield (
            f"diagnostics.statistics: {', '.join(unknown)} would need the second moments, which "
            f"optimizer={rule.name} keeps in 8 bits; use diagnostics.statistics=[{known}]"
        )
    if config.precision.autocast.startswith("pure_"):
        yield (
            f"optimizer={rule.name} does not work with precision.autocast="
            f"{config.precision.autocast}: it does not compensate for the rounding of 16-bit "
            "parameters; use bf16 or fp16"
        )
    if rule.beta2_decay is not None:
        yield f"optimizer.beta2_decay={rule.beta2_decay}: optimizer={rule.name} has one beta2"
    if rule.paged and rule.name != "adamw8bit_bnb":
        yield f"optimizer.paged=true needs optimizer=adamw8bit_bnb, not {rule.name}"


def _distributed_faults(config: Config) -> Iterator[str]:
    if config.batch_size % config.accumulate:
        yield (
            f"batch_size={config.batch_size} is not a multiple of accumulate={config.accumulate}, "
            "its number of micro-batches"
        )
    refused = {
        f"optimizer={config.optimizer.name}": config.optimizer.name in EIGHT_BIT,
        "scaler=dynamic": config.scaler.name == "dynamic",
        "diagnostics.recorder.enabled=true": config.diagnostics.recorder.enabled,
    }
    for choice, applies in refused.items():
        if applies and config.distributed.name == "fsdp2":
            yield f"{choice} does not work with distributed=fsdp2, which shards the state; use ddp"
    if config.resume.from_ and config.model.init_from:
        yield "resume.from and model.init_from would both set the weights; leave one of them out"


def _stream_faults(data: DataConfig) -> Iterator[str]:
    for name, pattern in (("train", data.train), ("val", data.val)):
        scheme = url_scheme(pattern or "")
        if scheme is not None and (data.name != "stream" or name == "val"):
            hint = "" if name == "val" else "; use data=stream for URLs"
            yield f"data.{name}: local files are expected, not {scheme}{hint}"
        elif scheme is not None and scheme not in REMOTE_SCHEMES:
            known = ", ".join(REMOTE_SCHEMES)
            yield f"data.train: {scheme} is not supported; use local files or {known}"
    if data.allow_remote and data.name != "stream":
        yield f"data.allow_remote={data.allow_remote} does nothing without data=stream"
    if data.resampled and data.name == "stream":
        yield "data.resampled=true does nothing with data=stream, which has its own order"
    if data.window != DataConfig().window and data.name == "stream":
        yield f"data.window={data.window} does nothing with data=stream"


def url_scheme(pattern: str) -> str | None:
    """`https` for `https://...`, `pipe` for `pipe:...`, None for a path."""
    match = re.match(r"([a-z][a-z0-9+.-]*):(?=//)|(pipe):", pattern)
    return match and (match[1] or match[2])


def _idle_faults(config: Config) -> Iterator[str]:
    """Keys that would change a run's identity but nothing else."""
    idle = (
        ("scaler", "init_scale", config.scaler.name != "none", "a scaler (dynamic or fixed)"),
        ("scaler", "max_skips", config.scaler.name != "none", "a scaler (dynamic or fixed)"),
        ("precision", "where", config.precision.recipe != "high", "a recipe other than high"),
        ("precision", "products", config.precision.recipe == "custom", "recipe=custom"),
        ("precision", "outlier_threshold", config.precision.recipe == "llm_int8",
         "recipe=llm_int8"),
        ("precision", "backend", _is_native(config.precision), "native 8-bit products"),
        ("precision", "skip_slow", _is_native(config.precision), "native 8-bit products"),
        ("distributed", "local_loss", config.distributed.name != "none",
         "distributed=ddp or fsdp2"),
        *(("distributed", name, config.distributed.name == "ddp", "distributed=ddp")
          for name in ("static_graph", "sync_bn")),
        ("optimizer", "clip_weight_decay", config.optimizer.name == "stable_adamw",
         "optimizer=stable_adamw"),
        *(("optimizer", name, config.optimizer.name in EIGHT_BIT, f"optimizer={EIGHT_BIT[0]}")
          for name in ("min_8bit_size", "override_32bit", "paged")),
    )  # fmt: skip
    for group, name, used, owner in idle:
        value, default = (getattr(getattr(c, group), name) for c in (config, Config()))
        if value != default and not used:
            yield f"{group}.{name}={value} does nothing without {owner}"
    spikes = dataclasses.asdict(config.diagnostics.spikes)
    if spikes.pop("protocol") == "none":
        for name, value in spikes.items():
            if value is not None:
                yield f"diagnostics.spikes.{name}={value} does nothing without a protocol"
    elif spikes["rms_threshold"] is not None and "rms" not in config.diagnostics.statistics:
        yield "diagnostics.spikes.rms_threshold does nothing without rms in diagnostics.statistics"
    rule = config.optimizer
    if rule.beta2_decay is not None and rule.beta2 != Config().optimizer.beta2:
        yield f"optimizer.beta2={rule.beta2} does nothing beside optimizer.beta2_decay"


def _is_native(precision: PrecisionConfig) -> bool:
    """Whether some products run on 8-bit units; True for a faulty custom recipe."""
    if precision.recipe != "custom":
        known = RECIPES.get(precision.recipe)
    else:
        try:
            known = custom_recipe(precision.products or {})
        except ValueError:
            return True
    products = () if known is None else known.products
    return any(product is not None and product.native for product in products)


def _recipe_faults(precision: PrecisionConfig) -> Iterator[str]:
    if precision.recipe == "int8_inference":
        yield (
            "precision.recipe=int8_inference is forward only; train with another recipe, then run "
            "experiments.evaluate run=DIR precision=int8_inference"
        )
    if not precision.where:
        yield f"precision.where=[]: at least one of {', '.join(LINEAR_LAYERS)} is expected"
    if precision.recipe != "custom":
        return
    if precision.skip_slow:
        yield "precision.skip_slow=true: the speed of recipe=custom is not known"
    if not precision.products:
        yield (
            "precision.recipe=custom needs precision.products, such as "
            "{output: {format: int8, x: rowwise, w: tensorwise}}"
        )
    try:
        custom_recipe(precision.products or {})
    except ValueError as error:
        yield f"precision.products: {error}"


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
        yield f"model.name={model.name} needs a tokenizer to be downloaded; use another model"
    if "multimodal_cfg" in towers:
        yield f"model.name={model.name} has a caption decoder, which lowprec does not train"
    size = model.image_size or towers["vision_cfg"].get("image_size")
    patch = model.patch_size or towers["vision_cfg"].get("patch_size", 1)
    if isinstance(size, int) and isinstance(patch, int) and (size % patch or size < patch):
        yield f"model.image_size={size} is not a multiple of the patch size {patch}"
    plain_vit = not foreign and isinstance(towers["vision_cfg"]["layers"], int)
    if intervention != "none" and not plain_vit:
        yield f"intervention={intervention} needs open_clip's own towers; {model.name} has others"
    if model.patch_dropout and not plain_vit:
        yield f"model.patch_dropout needs open_clip's own ViT, which {model.name} does not have"


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
    """The config file of each open_clip model, by name; open_clip is not imported."""
    spec = importlib.util.find_spec("open_clip")
    folder = Path(spec.submodule_search_locations[0]) / "model_configs" if spec else Path()
    return {path.stem: path for path in sorted(folder.glob("*.json"))}
