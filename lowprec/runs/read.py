"""Reads and encodes the files of a run directory: config, rows, status, tables of statistics.

A run directory holds everything about a run; every dashboard is a copy of it.
`lowprec.runs.record` writes it. Nothing here loads torch.
"""

import contextlib
import json
import math
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lowprec.config.check import ConfigError, RunError, check
from lowprec.config.schema import Config
from lowprec.nearest import nearest_path, runs_inside

TABLES = ("tensors", "details", "blocks")  # statistics per tensor, further ones, per block
STATES = ("running", "finished", "diverged", "preempted", "failed")
ENDED = ("finished", "diverged")  # states of a run that does not continue
STATUS = {"state": str, "step": int, "saved": int, "attempt": int, "reason": str}
METRICS = {"step": int, "loss": float}
TAIL_BYTES = 65536  # longer than any row
BAD_ARCHIVE = (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError)  # errors of a member
MAX_BYTES = 2**30  # a file of rows takes about 300 bytes a step
ROOM = 2**27  # bytes that a table may take beyond UNPACKED times those of its file
UNPACKED = 20
UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError)
UNREADABLE += (MemoryError, RecursionError, struct.error, *BAD_ARCHIVE)
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # perhaps half a character, which no file can hold


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
    """Decodes a line of `encode_row`; non-finite numbers are restored at the top level only.

    ValueError for a line that is no map, and for an integer of more than 64 bits, which no table
    can hold.
    """
    special = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return {
        name: special.get(value, value) if isinstance(value, str) else value
        for name, value in checked(decode_json(line), {}).items()
    }


def _int64(digits: str) -> int:
    if abs(value := int(digits)) >= 2**63:
        raise ValueError(f"{digits[:40]} has more than 64 bits")
    return value


DECODER = json.JSONDecoder(parse_int=_int64)


def decode_json(text: str) -> Any:
    """Decodes JSON; "?" replaces halves of characters, as in the name of a latin-1 file."""

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {whole(name): whole(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [whole(inner) for inner in value]
        return value.encode(errors="replace").decode() if isinstance(value, str) else value

    value = DECODER.decode(text)
    return whole(value) if HALF.search(text) else value


class RecordFileError(RunError, ValueError):
    """A file of a record cannot be used; the message names it and says why."""


def read_file(path: Path) -> bytes:
    """The content of a file of a record.

    Raises FileNotFoundError, or RecordFileError for a file that cannot be read, is larger than
    MAX_BYTES or is no regular file: reading a pipe or a device may never end.
    """
    try:
        facts = path.stat() if isinstance(path, Path) else None  # not of a URL
        if facts and not stat.S_ISREG(facts.st_mode):
            raise RecordFileError(f"{path} is not a regular file")
        if facts and facts.st_size > MAX_BYTES:
            raise RecordFileError(f"{path} has {facts.st_size:,} bytes, more than {MAX_BYTES:,}")
        return path.read_bytes()
    except (FileNotFoundError, RecordFileError):
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args, str(path)) from error
    except OSError as error:
        raise RecordFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except BAD_ARCHIVE as error:
        raise RecordFileError(f"{path} cannot be read: {error}") from error


def read_map(path: Path, types: dict[str, type] | None = None) -> dict:
    """The JSON object in a file of a record; keys in `types` must have a value of that type.

    Raises FileNotFoundError or RecordFileError.
    """
    try:
        return checked(decode_json(read_file(path).decode()), types or {})
    except RecordFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise RecordFileError(f"{path} is damaged: {error}") from error


def scan_rows(path: Path, types: dict[str, type] | None = None) -> tuple[list[dict], list[str]]:
    """The good rows of a .jsonl file, and a sentence about each damaged line.

    Keys in `types` must have a value of that type. A torn last line counts as neither. A missing
    file has no rows.
    """
    rows, faults, byte = [], [], 0
    try:
        lines = read_file(path).split(b"\n")
    except FileNotFoundError:
        return [], []
    except RecordFileError as error:
        return [], [str(error)]
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(checked(decode_row(line.decode()), types or {}))
        except (ValueError, RecursionError) as error:
            faults.append(f"{path}, line {number} (byte {byte}) is damaged: {error}")
        byte += len(line) + 1
    return rows, faults


def scan_metrics(run: Path) -> list[dict]:
    """The good rows of metrics.jsonl that have a step and a loss."""
    rows = scan_rows(run / "metrics.jsonl", METRICS)[0]
    return [row for row in rows if METRICS.keys() <= row.keys()]


def read_rows(path: Path) -> list[dict]:
    """The rows of a .jsonl file, as `scan_rows`; RecordFileError names the first damaged line."""
    rows, faults = scan_rows(path)
    if faults:
        raise RecordFileError(faults[0])
    return rows


def read_last_row(path: Path) -> dict:
    """The last whole row of metrics.jsonl, read from its end; {} if there is none.

    Raises FileNotFoundError, or RecordFileError if the row is damaged.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is not a regular file")
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return checked(decode_row(lines[-1].decode()), METRICS) if lines else {}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise RecordFileError(f"{path}: the last line is damaged: {error}") from error


def read_status(run: Path, default: dict | None = None) -> dict:
    """Reads status.json: `{"state": ..., "step": ..., "reason": ..., ...}`.

    Keys of `default` fill in missing ones, and replace a file that is missing or damaged. Without a
    default, such a file raises FileNotFoundError or RecordFileError.
    """
    try:
        return (default or {}) | read_map(run / "status.json", STATUS)
    except (FileNotFoundError, RecordFileError):
        if default is None:
            raise
        return dict(default)


def read_config(run: Path) -> Config:
    """Reads the config of a run directory; ConfigError if it is missing, damaged or invalid."""
    try:
        raw = OmegaConf.create(read_file(run / "config.yaml").decode())
        return check(OmegaConf.to_container(raw))
    except FileNotFoundError:
        why = "not a run directory (it has no config.yaml)" if run.exists() else "does not exist"
        near = nearest_path(run) + runs_inside(run) if isinstance(run, Path) else ""  # not of a URL
        raise ConfigError([f"run={run}: {why}{near}"]) from None
    except RecordFileError as error:
        raise ConfigError([f"run={run}: {error}"]) from error
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError([f"run={run}: config.yaml is damaged"]) from error


def checked(row: Any, types: dict[str, type]) -> dict:
    """A row; ValueError if it is no map or a key has a value of another type."""
    if not isinstance(row, dict):
        raise ValueError(f"a map is expected, not {str(row)[:40]!r}")
    for name in types.keys() & row.keys():
        if type(row[name]) not in ((int, float) if types[name] is float else (types[name],)):
            value = str(row[name])[:40]
            raise ValueError(f"{name}={value!r}: {types[name].__name__} is expected")
    return row


def find_runs(root: Path | str) -> list[Path]:
    """The run directories at or below `root`: folders with config.yaml and status.json, sorted.

    `root` is a path, or a `UPath` for a URL. Hidden folders and those named `*.bak` are left out.
    """
    root = Path(root) if isinstance(root, str) else root
    folders = {path.parent for path in root.glob("**/status.jso[n]")}  # a pattern: links too
    return sorted(
        path
        for path in folders
        if _is_there(path / "config.yaml") and not is_copy(path.parts[len(root.parts) :])
    )


def _is_there(path: Path) -> bool:
    """Whether a file exists, or a link that leads nowhere."""
    return os.path.lexists(path) if isinstance(path, Path) else path.exists()


def is_copy(parts: tuple[str, ...]) -> bool:
    """Whether a path is somebody's copy (`.bak`, `~`) or hidden."""
    return any(part.startswith(".") or part.endswith((".bak", "~")) for part in parts)


def is_sampled(step: int, interval: int | None) -> bool:
    """Whether a table is recorded at a step: the first, then every so many; None: never."""
    return interval is not None and (step == 1 or step % interval == 0)


def missing_steps(run: Path, last: int, intervals: dict[str, int | None]) -> list[str]:
    """A sentence about each table of a record that lacks steps up to `last`.

    `intervals`: the interval of each table, 1 for "metrics"; see `is_sampled`.
    """
    faults = []
    for name, interval in intervals.items():
        if name == "metrics":
            name = "metrics.jsonl"
            present = {row["step"] for row in scan_metrics(run)}
        else:
            present = {step for steps, _, _ in read_tensors(run, name) for step in steps.tolist()}
        expected = [step for step in range(1, last + 1) if is_sampled(step, interval)]
        if missing := [step for step in expected if step not in present]:
            share = f"{len(missing)} of {len(expected)} steps, the first is {missing[0]}"
            faults.append(f"{run / name} lacks {share}")
    return faults


def read_tensors(
    run: Path, table: str = "tensors"
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray], list[str]]]:
    """Yields `(steps, {statistic: [steps, names]}, names)` for each flush of one of TABLES.

    The streams of all attempts are read in order. An incomplete end (its writer was killed) is
    left out.
    """
    for path in sorted((run / table).glob("*.arrows")):
        if path.stem.isdecimal() and path.is_file():  # a stream of an attempt
            with contextlib.suppress(*UNREADABLE):
                yield from _read_stream(path)


def _read_stream(path: Path) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray], list[str]]]:
    is_local = isinstance(path, Path)  # not mapped: the file may be cut while it is read
    with pa.OSFile(str(path)) if is_local else pa.BufferReader(path.read_bytes()) as source:
        messages = pa.ipc.MessageReader.open_stream(source)
        schema = pa.ipc.read_schema(messages.read_next_message())
        names = decode_json(schema.metadata[b"tensors"].decode())
        if len(set(names)) < len(names):
            raise ValueError("a tensor has the name of another")
        refuse_columns(schema, pa.list_(pa.float32(), len(names)).equals)
        for message in messages:
            if _is_compressed(message.metadata):
                raise ValueError("its size after decompression is unknown")
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)  # damaged offsets would crash the process
            if batch.nbytes > message.body.size:
                raise ValueError("its columns share their values")
            columns = {
                name: batch.column(name).flatten().to_numpy().reshape(-1, len(names)).copy()
                for name in schema.names[1:]
            }
            yield batch.column("step").to_numpy().copy(), columns, names


def refuse_columns(schema: pa.Schema, is_number: Callable[[pa.DataType], bool]) -> None:
    """Raises ValueError unless `step` is a whole number and all other columns are numbers."""
    kinds = dict(zip(schema.names, schema.types, strict=True))
    if len(kinds) < len(schema):
        raise ValueError("a column has the name of another")
    if not pa.types.is_int64(kinds.pop("step")):
        raise ValueError("step is not a whole number")
    for name, kind in kinds.items():
        if not is_number(kind):
            raise ValueError(f"{name} is {kind}, not a number")


def _is_compressed(message: pa.Buffer) -> bool:
    """Whether an Arrow message has a codec: field 3 of its header, field 2 of the flatbuffer."""

    def place_of(table: int, field: int) -> int:
        fields = table - struct.unpack_from("<i", message, table)[0]
        at = 4 + 2 * field
        if at >= struct.unpack_from("<H", message, fields)[0]:
            return 0
        offset = struct.unpack_from("<H", message, fields + at)[0]
        return table + offset if offset else 0

    header = place_of(struct.unpack_from("<I", message)[0], 2)
    return bool(place_of(header + struct.unpack_from("<I", message, header)[0], 3))
