"""Finds what a checked config needs and this machine lacks, without loading torch."""

import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path

from lowprec.config.check import ConfigError
from lowprec.config.schema import LOGGERS, Config
from lowprec.data.sources import names_faults, shard_faults
from lowprec.nearest import nearest_path, runs_inside
from lowprec.train.ranks import place


def preflight(config: Config, *, training: bool = True, planned: int | None = None) -> None:
    """Raises ConfigError with every path, package and device that the config needs and lacks here.

    `planned` is the number of processes that a launcher will start for the run, if it differs from
    the current number.
    """
    faults = shard_faults(config, training) + names_faults(config) + _package_faults(config)
    if config.model.init_from and not _has_weights(Path(config.model.init_from)):
        faults.append(
            f"model.init_from={config.model.init_from}: no weights there; a run, a checkpoint, a "
            "folder or .safetensors of experiments.export or open_clip's .pt is expected"
            + nearest_path(config.model.init_from)
            + runs_inside(config.model.init_from)
        )
    if training:
        faults += _folder_faults(config)
        faults += process_faults(config, planned)
    if faults:
        raise ConfigError(faults)


def process_faults(config: Config, planned: int | None = None) -> list[str]:
    """Faults with the planned processes, or with those that torchrun, srun or submitit started."""
    size, num_batches = planned or place()[1], config.accumulate
    if size == 1:
        return []
    if config.distributed.name == "none":
        verb = "would be" if planned else "were"
        return [
            f"{size} processes {verb} started, but distributed=none trains in one; "
            "use distributed=ddp"
        ]
    if config.batch_size % (size * num_batches):
        near = max(1, round(config.batch_size / (size * num_batches))) * size * num_batches
        return [
            f"batch_size={config.batch_size} (of all ranks) is not a multiple of {size} processes "
            f"x accumulate={num_batches}; nearest: batch_size={near}"
        ]
    return []


def _package_faults(config: Config) -> list[str]:
    """The package of a logger that this machine lacks."""
    package = LOGGERS.get(config.logger.name)
    if package is None or importlib.util.find_spec(package):
        return []
    return [f"logger={config.logger.name} needs a package: pip install {package}"]


def _has_weights(source: Path) -> bool:
    names = (
        "model.safetensors",
        "checkpoints/step_*/model.safetensors",
        "open_clip_model.safetensors",
    )
    return os.path.isfile(source) or any(any(source.glob(name)) for name in names)


def _folder_faults(config: Config) -> list[str]:
    """Folders that a run writes to; none is made."""
    faults = []
    for key, folder in (("run_dir", config.run_dir), ("data.cache", config.data.cache)):
        if folder is not None and (fault := _write_fault(Path(folder))):
            faults.append(f"{key}={folder[:200]}: {fault}; choose another folder")
    return faults


def _write_fault(folder: Path) -> str | None:
    """Why a folder, or the one that it would be made in, cannot be written to."""
    folder = folder.absolute()
    parent = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with contextlib.suppress(FileNotFoundError):
            os.stat(folder)  # the name may be too long
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        return f"{parent} is not writable ({error.strerror})"
    return None
