"""From a checked config to the objects of a run. What can be wrong is found before any is built."""

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lowprec.config import Config
from lowprec.data.index import Shards, expand, open_shards
from lowprec.validate import ConfigError


def progress_bar() -> Progress:
    """A rich bar: description, done of total, time left; nothing where output is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"))


def preflight(config: Config) -> None:
    """Checks paths, packages and devices that a config names; ConfigError with all faults."""
    faults = []
    render = config.data.name == "shapes" and not Path(config.data.train).parent.exists()
    names = {"data.train": config.data.train, "data.val": config.data.val}
    if config.evaluation.name == "none":
        del names["data.val"]
    for name, pattern in names.items() if not render else ():
        try:
            expand(pattern, name)
        except FileNotFoundError as error:
            faults.append(str(error))
    for kind in ("classnames", "templates"):
        source = getattr(config.data, kind)
        if source not in (None, "imagenet") and not Path(source).is_file():
            faults.append(f"data.{kind}={source}: no such file; or imagenet")
        needed = config.evaluation.name in ("zero_shot", "both") and not render and not faults
        if needed and names_file(config, kind) is None:
            faults.append(
                f"evaluation={config.evaluation.name} needs data.{kind}: none beside data.val "
                f"({kind}.txt)"
            )
    if config.model.init_from and not Path(config.model.init_from).exists():
        faults.append(f"model.init_from={config.model.init_from}: no such file or folder")
    if config.logger.name != "none" and importlib.util.find_spec(config.logger.name) is None:
        faults.append(f"logger={config.logger.name} needs a package: pip install lowprec[loggers]")
    if config.compile and not any(shutil.which(c) for c in (os.environ.get("CXX", "c++"), "g++")):
        faults.append("compile=true needs a C++ compiler: apt-get install g++")
    if config.device == "cuda" and not _cuda():
        faults.append("device=cuda: torch finds no GPU here; use device=cpu or device=auto")
    if faults:
        raise ConfigError(faults)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def names_file(config: Config, kind: str) -> str | None:
    """Where class names or templates come from: the config, or `<kind>.txt` beside data.val."""
    source = getattr(config.data, kind)
    beside = Path(config.data.val).parent / f"{kind}.txt" if config.data.val else None
    return source or (str(beside) if beside and beside.is_file() else None)


@dataclass
class Data:
    """Opened shards; `val` is None when nothing is evaluated."""

    train: Shards
    val: Shards | None

    def digest(self, config: Config) -> str:
        """Digest of all that the data paths of a config hold."""
        parts = [self.train.digest, self.val.digest if self.val else ""]
        for kind in ("classnames", "templates"):
            source = names_file(config, kind) or ""
            parts.append(Path(source).read_text() if source and source != "imagenet" else source)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def open_data(config: Config) -> Data:
    """Opens (renders, indexes) the shards; ConfigError for damaged or too few ones."""
    if config.data.name == "shapes":
        render_default_shapes(Path(config.data.train).parent)
    try:
        train = open_with_progress(config.data.train, config.data.index, "data.train")
        val = None
        if config.evaluation.name != "none":
            val = open_with_progress(config.data.val, config.data.index, "data.val")
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError([str(error)]) from error
    if config.batch_size > train.num_samples:
        raise ConfigError(
            [f"batch_size={config.batch_size} exceeds the {train.num_samples} pairs of data.train"]
        )
    return Data(train, val)


def open_with_progress(pattern: str, index: str | None, name: str) -> Shards:
    """`open_shards` behind a progress bar."""
    with progress_bar() as bar:
        shown = bar.add_task(f"indexing {name}", total=None, note="", visible=False)

        def on_progress(done: int, total: int) -> None:
            slow = bar.tasks[shown].elapsed and bar.tasks[shown].elapsed > 2
            bar.update(shown, completed=done, total=total, visible=bool(slow))

        return open_shards(pattern, index, name=name, on_progress=on_progress)


def render_default_shapes(folder: Path) -> None:
    """Renders the default `shapes` into a folder that does not exist yet, under a lock."""
    import fcntl

    from lowprec.data.shapes import render_shapes

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
                on_progress=lambda n: bar.advance(shown, n),
            )
        temporary.rename(folder)


@dataclass
class Built:
    """The objects of a run, on their device."""

    device: object
    task: object
    state: object
    data: Data
    tokenizer: object
    config: Config

    def batches_from(self, first: int) -> Iterator:
        """Batches of steps first, first + 1, ... on the host."""
        from lowprec.clip.model import image_size
        from lowprec.data.loader import Batches, iterate, num_workers
        from lowprec.data.order import SampleOrder

        config = self.config
        order = SampleOrder(
            self.data.train.counts,
            seed=config.seed,
            window=config.data.window,
            resampled=config.data.resampled,
        )
        batches = Batches(
            self.data.train,
            order,
            batch_size=config.batch_size,
            num_batches=config.num_steps,
            image_size=image_size(self.task.model),
            tokenizer=self.tokenizer,
            seed=config.seed,
        )
        workers = num_workers(config.num_workers)
        return iterate(batches, workers=workers, first=first - 1, pin=self.device.type == "cuda")

    def evaluation(self):
        """The configured evaluation, or None."""
        from lowprec.clip.model import image_size
        from lowprec.clip.zero_shot import build_classifier, read_names
        from lowprec.data.loader import Batches, iterate, num_workers
        from lowprec.evaluate.evaluation import Evaluation
        from lowprec.train.precision import autocast

        config = self.config
        if config.evaluation.name == "none":
            return None
        size = 256
        batches = Batches(
            self.data.val,
            None,
            batch_size=size,
            num_batches=-(-self.data.val.num_samples // size),
            image_size=image_size(self.task.model),
            tokenizer=self.tokenizer,
        )
        classifier = None
        if config.evaluation.name in ("zero_shot", "both"):
            names, templates = (
                read_names(names_file(config, kind), kind) for kind in ("classnames", "templates")
            )
            classifier = partial(
                build_classifier, tokenizer=self.tokenizer, classnames=names, templates=templates
            )
        workers = min(4, num_workers(config.num_workers))
        return Evaluation(
            lambda: iterate(batches, workers=workers),
            self.task.normalize,
            autocast=lambda: autocast(config.precision.autocast, self.device),
            build_classifier=classifier,
            retrieval=config.evaluation.name in ("retrieval", "both"),
        )


def pick_device(name: str):
    """torch.device of `device=auto|cpu|cuda`: auto takes the GPU if there is one."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def build(config: Config, data: Data) -> Built:
    """Model, optimizer, scaler and tokenizer of a config, seeded."""
    import torch

    from lowprec.clip.export import load_weights
    from lowprec.clip.model import Normalize, build_model, compile_blocks, contrastive_loss
    from lowprec.clip.tokenizer import Tokenizer
    from lowprec.optim.loss_scaling import build_scaler
    from lowprec.optim.param_groups import param_groups
    from lowprec.optim.stable_adamw import StableAdamW
    from lowprec.train.checkpoint import TrainState
    from lowprec.train.precision import set_parameter_dtype
    from lowprec.train.task import ContrastiveTask

    device = pick_device(config.device)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)
    model = build_model(config.model, config.intervention.name)
    if config.model.init_from:
        load_weights(model, Path(config.model.init_from))
    set_parameter_dtype(model, config.precision.autocast)
    model.to(device)
    if config.checkpointing:
        model.set_grad_checkpointing(True)
    if config.compile:
        compile_blocks(model)
    rule = config.optimizer
    optimizer = StableAdamW(
        param_groups(model, rule.weight_decay),
        lr=rule.lr,
        betas=(rule.beta1, rule.beta2),
        eps=rule.eps,
        clip_threshold=rule.clip_threshold,
        clip_weight_decay=rule.clip_weight_decay,
        clip_norm=rule.clip_norm,
        skip="tensor" if config.scaler.name == "fixed" else "step",
    )
    scaler = build_scaler(config.scaler.name, config.scaler.init_scale, device)
    task = ContrastiveTask(
        model, contrastive_loss(), Normalize().to(device), config.precision.autocast
    )
    context = config.model.context_length or model.context_length
    vocabulary = config.model.vocab_size or model.vocab_size
    tokenizer = Tokenizer(context, vocabulary)
    return Built(device, task, TrainState(model, optimizer, scaler), data, tokenizer, config)
