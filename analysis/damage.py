"""What is wrong with a run's config or tensors, seen when runs are listed: sentences of a note."""

import os
from pathlib import Path

from lowprec.config.check import ConfigError, check, keys
from lowprec.config.schema import Config

MAGIC = b"PAR1"  # at both ends of a parquet file; before the last, the length of its footer
TEXTS = ("model.name", "optimizer.name", "precision.autocast", "precision.recipe")
CHECKED = (  # keys whose value a table or a figure counts with
    *("scale", "seed", "num_steps", "batch_size", "model.vision_layers"),
    *("optimizer.lr", "optimizer.beta2", "optimizer.beta2_decay"),
    *(name for name in keys(Config) if name.startswith("diagnostics.spikes.")),
)


def config_faults(config: dict) -> list[str]:
    """A sentence for each value of a flat config that no run can have, of those needed here.

    The names of methods are free: a run may be of a method that is not known here.
    """
    nested = {}
    for name in CHECKED:
        if name in config:
            *groups, last = name.split(".")
            node = nested
            for group in groups:
                node = node.setdefault(group, {})
            node[last] = config[name]
    texts = {name: config[name] for name in TEXTS}
    texts["experiment"] = config["experiment"] or ""  # null: of no study
    faults = [f"{k}={v!r}: text is expected" for k, v in texts.items() if not isinstance(v, str)]
    try:
        check(nested)
    except ConfigError as error:
        faults += error.faults if error.config is None else []  # else each is fine alone
    return faults


def tensor_faults(run: Path) -> list[str]:
    """What is wrong with the tensors of a run that ended; streams make up for a missing copy.

    Looks at the ends of the file alone: to parse a footer of thousands of columns takes 10 ms.
    """
    try:
        with (run / "tensors.parquet").open("rb") as file:
            begins = file.read(len(MAGIC))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8))
            footer, ends = file.read(4), file.read(4)
    except FileNotFoundError:
        has_streams = any((run / "tensors").glob("*.arrows"))
        return [] if has_streams else ["tensors.parquet is missing"]
    except OSError as error:
        return [f"tensors.parquet cannot be read: {error.strerror or error}"]
    whole = begins == ends == MAGIC and int.from_bytes(footer, "little") <= size - 12
    return [] if whole else ["tensors.parquet is damaged"]
