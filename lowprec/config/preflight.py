"""Finds what a checked config lacks on this machine, without loading torch."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import fsspec

from lowprec.config.check import ConfigError
from lowprec.config.combinations import open_clip_models, url_scheme
from lowprec.config.patterns import expand, expand_urls
from lowprec.config.place import place
from lowprec.config.schema import SHAPES, Config

EIGHT_BIT_PACKAGES = {"adamw8bit_bnb": "bitsandbytes<0.50", "adamw8bit_torchao": "torchao"}


def preflight(config: Config, *, training: bool = True, planned: int | None = None) -> None:
    """Raises ConfigError with every path, package and device that the config needs and lacks here.

    `planned` is the number of processes that a launcher will start for the run, if it differs from
    the current number.
    """
    faults = [*_data_faults(config, training), *_names_faults(config)]
    faults += _package_faults(config, training)
    if config.model.init_from and not Path(config.model.init_from).exists():
        faults.append(f"model.init_from={config.model.init_from}: no such file or folder")
    if training:
        faults += _folder_faults(config)
        faults += process_faults(config, planned)
    if config.device == "cuda" and not _finds_gpu():
        faults.append("device=cuda: torch finds no GPU here; use device=cpu or device=auto")
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
    faults = []
    if config.batch_size % (size * num_batches):
        near = max(1, round(config.batch_size / (size * num_batches))) * size * num_batches
        faults.append(
            f"batch_size={config.batch_size} (of all ranks) is not a multiple of {size} processes "
            f"x accumulate={num_batches}; nearest: batch_size={near}"
        )
    if not config.distributed.sync_bn and _is_resnet(config.model.name):
        faults.append(sync_bn_fault(config))
    return faults


def sync_bn_fault(config: Config) -> str:
    """Why a model with batch norm needs DDP's `sync_bn` in several processes."""
    return (
        f"distributed={config.distributed.name}: model {config.model.name} has batch norm, whose "
        "statistics each process would compute on its own; use distributed=ddp "
        "distributed.sync_bn=true"
    )


def will_render(config: Config) -> bool:
    """Whether the embedded set must still be rendered, which happens only in its default folder."""
    at_default = Path(config.data.train).parent == Path(SHAPES)
    return config.data.name == "shapes" and at_default and not Path(SHAPES).exists()


def names_file(config: Config, kind: str) -> str | None:
    """The file of class names or templates: the config's, or `<kind>.txt` beside data.val."""
    beside = Path(config.data.val).parent / f"{kind}.txt" if config.data.val else None
    default = str(beside) if beside and beside.is_file() else None
    return getattr(config.data, kind) or default


def read_lines(file: str) -> list[str]:
    """Lines of a file of class names or templates, without empty ones."""
    lines = [line.strip() for line in Path(file).read_text().splitlines()]
    return [line for line in lines if line]


def _is_resnet(name: str) -> bool:
    """Whether open_clip has a ResNet of this name; other towers with batch norm are found later."""
    file = open_clip_models().get(name)
    return file is not None and isinstance(
        json.loads(file.read_text())["vision_cfg"].get("layers"), list
    )


def _data_faults(config: Config, training: bool) -> list[str]:
    """Patterns of shards that match no file, or URLs that cannot be opened here."""
    if will_render(config):
        return []
    streaming = training and config.data.name == "stream"
    faults = _stream_faults(config) if streaming else []
    patterns = {"data.train": config.data.train} if training and not streaming else {}
    if config.evaluation.name != "none":
        patterns["data.val"] = config.data.val
    for name, pattern in patterns.items():
        if pattern is None or url_scheme(pattern):  # a fault of the check
            continue
        try:
            expand(pattern, name)
        except FileNotFoundError as error:
            faults.append(str(error))
    return faults


def _stream_faults(config: Config) -> list[str]:
    try:
        shards = expand_urls(config.data.train, config.data.allow_remote)
    except (FileNotFoundError, ValueError) as error:
        return [str(error)]
    schemes = {urlsplit(url).scheme for url in shards.urls} - {"", "pipe"}
    if schemes and shutil.which("curl") is None:
        return [f"data=stream opens {', '.join(sorted(schemes))} with curl: apt-get install curl"]
    return []


def _names_faults(config: Config) -> list[str]:
    """Files of class names and templates that are missing or that no evaluation can use."""
    faults = []
    needed = config.evaluation.name in ("zero_shot", "both") and config.data.val is not None
    needed = needed and not will_render(config)
    for kind in ("classnames", "templates"):
        given, file = getattr(config.data, kind), names_file(config, kind)
        if given not in (None, "imagenet") and not Path(given).is_file():
            faults.append(f"data.{kind}={given}: no such file; it can also be imagenet")
        elif needed and file is None:
            faults.append(
                f"evaluation={config.evaluation.name} needs data.{kind}: a file, or imagenet "
                f"(there is no {kind}.txt beside data.val); evaluation=retrieval needs none"
            )
        elif needed and file != "imagenet":
            faults += _lines_faults(kind, file)
    return faults


def _lines_faults(kind: str, file: str) -> list[str]:
    lines = read_lines(file)
    if not lines:
        return [f"data.{kind}={file}: the file is empty"]
    bad = [line for line in lines if kind == "templates" and line.count("{}") != 1]
    return [f"data.templates={file}: a template needs one {{}}: {bad[0]!r}"] if bad else []


def _package_faults(config: Config, training: bool) -> list[str]:
    """Packages and compilers that a logger, an optimizer or torch.compile needs."""
    faults, optimizer = [], config.optimizer.name
    if config.logger.name != "none" and importlib.util.find_spec(config.logger.name) is None:
        faults.append(f"logger={config.logger.name} needs a package: pip install '.[loggers]'")
    has_compiler = any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++"))
    compiling = {
        "compile=true": config.compile,
        "optimizer=adamw8bit_torchao": optimizer == "adamw8bit_torchao",
    }
    for choice, compiles in compiling.items():
        if compiles and not has_compiler:
            faults.append(f"{choice} needs a C++ compiler: apt-get install g++")
    package = EIGHT_BIT_PACKAGES.get(optimizer)
    if package and importlib.util.find_spec(package.partition("<")[0]) is None:
        faults.append(f"optimizer={optimizer} needs a package: pip install '{package}'")
    if optimizer == "adamw8bit_bnb" and training and (config.device == "cpu" or not _finds_gpu()):
        faults.append(
            f"optimizer={optimizer} needs a GPU (device={config.device}); use adamw8bit_torchao"
        )
    return faults


def _folder_faults(config: Config) -> list[str]:
    """Folders that a run reads its state from or writes its record to; nothing is opened."""
    faults = []
    if config.resume.from_ and not Path(config.resume.from_).is_dir():
        faults.append(f"resume.from={config.resume.from_}: no such run or checkpoint")
    if config.remote_sync:
        try:
            fsspec.get_filesystem_class(fsspec.utils.get_protocol(config.remote_sync))
        except (ImportError, ValueError) as error:
            faults.append(f"remote_sync={config.remote_sync}: {error}")
    folder = Path(config.run_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        faults.append(f"run_dir={config.run_dir}: {folder} is not writable; choose another folder")
    return faults


@cache
def _finds_gpu() -> bool:
    """Whether torch finds a GPU; a child process asks, since a launcher must not hold one."""
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    asked = subprocess.run([sys.executable, "-c", question], stderr=subprocess.DEVNULL)
    return asked.returncode == 0
