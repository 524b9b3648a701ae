"""What can be wrong with a checked config on this machine, found before torch is loaded."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from lowprec.config.check import ConfigError
from lowprec.config.combinations import open_clip_models, url_scheme
from lowprec.config.patterns import expand, expand_urls
from lowprec.config.schema import SHAPES, Config
from lowprec.runs.place import place

EIGHT_BIT_PACKAGES = {"adamw8bit_bnb": "bitsandbytes<0.50", "adamw8bit_torchao": "torchao"}


def preflight(config: Config, *, training: bool = True, planned: int | None = None) -> None:
    """Checks paths, packages and devices that a config names; ConfigError with all faults.

    `planned`: processes that a launcher will start for the run, where it is not this one.
    """
    faults = []
    evaluated = config.evaluation.name != "none"
    if not will_render(config):
        streaming = training and config.data.name == "stream"
        faults += _stream_faults(config) if streaming else []
        patterns = {"data.train": config.data.train} if training and not streaming else {}
        patterns |= {"data.val": config.data.val} if evaluated else {}
        for name, pattern in patterns.items():
            if pattern is None or url_scheme(pattern):  # the schema's check says so
                continue
            try:
                expand(pattern, name)
            except FileNotFoundError as error:
                faults.append(str(error))
    faults += _names_faults(config)
    if config.model.init_from and not Path(config.model.init_from).exists():
        faults.append(f"model.init_from={config.model.init_from}: no such file or folder")
    if config.resume.from_ and training and not Path(config.resume.from_).is_dir():
        faults.append(f"resume.from={config.resume.from_}: no such run or checkpoint")
    if config.remote_sync and training:
        faults += _remote_faults(config.remote_sync)
    if config.logger.name != "none" and importlib.util.find_spec(config.logger.name) is None:
        faults.append(f"logger={config.logger.name} needs a package: pip install '.[loggers]'")
    compiles = [("compile=true", config.compile)]
    compiles += [("optimizer=adamw8bit_torchao", config.optimizer.name == "adamw8bit_torchao")]
    for choice, compiling in compiles:
        compilers = (os.environ.get("CXX", "c++"), "g++")
        if compiling and not any(shutil.which(name) for name in compilers):
            faults.append(f"{choice} needs a C++ compiler: apt-get install g++")
    faults += _eight_bit_faults(config, training)
    faults += process_faults(config, planned) if training else []
    if training and (folder := _not_writable(config.run_dir)):
        faults.append(f"run_dir={config.run_dir}: {folder} cannot be written; choose another")
    if config.device == "cuda" and not _finds_gpu():
        faults.append("device=cuda: torch finds no GPU here; use device=cpu or device=auto")
    if faults:
        raise ConfigError(faults)


def _eight_bit_faults(config: Config, training: bool) -> list[str]:
    """What an 8-bit optimizer lacks here: its package, a GPU."""
    name, faults = config.optimizer.name, []
    package = EIGHT_BIT_PACKAGES.get(name)
    if package and importlib.util.find_spec(package.partition("<")[0]) is None:
        faults.append(f"optimizer={name} needs a package: pip install '{package}'")
    if name == "adamw8bit_bnb" and training and (config.device == "cpu" or not _finds_gpu()):
        faults.append(
            f"optimizer={name} needs a GPU (device={config.device}); use adamw8bit_torchao"
        )
    return faults


def _remote_faults(url: str) -> list[str]:
    """A fault unless fsspec knows how to write there; nothing is opened."""
    import fsspec

    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(url))
    except (ImportError, ValueError) as error:
        return [f"remote_sync={url}: {error}"]
    return []


def process_faults(config: Config, planned: int | None = None) -> list[str]:
    """What does not fit the planned processes, or those that torchrun, srun or submitit started."""
    size, parts = planned or place()[1], config.accumulate
    if size == 1:
        return []
    if config.distributed.name == "none":
        how = "would be" if planned else "were"
        return [
            f"{size} processes {how} started and distributed=none trains in one; "
            "use distributed=ddp"
        ]
    faults = []
    if config.batch_size % (size * parts):
        near = max(1, round(config.batch_size / (size * parts))) * size * parts
        faults.append(
            f"batch_size={config.batch_size} (of all ranks) is not a multiple of {size} processes "
            f"x accumulate={parts}; nearest: batch_size={near}"
        )
    if not config.distributed.sync_bn and _is_resnet(config.model.name):
        faults.append(sync_bn_fault(config))
    return faults


def sync_bn_fault(config: Config) -> str:
    """Why a model with batch norm needs DDP's `sync_bn` in several processes."""
    return (
        f"distributed={config.distributed.name}: model {config.model.name} has batch norm, whose "
        "statistics would be each process's own; use distributed=ddp distributed.sync_bn=true"
    )


def _is_resnet(name: str) -> bool:
    """Whether open_clip has a ResNet of this name; `spread` finds batch norm of any other tower."""
    file = open_clip_models().get(name)
    return file is not None and isinstance(
        json.loads(file.read_text())["vision_cfg"].get("layers"), list
    )


def will_render(config: Config) -> bool:
    """Whether the embedded set has still to be rendered: only at its own place."""
    own = Path(config.data.train).parent == Path(SHAPES)
    return config.data.name == "shapes" and own and not Path(SHAPES).exists()


def _stream_faults(config: Config) -> list[str]:
    try:
        shards = expand_urls(config.data.train, config.data.allow_remote)
    except (FileNotFoundError, ValueError) as error:
        return [str(error)]
    schemes = {urlsplit(url).scheme for url in shards.urls} - {"", "pipe"}
    if schemes and shutil.which("curl") is None:
        return [f"data=stream opens {', '.join(sorted(schemes))} with curl: apt-get install curl"]
    return []


def _not_writable(run_dir: str) -> Path | None:
    """The nearest folder there is, if it cannot be written."""
    folder = Path(run_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    return None if folder.is_dir() and os.access(folder, os.W_OK) else folder


def _names_faults(config: Config) -> list[str]:
    faults = []
    needed = config.evaluation.name in ("zero_shot", "both") and not will_render(config)
    needed = needed and config.data.val is not None  # else the schema's check says so
    for kind in ("classnames", "templates"):
        source = getattr(config.data, kind)
        if source not in (None, "imagenet") and not Path(source).is_file():
            faults.append(f"data.{kind}={source}: no such file; it can also be imagenet")
        elif needed and names_file(config, kind) is None:
            faults.append(
                f"evaluation={config.evaluation.name} needs data.{kind}: a file, or imagenet "
                f"(there is no {kind}.txt beside data.val); evaluation=retrieval needs none"
            )
        elif needed and names_file(config, kind) != "imagenet":
            faults += _lines_faults(kind, names_file(config, kind))
    return faults


def _lines_faults(kind: str, file: str) -> list[str]:
    lines = read_lines(file)
    if not lines:
        return [f"data.{kind}={file}: the file has no line"]
    bad = [line for line in lines if kind == "templates" and line.count("{}") != 1]
    return [f"data.templates={file}: a template needs one {{}}: {bad[0]!r}"] if bad else []


def read_lines(file: str) -> list[str]:
    """Lines of a file of class names or templates, without empty ones."""
    lines = [line.strip() for line in Path(file).read_text().splitlines()]
    return [line for line in lines if line]


def names_file(config: Config, kind: str) -> str | None:
    """Where class names or templates come from: the config, or `<kind>.txt` beside data.val."""
    source = getattr(config.data, kind)
    beside = Path(config.data.val).parent / f"{kind}.txt" if config.data.val else None
    return source or (str(beside) if beside and beside.is_file() else None)


@cache
def _finds_gpu() -> bool:
    """Asked in a child process: a launcher must not hold a GPU, nor load torch for a typo."""
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    asked = subprocess.run([sys.executable, "-c", question], stderr=subprocess.DEVNULL)
    return asked.returncode == 0
