"""Reads tables of statistics: the Arrow streams of a run's attempts, and its parquet files.

The files may come from someone else: types and sizes are checked before values are read, so that
damaged data cannot crash the process and a small file cannot unpack to a large table.
"""

import contextlib
import io
import struct
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
UNREADABLE += (MemoryError, RecursionError, struct.error, *BAD_ARCHIVE)


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


def read_parquet(path: Path, select: Callable[[str], bool]) -> tuple[pa.Table, list[str]]:
    """`step` and the selected columns of a parquet file, and the names of all others than `step`.

    Raises FileNotFoundError or one of UNREADABLE.
    """
    with _open(path) as source, pa.parquet.ParquetFile(source, pre_buffer=True) as file:
        schema, footer, most = file.schema_arrow, file.metadata, ROOM + UNPACKED * source.size()
        _refuse_columns(schema, pa.types.is_floating)
        numbers = [n for n, name in enumerate(schema.names) if name == "step" or select(name)]
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        pages = [_largest_page(source, group.column(n)) for group in groups for n in numbers]
        unpacked = max([8 * footer.num_rows * len(numbers), *pages])
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


def _largest_page(source: pa.NativeFile, chunk: pa.parquet.ColumnChunkMetaData) -> int:
    """Bytes of the largest page of a column's chunk after decompression, as page headers say.

    The footer's sizes are of the whole chunk, and pyarrow does not compare them with the pages'.
    """
    start, largest = chunk.data_page_offset, 0
    if chunk.has_dictionary_page:
        start = min(start, chunk.dictionary_page_offset)
    size = min(chunk.total_compressed_size, source.size() - start)
    data = io.BytesIO(source.read_at(size, start))
    while data.tell() < size:
        header = _read_struct(data)
        unpacked, packed = header[2], header[3]
        if packed < 0:
            raise ValueError(f"a page of {packed} bytes")
        largest = max(largest, unpacked)
        data.seek(packed, io.SEEK_CUR)
    return largest


def _read_struct(data: io.BytesIO) -> dict[int, object]:
    """The fields of a page's header by number, in Thrift's compact protocol; none is a list."""
    fields: dict[int, object] = {}
    number = 0
    while head := data.read(1)[0]:
        number = number + (head >> 4) if head >> 4 else _read_integer(data)
        kind = head & 15
        if kind in (1, 2):  # true and false
            fields[number] = kind == 1
        elif kind in (4, 5, 6):
            fields[number] = _read_integer(data)
        elif kind == 8:  # its length has no sign
            fields[number] = data.read(_read_varint(data))
        elif kind == 12:
            fields[number] = _read_struct(data)
        else:
            raise ValueError(f"a field of kind {kind}")
    return fields


def _read_integer(data: io.BytesIO) -> int:
    value = _read_varint(data)
    return value >> 1 ^ -(value & 1)


def _read_varint(data: io.BytesIO) -> int:
    value, shift = 0, 0
    while (byte := data.read(1)[0]) >= 128:
        value += (byte - 128) << shift
        shift += 7
    return value + (byte << shift)
