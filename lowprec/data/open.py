"""Opens the shards that a config names: renders the embedded set, indexes, shows progress."""

import fcntl
import hashlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lowprec.config.check import ConfigError
from lowprec.config.preflight import names_file, read_lines, will_render
from lowprec.config.schema import Config
from lowprec.data.index import Shards, open_shards
from lowprec.data.shapes import render_shapes
from lowprec.data.urls import ShardUrls, check_readers, expand_urls


def progress_bar() -> Progress:
    """A rich bar: description, done of total, time left, a note."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"))


@dataclass
class Data:
    """Opened shards; `val` is None when nothing is evaluated, `train` when nothing is trained.

    The shards of data=stream are only named here; they are opened when their turn comes.
    """

    train: Shards | ShardUrls | None
    val: Shards | None

    def digest(self, config: Config) -> str:
        """Digest of all that the data paths of a config hold."""
        parts = [self.train.digest, self.val.digest if self.val else ""]
        for kind in ("classnames", "templates") if needs_names(config) else ():
            source = names_file(config, kind) or ""
            parts.append(Path(source).read_text() if source not in ("", "imagenet") else source)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def open_data(config: Config, *, training: bool = True) -> Data:
    """Opens the shards of a config; ConfigError for damaged or too few ones, or wrong labels."""
    if will_render(config):
        render_default_shapes(Path(config.data.train).parent)
    train = val = None
    try:
        if training and config.data.name == "stream":
            train = _find_stream(config)
        elif training:
            train = open_with_progress(config.data.train, config.data.index, "data.train")
        if config.evaluation.name != "none":
            val = open_with_progress(config.data.val, config.data.index, "data.val")
    except (OSError, ValueError) as error:
        raise ConfigError([str(error)]) from error
    faults = _label_faults(config, val) if val is not None and needs_names(config) else []
    if isinstance(train, Shards) and config.batch_size > train.num_samples:
        fault = (
            f"batch_size={config.batch_size} exceeds the {train.num_samples} pairs of data.train"
        )
        faults.append(fault)
    if faults:
        raise ConfigError(faults)
    return Data(train, val)


def _find_stream(config: Config) -> ShardUrls:
    """The shards of data=stream; ValueError if they are too few for the workers of this machine."""
    from lowprec.data.loader import num_workers  # loads torch

    shards = expand_urls(config.data.train, config.data.allow_remote)
    check_readers(shards, num_workers(config.num_workers))
    return shards


def needs_names(config: Config) -> bool:
    """Whether classes are evaluated."""
    return config.evaluation.name in ("zero_shot", "both")


def _label_faults(config: Config, val: Shards) -> list[str]:
    """A fault unless data.val has labels and every label has a name."""
    source, largest = names_file(config, "classnames"), int(val.labels.max())
    count = 1000 if source == "imagenet" else len(read_lines(source))
    if largest < 0:
        return ["data.val has no labels (.cls): use evaluation=retrieval or evaluation=none"]
    if largest >= count:
        return [f"data.val has the label {largest}, but {source} names {count} classes"]
    return []


def open_with_progress(pattern: str, index: str | None, name: str, accept: bool = False) -> Shards:
    """`open_shards`, with a progress bar once it has taken two seconds."""
    bar, start, shown = progress_bar(), time.monotonic(), None

    def on_progress(done: int, total: int) -> None:
        nonlocal shown
        if shown is None and time.monotonic() - start > 2:
            bar.start()
            shown = bar.add_task(f"indexing {name}", total=total, note="")
        if shown is not None:
            bar.update(shown, completed=done)

    try:
        return open_shards(pattern, index, name=name, accept=accept, on_progress=on_progress)
    finally:
        if shown is not None:
            bar.stop()


def render_default_shapes(folder: Path) -> None:
    """Renders the default `shapes` into a folder that does not exist yet, under a lock."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        with progress_bar() as bar:
            shown = bar.add_task(f"rendering {folder}", total=25000, note="")
            render_shapes(
                temporary,
                num_processes=len(os.sched_getaffinity(0)),
                on_progress=lambda count: bar.advance(shown, count),
            )
        temporary.rename(folder)
