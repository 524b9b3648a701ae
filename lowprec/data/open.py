"""Opens the data that a config names: renders the built-in set, indexes shards, shows progress."""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowprec.config.check import ConfigError
from lowprec.config.schema import Config
from lowprec.data.index import open_shards
from lowprec.data.jobs import num_cores
from lowprec.data.shapes import render_shapes
from lowprec.data.shards import Shards
from lowprec.data.sources import (
    ShardUrls,
    check_readers,
    expand_urls,
    listing,
    names_file,
    read_names,
    will_render,
)
from lowprec.runs import durable


def num_workers(requested: int | None, num_ranks: int = 1) -> int:
    """`requested`, or by default one less than the cores of each rank here, at most 16."""
    if requested is not None:
        return requested
    return max(1, min(16, num_cores() // num_ranks - 1))


@dataclass
class Data:
    """Opened shards; `val` is None without evaluation, `train` None without training.

    With data=stream, `train` holds URLs that are not opened yet.
    """

    train: Shards | ShardUrls | None
    val: Shards | None

    def digest(self, config: Config) -> str:
        """Digest of everything in the data paths of a config."""
        parts = [self.train.digest, self.val.digest if self.val else ""]
        for kind in ("classnames", "templates") if needs_names(config) else ():
            source = names_file(config, kind) or ""
            parts.append(Path(source).read_text() if source not in ("", "imagenet") else source)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def open_data(config: Config, *, training: bool = True) -> Data:
    """Opens the shards of a config; ConfigError if they are damaged, too few or wrongly labeled."""
    data, train, val = config.data, None, None
    faults: list[str] = []
    with _collected(faults):
        if will_render(config):
            render_default_shapes(Path(data.train).parent)
        if training and data.name == "stream":
            train = expand_urls(data.train, data.allow_remote)
            check_readers(train, num_workers(config.num_workers))
        elif training:
            train = open_shards(data.train, data.index)
    with _collected(faults):
        if config.evaluation.name != "none" and not will_render(config):  # unless rendering failed
            val = open_shards(data.val, data.index, name="data.val")
    faults += _caption_faults(config, train, val)
    if val is not None and needs_names(config):
        faults += _label_faults(config, val)
    if isinstance(train, Shards) and config.batch_size > train.num_samples:
        count = train.num_samples
        faults.append(f"batch_size={config.batch_size} exceeds the {count} pairs of data.train")
    if faults:
        raise ConfigError(faults)
    return Data(train, val)


@contextlib.contextmanager
def _collected(faults: list[str]) -> Iterator[None]:
    """Adds an error in the data to the faults."""
    try:
        yield
    except (OSError, ValueError) as error:
        faults.append(str(error))


def needs_names(config: Config) -> bool:
    """Whether the evaluation needs class names."""
    return config.evaluation.name in ("zero_shot", "both")


def _caption_faults(
    config: Config, train: Shards | ShardUrls | None, val: Shards | None
) -> list[str]:
    """Faults of shards that hold only images with class numbers where captions are needed."""
    faults, needing = [], {}
    if isinstance(train, Shards):
        needing["data.train"] = train, ""
    if val is not None and config.evaluation.name != "zero_shot":
        needing["data.val"] = val, "; evaluation=zero_shot needs none"
    for name, (shards, hint) in needing.items():
        bare = [shards.paths[n] for n in np.flatnonzero(shards.num_captions == 0)]
        faults += [f"{name}: no captions (.txt) in {listing(bare, ', ')}{hint}"] if bare else []
    return faults


def _label_faults(config: Config, val: Shards) -> list[str]:
    """The fault if data.val has no labels or a label has no name; warns if some have no label."""
    labels, source = val.labels, names_file(config, "classnames")
    num, largest = (labels < 0).sum(), int(labels.max())
    count = 1000 if source == "imagenet" else len(read_names(source, "classnames"))
    if largest < 0:
        return ["data.val has no labels (.cls): use evaluation=retrieval or evaluation=none"]
    if largest >= count:
        return [f"data.val has the label {largest}, but {source} names {count} classes"]
    if num:
        lacking = f"{num:,} of {len(labels):,} validation samples have no class number (.cls)"
        print(f"warning: {lacking}: zero-shot accuracy leaves them out")  # by rank 0 alone
    return []


def render_default_shapes(folder: Path) -> None:
    """Renders the default `shapes` under a lock, unless the folder exists."""
    with durable.locked(folder.parent / f".{folder.name}.lock"):
        if folder.exists():
            return
        print(
            f"rendering {folder.absolute()}, once for this working directory: about a minute; "
            "'data.train=DIR/train-*.tar' 'data.val=DIR/val-*.tar' name another copy",
            flush=True,
        )
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        render_shapes(temporary)
        temporary.rename(folder)
