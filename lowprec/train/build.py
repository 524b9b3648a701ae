"""Builds the objects of a run from a checked config and opened data."""

import contextlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowprec.clip import model as clip
from lowprec.clip.export import load_weights
from lowprec.clip.text import Tokenizer, build_classifier, imagenet
from lowprec.clip.vision import PatchDropout, compile_embedding
from lowprec.config.check import ConfigError
from lowprec.config.schema import TORCH_OPTIMIZERS, Config, OptimizerConfig, PrecisionConfig
from lowprec.data.cache import DecodedCache
from lowprec.data.loader import (
    Batch,
    Batches,
    crop_box,
    decode_caption,
    decode_image,
    iterate,
    resize_by_torch,
)
from lowprec.data.open import Data, num_workers
from lowprec.data.order import SampleOrder
from lowprec.data.shards import Shards
from lowprec.data.sources import names_file, read_names
from lowprec.data.stream import Stream
from lowprec.diagnostics.blocks import BlockProbe
from lowprec.evaluate import Evaluation
from lowprec.formats import parse_format
from lowprec.nn.blocks import checkpoint_blocks, compile_blocks
from lowprec.nn.coverage import Layers
from lowprec.nn.recipe import RECIPES, custom_recipe
from lowprec.ops import takes
from lowprec.optim.clipping import SkipStep, ZClip
from lowprec.optim.loss_scaling import build_scaler
from lowprec.optim.muon import MuonAdamW
from lowprec.optim.schedules import lock, param_groups
from lowprec.optim.stable_adamw import StableAdamW
from lowprec.runs.provenance import code_digest
from lowprec.train.distributed import ONE_PROCESS, Ranks, has_batch_norm, shard
from lowprec.train.state import TrainState
from lowprec.train.step import can_capture, capture_stream
from lowprec.train.task import DTYPES, ContrastiveTask, autocast

EVALUATION_BATCH = 256  # pairs per rank


@dataclass
class Built:
    """The objects of a run, on their device."""

    config: Config
    data: Data | None
    device: torch.device
    tokenizer: Tokenizer
    task: ContrastiveTask
    state: TrainState
    layers: Layers  # under precision.recipe, or if that is high, under precision_change.recipe
    world: Ranks = ONE_PROCESS

    def batches_from(self, first: int) -> Iterator[Batch]:
        """Iterates over this rank's batches of steps first, first + 1, ... on the host."""
        config = self.config
        if config.data.name == "stream":
            return self.stream().batches_from(first)
        order = SampleOrder(
            self.data.train.counts,
            seed=config.seed,
            window=config.data.window,
            resampled=config.data.resampled,
        )
        options = self._options() | self._training_options()
        batches = Batches(
            self.data.train,
            order,
            num_batches=config.num_steps,
            cache=self._cache(self.data.train, config.data.fast_decoding),
            **options,
        )
        pin = self.device.type == "cuda"
        return iterate(batches, workers=self._num_workers(), first=first - 1, pin=pin)

    def stream(self) -> Stream:
        """Returns the training data of `data=stream`."""
        return Stream(
            self.data.train,
            num_steps=self.config.num_steps,
            segment_steps=self.config.save_every,
            workers=self._num_workers(),
            pin=self.device.type == "cuda",
            **self._options(),
            **self._training_options(),
        )

    def layout(self) -> dict:
        """Returns the ranks and workers that a stream's sample order depends on; else {}."""
        return self.stream().layout() if self.config.data.name == "stream" else {}

    def use_precision(self, precision: PrecisionConfig) -> None:
        """Changes the formats of the products; weights, moments and random state stay."""
        _apply_recipe(self.task.model, precision, self.device)
        self.task.autocast_name = precision.autocast
        if self.config.compile:
            torch.compiler.reset()  # its recompilation limit counts over both recipes

    def evaluation(self) -> Evaluation | None:
        """Builds the configured evaluation, which every rank runs on its share; or None."""
        config = self.config
        if config.evaluation.name == "none":
            return None
        pairs = EVALUATION_BATCH * self.world.size
        batches = Batches(
            self.data.val,
            None,
            batch_size=pairs,
            num_batches=-(-self.data.val.num_samples // pairs),
            cache=self._cache(self.data.val) if self.data.val.num_captions.any() else None,
            captions=config.evaluation.name != "zero_shot",
            **self._options(),
        )
        classifier = None
        if config.evaluation.name in ("zero_shot", "both"):
            classifier = partial(
                build_classifier,
                tokenizer=self.tokenizer,
                classnames=_read_names(config, "classnames"),
                templates=_read_names(config, "templates"),
            )
        return Evaluation(
            lambda: iterate(batches, workers=min(4, self._num_workers())),
            self.task.normalize,
            autocast=lambda: autocast(self.task.autocast_name, self.device),
            build_classifier=classifier,
            retrieval=config.evaluation.name in ("retrieval", "both"),
            each=self.world.each,
        )

    def _cache(self, shards: Shards, fast: bool = False) -> DecodedCache | None:
        folder, tokenizer = self.config.data.cache, self.tokenizer
        if folder is None:
            return None
        decoders = (decode_image, resize_by_torch, crop_box, decode_caption, Tokenizer)
        code = [code_digest(inspect.getsource(decoder)) for decoder in decoders]
        key = (
            f"{shards.digest} {tokenizer.context_length} {tokenizer.vocab_size} {code}"
            + f" fast {torch.__version__}" * fast
        )
        size = clip.image_size(self.task.model)
        return DecodedCache(folder, key, shards.num_samples, size, tokenizer.context_length)

    def _num_workers(self) -> int:
        return num_workers(self.config.num_workers, self.world.local_size)

    def _options(self) -> dict:
        size, world = clip.image_size(self.task.model), self.world
        options = {"image_size": size, "tokenizer": self.tokenizer}
        return options | {"rank": world.rank, "world_size": world.size}

    def _training_options(self) -> dict:
        config, data = self.config, self.config.data
        options = {"augment": data.augment == "crop_flip", "fast": data.fast_decoding}
        return {"seed": config.seed, "batch_size": config.batch_size, **options}


def pick_device(name: str) -> torch.device:
    """Returns the device for `device=auto|cpu|cuda`; auto takes the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["device=cuda: torch finds no GPU here; use device=cpu or device=auto"])
    return torch.device(name)


def is_slow(config: Config, device: torch.device) -> bool:
    """Whether a run computes in bf16 on a CPU without instructions for it."""
    if device.type != "cpu" or not config.precision.autocast.endswith("bf16"):
        return False
    is_x86 = torch.backends.cpu.get_cpu_capability() in ("NO AVX", "AVX2", "AVX512")
    return is_x86 and not torch.cpu._is_avx512_bf16_supported()  # CPUs with AMX have these too


def emulated(precision: PrecisionConfig, device: torch.device) -> str:
    """Says that a device emulates products below 16 bits, or ""."""
    recipe = RECIPES.get(precision.recipe) or custom_recipe(precision.products)
    if any(recipe.products) and not recipe.is_native:
        return f"{recipe.name} is fake-quantized: its speed says nothing about 8 bits"
    formats = sorted(recipe.native_formats)
    missing = [f for f in formats if takes("auto", parse_format(f), device) == "reference"]
    if not missing:
        return ""
    least = ".".join(map(str, max(parse_format(f).capability for f in missing)))
    what = f"emulates the {' and '.join(missing)} products of {recipe.name}"
    return (
        f"this device {what}, correctly but slowly; a GPU needs compute capability {least} for them"
    )


def build(config: Config, data: Data | None, world: Ranks = ONE_PROCESS) -> Built:
    """Builds and seeds the model, optimizer, scaler and tokenizer of a config.

    Every rank of `world` is seeded alike, so that all start from the same weights. `data` may be
    None if no batch is read. Raises ConfigError for faults that only the built model reveals.
    """
    device = pick_device(config.device)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    torch.use_deterministic_algorithms(config.deterministic)
    torch.manual_seed(config.seed)
    model = clip.build_model(config.model, config.intervention.name)
    if config.model.init_from:
        with _faults_of("model.init_from"):
            load_weights(model, Path(config.model.init_from))
    set_parameter_dtype(model, config.precision.autocast)
    model.to(device)
    later = config.precision_at(config.num_steps)
    # first, so that its faults come now, not at its step
    changed = _apply_recipe(model, later, device) if later != config.precision else None
    layers = _apply_recipe(model, config.precision, device)
    if changed is not None and config.precision.recipe == "high":
        layers = changed
    with _faults_of("optimizer.lr_scale"):
        lock(model, config.optimizer.lr_scale or {})
    parallel = parallelize(model, config, world)
    scaler = build_scaler(config.scaler.name, config.scaler.init_scale, device)
    state = TrainState(model, build_optimizer(config, model), scaler, world=world)
    task = ContrastiveTask(
        model,
        clip.contrastive_loss(world.rank, world.size),
        clip.Normalize().to(device),
        config.precision.autocast,
        parallel=parallel,
        world=world,
        accumulate=config.accumulate,
    )
    if clip.blocks(model):
        task.probe = BlockProbe(model, clip.blocks(model), task.measure)
    tokenizer = Tokenizer(
        config.model.context_length or model.context_length,
        config.model.vocab_size or model.vocab_size,
    )
    return Built(config, data, device, tokenizer, task, state, layers, world)


def _apply_recipe(model: nn.Module, precision: PrecisionConfig, device: torch.device) -> Layers:
    """Applies a recipe; its forward on blank inputs does not change the random state."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), _faults_of(f"precision.recipe={precision.recipe}"):
        return clip.set_precision(model, precision)


def set_parameter_dtype(model: nn.Module, autocast_name: str) -> None:
    """Converts the parameters of "pure_bf16" and "pure_fp16" runs to 16 bits, in place.

    The logit scale stays float32: its updates are smaller than half a 16-bit step.
    """
    if autocast_name.startswith("pure_"):
        logit_scale = model.logit_scale.data.clone()
        model.to(DTYPES[autocast_name.removeprefix("pure_")])
        model.logit_scale.data = logit_scale


@contextlib.contextmanager
def _faults_of(key: str) -> Iterator[None]:
    """Turns a ValueError or ImportError into a ConfigError that names the key."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise ConfigError([f"{key}: {error}"]) from error


def parallelize(model: nn.Module, config: Config, world: Ranks) -> nn.Module:
    """Applies recomputation, per-block compilation and DDP or FSDP2, in this order.

    Changes `model` in place and returns the module that averages gradients over ranks.
    """
    if config.accumulate > 1 and has_batch_norm(model):
        raise ConfigError([f"accumulate={config.accumulate}: batch norm needs its whole batch"])
    if config.model.patch_dropout and (world.size > 1 or config.accumulate > 1):
        model.visual.patch_dropout = PatchDropout(
            config.model.patch_dropout, config.batch_size, world.rank, world.size
        )
    if config.checkpointing:
        model.set_grad_checkpointing(True)
        if config.intervention.name == "kq_norm":
            checkpoint_blocks(model, clip.blocks(model))
    if config.compile:
        if not clip.blocks(model):
            raise ConfigError([f"compile=true: {config.model.name} has no open_clip blocks"])
        torch.compiler.reset()  # its recompilation limit counts over all runs of a process
        compile_blocks(model, clip.blocks(model))
        compile_embedding(model.visual)
    if world.size == 1:
        return model
    if has_batch_norm(model):
        raise ConfigError(
            [
                f"distributed={config.distributed.name}: model {config.model.name} has batch norm, "
                "whose statistics each process would compute on its own; train in one process"
            ]
        )
    if config.distributed.name == "ddp":
        return _replicate(model, config)
    shard(model, clip.blocks(model), world)
    return model


def _replicate(model: nn.Module, config: Config) -> DistributedDataParallel:
    """Wraps a model in DDP; on the stream of captures, if its steps are to be captured."""
    device = next(model.parameters()).device
    known = inspect.signature(DistributedDataParallel).parameters
    size_mib = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    renamed = "forward_sync_buffers"  # in torch 2.13
    options = {
        "device_ids": [device] if device.type == "cuda" else None,
        "gradient_as_bucket_view": True,
        # torch's 25 MiB cut ViT-H/14 into 135 buckets, whose launches cost more than they hide
        "bucket_cap_mb": size_mib / 40 if size_mib > 1000 else None,
        # of micro-batches, only the last averages gradients
        "static_graph": config.accumulate == 1,
        # no buffer changes: batch norm is refused
        renamed if renamed in known else "broadcast_buffers": False,
    }
    if not can_capture(config, device):
        return DistributedDataParallel(model, **options)
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        parallel = DistributedDataParallel(model, **options)
    torch.cuda.current_stream(device).wait_stream(stream)
    return parallel


def build_optimizer(config: Config, model: nn.Module) -> StableAdamW | MuonAdamW:
    """Builds the optimizer of a config's `optimizer` group; AdamW is unclipped StableAdamW."""
    rule = config.optimizer
    groups = param_groups(model, rule.weight_decay, rule.lr_scale)
    common = {"lr": rule.lr, "betas": (rule.beta1, rule.beta2), "eps": rule.eps}
    skip = "tensor" if config.scaler.name == "fixed" else "step"
    clip_norm = _clip_norm(rule, groups[0]["params"][0][1].device)
    options = {"clip_norm": clip_norm, "skip": skip}
    key = "optimizer.override_32bit" if rule.override_32bit else f"optimizer={rule.name}"
    with _faults_of(key):
        if rule.name in TORCH_OPTIMIZERS:
            return MuonAdamW(groups, common, **options)
        return StableAdamW(
            groups,
            clip_threshold=rule.clip_threshold,
            clip_weight_decay=rule.clip_weight_decay,
            beta2_decay=rule.beta2_decay,
            optim_bits=rule.optim_bits,
            min_8bit_size=rule.min_8bit_size,
            override_32bit=rule.override_32bit,
            paged=rule.paged,
            **common,
            **options,
        )


def _clip_norm(rule: OptimizerConfig, device: torch.device) -> float | ZClip | SkipStep | None:
    """What bounds the norm of the gradient; at most one of its keys is set."""
    if rule.zclip:
        return ZClip(rule.zclip).to(device)
    return SkipStep(rule.skip_sigmas).to(device) if rule.skip_sigmas else rule.clip_norm


def _read_names(config: Config, kind: str) -> list[str]:
    source = names_file(config, kind)
    return imagenet(kind) if source == "imagenet" else read_names(source, kind)
