"""Indexes image-text shards before a run, or again after they have changed.

python -m experiments.index_shards shards='some/where/train-*.tar' index=some/folder

Several sets may share one index folder.
"""

from dataclasses import dataclass

from experiments.entry import run_command
from lowprec.config.check import RunError
from lowprec.config.schema import key
from lowprec.data.index import open_shards


@dataclass
class IndexConfig:
    """Which shards to index, and where."""

    shards: str = key("???", "glob of the shards")
    index: str | None = key(None, "folder of the index; beside the shards if null")


def main(config: IndexConfig) -> None:
    """Indexes shards without a current index and accepts the set as it is now."""
    try:
        shards = open_shards(config.shards, config.index, name="shards", accept=True)
    except (FileNotFoundError, ValueError) as error:
        raise RunError(error) from error
    labeled = int((shards.labels >= 0).sum())
    print(
        f"{len(shards.paths)} shards, {shards.num_samples} pairs, {labeled} with a class, "
        f"digest {shards.digest[:12]}"
    )


if __name__ == "__main__":
    run_command(main, "index_shards", IndexConfig)
