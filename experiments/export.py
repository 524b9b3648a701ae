"""Converts weights between runs and open_clip: safetensors or .pt, tensor names unchanged.

    python -m experiments.export source=runs/run/nano-bf16-adamw-s0-0123456789 out=nano.safetensors
    python -m experiments.export source=open_clip_model.pt out=weights.safetensors
    python -m experiments.export source=RUN out=int8.safetensors precision=int8_inference

A run starts from such a file with model.init_from=FILE. Only `lowprec.nn.inference.load_int8(model,
FILE)` reads an int8 file. With int8_inference, `precision.autocast` means the same as in
`experiments.evaluate`: for a run with 16-bit parameters, the tensors that are not int8 become
float32.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from experiments.entry import run_command
from experiments.evaluate import EvaluatedPrecision
from lowprec.config.schema import key
from lowprec.runs.read import read_config

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class ExportConfig:
    """The source and the destination."""

    source: str = key("???", "a run directory, a checkpoint, a .safetensors or an open_clip .pt")
    out: str = key("???", "a .safetensors file, or a .pt in the layout of open_clip's trainer")
    precision: EvaluatedPrecision = field(default_factory=EvaluatedPrecision)


def main(config: ExportConfig) -> None:
    """Reads and writes weights; executes nothing in a .pt file."""
    from lowprec.clip.export import read_weights, write_weights

    if config.precision.recipe == "as_trained" and config.precision.autocast is not None:
        sys.exit("precision.autocast needs precision=int8_inference; else weights stay as they are")
    try:
        if config.precision.recipe == "int8_inference":
            state = write_int8(Path(config.source), Path(config.out), config.precision.autocast)
        else:
            state = read_weights(Path(config.source))
            write_weights(state, Path(config.out))
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        sys.exit(f"source={config.source} cannot be exported: {str(error).splitlines()[0]}")
    print(f"{config.out}: {len(state)} tensors")


def write_int8(run: Path, out: Path, autocast: str | None) -> "dict[str, Tensor]":
    """Converts the model of a run's newest checkpoint to int8, writes it and returns its state.

    `autocast` defaults to the run's.
    """
    from lowprec.clip.export import load_weights
    from lowprec.clip.model import build_model, set_precision
    from lowprec.nn.inference import save_int8, to_int8
    from lowprec.train.build import set_parameter_dtype

    trained = read_config(run)
    trained.precision.autocast = autocast or trained.precision.autocast
    model = build_model(trained.model, trained.intervention.name)
    set_parameter_dtype(model, trained.precision.autocast)
    load_weights(model, run)
    layers = set_precision(model, trained.precision)
    save_int8(to_int8(model, [layer.name for layer in layers]), out)
    return model.state_dict()


if __name__ == "__main__":
    run_command(main, "export", ExportConfig)
