"""From a checked config and opened data to the objects of a run."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from experiments.open_data import Data
from experiments.preflight import names_file, read_lines
from lowprec.clip.export import load_weights
from lowprec.clip.model import (
    Normalize,
    blocks,
    build_model,
    compile_blocks,
    contrastive_loss,
    image_size,
)
from lowprec.clip.precision import set_precision
from lowprec.clip.stable_embedding import use_stable_embedding
from lowprec.clip.tokenizer import Tokenizer
from lowprec.clip.zero_shot import build_classifier, imagenet
from lowprec.config import EIGHT_BIT, Config, OptimizerConfig
from lowprec.data.loader import Batch, Batches, iterate, num_workers
from lowprec.data.order import SampleOrder
from lowprec.data.stream import Stream
from lowprec.diagnostics.blocks import BlockProbe
from lowprec.evaluate.evaluation import Evaluation
from lowprec.formats import E4M3, INT8
from lowprec.nn.replace import Layer
from lowprec.ops import takes
from lowprec.optim.eight_bit import BitsAndBytesAdamW8bit, EightBitAdamW, TorchaoAdamW8bit
from lowprec.optim.loss_scaling import build_scaler
from lowprec.optim.param_groups import param_groups
from lowprec.optim.stable_adamw import StableAdamW
from lowprec.train.precision import autocast, set_parameter_dtype
from lowprec.train.state import TrainState
from lowprec.train.task import ContrastiveTask
from lowprec.validate import ConfigError

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
        )
        workers = num_workers(config.num_workers)
        return iterate(batches, workers=workers, first=first - 1, pin=self.device.type == "cuda")

    def stream(self) -> Stream:
        """The training data of data=stream."""
        config = self.config
        return Stream(
            self.data.train,
            seed=config.seed,
            batch_size=config.batch_size,
            num_steps=config.num_steps,
            segment_steps=config.save_every,
            workers=num_workers(config.num_workers),
            image_size=image_size(self.task.model),
            tokenizer=self.tokenizer,
            augment=config.data.augment == "crop_flip",
            pin=self.device.type == "cuda",
        )

    def layout(self) -> dict:
        """Ranks and workers, where the order of samples depends on them: in a stream."""
        if self.config.data.name != "stream":
            return {}
        return self.stream().layout()

    def evaluation(self) -> Evaluation | None:
        """The configured evaluation, or None."""
        config = self.config
        if config.evaluation.name == "none":
            return None
        batches = Batches(
            self.data.val,
            None,
            batch_size=EVALUATION_BATCH,
            num_batches=-(-self.data.val.num_samples // EVALUATION_BATCH),
            image_size=image_size(self.task.model),
            tokenizer=self.tokenizer,
        )
        classifier = None
        if config.evaluation.name in ("zero_shot", "both"):
            classnames, templates = (
                imagenet(kind) if source == "imagenet" else read_lines(source)
                for kind in ("classnames", "templates")
                for source in [names_file(config, kind)]
            )
            classifier = partial(
                build_classifier,
                tokenizer=self.tokenizer,
                classnames=classnames,
                templates=templates,
            )
        workers = min(4, num_workers(config.num_workers))
        return Evaluation(
            lambda: iterate(batches, workers=workers),
            self.task.normalize,
            autocast=lambda: autocast(config.precision.autocast, self.device),
            build_classifier=classifier,
            retrieval=config.evaluation.name in ("retrieval", "both"),
        )


def pick_device(name: str) -> torch.device:
    """The device of `device=auto|cpu|cuda`; auto takes the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def build(config: Config, data: Data) -> Built:
    """Model, optimizer, scaler and tokenizer of a config, seeded."""
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
    if config.checkpointing:
        model.set_grad_checkpointing(True)
    if config.compile:
        if not blocks(model):
            raise ConfigError([f"compile=true: {config.model.name} has no blocks of open_clip's"])
        torch.compiler.reset()  # its limit of versions counts over the runs of a process
        compile_blocks(model)
    scaler = build_scaler(config.scaler.name, config.scaler.init_scale, device)
    state = TrainState(model, build_optimizer(config, model), scaler)
    task = ContrastiveTask(
        model, contrastive_loss(), Normalize().to(device), config.precision.autocast
    )
    if blocks(model):
        task.probe = BlockProbe(model, blocks(model), task.loss)
    tokenizer = Tokenizer(
        config.model.context_length or model.context_length,
        config.model.vocab_size or model.vocab_size,
    )
    return Built(config, data, device, tokenizer, task, state, layers)


def _set_precision(model: torch.nn.Module, config: Config, device: torch.device) -> list[Layer]:
    """Swaps the layers of the config's recipe and checks that its backend can run."""
    precision = config.precision
    try:
        if precision.backend == "triton":
            takes("triton", E4M3 if "fp8" in precision.recipe else INT8, device)
        return set_precision(model, precision)
    except ValueError as error:
        raise ConfigError([f"precision.recipe={precision.recipe}: {error}"]) from error


def build_optimizer(config: Config, model: torch.nn.Module) -> StableAdamW | EightBitAdamW:
    """The optimizer of a config's `optimizer` group: AdamW is StableAdamW without clipping."""
    rule = config.optimizer
    groups = param_groups(model, rule.weight_decay)
    common = {"lr": rule.lr, "betas": (rule.beta1, rule.beta2), "eps": rule.eps}
    skip = "tensor" if config.scaler.name == "fixed" else "step"
    if rule.name in EIGHT_BIT:
        return _build_eight_bit(rule, groups, common, skip)
    return StableAdamW(
        groups,
        clip_threshold=rule.clip_threshold,
        clip_weight_decay=rule.clip_weight_decay,
        beta2_decay=rule.beta2_decay,
        clip_norm=rule.clip_norm,
        skip=skip,
        **common,
    )


def _build_eight_bit(
    rule: OptimizerConfig, groups: list[dict], common: dict, skip: str
) -> EightBitAdamW:
    embedding = ["*token_embedding"] if rule.stable_embedding else []
    options = {"min_8bit_size": rule.min_8bit_size, "skip": skip}
    options["override_32bit"] = [*rule.override_32bit, *embedding]
    try:
        if rule.name == "adamw8bit_torchao":
            return TorchaoAdamW8bit(groups, common, **options)
        on_gpu = groups[0]["params"][0][1].is_cuda  # a CPU only ever evaluates such a run
        common |= {"is_paged": rule.paged and on_gpu}
        return BitsAndBytesAdamW8bit(groups, common, **options)
    except ValueError as error:
        raise ConfigError([f"optimizer.override_32bit: {error}"]) from error
    except ImportError as error:
        raise ConfigError([f"optimizer={rule.name}: {error}"]) from error
