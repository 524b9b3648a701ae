"""Run directories that others made: nothing in one makes reading fail, wait or lose other runs."""

import functools
import io
import json
import os
import shutil
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from analysis import load_runs, run_files
from analysis.figures import FIGURES
from analysis.report import page as report_page
from lowprec.config.schema import DiagnosticsConfig, SpikeConfig
from tests.small import python

STEPS = 24
WATCHED = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=5, window=10))
pytestmark = pytest.mark.timeout(120)


def note_of(run):
    return load_runs(run).runs["note"].iloc[0]


def zero(path, start):
    data = path.read_bytes()
    path.write_bytes(data[:start] + bytes(len(data) - start))


@pytest.mark.parametrize("state", ["finished", "running"])
def test_steps_that_the_tensors_lack_are_noted(make_run, state):
    run = make_run(num_steps=100, state=state, flush=10)
    assert "tensors" not in note_of(run)
    (run / "tensors.parquet").unlink(missing_ok=True)
    stream = run / "tensors" / "0000.arrows"
    zero(stream, stream.stat().st_size // 2)  # a disk that lost its cache
    assert "tensors: " in note_of(run) and "steps are missing, first" in note_of(run)
    stream.write_bytes(b"")
    last = {"finished": 100, "running": 80}[state]  # the last flush of a running run may follow
    assert f"tensors: {last} steps are missing, first 1" in note_of(run)
    stream.unlink()
    assert note_of(run).endswith("tensors are not there") and "missing" not in note_of(run)


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def endless(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def sparse(path):
    with path.open("r+b") as file:
        file.truncate(2**40)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", [fifo, endless])
def test_an_archive_that_is_a_pipe_or_a_device_is_left_out(make_run, tmp_path, kind):
    good = make_run(num_steps=STEPS)
    archive = tmp_path / "runs" / "runs.zip"
    archive.touch()
    kind(archive)
    with pytest.warns(UserWarning, match=r"runs\.zip: left out: it is not a regular file"):
        assert load_runs(tmp_path / "runs").summaries["run"].tolist() == [good.name]


ALIASES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(10))}}}\n" for i in range(1, 9)
)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory, write_run):
    root = tmp_path_factory.mktemp("two")
    for lr in (1e-3, 2e-3):
        write_run(root, num_steps=STEPS, steps=STEPS, lr=lr, diagnostics=WATCHED, flush=8)
    return root


def in_config(run, /, **changes):
    """Changes values of a run's config; `a__b` is the key a.b."""
    path = run / "config.yaml"
    whole = yaml.safe_load(path.read_text())
    for name, value in changes.items():
        *groups, last = name.split("__")
        functools.reduce(dict.get, groups, whole)[last] = value
    path.write_text(yaml.safe_dump(whole))


def add_row(run, name, text):
    with (run / f"{name}.jsonl").open("a") as file:
        file.write(text + "\n")


def write_table(run, columns):
    shutil.rmtree(run / "tensors")
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, run / "tensors.parquet")


def write_stream(run, names, value=None, options=None, steps=STEPS):
    """The stream of a run's tensors, written anew; `value`: an array of a column."""
    (run / "tensors.parquet").unlink()
    if value is None:
        flat = pa.array(np.ones(steps * len(names), np.float32))
        value = pa.FixedSizeListArray.from_arrays(flat, len(names))
    batch = pa.record_batch({"step": pa.array(range(1, steps + 1)), "rms": value})
    schema = batch.schema.with_metadata({"tensors": json.dumps(names)})
    with pa.ipc.new_stream(run / "tensors" / "0000.arrows", schema, options=options) as stream:
        stream.write_batch(batch.replace_schema_metadata(schema.metadata))


def in_text(run, old, new):
    """Replaces a part of a run's config."""
    text = (run / "config.yaml").read_text()
    assert old in text
    (run / "config.yaml").write_text(text.replace(old, new, 1))


DAMAGED = "config.yaml is damaged"
TABLES = "tensors cannot be read"
NO_STEP = "24 steps are missing"
STEP, ONES = range(1, STEPS + 1), np.ones(STEPS, np.float32)
FAULTS = {  # what someone else's record may hold: how it gets there, a word of its run's note
    # a status
    "half a character": (
        lambda run: (run / "status.json").write_text(
            r'{"state": "failed", "step": 3, "reason": "caf\udce9.png is no file"}'
        ),
        "failed",
    ),
    "deep brackets": (
        lambda run: (run / "status.json").write_text("[" * 10**5),
        "status.json is damaged",
    ),
    "a hole": (lambda run: sparse(run / "status.json"), "status.json is damaged"),
    # rows
    "half a character in a row": (
        lambda run: add_row(run, "attempts", r'{"gpu": "\ud800", "sources": {"data": "\ud800"}}'),
        "",
    ),
    "half a character in an event": (
        lambda run: add_row(run, "events", r'{"step": 3, "\ud800": "\ud800"}'),
        "",
    ),
    "step 1e8": (
        lambda run: (
            in_config(run, num_steps=10**8),
            add_row(run, "metrics", '{"step": 100000000, "loss": 1.0}'),
            (run / "status.json").write_text('{"state": "running", "step": 24, "reason": ""}'),
        ),
        "1 lines are not rows of a step",
    ),
    "a pipe": (lambda run: fifo(run / "metrics.jsonl"), "is not a regular file"),
    "a hole for the rows": (lambda run: sparse(run / "metrics.jsonl"), "line 25 (byte"),
    # a config
    "columns of the table": (
        lambda run: in_config(run, run=[1], path=5, state=[1], note=5, step="x", reason={"a": 1}),
        "",
    ),
    "maps in lists": (
        lambda run: in_config(run, name=[{"a": [1]}], model__name_of=[[{}]], model__pool=[[{}]]),
        "",
    ),
    "a list for a number": (
        lambda run: in_config(run, optimizer__eps=[]),
        f"{DAMAGED}: optimizer.eps=()",
    ),
    "a number of 16 digits": (
        lambda run: in_config(run, model__image_size=10**15),
        f"{DAMAGED}: model.image_size=1",
    ),
    "aliases": (lambda run: in_text(run, "name: ", f"{ALIASES}name: "), DAMAGED),
    "deep blocks": (lambda run: in_text(run, "name: ", "- " * 10**5), DAMAGED),
    "half a character in the config": (
        lambda run: in_text(run, "name: ", r'name: "\ud800" # '),
        DAMAGED,
    ),
    "a looping link": (
        lambda run: (
            (run / "config.yaml").unlink() or (run / "config.yaml").symlink_to(run / "config.yaml")
        ),
        DAMAGED,
    ),
    # tables
    "a tensor twice": (lambda run: write_stream(run, ["a", "a"]), NO_STEP),
    "a column twice": (
        lambda run: write_table(run, pa.table([STEP, ONES, ONES], ["step", "rms/a", "rms/a"])),
        TABLES,
    ),
    "a text in a stream": (
        lambda run: write_stream(run, ["a"], pa.array([["x"]] * STEPS)),
        NO_STEP,
    ),
    "a number of values": (
        lambda run: write_stream(run, ["a", "b"], pa.array([[1.0]] * STEPS)),
        NO_STEP,
    ),
    "a pipe for a stream": (
        lambda run: (run / "tensors.parquet").unlink() or fifo(run / "tensors" / "0000.arrows"),
        NO_STEP,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_of_a_record_is_noted_and_affects_only_its_run(
    two_runs, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(report_page, "get_plotlyjs", lambda: "")
    root = tmp_path / "runs"
    shutil.copytree(two_runs, root)
    bad, good = sorted(path.parent for path in root.glob("**/status.json"))
    spoil, word = FAULTS[kind]
    spoil(bad)
    runs = load_runs(root)
    notes = runs.runs.set_index("run")["note"]
    assert notes[good.name] == "" and word in notes[bad.name]
    assert set(runs.tensors("*")["run"]) >= {good.name}
    assert good.name in set(FIGURES["loss_curves"].query(runs)["run"])
    assert good.name in set(FIGURES["rms_and_loss"].query(runs)["run"])
    assert good.name.encode() in report_page.make_page(runs).encode()


@pytest.mark.parametrize("reader", ["read_metrics", "_read_config"])
def test_a_run_whose_reader_fails_is_noted_and_affects_no_other(
    make_run, tmp_path, monkeypatch, reader
):
    bad, good = make_run(num_steps=STEPS), make_run(num_steps=STEPS, seed=1)
    read = getattr(run_files, reader)

    def fail(run):
        if bad.name in str(run):
            raise ZeroDivisionError("nobody thought of it")
        return read(run)

    monkeypatch.setattr(run_files, reader, fail)
    runs = load_runs(tmp_path / "runs")
    notes = runs.runs.set_index("run")["note"]
    assert "the run cannot be read: ZeroDivisionError: nobody thought of it" in notes[bad.name]
    assert notes[good.name] == "" and good.name in set(runs.metrics["run"])
    assert (bad.name in set(runs.metrics["run"])) == (reader == "_read_config")
    assert set(FIGURES["loss_curves"].query(runs)["run"]) == {good.name}


def compressed_stream(run):
    """A stream of 2,000 steps of 60,000 equal values, or 480 MB, compressed to 40 kB."""
    names, zstd = [f"t{i}" for i in range(60_000)], pa.ipc.IpcWriteOptions(compression="zstd")
    write_stream(run, names, options=zstd, steps=2000)


class Start(io.RawIOBase):
    """The first bytes of what is written."""

    def __init__(self, count):
        self.data, self.count = b"", count

    def writable(self):
        return True

    def write(self, data):
        self.data += bytes(data[: self.count - len(self.data)])
        return len(data)


def shared_values(run):
    """A stream of 400 statistics of 60,000 tensors, or 480 MB, that are the same 1.2 MB."""
    names, size, count = [f"t{i}" for i in range(60_000)], 1_200_000, 400
    flat = pa.array(np.ones(size // 4, np.float32))
    value = pa.FixedSizeListArray.from_arrays(flat, len(names))
    batch = pa.record_batch({"step": range(1, 6)} | {f"s{i}": value for i in range(count)})
    schema = batch.schema.with_metadata({"tensors": json.dumps(names)})
    start = Start(5_000_000)
    with pa.ipc.new_stream(pa.PythonFile(start, "w"), schema) as stream:
        stream.write_batch(batch.replace_schema_metadata(schema.metadata))
    data, first = start.data, 40  # where the values begin, after those of `step`
    body = data.index(struct.pack("<5q", *range(1, 6)))
    head = data[:body].replace(*(struct.pack("<q", first + n * size) for n in (count, 1)))
    for i in range(1, count):
        at = [struct.pack("<2q", first + n * size, size) for n in (i, 0)]
        head = head.replace(*at).replace(struct.pack("<2q", first + i * size, 0), bytes(16))
    (run / "tensors.parquet").unlink()
    (run / "tensors" / "0000.arrows").write_bytes(head + data[body : body + first + size])


def repeated_values(run):
    """A table of 20 million rows of equal values in 15 kB."""
    same = {"step": np.ones(20_000_000, np.int64), "rms/a": np.ones(20_000_000, np.float32)}
    write_table(run, same)


def varint(number):
    more = number >> 7
    return bytes([number & 127 | (128 if more else 0)]) + (varint(more) if more else b"")


def lying_page(run, unpacked=600_000_000):
    """20,000 steps in a page that unpacks to 600 MB, of which 160 kB are its values."""
    count, path = 20_000, run / "tensors.parquet"
    fields = [pa.field("step", pa.int64(), False), pa.field("rms/a", pa.float32(), False)]
    noise = np.random.default_rng(0).integers(2**60, size=count)  # of more than the page's size
    table = pa.table([noise, np.ones(count, np.float32)], pa.schema(fields))
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    shutil.rmtree(run / "tensors")
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    packed = pa.Codec("zstd").compress(bytes(unpacked), asbytes=True)

    def head(size):
        def numbers(*values):
            return b"".join(b"\x15" + varint(2 * value) for value in values)

        return numbers(0, unpacked, size) + b"\x2c" + numbers(count, 0, 3, 3) + bytes(2)

    size = chunk.total_compressed_size - len(head(2**16))
    rest = size - len(packed) - 8  # in a frame that is skipped
    packed += (0x184D2A50).to_bytes(4, "little") + rest.to_bytes(4, "little") + bytes(rest)
    data, start = path.read_bytes(), chunk.data_page_offset
    path.write_bytes(data[:start] + head(size) + packed + data[start + len(head(size)) + size :])


PEAK = """
import re, sys, warnings
from pathlib import Path
from analysis import load_runs
def peak():  # in KiB; getrusage would count the memory of the process that started this one
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
warnings.simplefilter("ignore")
for run in sys.argv[1:]:
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the run before
    before = peak()
    runs = load_runs(run)
    print(runs.runs["note"].iloc[0])
    try:
        runs.tensors("*")
    except LookupError:
        pass
    print((peak() - before) // 1024)
"""


def test_a_small_file_that_unpacks_to_much_is_refused(make_run):
    bombs, runs = (compressed_stream, shared_values, repeated_values, lying_page), []
    for seed, bomb in enumerate(bombs):
        runs.append(str(run := make_run(num_steps=STEPS, seed=seed)))
        bomb(run)
        assert sum(path.stat().st_size for path in run.glob("**/tensors*")) < 2_000_000
    lines = python("-c", PEAK, *runs).stdout.splitlines()
    for bomb, note, peak in zip(bombs, lines[::2], lines[1::2], strict=True):
        assert "tensors" in note, bomb
        assert int(peak) < 250, f"{bomb}: {peak} MiB"
