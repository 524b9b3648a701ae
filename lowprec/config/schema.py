"""The schema: every key of a run, its default, what it may be, and whether it is identity.

A field's default lives here; a file under `conf/` only says what differs. A field declared with
`identity=False` does not enter the run's digest (of a path, what it holds enters instead). A choice
under `planned` ("*": any other value) has its name reserved and is refused with a sentence that
says so. `lowprec.config.check` checks a config.

Imports nothing heavier than the standard library: reading a config must not load torch.
"""

from dataclasses import dataclass, field
from typing import Any

SHAPES = "data/shapes"  # where the embedded set is rendered on first use
PRESETS = ("nano", "mini_b", "mini_l", "mini_h", "vit_b32", "vit_l14", "vit_h14")
RECIPES = (
    *("high", "autograd_high", "switchback", "switchback_m", "switchback_q", "llm_int8"),
    *("fp8_tensorwise", "fp8_rowwise", "fp8_switchback", "fp8_switchback_blocks"),
    *("hw_fp8_tensorwise", "hw_fp8_switchback", "custom", "int8_inference"),
)
LINEAR_LAYERS = ("in_proj", "out_proj", "c_fc", "c_proj")
STATISTICS = (
    *("rms", "grad_norm", "update_norm"),
    *("grad_abs_max", "grad_inf", "grad_nan", "param_norm", "u_min", "u_mean", "u_max"),
)
OF_SECOND_MOMENT = ("rms", "u_min", "u_mean", "u_max")  # of STATISTICS
EIGHT_BIT = ("adamw8bit_bnb", "adamw8bit_torchao")  # optimizers that keep moments in 8 bits
REMOTE_SCHEMES = ("http", "https", "sftp", "ftps", "scp", "pipe")  # pipe: runs a shell command
LEGAL_SCALERS = {  # autocast: the scalers it may run with
    "fp32": ("none",),
    "bf16": ("none",),
    "pure_bf16": ("none",),
    "fp16": ("dynamic", "fixed"),
    "pure_fp16": ("fixed",),
}


def key(
    default: Any,
    doc: str,
    *,
    choices: tuple = (),
    planned: tuple = (),
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    identity: bool = True,
) -> Any:
    """A schema field: default, meaning, allowed choices or bounds, identity mark.

    `least`/`most` are inclusive bounds, `above`/`below` exclusive ones. A list-valued field
    applies `choices` and bounds to each element.
    """
    bounds = {"least": least, "above": above, "most": most, "below": below}
    metadata = {"doc": doc, "choices": choices, "planned": planned, "identity": identity}
    metadata["bounds"] = {name: bound for name, bound in bounds.items() if bound is not None}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    """Two towers of a CLIP model. None: as open_clip's own config of `name` says."""

    name: str = key("nano", "a preset's name, or with model=open_clip a model of open_clip")
    image_size: int | None = key(32, "pixels a side", least=1)
    patch_size: int | None = key(8, "pixels a side of one patch", least=1)
    vision_width: int | None = key(128, "features of the vision tower", least=1)
    vision_layers: int | None = key(4, "blocks of the vision tower", least=1)
    text_width: int | None = key(128, "features of the text tower, a multiple of 64", least=1)
    text_layers: int | None = key(2, "blocks of the text tower", least=1)
    heads: int | None = key(
        64, "width of one attention head of the vision tower (text: 64)", least=1
    )
    context_length: int | None = key(16, "tokens of a caption, start and end included", least=3)
    vocab_size: int | None = key(49408, "token ids; tests may shrink it", least=3, most=49408)
    embed_dim: int | None = key(128, "features of the shared embedding", least=1)
    patch_dropout: float = key(0.0, "share of patches dropped in training", least=0, below=1)
    init_from: str | None = key(None, "run or checkpoint with first weights", identity=False)


@dataclass
class PrecisionConfig:
    """The number formats of a run; `recipe` names a row of the recipe table."""

    autocast: str = key("bf16", "16-bit dtype, or pure_*", choices=tuple(LEGAL_SCALERS))
    recipe: str = key("high", "formats of a linear layer's products", choices=RECIPES)
    products: dict | None = key(None, "the products of recipe=custom")
    where: list[str] = key(list(LINEAR_LAYERS), "layers it applies to", choices=LINEAR_LAYERS)
    backend: str = key(
        "auto", "who computes 8-bit products", choices=("auto", "reference", "triton")
    )
    outlier_threshold: float = key(
        0.0, "llm_int8: features above it stay 16-bit (6.0 = LLM.int8()'s); 0: none", least=0
    )
    skip_slow: bool = key(False, "leave layers 16-bit whose shape gains no speed")

    @property
    def label(self) -> str:
        """The recipe's name, or under recipe `high` the autocast dtype's."""
        return self.autocast if self.recipe == "high" else self.recipe


@dataclass
class ScalerConfig:
    """Loss scaling."""

    name: str = key("none", "loss scaling", choices=("none", "dynamic", "fixed"))
    init_scale: float = key(65536.0, "first scale (dynamic), the scale (fixed)", above=0)
    max_skips: int = key(100, "skips in a row after which the run has diverged", least=1)


@dataclass
class InterventionConfig:
    """A change to the model that discourages large features."""

    name: str = key("none", "change to the blocks", choices=("none", "zero_init", "kq_norm"))


@dataclass
class OptimizerConfig:
    """AdamW and its relatives."""

    name: str = key(
        "adamw", "update rule", choices=("adamw", "adamw_clip", "stable_adamw", *EIGHT_BIT)
    )
    lr: float = key(1e-3, "peak learning rate", above=0)
    beta1: float = key(0.9, "decay of the first moment", least=0, below=1)
    beta2: float = key(0.98, "decay of the second moment", least=0, below=1)
    beta2_decay: float | None = key(None, "lambda of beta2 = 1 - t^-lambda", above=0)
    eps: float = key(1e-6, "added to the root of the second moment", above=0)
    weight_decay: float = key(0.2, "not on gains, biases, logit scale", least=0)
    clip_norm: float | None = key(None, "bound of the global gradient norm", above=0)
    clip_threshold: float | None = key(None, "bound of RMS_t in update clipping", above=0)
    clip_weight_decay: bool = key(True, "update clipping slows weight decay too")
    min_8bit_size: int = key(4096, "elements from which on moments are 8-bit", least=1)
    override_32bit: list[str] = key([], "modules with 32-bit moments, such as 'visual.conv*'")
    paged: bool = key(False, "bitsandbytes: moments in CUDA's managed memory")
    stable_embedding: bool = key(False, "Xavier weights and the layer norm token_embedding.norm")


@dataclass
class ScheduleConfig:
    """Learning rate over steps."""

    name: str = key("cosine", "shape after warmup", choices=("cosine", "constant"))
    warmup_steps: int | None = key(
        None, "linear warmup; null: a tenth of the run, 100 if constant", least=0
    )


@dataclass
class DataConfig:
    """Image-text pairs in webdataset shards."""

    name: str = key("shapes", "kind of data", choices=("shapes", "shards", "stream"))
    train: str = key("???", "glob of the training shards; of data=stream URLs", identity=False)
    val: str | None = key(None, "glob of the validation shards", identity=False)
    classnames: str | None = key(None, "file, a name a line; or 'imagenet'", identity=False)
    templates: str | None = key(None, "file, a prompt a line; or 'imagenet'", identity=False)
    index: str | None = key(None, "folder of the index; beside the shards if null", identity=False)
    resampled: bool = key(False, "draw with replacement")
    augment: str = key("none", "image augmentation", choices=("none", "crop_flip"))
    window: int = key(16, "shards shuffled together", least=1)
    max_skip_rate: float = key(
        0.001, "share of bad samples tolerated", least=0, most=1, identity=False
    )
    allow_remote: list[str] = key(
        [], "schemes of URLs that stream may open", choices=REMOTE_SCHEMES, identity=False
    )


@dataclass
class EvaluationConfig:
    """What is measured on the validation shards."""

    name: str = key("zero_shot", "tasks", choices=("none", "zero_shot", "retrieval", "both"))


@dataclass
class SpikeConfig:
    """Spike detection; a threshold of null is the protocol's (lowprec/diagnostics/README.md)."""

    protocol: str = key("paper", "online detector", choices=("none", "paper", "sigma"))
    rms_threshold: float | None = key(None, "RMS_t of an RMS spike", above=0)
    loss_sigmas: float | None = key(None, "standard deviations of a deviation", above=0)
    num_deviations: int | None = key(None, "deviations of a loss spike", least=1)
    within: int | None = key(None, "steps in which they fall, and spikes count once", least=1)
    ignore_steps: int | None = key(None, "first steps without spikes", least=0)
    window: int | None = key(None, "steps of the running mean", least=2)


@dataclass
class RecorderConfig:
    """The flight recorder; costs 24 bytes of host memory a parameter (lowprec/train/README.md)."""

    enabled: bool = key(False, "keep the state of some steps ago, write it when the loss spikes")
    steps: int = key(100, "a snapshot is at least so much older than its spike", least=1)
    keep: int = key(3, "newest snapshots kept", least=1)


@dataclass
class DiagnosticsConfig:
    """What is recorded of every tensor."""

    statistics: list[str] = key(list(STATISTICS[:3]), "recorded of each tensor", choices=STATISTICS)
    every: int = key(1, "steps between two records of them", least=1)
    detail_every: int | None = key(100, "of the other statistics; null: never", least=1)
    block_every: int | None = key(100, "of features and attention logits; null: never", least=1)
    spikes: SpikeConfig = field(
        default_factory=SpikeConfig, metadata={"identity": False, "doc": "spike detection"}
    )
    recorder: RecorderConfig = field(
        default_factory=RecorderConfig, metadata={"identity": False, "doc": "flight recorder"}
    )


@dataclass
class DistributedConfig:
    """Many processes, one a GPU: started by torchrun, srun or submitit."""

    name: str = key("none", "data parallelism", choices=("none", "ddp", "fsdp2"))
    local_loss: bool = key(True, "each rank computes its own rows of the loss, not all of them")
    gather_with_grad: bool = key(True, "through gathered features; always", choices=(True,))
    static_graph: bool = key(True, "ddp: every step uses the same parameters")
    sync_bn: bool = key(False, "ddp: batch norm over the batches of all ranks, on GPUs")
    timeout_s: float = key(
        600.0, "a rank that stands still for so long ends the run", above=0, identity=False
    )


@dataclass
class LoggerConfig:
    """A copy of the record in a dashboard."""

    name: str = key("none", "dashboard", choices=("none", "tensorboard", "wandb"))


@dataclass
class ResumeConfig:
    """Start from another run's state."""

    from_: str | None = key(
        None, "run or checkpoint whose weights and moments this run begins with", identity=False
    )
    allow_reshard: bool = key(
        False, "data=stream may go on with other ranks or workers", identity=False
    )
    allow_drift: bool = key(False, "resume though the code has changed", identity=False)


@dataclass
class Config:
    """One run. See `conf/train.yaml` for the groups and `conf/experiment` for whole studies."""

    name: str = key("run", "folder of a run that belongs to no experiment: a plain name")
    experiment: str | None = key(None, "slug of the study the run belongs to")
    scale: str = key("mini", "size of the study", choices=("paper", "mini", "demo"))
    seed: int = key(0, "of weights, dropout and sample order", least=0, below=2**31)
    num_steps: int = key(1000, "optimizer updates", least=1)
    batch_size: int = key(128, "image-text pairs a step, over all ranks", least=2)
    accumulate: int = key(1, "parts a rank computes its batch in, one after the other", least=1)
    device: str = key("auto", "where", choices=("auto", "cpu", "cuda"), identity=False)
    num_workers: int | None = key(
        None, "decoding processes; null: cores - 1, at most 16", least=0, identity=False
    )
    compile: bool = key(False, "torch.compile of every block")
    checkpointing: bool = key(False, "recompute activations in backward")
    deterministic: bool = key(False, "only bit-reproducible kernels", identity=False)
    profile: bool = key(False, "write a profiler trace of a few steps", identity=False)
    run_dir: str = key("runs", "folder under which run directories are made", identity=False)
    log_every: int = key(20, "steps between two flushes of the record", least=1, identity=False)
    eval_every: int = key(0, "steps between evaluations; 0: at the end", least=0)
    save_every: int = key(1000, "steps between checkpoints", least=1, identity=False)
    keep_checkpoints: int = key(2, "newest checkpoints kept", least=2, identity=False)
    remote_sync: str | None = key(None, "URL of a folder for a copy of the run", identity=False)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    intervention: InterventionConfig = field(default_factory=InterventionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    logger: LoggerConfig = field(
        default_factory=LoggerConfig, metadata={"identity": False, "doc": "dashboard"}
    )
