"""Weights between runs and open_clip: safetensors or .pt, tensor names unchanged.

    python -m experiments.export source=runs/run/nano-bf16-adamw-s0-0123456789 out=nano.safetensors
    python -m experiments.export source=open_clip_model.pt out=weights.safetensors

A run starts from such a file with model.init_from=FILE.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

from experiments import cli
from lowprec.config import key


@dataclass
class ExportConfig:
    """From where, to where."""

    source: str = key("???", "a run directory, a checkpoint, a .safetensors or an open_clip .pt")
    out: str = key("???", "a .safetensors file, or a .pt in the layout of open_clip's trainer")


def main(config: ExportConfig) -> None:
    """Reads weights only, writes them."""
    from safetensors import SafetensorError

    from lowprec.clip.export import read_weights, write_weights

    try:
        state = read_weights(Path(config.source))
        write_weights(state, Path(config.out))
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        sys.exit(f"source={config.source} cannot be exported: {str(error).splitlines()[0]}")
    size = sum(tensor.numel() for tensor in state.values())
    print(f"{config.out}: {len(state)} tensors, {size / 1e6:.2f} M numbers")


if __name__ == "__main__":
    cli.main(main, "export", ExportConfig)
