"""Reads and encodes the files of a run directory: config, rows, status, tables of statistics.

A run directory holds everything about a run; every dashboard is a copy of it.
`lowprec.runs.record` writes it. Nothing here loads torch.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lowprec.config.check import ConfigError, check
from lowprec.config.schema import Config

TABLES = ("tensors", "details", "blocks")  # statistics per tensor, further ones, per block
STATES = ("running", "finished", "diverged", "preempted", "failed")
ENDED = ("finished", "diverged")  # states of a run that does not continue
TAIL_BYTES = 65536  # longer than any row


def encode_row(row: dict) -> str:
    """Encodes a row as one line of strict JSON; non-finite numbers become "nan", "inf", "-inf"."""

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
    """Decodes a line of `encode_row`; non-finite numbers are restored at the top level only."""
    special = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return {
        name: special.get(value, value) if isinstance(value, str) else value
        for name, value in json.loads(line).items()
    }


def read_rows(path: Path) -> list[dict]:
    """Reads the rows of a .jsonl file; ValueError names the first damaged line.

    A torn last line (its writer was killed) is left out. A missing file has no rows.
    """
    rows, faults = scan_rows(path)
    if faults:
        raise ValueError(faults[0])
    return rows


def scan_rows(path: Path) -> tuple[list[dict], list[str]]:
    """Reads the good rows of a .jsonl file, and a sentence about each damaged line.

    A torn last line counts as neither. A missing file has no rows.
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


def read_last_row(path: Path) -> dict:
    """Reads the last whole row from the end of a .jsonl file; {} if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return decode_row(lines[-1].decode()) if lines else {}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def read_status(run: Path, default: dict | None = None) -> dict:
    """Reads status.json: `{"state": ..., "step": ..., "reason": ..., ...}`.

    Keys of `default` fill in missing ones, and replace a file that is missing or damaged. Without a
    default, such a file raises OSError or ValueError.
    """
    try:
        return (default or {}) | json.loads((run / "status.json").read_text())
    except (OSError, ValueError, TypeError, RecursionError):
        if default is None:
            raise
        return dict(default)


def read_config(run: Path) -> Config:
    """Reads the config of a run directory; ConfigError if it is missing, damaged or invalid."""
    path = run / "config.yaml"
    if not path.exists():
        raise ConfigError([f"run={run}: not a run directory (it has no config.yaml)"])
    try:
        raw = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OSError, OmegaConfBaseException) as error:
        raise ConfigError([f"run={run}: config.yaml is damaged"]) from error
    return check(raw)


def find_runs(root: Path | str) -> list[Path]:
    """Finds the run directories at or below `root`: folders with config.yaml and status.json.

    `root` is a path, or a `UPath` for a URL. The result is sorted.
    """
    root = Path(root) if isinstance(root, str) else root
    folders = {path.parent for path in root.glob("**/status.json")}
    return sorted(path for path in folders if (path / "config.yaml").exists())


def read_tensors(
    run: Path, table: str = "tensors"
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray], list[str]]]:
    """Yields `(steps, {statistic: [steps, names]}, names)` for each flush of one of TABLES.

    The streams of all attempts are read in order. An incomplete end (its writer was killed) is
    left out.
    """
    for path in sorted((run / table).glob("*.arrows")):
        is_local = isinstance(path, Path)
        source = pa.memory_map(str(path)) if is_local else pa.BufferReader(path.read_bytes())
        with source:
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
