"""What a run is made of beside its config: digests of what the config's paths hold."""

import json
from pathlib import Path

from lowprec.config.check import ConfigError
from lowprec.config.schema import Config
from lowprec.data.open import Data


def sources_of(config: Config, data: Data) -> dict[str, str]:
    """Digests of what the config's paths hold."""
    sources = {"data": data.digest(config)}
    if config.model.init_from:
        from lowprec.clip.export import weights_digest

        try:
            sources["init_from"] = weights_digest(Path(config.model.init_from))
        except FileNotFoundError as error:
            raise ConfigError([f"model.init_from={config.model.init_from}: {error}"]) from error
    if config.resume.from_:
        from lowprec.runs.attempts import CheckpointError
        from lowprec.train.checkpoint import find_checkpoint

        try:
            manifest = find_checkpoint(Path(config.resume.from_)) / "manifest.json"
        except CheckpointError as error:
            raise ConfigError([f"resume.from={config.resume.from_}: {error}"]) from error
        sources["resume_from"] = _sha256_of(manifest.parent)
    return sources


def source_of_weights(config: Config, sources: dict[str, str]) -> str:
    """The checkpoint of `resume.from`, if it is still the one that the run is named after."""
    from lowprec.runs.attempts import CheckpointError
    from lowprec.train.checkpoint import find_checkpoint

    found = find_checkpoint(Path(config.resume.from_))
    if _sha256_of(found) != sources["resume_from"]:
        raise CheckpointError(
            f"resume.from={config.resume.from_}: it is still being trained, and {found.name} has "
            "come since; wait for its end, or name one of its checkpoints"
        )
    return str(found)


def _sha256_of(checkpoint: Path) -> str:
    return json.loads((checkpoint / "manifest.json").read_text())["sha256"]
