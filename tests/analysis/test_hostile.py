"""Run directories that others made: nothing in one makes reading fail, wait or lose other runs."""

import contextlib
import json
import os
import random
import shutil

import pytest
import yaml

from analysis import load_runs
from analysis.figures import load
from analysis.report import page as report_page
from lowprec.config.schema import DiagnosticsConfig, SpikeConfig

STEPS = 24
NONSENSE = [None, True, "x", "", [], [1], {"a": [1]}, -1, 0, 10**400, 1e300, "nan", "inf", 0.5]
TEXTS = [b"", b"[]", b"5", b"null", b'"text"', b"{}", b"\0" * 300, b"[" * 10**5, b"\xff\xfe"]
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


@pytest.mark.parametrize("kind", [fifo, endless, sparse])
@pytest.mark.parametrize(
    "name", ["config.yaml", "status.json", "metrics.jsonl", "attempts.jsonl", "tensors.parquet"]
)
def test_pipes_devices_and_endless_files_are_refused(make_run, tmp_path, kind, name):
    run, good = make_run(num_steps=STEPS), make_run(num_steps=STEPS, seed=1)
    shutil.rmtree(run / "tensors")
    kind(run / name)
    runs = load_runs(tmp_path / "runs")
    notes = runs.runs.set_index("run")["note"]
    assert notes[good.name] == "" and len(runs.metrics) >= STEPS
    assert (notes[run.name] == "") == (name == "attempts.jsonl")
    with (
        pytest.warns(UserWarning, match="left out")
        if "tensors" in name
        else contextlib.nullcontext()
    ):
        assert set(runs.tensors("*")["run"]) >= {good.name}


ALIASES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(10))}}}\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    "text", ["[" * 10**5, "- " * 10**5, ALIASES], ids=["flow", "block", "alias"]
)
def test_a_config_that_nests_or_multiplies_without_end_is_damaged(make_run, text):
    run = make_run(num_steps=STEPS)
    whole = (run / "config.yaml").read_text() if text == ALIASES else ""
    (run / "config.yaml").write_text(f"{whole}\n{text}")
    assert note_of(run) == "config.yaml is damaged"


def spoil(run, rng):
    """Changes one file of a run; returns what was done."""
    files = ["config.yaml", "status.json", "metrics.jsonl", "timing.jsonl", "events.jsonl"]
    path = run / rng.choice([*files, "attempts.jsonl", "tensors.parquet", "tensors/0000.arrows"])
    data, kind = path.read_bytes() if path.exists() else b"", rng.randrange(4)
    start, value = rng.randrange(len(data) + 1), rng.choice(NONSENSE)
    if kind == 0:
        data = data[:start]
    elif kind == 1:
        data = data[:start] + rng.randbytes(rng.randrange(1, 40)) + data[start + 20 :]
    elif kind == 2:
        data = rng.choice(TEXTS)
    else:
        with contextlib.suppress(ValueError, TypeError, LookupError, yaml.YAMLError):
            data = with_value(path, data, value, rng)  # unless it is spoiled already
    path.write_bytes(data)
    return f"{path.name}, kind {kind}, {str(value)[:40]} at {start}"


def with_value(path, data, value, rng):
    """A file of rows or keys in which one has another value."""
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in data.splitlines()]
        row = rng.choice(rows)
        row[rng.choice(list(row))] = value
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    whole = node = yaml.safe_load(data.decode())
    while isinstance(node[key := rng.choice(list(node))], dict) and rng.random() < 0.9:
        node = node[key]
    node[key] = value
    return (json.dumps(whole) if path.suffix == ".json" else yaml.safe_dump(whole)).encode()


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory, write_run):
    root = tmp_path_factory.mktemp("two")
    for lr in (1e-3, 2e-3):
        write_run(root, num_steps=STEPS, steps=STEPS, lr=lr, diagnostics=WATCHED, flush=8)
    return root


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "seeds",
    [
        [*range(6), 202],
        pytest.param(range(6, 600), marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
    ids=["few", "many"],
)
def test_one_spoiled_run_takes_down_no_reader(two_runs, tmp_path, monkeypatch, seeds):
    monkeypatch.setattr(report_page, "get_plotlyjs", lambda: "")
    names = sorted(path.parent.name for path in two_runs.glob("**/status.json"))
    for seed in seeds:
        root, rng = tmp_path / str(seed), random.Random(seed)
        shutil.copytree(two_runs, root)
        bad, good = sorted(path.parent for path in root.glob("**/status.json"))
        done = [spoil(bad, rng) for _ in range(rng.choice([1, 1, 2, 4]))]
        try:
            runs = load_runs(root)
            assert runs.runs.set_index("run")["note"][good.name] == "", done
            frame = load("rms_and_loss").query(runs)
            assert (frame["run"] == good.name).sum() == STEPS, done
            assert good.name in set(load("loss_curves").query(runs)["run"])
            assert names[1] in report_page.make_page(runs)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {done}") from error
        shutil.rmtree(root)
