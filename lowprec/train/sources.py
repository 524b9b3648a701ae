"""Digests of what a config's paths hold, part of a run's identity; importing it loads no torch."""

import json
from pathlib import Path

from lowprec.config.check import ConfigError
from lowprec.config.schema import Config
from lowprec.data.open import Data
from lowprec.runs.attempts import CheckpointError
from lowprec.runs.provenance import file_digest


def sources_of(config: Config, data: Data) -> dict[str, str]:
    """Returns the digest by role: "data", and if configured "init_from" and "resume_from".

    Raises ConfigError if weights or a checkpoint are missing or damaged.
    """
    sources = {"data": data.digest(config)}
    if config.model.init_from:
        from lowprec.clip.export import find_weights

        try:
            sources["init_from"] = file_digest(find_weights(Path(config.model.init_from)))
        except FileNotFoundError as error:
            raise ConfigError([f"model.init_from={config.model.init_from}: {error}"]) from error
    if config.resume.from_:
        from lowprec.train.checkpoint import find_checkpoint, is_of_optimizer

        try:
            checkpoint = find_checkpoint(Path(config.resume.from_))
        except CheckpointError as error:
            raise ConfigError([f"resume.from={config.resume.from_}: {error}"]) from error
        if not any(map(is_of_optimizer, _manifest(checkpoint)["files"])):
            raise ConfigError(
                [
                    f"resume.from={config.resume.from_}: {checkpoint.name} has no moments, which a "
                    "finished run keeps with keep_checkpoints=2; model.init_from starts from its "
                    "weights"
                ]
            )
        sources["resume_from"] = checkpoint_digest(checkpoint)
    return sources


def checkpoint_digest(checkpoint: Path) -> str:
    """Returns the digest of a checkpoint's manifest, which holds its files' digests."""
    return _manifest(checkpoint)["sha256"]


def _manifest(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "manifest.json").read_text())
