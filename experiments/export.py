"""Converts weights between runs and open_clip, with unchanged tensor names.

    python -m experiments.export source=runs/run/nano-bf16-adamw-s0-0123456789 out=exported/nano
    python -m experiments.export source=open_clip_model.pt out=weights.safetensors
    python -m experiments.export source=RUN out=int8.safetensors precision=int8_inference

The first command writes a folder with the model's config and weights, which open_clip loads as it
is, and prints the lines that load it. With model.init_from=exported/nano, a run starts from such a
folder or file. Only `lowprec.nn.inference.load_int8(model, FILE)` reads an int8 file. With
int8_inference, `precision.autocast` has the same meaning as in `experiments.evaluate`: for a run
with 16-bit parameters, the tensors that are not int8 become float32.
"""

import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError

from experiments.entry import run_command
from experiments.evaluate import EvaluatedPrecision
from lowprec.config.check import ConfigError
from lowprec.config.schema import key
from lowprec.nearest import nearest_path
from lowprec.runs.attempts import step_of
from lowprec.runs.read import read_config
from lowprec.waiting import Waiting


@dataclass
class ExportConfig:
    """The source and the destination."""

    source: str = key("???", "a run, a checkpoint, an exported folder or file, or open_clip's .pt")
    out: str = key(
        "???", "a new folder (no suffix), .safetensors, or .pt as open_clip's trainer writes"
    )
    precision: EvaluatedPrecision = field(default_factory=EvaluatedPrecision)


def main(config: ExportConfig) -> None:
    """Reads and writes the weights; never executes code from a .pt file."""
    if config.precision.recipe == "as_trained" and config.precision.autocast is not None:
        raise ConfigError(["precision.autocast needs precision=int8_inference"])
    if hint := nearest_path(config.source):
        raise ConfigError([f"source={config.source} does not exist{hint}"])
    out = Path(config.out)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError([f"out={out} already exists; name another, or remove it first"])
    try:
        with closing(Waiting(f"exporting {config.source}")):
            export(Path(config.source), out, config.precision)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        sys.exit(f"source={config.source} cannot be exported: {str(error).splitlines()[0]}")


def export(source: Path, out: Path, precision: EvaluatedPrecision) -> None:
    """Writes the weights of a source: as a file, in int8 or, with a run's config, as a folder."""
    # a refused command loads no torch
    from lowprec.clip import TORCHVISION_FITS
    from lowprec.clip.export import (
        find_weights,
        load_weights,
        read_weights,
        write_folder,
        write_weights,
    )
    from lowprec.clip.model import build_model, model_config, set_precision
    from lowprec.nn.inference import save_int8, to_int8
    from lowprec.train.build import set_parameter_dtype

    if precision.recipe == "int8_inference":
        trained = read_config(source)
        trained.precision.autocast = precision.autocast or trained.precision.autocast
        model = build_model(trained.model, trained.intervention.name)
        set_parameter_dtype(model, trained.precision.autocast)
        load_weights(model, source)
        layers = set_precision(model, trained.precision)
        save_int8(to_int8(model, [layer.name for layer in layers]), out)
        print(f"{out}: {len(model.state_dict())} tensors")
        return
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
        print(f"{out}: {len(state)} tensors")
        return
    trained = read_config(run)
    sizes = model_config(trained.model, trained.intervention.name)
    write_folder(state, sizes, out, **facts)
    print(f"{out}: {len(state)} tensors")
    print("import open_clip" if TORCHVISION_FITS else "from lowprec.clip import open_clip")
    name = f"local-dir:{out}"
    print(f"model, _, preprocess = open_clip.create_model_and_transforms({name!r})")


if __name__ == "__main__":
    run_command(main, "export", ExportConfig)
