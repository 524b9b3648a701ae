"""Converts weights between runs and open_clip, with unchanged tensor names.

    python -m experiments.export source=runs/run/nano-bf16-adamw-s0-0123456789 out=nano
    python -m experiments.export source=open_clip_model.pt out=weights.safetensors
    python -m experiments.export source=RUN out=int8.safetensors precision=int8_inference

The first command writes a folder with the model's config and weights, which open_clip loads as it
is, and prints the lines that load it. With model.init_from=nano, a run starts from such a folder
or file. Only `lowprec.nn.inference.load_int8(model, FILE)` reads an int8 file. With int8_inference,
`precision.autocast` has the same meaning as in `experiments.evaluate`: for a run with 16-bit
parameters, the tensors that are not int8 become float32.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from experiments.entry import run_command
from experiments.evaluate import EvaluatedPrecision
from lowprec.config.schema import key
from lowprec.nearest import nearest_path
from lowprec.runs.read import read_config

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class ExportConfig:
    """The source and the destination."""

    source: str = key("???", "a run, a checkpoint, an exported folder or file, or open_clip's .pt")
    out: str = key(
        "???", "a folder (no suffix), a .safetensors, or a .pt as open_clip's trainer writes"
    )
    precision: EvaluatedPrecision = field(default_factory=EvaluatedPrecision)


def main(config: ExportConfig) -> None:
    """Reads and writes the weights; never executes code from a .pt file."""
    if config.precision.recipe == "as_trained" and config.precision.autocast is not None:
        sys.exit(
            "precision.autocast needs precision=int8_inference: otherwise weights do not change"
        )
    if hint := nearest_path(config.source):
        sys.exit(f"source={config.source} does not exist{hint}")
    try:
        if config.precision.recipe == "int8_inference":
            state = write_int8(Path(config.source), Path(config.out), config.precision.autocast)
        else:
            state = write(Path(config.source), Path(config.out))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        sys.exit(f"source={config.source} cannot be exported: {str(error).splitlines()[0]}")
    print(f"{config.out}: {len(state)} tensors")
    if not Path(config.out).suffix:
        from lowprec.clip import TORCHVISION_FITS

        print("import open_clip" if TORCHVISION_FITS else "from lowprec.clip import open_clip")
        name = f"local-dir:{Path(config.out)}"
        print(f"model, _, preprocess = open_clip.create_model_and_transforms({name!r})")


def write(source: Path, out: Path) -> "dict[str, Tensor]":
    """Writes the weights of a source as a file or, together with a run's config, as a folder."""
    from lowprec.clip.export import find_weights, read_weights, write_folder, write_weights
    from lowprec.clip.model import model_config
    from lowprec.train.checkpoint import step_of

    weights = find_weights(source)
    checkpoint = weights.resolve().parent
    run = checkpoint.parent.parent
    is_run = checkpoint.name.startswith("step_") and (run / "config.yaml").is_file()
    facts = {"run": run.name, "step": str(step_of(checkpoint))} if is_run else {}
    if not (out.suffix or is_run):
        raise ValueError("a folder needs a run, whose config has the sizes of the model")
    state = read_weights(weights)
    if out.suffix:
        write_weights(state, out, **facts)
    else:
        trained = read_config(run)
        sizes = model_config(trained.model, trained.intervention.name)
        write_folder(state, sizes, out, **facts)
    return state


def write_int8(run: Path, out: Path, autocast: str | None) -> "dict[str, Tensor]":
    """Converts the model of a run's newest checkpoint to int8, writes it and returns its state.

    `autocast` defaults to that of the run.
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
