"""The keys of each benchmark; loads no torch."""

from dataclasses import dataclass

from lowprec.config.schema import Config, key

OURS = (  # recipes of `layer`
    "autograd_high",
    "switchback",
    "switchback_m",
    "switchback_q",
    "llm_int8",
    "hw_fp8_tensorwise",
    "hw_fp8_switchback",
    "hw_fp8_blockwise",
)
PEERS = (
    "bnb_switchback",
    "dinov3",
    "torchao_tensorwise",
    "torchao_rowwise",
    "torchao_rowwise_with_gw_hp",
)
OPEN_CLIP = ("open_clip eager", "open_clip")
RECIPES = (
    "high",
    "autograd_high",
    "switchback",
    "switchback_m",
    "hw_fp8_switchback",
    "hw_fp8_blockwise",
    "llm_int8",
)


@dataclass
class OpsConfig:
    """Sizes of the operations, each measured as dim -> 4 dim and as 4 dim -> dim."""

    dims: list[int] = key([768, 1024, 1280, 1408, 1664, 2048, 4096], "widths", least=1)
    tokens: int = key(32768, "rows of the input", least=1)
    repeats: int = key(50, "calls of which the median is kept", least=1)
    device: str = key("auto", "where", choices=("auto", "cpu", "cuda"))
    run_dir: str = key("runs", "the lines go into its bench/")


@dataclass
class LayerConfig(OpsConfig):
    """Sizes of the layers, and what is measured."""

    dims: list[int] = key([768, 1024, 1280, 2048, 4096], "widths of the layer", least=1)
    cases: list[str] = key(
        [*OURS, *PEERS], "what is measured besides nn.Linear", choices=(*OURS, *PEERS)
    )


@dataclass
class ModelConfig(Config):
    """A run's keys, and what is measured of its model."""

    cases: list[str] = key(
        [*OPEN_CLIP, *RECIPES],
        "what is measured: open_clip's model and recipes",
        choices=(*OPEN_CLIP, *RECIPES),
    )


@dataclass
class StepConfig(ModelConfig):
    """A run's keys, and what is measured of its training loop."""

    cases: list[str] = key(
        [*OPEN_CLIP, "high", "switchback", "hw_fp8_switchback"],
        "what is measured: open_clip's training loop, ours by recipe",
        choices=(*OPEN_CLIP, *RECIPES),
    )
    preloaded: bool = key(False, "train on one batch in memory instead of data.train")


BENCHMARKS = {  # module of this package: its keys
    "layer": LayerConfig,
    "model": ModelConfig,
    "ops": OpsConfig,
    "optimizer": Config,
    "scale": Config,
    "step": StepConfig,
}
