"""Reads tables of statistics: the Arrow streams of a run's attempts, and its parquet files.

Types and the number of values are checked before values are read, so that damaged data cannot crash
the process or fill the memory.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from lowprec.config.schema import is_sampled
from lowprec.runs.read import BAD_ARCHIVE, RecordFileError, decode_json, open_file, scan_metrics

TABLES = ("tensors", "details", "blocks")  # statistics per tensor, further ones, per block
ROOM, UNPACKED = 2**27, 20  # a table may take ROOM bytes and UNPACKED times those of its file
MAX_BYTES = 2**30  # of a table in an archive
UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError)
UNREADABLE += (MemoryError, RecursionError, *BAD_ARCHIVE)


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
        if path.stem.isdecimal():  # a stream of an attempt
            with contextlib.suppress(*UNREADABLE):
                yield from _read_stream(path)


def _read_stream(path: Path) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray], list[str]]]:
    with _open(path) as source:
        messages = pa.ipc.MessageReader.open_stream(source)
        schema = pa.ipc.read_schema(messages.read_next_message())
        names = decode_json(schema.metadata[b"tensors"].decode())
        if len(set(names)) < len(names):
            raise ValueError("a tensor has the name of another")
        _refuse_columns(schema, pa.list_(pa.float32(), len(names)).equals)
        for message in messages:
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)  # damaged offsets would crash the process
            columns = {
                name: batch.column(name).flatten().to_numpy().reshape(-1, len(names)).copy()
                for name in schema.names[1:]
            }
            yield batch.column("step").to_numpy().copy(), columns, names


def read_parquet(path: Path, select: Callable[[str], bool]) -> tuple[pa.Table, list[str]]:
    """`step` and the selected columns of a parquet file, and the names of all others than `step`.

    Raises FileNotFoundError or one of UNREADABLE.
    """
    with _open(path) as source, pa.parquet.ParquetFile(source, pre_buffer=True) as file:
        schema, footer, most = file.schema_arrow, file.metadata, ROOM + UNPACKED * source.size()
        _refuse_columns(schema, pa.types.is_floating)
        numbers = [n for n, name in enumerate(schema.names) if name == "step" or select(name)]
        unpacked = 8 * footer.num_rows * len(numbers)
        if unpacked > most:
            raise ValueError(f"{path} has {source.size():,} bytes, which unpack to {unpacked:,}")
        table = file.read(columns=[schema.names[n] for n in numbers], use_threads=False)
    return table, [name for name in schema.names if name != "step"]


@contextlib.contextmanager
def _open(path: Path) -> Iterator[pa.NativeFile]:
    """Opens a file for pyarrow; not mapped, since it may be cut while it is read.

    Of a file behind a URL, only what pyarrow asks for is fetched. A member of an archive, which
    cannot be read backwards, is unpacked whole.
    """
    with open_file(path) as file:
        if isinstance(path, Path):
            source = pa.OSFile(str(path))
        elif path.protocol == "zip":
            data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise RecordFileError(f"{path} has more than {MAX_BYTES:,} bytes")
            source = pa.BufferReader(data)
        else:
            source = pa.PythonFile(file, "r")
        with source:
            yield source


def _refuse_columns(schema: pa.Schema, is_number: Callable[[pa.DataType], bool]) -> None:
    """Raises ValueError unless `step` is a whole number and all other columns are numbers."""
    kinds = dict(zip(schema.names, schema.types, strict=True))
    if len(kinds) < len(schema):
        raise ValueError("a column has the name of another")
    if not pa.types.is_int64(kinds.pop("step")):
        raise ValueError("step is not a whole number")
    for name, kind in kinds.items():
        if not is_number(kind):
            raise ValueError(f"{name} is {kind}, not a number")
