"""Makes shards from a table (CSV) of image paths and captions.

    python -m experiments.make_shards table=photos/train.csv out=shards/train
    python -m experiments.make_shards table=val.tsv out=shards/val image=path caption=text

The first line of the table names its columns; tabs, commas or semicolons separate them. Paths are
relative to the table or else, as in open_clip, to the working directory. If training could not read
some rows (a missing or damaged image, an empty caption), they are listed (up to 100) and nothing is
written; with skip_bad=true they are left out.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.entry import run_command
from lowprec.config.check import ConfigError, RunError
from lowprec.config.schema import key
from lowprec.data.index import open_shards
from lowprec.nearest import nearest_path


@dataclass
class MakeShardsConfig:
    """What to read, and where to write it."""

    table: str = key("???", "CSV file with the names of the columns in its first line")
    out: str = key("???", "new folder for the shards")
    image: str = key("filepath", "column of the paths of JPEG, PNG or WEBP files")
    caption: str = key("title", "column of the captions")
    label: str | None = key(None, "column of class numbers, for zero-shot accuracy")
    skip_bad: bool = key(False, "leave out the rows that cannot be read")


def main(config: MakeShardsConfig) -> None:
    """Writes the shards, then indexes them."""
    if set(config.out) & set("*?[{}\\"):
        raise ConfigError([f"out={config.out} has one of *?[{{}}\\, which data.train would expand"])
    table, out = Path(config.table), Path(config.out)
    if near := nearest_path(table):
        raise RunError(f"table={table} does not exist{near}")
    if table.is_dir():
        raise RunError(f"table={table} is a folder; a CSV file is expected")
    from lowprec.data.table import write_shards  # loads torch

    columns = [config.image, config.caption, *([config.label] if config.label else [])]
    try:
        bad = write_shards(table, out, columns, config.skip_bad)
        shards = open_shards(f"{out}/*.tar", name="shards", accept=True)
    except UnicodeDecodeError:
        raise RunError(f"table={table} is not UTF-8 text; save it as UTF-8") from None
    except RunError:  # names another file
        raise
    except (ValueError, OSError) as error:
        raise RunError(f"table={table}: {error}") from error
    print(f"{out}/*.tar: {shards.num_samples} pairs, {bad} left out, digest {shards.digest[:12]}")
    print(f"data.train='{out}/*.tar'\nor, for evaluation, data.val='{out}/*.tar'")


if __name__ == "__main__":
    run_command(main, "make_shards", MakeShardsConfig)
