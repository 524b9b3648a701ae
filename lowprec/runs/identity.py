"""Names a run: which parts of a config make two runs the same run, and where a run lives."""

import hashlib
import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from lowprec.config.check import IN_DIGESTS
from lowprec.config.schema import Config, OptimizerConfig, PrecisionChangeConfig


def identity(config: Any) -> dict:
    """Returns the part of a config that makes two runs the same run, as nested plain data.

    `num_steps` is left out with `schedule=constant`, where a longer run continues a shorter one.
    `save_every` is included with `data=stream`, which is reseeded at each checkpoint.
    """
    marked = {}
    for f in fields(config):
        if f.metadata.get("identity", True):
            value = getattr(config, f.name)
            marked[f.name] = identity(value) if is_dataclass(value) else value
    if not isinstance(config, Config):
        return marked
    if config.schedule.name == "constant":
        del marked["num_steps"]
    if config.data.name == "stream":
        marked["save_every"] = config.save_every
    unknown = ("lr_scale", "zclip", "skip_sigmas", "optim_bits")  # to old runs
    for name in unknown:
        if getattr(config.optimizer, name) in ({}, getattr(OptimizerConfig(), name)):
            del marked["optimizer"][name]
    if not config.data.fast_decoding:
        del marked["data"]["fast_decoding"]
    if config.precision_change == PrecisionChangeConfig():
        del marked["precision_change"]
    marked["optimizer"]["paged"] = False  # in old digests; it changes no result
    for key, value in IN_DIGESTS.items():  # they keep the digests of old runs
        group, _, name = key.partition(".")
        marked[group][name] = value
    return marked


def digest(config: Config, sources: dict[str, str]) -> str:
    """Returns ten hexadecimal digits for a run's identity and the contents of its paths.

    `sources` maps a role ("data", "init_from") to the digest of the bytes behind its path.
    """
    text = json.dumps({"config": identity(config), "sources": sources}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def label(config: Config) -> str:
    """Returns `<model>-<precision>-<optimizer>-s<seed>`."""
    parts = (config.model.name, config.precision.label, config.optimizer.name)
    return "-".join(parts) + f"-s{config.seed}"


def directory(config: Config, sources: dict[str, str]) -> Path:
    """Returns a run's directory, `<run_dir>/<experiment or name>/<label>-<digest>`."""
    study = config.experiment or config.name
    return Path(config.run_dir) / study / f"{label(config)}-{digest(config, sources)}"
