"""Reads a run directory: config, rows and status; decodes and encodes rows.

A run directory holds everything about a run; every dashboard is a copy of it.
`lowprec.runs.record` writes it, `lowprec.runs.tables` reads its tables. Nothing here loads torch.
"""

import contextlib
import io
import json
import math
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import yaml

from lowprec.config.check import ConfigError, RunError, check
from lowprec.config.schema import Config
from lowprec.nearest import nearest_path, runs_inside

STATES = ("running", "finished", "diverged", "preempted", "failed")
ENDED = ("finished", "diverged")  # states of a run that does not continue
STATUS = {"state": str, "step": int, "saved": int, "attempt": int, "reason": str}
METRICS = {"step": int, "loss": float}
TAIL_BYTES = 65536  # longer than any row
BAD_ARCHIVE = (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError)  # errors of a member
MAX_TEXT = 2**25  # bytes of a file of keys, or of a row; its values may take 20 times as many
MAX_DEPTH = 100  # of a config
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # which UTF-8 cannot encode, unless paired


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Reads plain data; 1e-6 is a number, as in YAML 1.2 and JSON.

    ValueError for an integer of more than 64 bits, as in rows, and for a key that is given twice.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:  # noqa: D102
        names = [key.value for key, _ in node.value]
        if len(set(names)) < len(names):
            raise ValueError(f"a key is given twice: {', '.join(names)[:200]}")
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
Loader.add_constructor("tag:yaml.org,2002:int", lambda l, node: _int64(l.construct_yaml_int(node)))


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


def _int64(digits: str | int) -> int:
    if abs(value := int(digits)) >= 2**63:
        raise ValueError(f"{digits!s:.40} has more than 64 bits")
    return value


DECODER = json.JSONDecoder(parse_int=_int64)


def decode_json(text: str) -> Any:
    """Decodes JSON; "?" replaces unpaired surrogates, as in the name of a latin-1 file."""

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {whole(name): whole(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [whole(inner) for inner in value]
        return value.encode(errors="replace").decode() if isinstance(value, str) else value

    value = DECODER.decode(text)
    return whole(value) if SURROGATE.search(text) else value


class RecordFileError(RunError, ValueError):
    """A file of a record cannot be used; the message names it and says why."""


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file of a record.

    Raises FileNotFoundError, or RecordFileError for a file that cannot be read or is no regular
    file: reading a pipe or a device may never end.
    """
    try:
        if isinstance(path, Path) and not stat.S_ISREG(path.stat().st_mode):  # not of a URL
            raise RecordFileError(f"{path} is not a regular file")
        with path.open("rb") as file, io.BufferedReader(file, 2**20) as buffered:
            yield buffered  # lines of a member of an archive are slow without
    except (FileNotFoundError, RecordFileError):
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args, str(path)) from error
    except OSError as error:
        raise RecordFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except BAD_ARCHIVE as error:
        raise RecordFileError(f"{path} cannot be read: {error}") from error


def read_file(path: Path) -> bytes:
    """The content of a file of a record of at most MAX_TEXT bytes; raises as `open_file`."""
    with open_file(path) as file:
        data = file.read(MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise RecordFileError(f"{path} has more than {MAX_TEXT:,} bytes")
    return data


def read_yaml(path: Path) -> Any:
    """The plain data in a YAML file of a record; raises FileNotFoundError or RecordFileError.

    Aliases, which can multiply without end, and what is nested so deep that parsing would overflow
    the stack count as damage, as does a file without data.
    """
    data, depth = read_file(path), 0
    try:
        for event in yaml.parse(data, Loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError(f"an alias, or nested deeper than {MAX_DEPTH}")
        if (plain := yaml.load(data, Loader)) is None:
            raise ValueError("it is empty")
        return plain
    except (yaml.YAMLError, ValueError, ArithmeticError, TypeError, AttributeError) as error:
        raise RecordFileError(f"{path} is damaged: {error}") from error


def scan_rows(path: Path, types: dict[str, type] | None = None) -> tuple[list[dict], str]:
    """The good rows of a .jsonl file, and a sentence about its damaged lines, "" without any.

    Keys in `types` must have a value of that type. A torn last line counts as neither. A missing
    file has no rows.
    """
    rows, fault, count, number, byte = [], "", 0, 0, 0
    try:
        with open_file(path) as file:
            while (line := file.readline(MAX_TEXT)).endswith(b"\n"):
                number += 1
                try:
                    rows.append(checked(decode_row(line.decode()), types or {}))
                except (ValueError, RecursionError) as error:
                    fault = fault or f"{path}, line {number} (byte {byte}) is damaged: {error}"
                    count += 1
                byte += len(line)
        if len(line) == MAX_TEXT:
            fault = fault or f"{path}, line {number + 1} (byte {byte}) has no end"
    except FileNotFoundError:
        pass
    except RecordFileError as error:
        fault = fault or str(error)
    return rows, fault + f", and {count - 1} more" * (count > 1)


def scan_metrics(run: Path) -> list[dict]:
    """The good rows of metrics.jsonl that have a step and a loss."""
    rows = scan_rows(run / "metrics.jsonl", METRICS)[0]
    return [row for row in rows if METRICS.keys() <= row.keys()]


def read_rows(path: Path) -> list[dict]:
    """The rows of a .jsonl file, as `scan_rows`; RecordFileError names the first damaged line."""
    rows, fault = scan_rows(path)
    if fault:
        raise RecordFileError(fault)
    return rows


def read_last_row(path: Path) -> dict:
    """The last whole row of metrics.jsonl, read from its end; {} if there is none.

    Raises FileNotFoundError, or RecordFileError if the row is damaged.
    """
    with open_file(path) as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    try:
        return checked(decode_row(lines[-1].decode()), METRICS) if lines else {}
    except (ValueError, RecursionError) as error:
        raise RecordFileError(f"{path}: the last line is damaged: {error}") from error


def read_status(run: Path, default: dict | None = None) -> dict:
    """Reads status.json: `{"state": ..., "step": ..., "reason": ..., ...}`.

    Keys of `default` fill in missing ones, and replace a file that is missing or damaged. Without a
    default, such a file raises FileNotFoundError or RecordFileError.
    """
    path = run / "status.json"
    try:
        data = read_file(path)
        try:
            return (default or {}) | checked(decode_json(data.decode()), STATUS)
        except (ValueError, RecursionError) as error:
            raise RecordFileError(f"{path} is damaged: {error}") from error
    except (FileNotFoundError, RecordFileError):
        if default is None:
            raise
        return dict(default)


def read_config(run: Path) -> Config:
    """Reads the config of a run directory; ConfigError if it is missing, damaged or invalid."""
    try:
        return check(read_yaml(run / "config.yaml"), is_record=True)
    except FileNotFoundError:
        why = "not a run directory (it has no config.yaml)" if run.exists() else "does not exist"
        near = nearest_path(run) + runs_inside(run) if isinstance(run, Path) else ""  # not of a URL
        raise ConfigError([f"run={run}: {why}{near}"]) from None
    except RecordFileError as error:
        raise ConfigError([f"run={run}: {error}"]) from error


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
    """Whether a path is a backup (`.bak`, `~`) or hidden."""
    return any(part.startswith(".") or part.endswith((".bak", "~")) for part in parts)
