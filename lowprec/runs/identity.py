"""What makes two runs the same run, where a run lives, and how its record is read.

A run directory holds everything there is to know of a run; every dashboard is a copy. The writer
is `lowprec.runs.record`. Torch-free, so that a sweep or a figure can look at runs without loading it.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from lowprec.config.check import public_name
from lowprec.config.schema import Config

TABLES = ("tensors", "details", "blocks")  # statistics of tensors, more of them, of blocks
STATES = ("running", "finished", "diverged", "preempted", "failed")


def to_dict(config: Any) -> dict:
    """A config (or one of its groups) as nested plain data, under its public names."""

    def rename(node: Any) -> Any:
        if isinstance(node, dict):
            return {public_name(name): rename(value) for name, value in node.items()}
        return node

    return rename(asdict(config))


def identity(config: Any) -> dict:
    """The part of a config that makes two runs the same run, as nested plain data.

    `num_steps` is left out under `schedule=constant`, whose longer run only continues a shorter;
    `save_every` is part of it under `data=stream`, which is seeded anew at each checkpoint.
    """
    chosen = {}
    for f in fields(config):
        if f.metadata.get("identity", True):
            value = getattr(config, f.name)
            chosen[public_name(f.name)] = identity(value) if is_dataclass(value) else value
    if isinstance(config, Config) and config.schedule.name == "constant":
        del chosen["num_steps"]
    if isinstance(config, Config) and config.data.name == "stream":
        chosen["save_every"] = config.save_every
    return chosen


def digest(config: Config, sources: dict[str, str]) -> str:
    """Ten hexadecimal digits that name a run: of its identity and of what its paths hold.

    `sources` maps a role ("data", "init_from") to the digest of the bytes behind its path.
    """
    text = json.dumps({"config": identity(config), "sources": sources}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def precision_label(config: Config) -> str:
    """The recipe's name, or under recipe `high` the autocast dtype's."""
    recipe = config.precision.recipe
    return config.precision.autocast if recipe == "high" else recipe


def label(config: Config) -> str:
    """`<model>-<precision>-<optimizer>-s<seed>`."""
    parts = (config.model.name, precision_label(config), config.optimizer.name)
    return "-".join(parts) + f"-s{config.seed}"


def directory(config: Config, sources: dict[str, str]) -> Path:
    """`<run_dir>/<experiment or name>/<label>-<digest>`: the same command finds the same run."""
    study = config.experiment or config.name
    return Path(config.run_dir) / study / f"{label(config)}-{digest(config, sources)}"


def encode_row(row: dict) -> str:
    """One line of strict JSON; a non-finite number becomes the string "nan", "inf", "-inf"."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(inner) for inner in value]
        if isinstance(value, (float, np.floating)):
            return float(value) if math.isfinite(value) else str(float(value))
        return value

    return json.dumps(plain(row), allow_nan=False) + "\n"


def decode_row(line: str) -> dict:
    """The inverse of `encode_row` for the values of a flat row."""
    special = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return {
        name: special.get(value, value) if isinstance(value, str) else value
        for name, value in json.loads(line).items()
    }


def read_rows(path: Path) -> list[dict]:
    """Rows of a .jsonl file. A torn last line (a killed writer) is left out; no file: no rows.

    A damaged line elsewhere raises ValueError with file and line number.
    """
    rows, faults = scan_rows(path)
    if faults:
        raise ValueError(faults[0])
    return rows


def scan_rows(path: Path) -> tuple[list[dict], list[str]]:
    """The good rows of a .jsonl file, and a sentence with line and byte for each damaged line.

    A torn last line is neither; no file: no rows.
    """
    rows, faults, byte = [], [], 0
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(decode_row(line.decode()))
        except (ValueError, AttributeError, RecursionError) as error:  # no JSON, or no map
            faults.append(f"{path}, line {number} (byte {byte}) is damaged: {error}")
        byte += len(line) + 1
    return rows, faults


def read_status(run: Path) -> dict:
    """`{"state": ..., "step": ..., "reason": ...}` of a run directory."""
    return json.loads((run / "status.json").read_text())


def find_runs(root: Path) -> list[Path]:
    """Run directories at or below `root`, sorted: folders that hold config.yaml and status.json."""
    root = Path(root)
    found = {path.parent for path in root.glob("**/status.json")}
    return sorted(path for path in found if (path / "config.yaml").exists())


def read_tensors(
    run: Path, table: str = "tensors"
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray], list[str]]]:
    """One of TABLES: one (steps, {statistic: [steps, names]}, names) a flush.

    Reads the streams of all attempts in order. The unfinished end of a stream whose writer was
    killed is left out.
    """
    for path in sorted((run / table).glob("*.arrows")):
        with pa.memory_map(str(path)) as source:
            try:
                stream = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:  # killed before the schema was complete
                continue
            names = json.loads(stream.schema.metadata[b"tensors"])
            while True:
                try:
                    batch = stream.read_next_batch()
                except (StopIteration, pa.ArrowInvalid, OSError):
                    break
                columns = {
                    name: batch.column(name).flatten().to_numpy().reshape(-1, len(names)).copy()
                    for name in batch.schema.names[1:]
                }
                yield batch.column("step").to_numpy().copy(), columns, names
