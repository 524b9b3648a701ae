"""Names a run: which parts of a config make two runs the same run, and where a run lives."""

import hashlib
import json
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from lowprec.config.check import public_name
from lowprec.config.schema import Config


def to_dict(config: Any) -> dict:
    """A config (or one of its groups) as nested plain data, under its public names."""

    def rename(node: Any) -> Any:
        if isinstance(node, dict):
            return {public_name(name): rename(value) for name, value in node.items()}
        return node

    return rename(asdict(config))


def identity(config: Any) -> dict:
    """The part of a config that makes two runs the same run, as nested plain data.

    `num_steps` is left out under `schedule=constant`, whose longer run only continues a shorter;
    `save_every` is part of it under `data=stream`, which is seeded anew at each checkpoint.
    """
    chosen = {}
    for f in fields(config):
        if f.metadata.get("identity", True):
            value = getattr(config, f.name)
            chosen[public_name(f.name)] = identity(value) if is_dataclass(value) else value
    if isinstance(config, Config) and config.schedule.name == "constant":
        del chosen["num_steps"]
    if isinstance(config, Config) and config.data.name == "stream":
        chosen["save_every"] = config.save_every
    return chosen


def digest(config: Config, sources: dict[str, str]) -> str:
    """Ten hexadecimal digits that name a run: of its identity and of what its paths hold.

    `sources` maps a role ("data", "init_from") to the digest of the bytes behind its path.
    """
    text = json.dumps({"config": identity(config), "sources": sources}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def precision_label(config: Config) -> str:
    """The recipe's name, or under recipe `high` the autocast dtype's."""
    return config.precision.label


def label(config: Config) -> str:
    """`<model>-<precision>-<optimizer>-s<seed>`."""
    parts = (config.model.name, precision_label(config), config.optimizer.name)
    return "-".join(parts) + f"-s{config.seed}"


def directory(config: Config, sources: dict[str, str]) -> Path:
    """`<run_dir>/<experiment or name>/<label>-<digest>`: the same command finds the same run."""
    study = config.experiment or config.name
    return Path(config.run_dir) / study / f"{label(config)}-{digest(config, sources)}"
