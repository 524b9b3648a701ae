import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow.ipc
import pyarrow.parquet
import pytest

from lowprec.runs.read import read_rows, read_status
from lowprec.runs.record import Record, RunBusyError
from lowprec.runs.tables import missing_steps, read_tensors

REPOSITORY = Path(__file__).parents[2]
NAMES = ["visual.conv1.weight", "logit_scale", "ü"]


def batch(first, count=2):
    """Steps and statistics with nan, inf and a subnormal among them."""
    steps = np.arange(first, first + count)
    rms = (steps[:, None] + np.array([0.1, np.nan, 1e-45])).astype(np.float32)
    return steps, {"rms": rms, "grad_norm": np.where(np.isnan(rms), np.inf, -rms)}


@pytest.fixture
def record(tmp_path):
    with contextlib.closing(Record(tmp_path)) as opened:
        yield opened


def start(run):
    """Opens a record and notes its attempt, as training does."""
    record = Record(run)
    record.append("attempts", [{"attempt": record.attempt}])
    return record


def stream(run, attempt=0):
    return run / "tensors" / f"{attempt:04d}.arrows"


def write_batches(record):
    """Writes three batches; the stream's bytes after each flush, left without an end."""
    sizes = []
    for first in (1, 3, 5):
        record.append_tensors(*batch(first), NAMES)
        sizes.append(stream(record.run).stat().st_size)
    return sizes


def hold(run, code):
    """A process that opens `run`, runs `code`, prints and sleeps; and what `code` printed."""
    program = (
        "import os, sys, time\nfrom lowprec.runs.record import Record\n"
        f"record = Record(sys.argv[1])\n{code}\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(run)],
        stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip
    printed, held = process.stdout.readline().split()
    assert held == "held"
    return process, printed


def test_row_that_does_not_fit_is_an_error_and_leaves_nothing(record, monkeypatch):
    write, written = os.write, []

    def fill(descriptor, data):
        if sum(written) > 15:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(write(descriptor, bytes(data[:7])))
        return written[-1]

    record.append("metrics", [{"step": 1}])
    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(OSError, match=r"metrics\.jsonl cannot be written: No space .* are free"):
        record.append("metrics", [{"step": 2}, {"step": 3}])
    monkeypatch.undo()
    record.append("metrics", [{"step": 4}])
    assert [row["step"] for row in read_rows(record.run / "metrics.jsonl")] == [1, 2, 4]


def test_every_truncation_of_a_stream_yields_whole_batches_only(tmp_path, record):
    sizes = write_batches(record)
    whole = stream(tmp_path).read_bytes()
    for size in range(len(whole) + 1):
        stream(tmp_path).write_bytes(whole[:size])
        flushes = list(read_tensors(tmp_path))
        assert len(flushes) == sum(size >= end for end in sizes)
        for first, (_, statistics, _) in zip((1, 3, 5), flushes, strict=False):
            np.testing.assert_array_equal(statistics["rms"], batch(first)[1]["rms"])


def test_a_stream_that_is_cut_while_it_is_read_ends_early(tmp_path, record):
    write_batches(record)
    flushes = read_tensors(tmp_path)
    first = next(flushes)
    # the kernel kills a process that reads what is no longer in a mapped file
    assert str(stream(tmp_path)) not in Path("/proc/self/maps").read_text()
    os.truncate(stream(tmp_path), 0)
    assert list(flushes) == [] and first[0].tolist() == [1, 2]


def test_damaged_streams_are_left_out_and_do_not_hide_the_next(tmp_path):
    for first in (1, 3, 5):
        record = start(tmp_path)
        record.append_tensors(*batch(first), NAMES)
        record.close()
    stream(tmp_path, 0).write_bytes(b"")
    for metadata in (None, {"a": "b"}, {"tensors": "{"}):  # which name no tensors
        columns = pyarrow.table({"step": [1], "rms": [[0.5]]}).replace_schema_metadata(metadata)
        with pyarrow.ipc.new_stream(stream(tmp_path, 1), columns.schema) as writer:
            writer.write_table(columns)
        assert [steps[0] for steps, _, _ in read_tensors(tmp_path)] == [5]
        assert len(missing_steps(tmp_path, 1, {"tensors": 1})) == 1


def test_cut_archives_the_tails_and_a_second_writer_continues(tmp_path):
    record = start(tmp_path)
    record.append("metrics", [{"step": 1}, {"step": 2}])
    record.append_tensors(*batch(1), NAMES)
    offsets = record.offsets()
    kept = {name: (tmp_path / name).read_bytes() for name in offsets}
    record.append("metrics", [{"step": 3}])
    record.append("events", [{"step": 3, "kind": "spike"}])
    record.append_tensors(*batch(3), NAMES)
    record.close()
    grown = {name: (tmp_path / name).read_bytes() for name in (*kept, "events.jsonl")}
    tails = {name: data[len(kept.get(name, b"")) :] for name, data in grown.items()}

    second = start(tmp_path)
    for _ in range(2):  # nothing is left for the second
        second.cut(json.loads(json.dumps(offsets)))
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept
    assert not (tmp_path / "events.jsonl").exists()
    assert {name: (tmp_path / "cut/0001" / name).read_bytes() for name in tails} == tails
    second.append("metrics", [{"step": 3}, {"step": 4}])
    second.append_tensors(*batch(3), NAMES)
    second.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    steps = np.concatenate([steps for steps, _, _ in read_tensors(tmp_path)])
    assert steps.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("torn", [b"", b"{", b'{"attempt": 1, "pi'])
def test_attempts_are_counted_on_after_a_torn_line(tmp_path, torn):
    start(tmp_path).close()
    with open(tmp_path / "attempts.jsonl", "ab") as file:
        file.write(torn)
    for attempt in (1, 2):
        record = start(tmp_path)
        assert record.attempt == attempt
        record.close()
    assert [row["attempt"] for row in read_rows(tmp_path / "attempts.jsonl")] == [0, 1, 2]


def test_an_attempt_that_left_stacks_but_no_row_keeps_its_number(tmp_path):
    (tmp_path / "stacks" / "0000").mkdir(parents=True)  # a watchdog ends the ranks that find it
    with contextlib.closing(Record(tmp_path)) as record:
        assert record.attempt == 1


def test_busy_run_names_its_holder_and_is_free_after_close(tmp_path):
    first = Record(tmp_path)
    for _ in range(2):  # a refused opener does not wipe the name
        with pytest.raises(RunBusyError, match=f"process {os.getpid()} on {os.uname().nodename}"):
            Record(tmp_path)
    first.close()
    Record(tmp_path).close()


def test_lock_is_freed_when_its_holder_is_killed_even_if_a_worker_outlives_it(tmp_path):
    code = "ready, tell = os.pipe()\nchild = os.fork()\n"
    code += "if not child:\n    os.write(tell, b'.')\n    time.sleep(60)\n"
    code += "os.read(ready, 1)\nprint(child, end=' ')"  # once the child has dropped the lock
    process, child = hold(tmp_path, code)
    try:
        with pytest.raises(RunBusyError, match=f"process {process.pid} on"):
            Record(tmp_path)
        process.kill()
        process.wait()
        process.stdout.close()
        Record(tmp_path).close()
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_parquet_equals_the_streams(tmp_path):
    for first in (1, 3):
        record = start(tmp_path)
        record.append_tensors(*batch(first), NAMES)
        record.finish_stream()
        record.write_parquet()
        record.close()
    table = pyarrow.parquet.read_table(tmp_path / "tensors.parquet")
    expected = [batch(first) for first in (1, 3)]
    assert table.column_names == ["step"] + [f"{s}/{n}" for s in expected[0][1] for n in NAMES]
    assert table["step"].to_pylist() == [1, 2, 3, 4]
    for statistic in expected[0][1]:
        whole = np.concatenate([values[statistic] for _, values in expected])
        for i, name in enumerate(NAMES):
            column = table[f"{statistic}/{name}"].to_numpy()
            assert column.dtype == np.float32 and column.tobytes() == whole[:, i].tobytes()


def test_parquet_has_the_statistics_of_all_attempts(tmp_path):
    steps, values = batch(1)
    kept, *_, dropped = values
    for recorded in (values, {kept: values[kept], "kurtosis": values[dropped]}):
        record = start(tmp_path)
        record.append_tensors(steps, recorded, NAMES)
        record.close()
    with contextlib.closing(start(tmp_path)) as record:
        record.write_parquet()
    table = pyarrow.parquet.read_table(tmp_path / "tensors.parquet")
    num = len(steps)
    for statistic, missing in ((dropped, slice(num, None)), ("kurtosis", slice(num))):
        isnan = np.isnan(table[f"{statistic}/{NAMES[0]}"].to_numpy())
        assert isnan[missing].all() and isnan.sum() == num
    assert not np.isnan(table[f"{kept}/{NAMES[0]}"].to_numpy()).any()


def test_status_is_whole_at_every_moment(tmp_path, record):
    record.status("running", 0)
    done = threading.Event()

    def write():
        for step in range(300):
            record.status("running", step, "x" * (step % 50) * 100)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        status = read_status(tmp_path)
        assert len(status["reason"]) == status["step"] % 50 * 100
    writer.join()
    assert read_status(tmp_path)["step"] == 299


def test_a_final_state_is_not_replaced_by_another_thread(tmp_path):
    with contextlib.closing(Record(tmp_path / "run")) as record:
        record.append("attempts", [{"attempt": 0}])

        def fail():
            for _ in range(50):
                record.status("failed", reason="late", unless=("finished",))

        other = threading.Thread(target=fail)
        other.start()
        for step in range(50):
            record.status("finished", step)
        other.join()
        assert record.last_status()["state"] == "finished"
