"""Converts weights between runs and open_clip, with unchanged tensor names.

    python -m experiments.export source=runs/run/nano-bf16-adamw-s0-0123456789 out=exported/nano
    python -m experiments.export source=open_clip_model.pt out=weights.safetensors

The first command writes a folder with the model's config and weights, which open_clip loads as it
is, and prints the lines that load it. With model.init_from=exported/nano, a run starts from such a
folder or file.
"""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from experiments.entry import run_command
from lowprec.config.check import ConfigError, RunError
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


def main(config: ExportConfig) -> None:
    """Reads and writes the weights; never executes code from a .pt file."""
    if hint := nearest_path(config.source):
        raise ConfigError([f"source={config.source} does not exist{hint}"])
    out = Path(config.out)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError([f"out={out} already exists; name another, or remove it first"])
    try:
        with closing(Waiting(f"exporting {config.source}")):
            export(Path(config.source), out)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        why = str(error).splitlines()[0]
        raise RunError(f"source={config.source} cannot be exported: {why}") from error


def export(source: Path, out: Path) -> None:
    """Writes the weights of a source: as a file or, with a run's config, as a folder."""
    # a refused command loads no torch
    from lowprec.clip import TORCHVISION_FITS
    from lowprec.clip.export import find_weights, read_weights, write_folder, write_weights
    from lowprec.clip.model import model_config

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
