"""The writer of a run directory: rows appended with one write each, tensors as an Arrow stream.

Nothing acknowledged is lost when the process is killed: rows are not buffered, a stream needs no
footer. A checkpoint stores `offsets()`; a resume cuts every file back to them and keeps the tail
under `cut/`, so that a record has no step twice.
"""

import fcntl
import io
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from lowprec.runs import durable
from lowprec.runs.read import TABLES, encode_row, read_status, read_tensors

STATUS_S = 10  # that a thread waits for another to write status.json
ROW_FILES = ("metrics.jsonl", "timing.jsonl", "events.jsonl", "skips.jsonl")


class RunBusyError(RuntimeError):
    """Another process is writing this run."""


class RecordError(RuntimeError):
    """The record lacks what a checkpoint says it held; the message names the files."""


class Record:
    """The open record of one run; one process writes it at a time.

    Raises RunBusyError naming the holder if another process has it open. `attempt` counts the
    starts of the run, from 0.
    """

    def __init__(self, run: Path):
        self.run = Path(run)
        self.run.mkdir(parents=True, exist_ok=True)
        self._status = threading.Lock()
        self._lock = open(self.run / ".lock", "a+")  # noqa: SIM115 (held as long as the record)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            self._lock.close()
            raise RunBusyError(f"{self.run} is being written by {holder}") from error
        except OSError as error:
            self._lock.close()
            raise RecordError(f"{self.run}: its file system has no locks ({error})") from error
        os.register_at_fork(after_in_child=self._lock.close)  # a worker must not outlive as holder
        _drop_torn_end(self.run / "attempts.jsonl")
        self.attempt = self.count("attempts")
        self._lock.truncate(0)
        self._lock.write(_holder(self.attempt))
        self._lock.flush()
        self._streams: dict[str, _Stream] = {}

    def append(self, name: str, rows: list[dict]) -> None:
        """Appends rows to `<name>.jsonl`, each by one write; DiskError if one does not fit."""
        durable.append(self.run / f"{name}.jsonl", (encode_row(row).encode() for row in rows))

    def count(self, name: str) -> int:
        """Whole lines of `<name>.jsonl`, damaged ones included; 0 if there is none."""
        path = self.run / f"{name}.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def append_tensors(
        self,
        steps: np.ndarray,
        statistics: dict[str, np.ndarray],
        names: list[str],
        table: str = "tensors",
    ) -> None:
        """Appends one batch to a table: steps [n], each statistic float32 [n, names], names."""
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
        """Replaces status.json. step None: as it was; `saved`: the last committed checkpoint.

        `unless`: states of this attempt that stay as they are. Any thread may call it.
        """
        if not self._status.acquire(timeout=STATUS_S):  # the other thread's disk hangs
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
        """What status.json says: state (None: it is missing or damaged), step, saved, ..."""
        status = {"state": None, "step": 0, "saved": 0}
        try:
            return status | read_status(self.run)
        except (OSError, ValueError, TypeError):
            return status

    def offsets(self) -> dict[str, int]:
        """Bytes of every file of the record, durable on disk when this returns."""
        sizes = {}
        attempts = self.run / "attempts.jsonl"
        if attempts.exists():  # or the next attempt would take this one's number, and its stream
            durable.sync(attempts)
        for path in self._files():
            durable.sync(path)
            sizes[str(path.relative_to(self.run))] = path.stat().st_size
        for folder in {path.parent for path in self._files()}:
            durable.sync(folder)
        return sizes

    def cut(self, offsets: dict[str, int]) -> None:
        """Cuts every file back to a checkpoint's offsets; the tails go to `cut/<attempt>/`.

        RecordError names all files that are gone or shorter; nothing is cut then.
        """
        sizes = {str(path.relative_to(self.run)): path.stat().st_size for path in self._files()}
        short = [name for name, size in offsets.items() if sizes.get(name, 0) < size]
        if short:
            raise RecordError(
                f"{self.run}: gone or shorter than when the checkpoint was made: {', '.join(short)}"
            )
        for path in self._files():
            name = str(path.relative_to(self.run))
            size = offsets.get(name, 0)
            if path.stat().st_size > size:
                tail = self.run / "cut" / f"{self.attempt:04d}" / name
                tail.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "rb") as file, open(tail, "wb") as kept:
                    file.seek(size)
                    shutil.copyfileobj(file, kept)
                durable.sync(tail)
                os.truncate(path, size)
            if size == 0:
                os.unlink(path)

    def _files(self) -> list[Path]:
        rows = [self.run / name for name in ROW_FILES]
        streams = [path for table in TABLES for path in sorted((self.run / table).glob("*.arrows"))]
        return [path for path in (*rows, *streams) if path.exists()]

    def write_parquet(self) -> None:
        """Writes each table there is as one file: `step` and a column `<statistic>/<name>` each."""
        for table in TABLES:
            flushes = list(read_tensors(self.run, table))
            if flushes:
                self._write_table(table, flushes)

    def _write_table(self, table: str, flushes: list) -> None:
        _, first, names = flushes[0]
        columns = {"step": np.concatenate([steps for steps, _, _ in flushes])}
        for statistic in first:
            whole = np.concatenate([values[statistic] for _, values, _ in flushes])
            for i, name in enumerate(names):
                columns[f"{statistic}/{name}"] = whole[:, i]
        temporary = self.run / f".{table}.parquet.tmp"
        try:
            numbers = [name for name in columns if name != "step"]
            options = {"use_dictionary": False, "use_byte_stream_split": numbers}  # half the bytes
            pa.parquet.write_table(pa.table(columns), temporary, compression="zstd", **options)
            durable.sync(temporary)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise durable.DiskError(self.run / f"{table}.parquet", error) from error
        os.replace(temporary, self.run / f"{table}.parquet")

    def finish_stream(self) -> None:
        """Ends the Arrow streams of this attempt."""
        while self._streams:
            self._streams.popitem()[1].close()

    def close(self) -> None:
        """Ends the stream and frees the lock, also where the disk is full."""
        try:
            self.finish_stream()
        except durable.DiskError:
            pass  # a stream without its end is read all the same
        finally:
            self._lock.close()


class NullRecord(Record):
    """The record in ranks other than 0: reads the run and writes nothing."""

    def __init__(self, run: Path, attempt: int):
        self.run, self.attempt = Path(run), attempt

    def _ignore(self, *args: object, **kwargs: object) -> None:
        """Writes nothing."""

    append = append_tensors = status = cut = write_parquet = finish_stream = close = _ignore

    def offsets(self) -> dict[str, int]:
        """None: the offsets are rank 0's."""
        return {}


class _Stream:
    """An Arrow stream of which each batch is one write to the file."""

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
        """One write of what the stream has produced since the last."""
        durable.append(self.path, [self._unwritten.getvalue()])
        self._unwritten.seek(0)
        self._unwritten.truncate()


def _drop_torn_end(path: Path) -> None:
    """Cuts a last line that was never finished, so that the next row starts on its own line."""
    if path.exists():
        whole = path.read_bytes()
        if not whole.endswith(b"\n"):
            os.truncate(path, whole.rfind(b"\n") + 1)


def _holder(attempt: int) -> str:
    job = os.environ.get("SLURM_JOB_ID")
    where = f"process {os.getpid()} on {os.uname().nodename}" + (f", job {job}" if job else "")
    return f"{where}, attempt {attempt}"
