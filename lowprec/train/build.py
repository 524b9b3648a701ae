"""From a checked config and opened data to the objects of a run."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lowprec.clip.export import load_weights
from lowprec.clip.model import (
    Normalize,
    blocks,
    build_model,
    contrastive_loss,
    image_size,
)
from lowprec.clip.precision import set_precision
from lowprec.clip.stable_embedding import use_stable_embedding
from lowprec.clip.tokenizer import Tokenizer
from lowprec.clip.zero_shot import imagenet
from lowprec.config.check import ConfigError
from lowprec.config.preflight import names_file, read_lines
from lowprec.config.schema import Config
from lowprec.data.loader import Batch, Batches, iterate
from lowprec.data.open import Data, num_workers
from lowprec.data.order import SampleOrder
from lowprec.data.stream import Stream
from lowprec.diagnostics.blocks import BlockProbe
from lowprec.evaluate.evaluation import Evaluation
from lowprec.formats import E4M3, INT8
from lowprec.nn.replace import Layer
from lowprec.ops import takes
from lowprec.optim.loss_scaling import build_scaler
from lowprec.train.build_optimizer import build_optimizer
from lowprec.train.distributed import ONE_PROCESS, Ranks
from lowprec.train.precision import autocast, set_parameter_dtype
from lowprec.train.speed import flops_per_pair, peak_flops
from lowprec.train.spread import classifier_over, share_of_cores, spread
from lowprec.train.state import TrainState
from lowprec.train.task import ContrastiveTask

EVALUATION_BATCH = 256


@dataclass
class Built:
    """The objects of a run, on their device."""

    config: Config
    data: Data
    device: torch.device
    tokenizer: Tokenizer
    task: ContrastiveTask
    state: TrainState
    layers: list[Layer]  # what precision.recipe made of the linear layers
    world: Ranks = ONE_PROCESS

    @property
    def workers(self) -> int:
        """Decoding processes of this rank: those of a machine share its cores."""
        asked = self.config.num_workers
        return num_workers(asked) if asked is not None else share_of_cores(self.world.local_size)

    @property
    def ranks(self) -> dict[str, int]:
        """What this process and the others are to the data."""
        return {"rank": self.world.rank, "world_size": self.world.size}

    def batches_from(self, first: int) -> Iterator[Batch]:
        """Batches of steps first, first + 1, ... on the host."""
        config = self.config
        if config.data.name == "stream":
            return self.stream().batches_from(first)
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
            augment=config.data.augment == "crop_flip",
            **self.ranks,
        )
        pin = self.device.type == "cuda"
        return iterate(batches, workers=self.workers, first=first - 1, pin=pin)

    def stream(self) -> Stream:
        """The training data of data=stream."""
        config = self.config
        return Stream(
            self.data.train,
            seed=config.seed,
            batch_size=config.batch_size,
            num_steps=config.num_steps,
            segment_steps=config.save_every,
            workers=self.workers,
            image_size=image_size(self.task.model),
            tokenizer=self.tokenizer,
            augment=config.data.augment == "crop_flip",
            pin=self.device.type == "cuda",
            **self.ranks,
        )

    def flops_per_pair(self) -> int | None:
        """Operations of the model for one pair; None where there is nothing to hold them against.

        Counted on the plain model of the config, which recipes and ranks have not changed.
        """
        if peak_flops(self.device) is None:
            return None
        with torch.device("meta"):
            plain = build_model(self.config.model)
        return flops_per_pair(plain, image_size(plain), self.tokenizer.context_length)

    def layout(self) -> dict:
        """Ranks and workers, where the order of samples depends on them: in a stream."""
        if self.config.data.name != "stream":
            return {}
        return self.stream().layout()

    def evaluation(self) -> Evaluation | None:
        """The configured evaluation, to which every rank comes with its share, or None."""
        config = self.config
        if config.evaluation.name == "none":
            return None
        turn = EVALUATION_BATCH * self.world.size
        batches = Batches(
            self.data.val,
            None,
            batch_size=turn,
            num_batches=-(-self.data.val.num_samples // turn),
            image_size=image_size(self.task.model),
            tokenizer=self.tokenizer,
            **self.ranks,
        )
        classifier = None
        if config.evaluation.name in ("zero_shot", "both"):
            classnames, templates = (
                imagenet(kind) if source == "imagenet" else read_lines(source)
                for kind in ("classnames", "templates")
                for source in [names_file(config, kind)]
            )
            classifier = partial(
                classifier_over,
                self.world,
                tokenizer=self.tokenizer,
                classnames=classnames,
                templates=templates,
            )
        workers = min(4, self.workers)
        return Evaluation(
            lambda: self._noticed(iterate(batches, workers=workers)),
            self.task.normalize,
            autocast=lambda: autocast(config.precision.autocast, self.device),
            build_classifier=classifier,
            retrieval=config.evaluation.name in ("retrieval", "both"),
            each=self.world.each,
        )

    def _noticed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of an evaluation, which may take longer than a rank may stand still."""
        for batch in batches:
            self.world.heartbeat(None, "evaluating")
            yield batch


def pick_device(name: str) -> torch.device:
    """The device of `device=auto|cpu|cuda`; auto takes the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def build(config: Config, data: Data, world: Ranks = ONE_PROCESS) -> Built:
    """Model, optimizer, scaler and tokenizer of a config, seeded; `world`: the ranks it is for.

    Every rank is seeded alike, so that all begin with the same weights.
    """
    device = pick_device(config.device)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS demands it
    torch.use_deterministic_algorithms(config.deterministic)
    torch.manual_seed(config.seed)
    model = build_model(config.model, config.intervention.name)
    if config.model.init_from:
        try:
            load_weights(model, Path(config.model.init_from))
        except ValueError as error:
            raise ConfigError([f"model.init_from: {error}"]) from error
    if config.optimizer.stable_embedding:
        try:
            use_stable_embedding(model)
        except ValueError as error:
            raise ConfigError([f"optimizer.stable_embedding=true: {error}"]) from error
    set_parameter_dtype(model, config.precision.autocast)
    layers = _set_precision(model, config, device)
    model.to(device)
    parallel = spread(model, config, world)
    scaler = build_scaler(config.scaler.name, config.scaler.init_scale, device)
    state = TrainState(model, build_optimizer(config, model), scaler, world=world)
    task = ContrastiveTask(
        model,
        contrastive_loss(world.rank, world.size, config.distributed.local_loss),
        Normalize().to(device),
        config.precision.autocast,
        parallel=parallel,
        world=world,
        accumulate=config.accumulate,
    )
    if blocks(model):
        task.probe = BlockProbe(model, blocks(model), task.measure)
    tokenizer = Tokenizer(
        config.model.context_length or model.context_length,
        config.model.vocab_size or model.vocab_size,
    )
    return Built(config, data, device, tokenizer, task, state, layers, world)


def _set_precision(model: torch.nn.Module, config: Config, device: torch.device) -> list[Layer]:
    """Swaps the layers of the config's recipe and checks that its backend can run."""
    precision = config.precision
    try:
        if precision.backend == "triton":
            takes("triton", E4M3 if "fp8" in precision.recipe else INT8, device)
        return set_precision(model, precision)
    except ValueError as error:
        raise ConfigError([f"precision.recipe={precision.recipe}: {error}"]) from error
