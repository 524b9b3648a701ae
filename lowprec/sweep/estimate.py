"""What a sweep will cost: hours from measured step times, disk from the size of checkpoints."""

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from lowprec.config.check import ConfigError, check
from lowprec.runs.identity import precision_label
from lowprec.runs.read import find_runs, read_rows
from lowprec.sweep.manifest import Cell

RECORDS = Path(__file__).parents[2] / "experiments" / "results"
BYTES_A_PARAMETER = 12  # a weight and two moments, float32


@dataclass
class Measured:
    """The step time of a run that has ended."""

    model: str
    precision: str
    optimizer: str
    batch_size: int
    processes: int
    step_ms: float
    device: str
    run: Path


def print_estimate(cells: list[Cell], processes: int = 1) -> None:
    """Prints every cell and what all take with so many processes each, a GPU a process.

    "unknown" where no run of the same model and number of processes was measured.
    """
    configs = [check(cell.config) for cell in cells]
    known = measured([Path(configs[0].run_dir), RECORDS])
    hours, unknown, sources, assumed = Counter(), Counter(), {}, {}
    for cell, config in zip(cells, configs, strict=True):
        found = nearest_measured(config, known, processes)
        what = f"model={config.model.name} on {processes} process{'es' * (processes > 1)}"
        shown = f"unknown: no finished run of {what} was found"
        if found is None:
            unknown[what] += 1
        else:
            ms = found.step_ms * config.batch_size / found.batch_size
            spent = ms * config.num_steps / 3.6e6
            hours[found.device] += spent * processes
            sources[str(found.run)] = None
            assumed |= dict.fromkeys(_differences(config, found))
            shown = f"{spent:.2f} h ({ms:.1f} ms a step)"
        print(f"{cell.run}: {config.num_steps} steps, {shown}")
    print(f"{len(cells)} cells")
    for device, spent in hours.items():
        kind = "CPU-hours" if device == "CPU" else f"GPU-hours on {device}"
        print(f"time: {spent:.2f} {kind}, of training steps alone, by {', '.join(sources)}")
    if hours:
        each = f"{processes} processes a cell" if processes > 1 else "one process a cell"
        print(", ".join([f"assumed: {each}", "a step time in proportion to batch_size", *assumed]))
    for what, count in unknown.items():
        print(f"time: unknown for {count} cells of {what}")
    sizes = [disk_bytes(config) for config in configs]
    free = shutil.disk_usage(_existing(Path(configs[0].run_dir))).free
    total = sum(size for size in sizes if size)
    more = f" and unknown for {sizes.count(None)} cells" if None in sizes else ""
    print(f"disk: {total / 1e9:.2f} GB of checkpoints{more}; {free / 1e9:.2f} GB are free")


def measured(roots: list[Path]) -> list[Measured]:
    """The median step time of every finished run below these folders, the first flush left out."""
    found = []
    for run in (run for root in roots for run in find_runs(root)):
        try:
            status = json.loads((run / "status.json").read_text())
            times = [row["step_ms"] for row in read_rows(run / "timing.jsonl")][1:]
            if status["state"] != "finished" or not times:
                continue
            config = check(OmegaConf.to_container(OmegaConf.load(run / "config.yaml")))
            facts = json.loads((run / "environment.json").read_text())
            (processes,) = _processes(run, config)
        except (OSError, ValueError, KeyError, ConfigError):
            continue
        ms, device = float(np.median(times)), facts.get("gpu") or "CPU"
        what = (config.model.name, precision_label(config), config.optimizer.name)
        found.append(Measured(*what, config.batch_size, processes, ms, device, run))
    return found


def _differences(config: object, found: Measured) -> list[str]:
    """What a measured run had otherwise than the cell whose time it gives."""
    pairs = (
        ("in", found.precision, precision_label(config)),
        ("with", found.optimizer, config.optimizer.name),
    )
    return [f"measured {word} {its} for {own}" for word, its, own in pairs if its != own]


def _processes(run: Path, config: object) -> set[int | None]:
    """How many processes the attempts of a run had; records that do not say it may be of one."""
    unsaid = 1 if config.distributed.name == "none" else None
    return {row.get("processes", unsaid) for row in read_rows(run / "attempts.jsonl")}


def nearest_measured(config: object, known: list[Measured], processes: int) -> Measured | None:
    """A run of the same model and number of processes, if there is one.

    Of several one of the same precision, then of the nearest batch size, then of its optimizer.
    """
    same = [i for i in known if (i.model, i.processes) == (config.model.name, processes)]
    if config.device != "auto":
        same = [item for item in same if (item.device == "CPU") == (config.device == "cpu")]
    return min(
        same,
        key=lambda item: (
            item.precision != precision_label(config),
            abs(np.log(item.batch_size / config.batch_size)),
            item.optimizer != config.optimizer.name,
        ),
        default=None,
    )


def disk_bytes(config: object) -> int | None:
    """Bytes of the checkpoints that are kept and of the one being written; None if not known."""
    m = config.model
    if m.vision_width is None or m.text_width is None:
        return None
    towers = 12 * (m.vision_width**2 * m.vision_layers + m.text_width**2 * m.text_layers)
    patches = 3 * m.patch_size**2 * m.vision_width + m.vocab_size * m.text_width
    return (towers + patches) * BYTES_A_PARAMETER * (config.keep_checkpoints + 1)


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
