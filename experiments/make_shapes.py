"""Renders the built-in image-text data set `shapes` and indexes it.

    python -m experiments.make_shapes out=data/shapes-256 image_size=256 num_train=20000 seed=0

The same arguments give the same bytes, for any number of processes.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.entry import run_command
from lowprec.config.check import RunError
from lowprec.config.schema import key
from lowprec.data.index import open_shards
from lowprec.data.shapes import render_shapes


@dataclass
class MakeShapesConfig:
    """What to render, and where."""

    out: str = key("???", "folder for the shards")
    num_train: int = key(20000, "training pairs", least=1)
    num_val: int = key(5000, "validation pairs, all distinct", least=0, most=200_000)
    swapped: bool = key(False, "follow validation scenes of two objects by swapped colors")
    image_size: int = key(64, "pixels per side", least=16)
    seed: int = key(0, "seed of all scenes", least=0)


def main(config: MakeShapesConfig) -> None:
    """Renders the set, then indexes it."""
    options = asdict(config)
    out = Path(options.pop("out"))
    try:
        render_shapes(out, **options)
    except (ValueError, OSError) as error:
        raise RunError(error) from error
    for split in ("train", "val") if config.num_val else ("train",):
        pattern = f"{out}/{split}-*.tar"
        shards = open_shards(pattern, name=f"data.{split}", accept=True)
        print(f"{pattern}: {shards.num_samples} pairs, digest {shards.digest[:12]}")


if __name__ == "__main__":
    run_command(main, "make_shapes", MakeShapesConfig)
