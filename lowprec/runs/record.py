"""Writes a run directory: rows with one write each, tensors as an Arrow stream.

A killed process loses nothing that it has appended: rows are not buffered, and a stream is readable
without its end. A checkpoint stores `offsets()`; a resume cuts every file back to them and moves
the tails to `cut/`, so that no step is recorded twice.
"""

import contextlib
import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from lowprec.config.check import RunError
from lowprec.runs import durable
from lowprec.runs.read import encode_row, read_status
from lowprec.runs.tables import TABLES, read_tensors

STATUS_S = 10  # how long a thread waits for another to write status.json
ROW_FILES = ("metrics.jsonl", "timing.jsonl", "events.jsonl", "skips.jsonl")


class RunBusyError(RunError):
    """Another process has this run open for writing."""


class RecordError(RunError):
    """The record lacks rows, or is another process's; the message names the files."""


class Record:
    """The record of one run, open for writing.

    Raises RunBusyError, which names the process that already has it open. `attempt` counts the
    starts of the run, from 0.
    """

    def __init__(self, run: Path):
        self.run = Path(run)
        self.run.mkdir(parents=True, exist_ok=True)
        self._status = threading.Lock()
        if (path := self.run / ".lock").exists() and not path.is_file():
            raise RecordError(f"{path} is not a regular file")
        self._lock = open(path, "a+")  # noqa: SIM115 (until close)
        try:  # longer than a look at it
            is_ours = durable.try_lock(self._lock.fileno(), path, patience_s=0.2)
        except RunError:
            self._lock.close()
            raise
        if not is_ours:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            self._lock.close()
            raise RunBusyError(f"{self.run} is being written by {holder}")
        os.register_at_fork(after_in_child=self._lock.close)  # a worker must not hold the lock
        _drop_torn_end(self.run / "attempts.jsonl")
        self.attempt = max([self.count("attempts"), *self._next_numbers()])
        self._lock.truncate(0)
        job = os.environ.get("SLURM_JOB_ID")
        holder = f"process {os.getpid()} on {os.uname().nodename}" + f", job {job}" * bool(job)
        try:
            durable.append(self.run / ".lock", [f"{holder}, attempt {self.attempt}".encode()])
        except durable.DiskError:
            self._lock.close()
            raise
        self._streams: dict[str, _Stream] = {}

    def _next_numbers(self) -> Iterator[int]:
        """Numbers after those that file names show, in case attempts.jsonl has lost rows."""
        for folder in ("cut", "stacks", *TABLES):
            for path in (self.run / folder).glob("*"):
                if path.stem.isdecimal():
                    yield int(path.stem) + 1

    def require_lock(self) -> None:
        """Raises RecordError if the run directory is another one than this process has locked."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.run / ".lock"), os.fstat(self._lock.fileno())):
                return
        raise RecordError(
            f"{self.run} was deleted or replaced during training; this process writes nothing more"
        )

    def append(self, name: str, rows: list[dict]) -> None:
        """Appends rows to `<name>.jsonl`, one write each; DiskError if one does not fit."""
        self.require_lock()
        durable.append(self.run / f"{name}.jsonl", (encode_row(row).encode() for row in rows))

    def count(self, name: str) -> int:
        """Number of complete lines of `<name>.jsonl`, damaged or not; 0 without the file."""
        path = self.run / f"{name}.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def append_tensors(
        self,
        steps: np.ndarray,
        statistics: dict[str, np.ndarray],
        names: list[str],
        table: str = "tensors",
    ) -> None:
        """Appends rows to a table: steps [n], every statistic float32 [n, len(names)]."""
        self.require_lock()
        stream = self._streams.get(table)
        if stream is None:
            (self.run / table).mkdir(exist_ok=True)
            path = self.run / table / f"{self.attempt:04d}.arrows"
            stream = self._streams[table] = _Stream(path, list(statistics), names)
        stream.append(steps, statistics)

    def status(
        self,
        state: str,
        step: int | None = None,
        reason: str = "",
        saved: int = 0,
        unless: tuple[str, ...] = (),
    ) -> None:
        """Replaces status.json; any thread may call it.

        step None: the step stays. `saved`: step of the last committed checkpoint. `unless`: states
        of this attempt that must not be replaced.
        """
        self.require_lock()
        if not self._status.acquire(timeout=STATUS_S):  # the other thread is stuck in a write
            return
        try:
            before = self.last_status()
            if before["state"] in unless and before.get("attempt") == self.attempt:
                return
            row = {
                "state": state,
                "step": before["step"] if step is None else step,
                "saved": max(saved, before["saved"]),
                "attempt": self.attempt,
                "reason": reason,
            }
            durable.replace(self.run / "status.json", encode_row(row).encode())
        finally:
            self._status.release()

    def last_status(self) -> dict:
        """The content of status.json; state is None if the file is missing or damaged."""
        return read_status(self.run, {"state": None, "step": 0, "saved": 0})

    def offsets(self) -> dict[str, int]:
        """Sizes in bytes of all files, after syncing them to disk."""
        self.require_lock()
        files, attempts = self._files(), self.run / "attempts.jsonl"
        for path in (*files, attempts):  # or an attempt could reuse the number and the stream
            if path.exists():
                durable.sync(path)
        for folder in {path.parent for path in files}:
            durable.sync(folder)
        return {str(path.relative_to(self.run)): path.stat().st_size for path in files}

    def cut(self, offsets: dict[str, int]) -> None:
        """Cuts every file back to a checkpoint's offsets and moves the tails to `cut/<attempt>/`.

        Raises RecordError, before cutting anything, which names all missing or too short files.
        """
        files = {str(path.relative_to(self.run)): path for path in self._files()}
        sizes = {name: path.stat().st_size for name, path in files.items()}
        short = [name for name, size in offsets.items() if sizes.get(name, 0) < size]
        if short:
            names = ", ".join(short)
            raise RecordError(f"{self.run}: missing or shorter than at the checkpoint: {names}")
        for name, path in files.items():
            size = offsets.get(name, 0)
            if sizes[name] > size:
                tail = self.run / "cut" / f"{self.attempt:04d}" / name
                tail.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "rb") as file, open(tail, "wb") as target:
                    file.seek(size)
                    shutil.copyfileobj(file, target)
                durable.sync(tail)
                os.truncate(path, size)
            if size == 0:
                os.unlink(path)

    def _files(self) -> list[Path]:
        rows = [self.run / name for name in ROW_FILES]
        streams = [path for table in TABLES for path in sorted((self.run / table).glob("*.arrows"))]
        return [path for path in (*rows, *streams) if path.exists()]

    def write_parquet(self) -> None:
        """Writes `<table>.parquet` for each table: `step` and columns `<statistic>/<name>`.

        A statistic that only some attempts recorded is NaN in the steps of the others.
        """
        for table in TABLES:
            flushes = list(read_tensors(self.run, table))
            if not flushes:
                continue
            names = flushes[0][2]
            columns = {"step": np.concatenate([steps for steps, _, _ in flushes])}
            for statistic in dict.fromkeys(key for _, values, _ in flushes for key in values):
                whole = np.concatenate(
                    [
                        values.get(statistic, np.full((len(steps), len(names)), np.nan, "f4"))
                        for steps, values, _ in flushes
                    ]
                )
                columns |= {f"{statistic}/{name}": whole[:, i] for i, name in enumerate(names)}
            _write_parquet(self.run / f"{table}.parquet", columns)

    def finish_stream(self) -> None:
        """Closes the Arrow streams of this attempt."""
        if self._streams:
            self.require_lock()
        while self._streams:
            self._streams.popitem()[1].close()

    def close(self) -> None:
        """Closes the streams and releases the lock, even if nothing can be written any more."""
        try:
            self.finish_stream()
        except (durable.DiskError, RecordError):
            pass  # a stream is readable without its end
        finally:
            self._lock.close()


class NullRecord(Record):
    """The record in ranks other than 0: reads the run but writes nothing."""

    def __init__(self, run: Path, attempt: int):
        self.run, self.attempt = Path(run), attempt

    def _ignore(self, *args: object, **kwargs: object) -> None:
        """Writes nothing."""

    append = append_tensors = status = cut = write_parquet = finish_stream = close = _ignore

    def offsets(self) -> dict[str, int]:
        """None: the offsets are rank 0's."""
        return {}


class _Stream:
    """An Arrow stream that writes each batch with one write."""

    def __init__(self, path: Path, statistics: list[str], names: list[str]):
        self.path, self.names = path, names
        columns = [pa.field("step", pa.int64())]
        columns += [pa.field(name, pa.list_(pa.float32(), len(names))) for name in statistics]
        self._schema = pa.schema(columns, metadata={"tensors": json.dumps(names)})
        self._unwritten = io.BytesIO()
        self._stream = pa.ipc.new_stream(self._unwritten, self._schema)

    def append(self, steps: np.ndarray, statistics: dict[str, np.ndarray]) -> None:
        arrays = [pa.array(steps, pa.int64())]
        for values in statistics.values():
            flat = pa.array(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, len(self.names)))
        self._stream.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._write()

    def close(self) -> None:
        self._stream.close()
        self._write()

    def _write(self) -> None:
        """Writes what the stream has produced since the last call."""
        durable.append(self.path, [self._unwritten.getvalue()])
        self._unwritten.seek(0)
        self._unwritten.truncate()


def _write_parquet(path: Path, columns: dict[str, np.ndarray]) -> None:
    """Writes a table or leaves the old one."""
    temporary = path.with_name(f".{path.name}.tmp")
    numbers = [name for name in columns if name != "step"]
    options = {"use_dictionary": False, "use_byte_stream_split": numbers}  # halves the size
    try:
        pa.parquet.write_table(pa.table(columns), temporary, compression="zstd", **options)
        durable.sync(temporary)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise durable.DiskError(path, error) from error
    os.replace(temporary, path)


def _drop_torn_end(path: Path) -> None:
    """Removes an incomplete last line, so that the next row starts on its own line."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
