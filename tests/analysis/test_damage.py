"""Damaged records: undamaged rows are read, and the note says what is missing."""

import json
import random
import shutil
from pathlib import Path

import pytest

from analysis import load_runs
from analysis.make import mark_of_runs
from analysis.run_files import read_metrics
from lowprec.config.schema import DiagnosticsConfig
from lowprec.runs.read import read_rows

STEPS = 12


@pytest.fixture(scope="module")
def lines():
    """The lines of an undamaged metrics.jsonl; each holds a character of two bytes."""
    rows = [{"step": n, "loss": 1 / n, "lr": 1e-3, "ü": n} for n in range(1, STEPS + 1)]
    return [(json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows]


def survivors(data, lines):
    """Steps of the undamaged lines, and number and byte of the first damaged line."""
    first, byte, steps = None, 0, set()
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        if line + b"\n" in lines:
            steps.add(lines.index(line + b"\n") + 1)
        elif first is None:
            first = (number, byte)
        byte += len(line) + 1
    return sorted(steps), first


def tails(lines):
    """More than 200 damaged versions of a file, by the kind of damage."""
    whole, last = b"".join(lines), lines[-1]
    start = len(whole) - len(last)
    rng = random.Random(0)
    for cut in range(start, len(whole)):
        yield f"cut at {cut}", whole[:cut]
        yield f"cut at {cut}, then a row", whole[:cut] + lines[5]
    for size in (1, 7, 512, 4096):
        yield f"{size} NUL at the end", whole + bytes(size)
        yield f"{size} NUL and a row", whole + bytes(size) + b"\n" + lines[3]
        yield f"{size} NUL over the middle", whole[:60] + bytes(size) + whole[60 + size :]
    for size in range(1, 40):
        noise = rng.randbytes(size)
        yield f"noise {size}", whole + noise
        yield f"noise {size} and a line end", whole + noise + b"\n"
        yield f"noise {size} within", whole[:start] + noise + whole[start:]
    for line in (b"", b'{"a" 1}', b"5", b"null", b"[1]", b'"a"', b"{}", b"[" * 10**5,
                 b'{"step": ' + b"9" * 5000):  # fmt: skip
        yield f"line {line[:9]}", whole + line + b"\n"
    for row in (
        {"loss": 1.0}, {"step": 0}, {"step": -3}, {"step": 1.5}, {"step": True}, {"step": "4"},
        {"step": None}, {"step": STEPS + 1}, {"step": 10**30}, {"step": 3, "loss": "high"},
        {"step": 3, "loss": None}, {"step": 3, "loss": [1]}, {"step": 3, "loss": {"a": 1}},
    ):  # fmt: skip
        yield f"row {row}", whole + json.dumps(row).encode() + b"\n"
    yield "half a character", whole[:-3] + b"\n"
    yield "half a character in the middle", lines[0][:-3] + b"\n" + b"".join(lines[1:])
    yield "nothing", b""
    yield "one NUL", b"\0"


def test_undamaged_rows_are_read_and_the_first_damage_is_named_for_200_tails(lines, tmp_path):
    cases = list(tails(lines))
    assert len(cases) >= 200
    run = {"path": str(tmp_path), "num_steps": STEPS, "step": STEPS}
    for i, (name, data) in enumerate(cases):
        state = "finished" if i % 3 else "running"
        (tmp_path / "metrics.jsonl").write_bytes(data)
        rows, notes = read_metrics({**run, "state": state})
        steps = [row["step"] for row in rows]
        expected, first = survivors(data, lines)
        assert steps == expected, name
        if first is not None:
            where = f"metrics.jsonl: line {first[0]} (byte {first[1]}) is damaged"
            valid = name.startswith("row") or name == "line b'{}'"
            assert any(p.startswith(where) or valid and "not rows of a step" in p for p in notes)
            if not valid:
                with pytest.raises(ValueError, match=rf"line {first[0]} \(byte {first[1]}\)"):
                    read_rows(tmp_path / "metrics.jsonl")
        missing = (STEPS if state == "finished" else max(steps, default=0)) - len(steps)
        gap = next((n for n in range(1, STEPS + 1) if n not in steps), None)
        expected = [f"metrics.jsonl: {missing} steps are missing, first {gap}"] if missing else []
        assert [part for part in notes if "missing" in part] == expected, name


def test_rows_are_sorted_repeated_steps_are_noted_and_the_last_row_counts(lines, make_run):
    run = make_run(num_steps=STEPS)
    again = lines[4].replace(b"0.2", b"0.25")
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[6:], *lines[:6], again, lines[5]]))
    runs = load_runs(run)
    assert runs.metrics["step"].tolist() == list(range(1, STEPS + 1))
    assert runs.metrics.set_index("step").loc[5, "loss"] == 0.25
    assert "2 rows repeat a step" in runs.runs["note"].iloc[0]


@pytest.mark.parametrize("name", ["timing", "events", "attempts"])
def test_damage_in_another_file_is_named_and_keeps_the_metrics(make_run, name):
    run = make_run(num_steps=STEPS)
    with open(run / f"{name}.jsonl", "ab") as file:
        file.write(b"\0\0\0\n" + b'{"step": 12}\n' + b"\xff" * 30)
    runs = load_runs(run)
    assert len(runs.metrics) == STEPS
    note = runs.runs["note"].iloc[0]
    assert (name == "attempts") == (note == "") and (note == "" or f"{name}.jsonl: line" in note)


def test_config_of_an_older_schema_is_valid(make_run):
    run = make_run(num_steps=STEPS)
    with (run / "config.yaml").open("a") as file:
        file.write("gone: 1\n")
    text = (run / "config.yaml").read_text().replace("    protocol:", "    gone: 1\n    protocol:")
    (run / "config.yaml").write_text(text.replace("recipe: high", "recipe: of_another_branch"))
    assert load_runs(run).runs["note"].tolist() == [""]


def test_committed_records_of_an_older_schema_are_valid():
    runs = load_runs(Path(__file__).parents[1] / "fixtures" / "runs").runs
    assert set(runs["note"]) == {""}
    assert set(runs["data.allow_remote"]) == {False}  # a list now


def test_missing_tensors_of_an_ended_run_are_named(make_run):
    run = make_run(num_steps=STEPS)
    make_run(num_steps=STEPS, seed=1, tables={}, diagnostics=DiagnosticsConfig([]))
    for missing in (lambda: shutil.rmtree(run / "tensors"), (run / "tensors.parquet").unlink):
        assert set(load_runs(run.parent).runs["note"]) == {""}
        missing()
    runs = load_runs(run.parent).runs
    assert set(runs["note"]) == {"", "tensors are not there"}
    assert mark_of_runs(runs) == ""  # a record may be kept without them
