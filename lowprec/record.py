"""The writer of a run directory: rows appended with one write each, tensors as an Arrow stream.

Nothing acknowledged is lost when the process is killed: rows are not buffered, a stream needs no
footer. A checkpoint stores `offsets()`; a resume cuts every file back to them and keeps the tail
under `cut/`, so that a record has no step twice.
"""

import fcntl
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from lowprec.run import encode_row, read_rows, read_tensors

ROW_FILES = ("metrics.jsonl", "timing.jsonl", "events.jsonl", "skips.jsonl")


class RunBusyError(RuntimeError):
    """Another process is writing this run."""


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _drop_torn_end(path: Path) -> None:
    """Cuts a last line that was never finished, so that the next row starts on its own line."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


class Record:
    """The open record of one run; one process writes it at a time.

    Raises RunBusyError naming the holder if another process has it open. `attempt` counts the
    starts of the run, from 0.
    """

    def __init__(self, run: Path):
        self.run = Path(run)
        self.run.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.run / ".lock", "a+")  # noqa: SIM115 (held as long as the record)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            self._lock.close()
            raise RunBusyError(f"{self.run} is being written by {holder}") from error
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        self._lock.flush()
        os.register_at_fork(after_in_child=self._lock.close)  # a worker must not outlive as holder
        _drop_torn_end(self.run / "attempts.jsonl")
        self.attempt = len(read_rows(self.run / "attempts.jsonl"))
        self._stream = self._sink = self._schema = None

    def append(self, name: str, rows: list[dict]) -> None:
        """Appends rows to `<name>.jsonl`, each by one write."""
        descriptor = os.open(
            self.run / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
        )
        try:
            for row in rows:
                data = encode_row(row).encode()
                if os.write(descriptor, data) != len(data):
                    raise OSError(f"{self.run}/{name}.jsonl: the disk is full")
        finally:
            os.close(descriptor)

    def append_tensors(
        self, steps: np.ndarray, statistics: dict[str, np.ndarray], names: list[str]
    ) -> None:
        """Appends one batch: steps [n], each statistic float32 [n, tensors], tensor names."""
        if self._stream is None:
            (self.run / "tensors").mkdir(exist_ok=True)
            columns = [pa.field("step", pa.int64())]
            columns += [pa.field(name, pa.list_(pa.float32(), len(names))) for name in statistics]
            self._schema = pa.schema(columns, metadata={"tensors": json.dumps(names)})
            self._sink = open(self.run / "tensors" / f"{self.attempt:04d}.arrows", "wb")  # noqa: SIM115
            self._stream = pa.ipc.new_stream(self._sink, self._schema)
        arrays = [pa.array(steps, pa.int64())]
        for values in statistics.values():
            flat = pa.array(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, len(names)))
        self._stream.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._sink.flush()

    def status(self, state: str, step: int, reason: str = "") -> None:
        """Replaces status.json."""
        row = {"state": state, "step": step, "attempt": self.attempt, "reason": reason}
        write_atomically(self.run / "status.json", json.dumps(row) + "\n")

    def offsets(self) -> dict[str, int]:
        """Bytes of every file of the record, durable on disk when this returns."""
        sizes = {}
        for path in self._files():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
            sizes[str(path.relative_to(self.run))] = path.stat().st_size
        return sizes

    def cut(self, offsets: dict[str, int]) -> None:
        """Cuts every file back to a checkpoint's offsets; the tails go to `cut/<attempt>/`."""
        for path in self._files():
            name = str(path.relative_to(self.run))
            size = offsets.get(name, 0)
            if path.stat().st_size < size:
                raise ValueError(f"{path} is shorter than the checkpoint says: {size} bytes")
            if path.stat().st_size > size:
                tail = self.run / "cut" / f"{self.attempt:04d}" / name
                tail.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "rb+") as file, open(tail, "wb") as kept:
                    file.seek(size)
                    shutil.copyfileobj(file, kept)
                    kept.flush()
                    os.fsync(kept.fileno())
                    file.truncate(size)
            if path.stat().st_size == 0:
                path.unlink()

    def _files(self) -> list[Path]:
        rows = [self.run / name for name in ROW_FILES]
        streams = sorted((self.run / "tensors").glob("*.arrows"))
        return [path for path in (*rows, *streams) if path.exists()]

    def write_parquet(self) -> None:
        """Writes tensors.parquet: `step` and a column `<statistic>/<tensor>` for each."""
        flushes = list(read_tensors(self.run))
        if not flushes:
            return
        _, first, names = flushes[0]
        columns = {"step": np.concatenate([steps for steps, _, _ in flushes])}
        for statistic in first:
            whole = np.concatenate([values[statistic] for _, values, _ in flushes])
            for i, name in enumerate(names):
                columns[f"{statistic}/{name}"] = whole[:, i]
        temporary = self.run / ".tensors.parquet.tmp"
        pa.parquet.write_table(pa.table(columns), temporary, compression="zstd")
        temporary.rename(self.run / "tensors.parquet")

    def finish_stream(self) -> None:
        """Ends the Arrow stream of this attempt."""
        if self._stream is not None:
            self._stream.close()
            self._sink.close()
            self._stream = self._sink = None

    def close(self) -> None:
        """Ends the stream and frees the lock."""
        self.finish_stream()
        self._lock.close()
