"""The schema: every key of a run with its default, its meaning and its allowed values.

A field's default lives here; the files in `conf/` hold only what differs from it. A field declared
with `identity=False` is not part of the run's digest; for a path, the digest of its content is.
`lowprec.config.check` checks a config.

Imports no torch, so that a config can be read without it.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from lowprec.nn.recipe import LINEAR_LAYERS, RECIPES

SHAPES = "data/shapes"  # folder that the built-in set is rendered into on first use
PRESETS = ("nano", "mini_b", "mini_l", "mini_h", "vit_b14", "vit_b32", "vit_l14", "vit_h14")
SCALES = ("paper", "true_size", "mini", "demo")
STATISTICS = (
    *("rms", "grad_norm", "update_norm"),
    *("grad_abs_max", "grad_inf", "grad_nan", "param_norm", "u_min", "u_mean", "u_max"),
)
TORCH_OPTIMIZERS = ("muon",)  # wrapped in the interface of ours
LOGGERS = {  # and the packages that they need
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
}
REMOVED_OPTIMIZERS = ("adamw8bit_bnb", "adamw8bit_torchao", "adagc", "stable_spam")
CLIPPING = {  # key that bounds the gradient norm, of which a run sets one: its own optimizer
    "clip_norm": "adamw_clip",
    "zclip": "adamw_zclip",
    "skip_sigmas": "adamw_skip_step",
}
OPTIMIZERS = ("adamw", *CLIPPING.values(), "stable_adamw", *TORCH_OPTIMIZERS)
MAPS = ("precision.products", "optimizer.lr_scale")  # keys whose values are maps
REMOTE_SCHEMES = ("http", "https", "sftp", "ftps", "scp", "pipe")  # pipe runs a shell command
AUTOCAST = ("fp32", "bf16", "fp16")  # dtypes under which the weights are float32
LEGAL_SCALERS = {  # autocast: the scalers that work with it
    "fp32": ("none",),
    "bf16": ("none",),
    "pure_bf16": ("none",),
    "fp16": ("dynamic", "fixed"),
    "pure_fp16": ("fixed",),
}


def key(
    default: Any, doc: str, *, choices: tuple = (), identity: bool = True, **bounds: float
) -> Any:
    """A schema field with its default, meaning, allowed choices or bounds, and identity mark.

    The bounds `least` and `most` are inclusive, `above` and `below` exclusive. For a list or a
    map, the choices and bounds apply to each element.
    """
    metadata = {"doc": doc, "choices": choices, "identity": identity, "bounds": bounds}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    """The two towers of a CLIP model. None takes the value of open_clip's config for `name`."""

    name: str = key("nano", "name of a preset, or of an open_clip model with model=open_clip")
    image_size: int | None = key(32, "height and width of an image in pixels", least=1, most=4096)
    patch_size: int | None = key(8, "height and width of a patch in pixels", least=1)
    vision_width: int | None = key(128, "width of the vision tower", least=1, most=16384)
    vision_layers: int | None = key(4, "blocks of the vision tower", least=1, most=256)
    text_width: int | None = key(128, "text tower's width (multiple of 64)", least=1, most=16384)
    text_layers: int | None = key(2, "blocks of the text tower", least=1, most=256)
    heads: int | None = key(64, "width of a head in the vision tower (text: 64)", least=1)
    context_length: int | None = key(16, "tokens of a caption, with both ends", least=3, most=4096)
    vocab_size: int | None = key(
        49408, "token ids; if fewer, words share them", least=3, most=49408
    )
    embed_dim: int | None = key(128, "width of the shared embedding", least=1, most=16384)
    patch_dropout: float = key(0.0, "fraction of patches dropped during training", least=0, below=1)
    init_from: str | None = key(None, "run or file with the initial weights", identity=False)


@dataclass
class PrecisionConfig:
    """The number formats of a run; `recipe` names a row of the recipe table."""

    autocast: str = key("bf16", "dtype; pure_*: also of weights", choices=tuple(LEGAL_SCALERS))
    recipe: str = key("high", "formats of a layer's products", choices=(*RECIPES, "custom"))
    products: dict | None = key(None, "formats of the three products for recipe=custom")
    where: list[str] = key(list(LINEAR_LAYERS), "layers to convert", choices=LINEAR_LAYERS)
    backend: str = key("auto", "8-bit kernels", choices=("auto", "reference", "triton"))
    outlier_threshold: float = key(
        0.0, "llm_int8: larger features stay 16-bit (LLM.int8() uses 6.0); 0: none do", least=0
    )
    skip_slow: bool = key(False, "keep layers 16-bit if their shape is no faster in 8 bits")

    @property
    def label(self) -> str:
        """The recipe's name, or under recipe `high` the autocast dtype's."""
        return self.autocast if self.recipe == "high" else self.recipe


@dataclass
class PrecisionChangeConfig:
    """A change of number formats within a run: weights, moments and layers stay."""

    step: int | None = key(None, "first step with the new formats; null: no change", least=2)
    recipe: str | None = key(
        None, "precision.recipe from this step on; null: no change", choices=(*RECIPES, "custom")
    )
    autocast: str | None = key(
        None, "precision.autocast from this step on; null: no change", choices=AUTOCAST
    )


@dataclass
class ScalerConfig:
    """Loss scaling."""

    name: str = key("none", "kind of loss scaling", choices=("none", "dynamic", "fixed"))
    init_scale: float = key(65536.0, "initial (dynamic) or constant (fixed) loss scale", above=0)
    max_skips: int = key(100, "consecutive skipped steps that end the run as diverged", least=1)


@dataclass
class InterventionConfig:
    """A change to the model that keeps feature magnitudes small."""

    name: str = key("none", "change to the blocks", choices=("none", "zero_init", "kq_norm"))


@dataclass
class OptimizerConfig:
    """AdamW and its variants."""

    name: str = key("adamw", "update rule", choices=OPTIMIZERS)
    lr: float = key(1e-3, "peak learning rate", above=0)
    beta1: float = key(0.9, "decay rate of the first moment", least=0, below=1)
    beta2: float = key(0.98, "decay rate of the second moment", least=0, below=1)
    beta2_decay: float | None = key(None, "lambda in the schedule beta2 = 1 - t^-lambda", above=0)
    eps: float = key(1e-6, "term added to the root of the second moment", above=0)
    weight_decay: float = key(0.2, "of tensors with at least two dimensions", least=0)
    clip_norm: float | None = key(
        None, "largest global gradient norm (adamw_clip, stable_adamw, muon)", above=0
    )
    zclip: float | None = key(None, "least z-score of a norm that ZClip clips", above=0)
    skip_sigmas: float | None = key(
        None, "standard deviations above which SkipStep skips a loss or norm", above=0
    )
    clip_threshold: float | None = key(None, "largest unclipped RMS_t (stable_adamw)", above=0)
    clip_weight_decay: bool = key(True, "let update clipping reduce weight decay as well")
    optim_bits: int = key(32, "bits of a moment of adamw or stable_adamw", choices=(8, 32))
    min_8bit_size: int = key(4096, "smallest tensor, in elements, with 8-bit moments", least=1)
    override_32bit: list[str] = key([], "modules with 32-bit moments, such as 'visual.conv*'")
    paged: bool = key(False, "keep moments on the host that do not fit on the GPU", identity=False)
    lr_scale: dict[str, float] | None = key(
        None, "learning rate factors, {image: 0.1}, {visual.conv*: 0}; 0: locked", least=0
    )


@dataclass
class ScheduleConfig:
    """The learning rate over the steps of a run."""

    name: str = key("cosine", "shape after the warmup", choices=("cosine", "constant"))
    warmup_steps: int | None = key(None, "null: a tenth of the run, or 100 for constant", least=0)


def num_warmup_steps(warmup_steps: int | None, num_steps: int, shape: str) -> int:
    """`warmup_steps`; if None, a tenth of the run, or 100 steps for a constant rate."""
    if warmup_steps is not None:
        return warmup_steps
    return 100 if shape == "constant" else num_steps // 10


def is_sampled(step: int, interval: int | None) -> bool:
    """Whether a table is recorded at a step: 1 and multiples of `interval`; None: never."""
    return interval is not None and (step == 1 or step % interval == 0)


@dataclass
class DataConfig:
    """Image-text pairs in webdataset shards."""

    name: str = key("shapes", "source of the data", choices=("shapes", "shards", "stream"))
    train: str = key("???", "glob of training shards, or URLs (stream)", identity=False)
    val: str | None = key(None, "glob of the validation shards", identity=False)
    classnames: str | None = key(None, "file of class names, or 'imagenet'", identity=False)
    templates: str | None = key(None, "file of prompt templates, or 'imagenet'", identity=False)
    index: str | None = key(None, "folder of the index; null: beside the shards", identity=False)
    cache: str | None = key(
        None, "local folder for decoded pairs, which later epochs and runs reuse", identity=False
    )
    resampled: bool = key(False, "draw samples with replacement")
    augment: str = key("none", "image augmentation", choices=("none", "crop_flip"))
    fast_decoding: bool = key(
        False, "decode and resize training images faster; pixels differ slightly"
    )
    window: int = key(16, "number of shards whose samples are shuffled together", least=1)
    max_skip_rate: float = key(0.001, "largest unreadable share", least=0, most=1, identity=False)
    allow_remote: list[str] = key(
        [], "URL schemes that data=stream may open", choices=REMOTE_SCHEMES, identity=False
    )


@dataclass
class EvaluationConfig:
    """Evaluation on the validation shards."""

    name: str = key("zero_shot", "tasks", choices=("none", "zero_shot", "retrieval", "both"))


@dataclass
class SpikeConfig:
    """Spike detection. A null threshold is the protocol's (lowprec/diagnostics/README.md)."""

    protocol: str = key("paper", "rule of the detector", choices=("none", "paper", "sigma"))
    rms_threshold: float | None = key(None, "least RMS_t that counts as a spike", above=0)
    loss_sigmas: float | None = key(None, "standard deviations that make an outlier", above=0)
    num_deviations: int | None = key(None, "number of outliers that make a loss spike", least=1)
    within: int | None = key(None, "most steps between a spike's outliers", least=1)
    ignore_steps: int | None = key(
        None, "initial steps to ignore; null: the warmup, at most 1000", least=0
    )
    window: int | None = key(None, "number of steps in the running mean", least=2, most=4096)


@dataclass
class RecorderConfig:
    """Pre-spike snapshots; they take 24 bytes of host memory per parameter."""

    enabled: bool = key(False, "write a snapshot from before each loss spike")
    rms: bool = key(False, "also before each RMS spike, of any tensor", identity=False)
    steps: int = key(100, "least number of steps between a snapshot and its spike", least=1)
    keep: int = key(3, "number of newest snapshots to keep", least=1)


@dataclass
class DiagnosticsConfig:
    """What is recorded for each tensor and block."""

    statistics: list[str] = key(list(STATISTICS[:3]), "per tensor", choices=STATISTICS)
    every: int = key(1, "steps between records of these statistics", least=1)
    detail_every: int | None = key(100, "steps between records of the others; null: never", least=1)
    block_every: int | None = key(100, "steps between records of blocks; null: never", least=1)
    spikes: SpikeConfig = field(default_factory=SpikeConfig, metadata={"identity": False})
    recorder: RecorderConfig = field(default_factory=RecorderConfig, metadata={"identity": False})


@dataclass
class DistributedConfig:
    """Training in several processes, one per GPU, started by torchrun, srun or submitit."""

    name: str = key("none", "kind of data parallelism", choices=("none", "ddp", "fsdp2"))
    timeout_s: float = key(600.0, "seconds a rank may make no progress", above=0, identity=False)


@dataclass
class LoggerConfig:
    """A copy of the record in a dashboard."""

    name: str = key("none", "dashboard", choices=("none", *LOGGERS))


@dataclass
class ResumeConfig:
    """What a resume tolerates."""

    allow_reshard: bool = key(False, "resume a stream with other ranks or workers", identity=False)
    allow_drift: bool = key(False, "resume although the code has changed", identity=False)


@dataclass
class Config:
    """One run. `conf/train.yaml` has the groups and `conf/experiment` whole studies."""

    name: str = key("run", "folder name of a run that belongs to no experiment")
    experiment: str | None = key(None, "name of the study that the run belongs to")
    scale: str = key("mini", "scale of the study", choices=SCALES)
    remark: str | None = key(None, "free text about the run, for its reader", identity=False)
    seed: int = key(0, "seed of weights, dropout and sample order", least=0, below=2**31)
    num_steps: int = key(1000, "number of optimizer steps", least=1)
    batch_size: int = key(128, "image-text pairs per step, over all ranks", least=2)
    accumulate: int = key(1, "number of micro-batches per step on each rank", least=1)
    device: str = key("auto", "device", choices=("auto", "cpu", "cuda"), identity=False)
    num_workers: int | None = key(None, "data workers; null: auto", least=0, identity=False)
    compile: bool = key(False, "compile every block with torch.compile")
    checkpointing: bool = key(False, "recompute activations in the backward pass")
    deterministic: bool = key(False, "use only bit-reproducible kernels", identity=False)
    run_dir: str = key("runs", "folder that holds the run directories", identity=False)
    log_every: int = key(20, "steps between writes of the record", least=1, identity=False)
    eval_every: int = key(0, "steps between evaluations; 0: only at the end", least=0)
    save_every: int = key(1000, "steps between checkpoints", least=1, identity=False)
    keep_checkpoints: int | None = key(
        None, "number to keep; null: 2, then only the final weights", least=2, identity=False
    )
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    precision_change: PrecisionChangeConfig = field(default_factory=PrecisionChangeConfig)
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    intervention: InterventionConfig = field(default_factory=InterventionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig, metadata={"identity": False})

    @property
    def warmup_steps(self) -> int:
        """The steps of warmup, which `schedule.warmup_steps` may leave to the schedule's shape."""
        return num_warmup_steps(self.schedule.warmup_steps, self.num_steps, self.schedule.name)

    def precision_at(self, step: int) -> PrecisionConfig:
        """The precision of a step (from 1), which `precision_change` may have changed."""
        before, change = self.precision, self.precision_change
        if change.step is None or step < change.step:
            return before
        recipe, autocast = change.recipe or before.recipe, change.autocast or before.autocast
        return replace(before, recipe=recipe, autocast=autocast)

    def at_step(self, step: int) -> "Config":
        """The config with the precision of a step and no change of it."""
        no_change = PrecisionChangeConfig()
        return replace(self, precision=self.precision_at(step), precision_change=no_change)
