"""Damaged records: every good row is read, and the note says what is not."""

import json
import random
import shutil

import pytest

from analysis import load_runs, make
from lowprec.config.schema import DiagnosticsConfig

STEPS = 12


@pytest.fixture(scope="module")
def lines():
    """The lines of a whole metrics.jsonl, their last a character of two bytes."""
    rows = [{"step": n, "loss": 1 / n, "lr": 1e-3, "ü": n} for n in range(1, STEPS + 1)]
    return [(json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows]


@pytest.fixture
def read(make_run):
    """A function: steps and note of a run that has `data` for its metrics.jsonl."""
    states = enumerate(("running", "finished"))
    runs = {state: make_run(num_steps=STEPS, state=state, seed=seed) for seed, state in states}

    def read(data, state="running"):
        (runs[state] / "metrics.jsonl").write_bytes(data)
        loaded = load_runs(runs[state])
        found = loaded.runs["note"].iloc[0].split("; ")
        return loaded.metrics["step"].tolist(), [part for part in found if "metrics" in part]

    return read


def survivors(data, lines):
    """Steps of the lines that are whole, and number and byte of the first line that is not."""
    first, byte, steps = None, 0, set()
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        if line + b"\n" in lines:
            steps.add(lines.index(line + b"\n") + 1)
        elif first is None:
            first = (number, byte)
        byte += len(line) + 1
    return sorted(steps), first


def tails(lines):
    """More than 200 damaged ends of a file, by what was done to it."""
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
    for line in (b"5", b"null", b"[1]", b'"a"', b"{}", b"[" * 10**5, b'{"step": ' + b"9" * 5000):
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


def test_every_good_row_is_read_and_the_first_damage_named_for_200_damaged_tails(lines, read):
    cases = list(tails(lines))
    assert len(cases) >= 200
    for i, (name, data) in enumerate(cases):
        state = "finished" if i % 3 else "running"
        steps, note = read(data, state)
        expected, first = survivors(data, lines)
        assert steps == expected, name
        if first is not None:
            where = f"metrics.jsonl: line {first[0]} (byte {first[1]}) is damaged"
            valid = name.startswith("row") or name == "line b'{}'"
            assert any(p.startswith(where) or valid and "not rows of a step" in p for p in note)
        missing = (STEPS if state == "finished" else max(steps, default=0)) - len(steps)
        gap = next((n for n in range(1, STEPS + 1) if n not in steps), None)
        wanted = [f"metrics.jsonl: {missing} steps are missing, first {gap}"] if missing else []
        assert [part for part in note if "missing" in part] == wanted, name


def test_a_step_twice_counts_once_by_its_later_row(lines, read, make_run):
    again = lines[4].replace(b"0.2", b"0.25")
    steps, note = read(b"".join([*lines[:7], again, lines[5], *lines[7:]]), "finished")
    assert steps == list(range(1, STEPS + 1))
    assert note == ["metrics.jsonl: 2 rows repeat a step, first step 5"]


def test_a_step_twice_has_the_loss_of_the_later_row(lines, make_run):
    run = make_run(num_steps=STEPS)
    again = lines[4].replace(b"0.2", b"0.25")
    (run / "metrics.jsonl").write_bytes(b"".join([*lines, again]))
    metrics = load_runs(run).metrics.set_index("step")
    assert metrics.loc[5, "loss"] == 0.25


def test_rows_out_of_order_are_put_in_order(lines, read):
    assert read(b"".join(lines[6:] + lines[:6]), "finished") == (list(range(1, STEPS + 1)), [])


@pytest.mark.parametrize("name", ["timing", "events", "attempts"])
def test_damage_of_another_file_is_named_and_leaves_the_metrics(make_run, name):
    run = make_run(num_steps=STEPS)
    with open(run / f"{name}.jsonl", "ab") as file:
        file.write(b"\0\0\0\n" + b'{"step": 12}\n' + b"\xff" * 30)
    runs = load_runs(run)
    assert len(runs.metrics) == STEPS
    note = runs.runs["note"].iloc[0]
    assert (name == "attempts") == (note == "") and (note == "" or f"{name}.jsonl: line" in note)


@pytest.mark.parametrize(
    "text",
    ['{"state": "finished", "step": "x", "reason": ""}', '{"state": 3}', "[" * 10**5, "{}", "5"],
    ids=lambda text: text[:30],
)
def test_a_nonsense_status_is_an_unknown_state(make_run, text):
    run = make_run(num_steps=STEPS)
    (run / "status.json").write_text(text)
    runs = load_runs(run)
    assert runs.runs["state"].tolist() == ["unknown"]
    assert "status.json is damaged" in runs.runs["note"].iloc[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_steps: 12", "num_steps: many"),
        ("scale: demo", "scale: 5"),
        ("scale: demo", "scale: tiny"),
        ("seed: 0", "seed: null"),
        ("batch_size: 128", "batch_size: null"),
        ("beta2: 0.99", "beta2: [1]"),
        ("window: null", "window: -1"),
        ("protocol: paper", "protocol: 3"),
        ("recipe: high", "recipe: 8"),
    ],
)
def test_a_value_that_no_run_can_have_damages_that_run_alone(make_run, tmp_path, old, new):
    bad, good = make_run(num_steps=STEPS), make_run(num_steps=STEPS, seed=1)
    text = (bad / "config.yaml").read_text()
    assert old in text
    (bad / "config.yaml").write_text(text.replace(old, new, 1))
    runs = load_runs(tmp_path / "runs").runs.set_index("run")
    assert runs["note"][bad.name].startswith("config.yaml is damaged: ")
    assert new.partition(":")[0] in runs["note"][bad.name]
    assert runs["note"][good.name] == ""
    _, about = make.draw("loss_curves", tmp_path / "runs", tmp_path / "out", "", "demo")
    assert [run["path"] for run in about["runs"]] == [str(good)]


def test_a_config_of_an_older_schema_is_whole(make_run):
    run = make_run(num_steps=STEPS)
    with (run / "config.yaml").open("a") as file:
        file.write("gone: 1\n")
    text = (run / "config.yaml").read_text().replace("    protocol:", "    gone: 1\n    protocol:")
    (run / "config.yaml").write_text(text.replace("recipe: high", "recipe: of_another_branch"))
    assert load_runs(run).runs["note"].tolist() == [""]


CUTS = {"half": 0.5, "the end": 0.99, "all": 0}


@pytest.mark.parametrize("kept", [*CUTS.values(), None], ids=[*CUTS, "deleted"])
def test_damaged_tensors_of_a_run_that_ended_are_named(make_run, kept):
    run = make_run(num_steps=STEPS)
    path = run / "tensors.parquet"
    data = path.read_bytes()
    shutil.rmtree(run / "tensors")
    path.unlink() if kept is None else path.write_bytes(data[: int(kept * len(data))])
    word = "missing" if kept is None else "damaged"
    assert load_runs(run).runs["note"].tolist() == [f"tensors.parquet is {word}"]
    path.write_bytes(data)
    assert load_runs(run).runs["note"].tolist() == [""]


def test_tensors_that_are_whole_in_their_streams_or_not_asked_for_are_not_missing(make_run):
    run = make_run(num_steps=STEPS)
    (run / "tensors.parquet").unlink()
    bare = make_run(num_steps=STEPS, seed=1, tables={}, diagnostics=DiagnosticsConfig([]))
    assert load_runs(run.parent).runs["note"].tolist() == ["", ""]
    assert not (bare / "tensors.parquet").exists()
