"""Indexes image-text shards, so that a run finds the index ready; again, if they have changed.

python -m experiments.index_shards shards='some/where/train-*.tar' index=some/folder

The index of a set is named by its shards' folder: several sets may share one index folder.
"""

import sys
from dataclasses import dataclass

from experiments.entry import run_command
from lowprec.config.schema import key
from lowprec.data.open import open_with_progress


@dataclass
class IndexConfig:
    """Which shards, and where the index goes."""

    shards: str = key("???", "glob of the shards")
    index: str | None = key(None, "folder of the index; beside the shards if null")


def main(config: IndexConfig) -> None:
    """Indexes what is not indexed yet and takes the shards as they are now."""
    try:
        shards = open_with_progress(config.shards, config.index, "shards", accept=True)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    labeled = int((shards.labels >= 0).sum())
    print(
        f"{len(shards.paths)} shards, {shards.num_samples} pairs, {labeled} with a class, "
        f"digest {shards.digest[:12]}"
    )


if __name__ == "__main__":
    run_command(main, "index_shards", IndexConfig)
