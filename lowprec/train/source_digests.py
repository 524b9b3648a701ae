"""Digests of what a config's paths hold, part of a run's identity; importing it loads no torch."""

from pathlib import Path

from lowprec.config.check import ConfigError
from lowprec.config.schema import Config
from lowprec.data.open import Data
from lowprec.runs.provenance import file_digest


def sources_of(config: Config, data: Data) -> dict[str, str]:
    """Returns the digest by role: "data", and if configured "init_from".

    Raises ConfigError if weights are missing or damaged.
    """
    sources = {"data": data.digest(config)}
    if config.model.init_from:
        from lowprec.clip.export import find_weights

        try:
            sources["init_from"] = file_digest(find_weights(Path(config.model.init_from)))
        except FileNotFoundError as error:
            raise ConfigError([f"model.init_from={config.model.init_from}: {error}"]) from error
    return sources
