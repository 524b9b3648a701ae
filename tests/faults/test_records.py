"""Records under clocks that step back, damaged lines, non-finite numbers and other machines."""

import contextlib
import itertools
import json
import os
import shutil
import time

import numpy as np
import pytest

from experiments import train
from lowprec.runs.attempts import CheckpointError
from lowprec.runs.read import find_runs, read_rows, read_status, scan_rows
from lowprec.runs.record import Record, RecordError
from lowprec.runs.tables import read_tensors
from lowprec.train.checkpoint import list_checkpoints


@pytest.fixture(scope="module")
def calm(tiny_config, run_once, tmp_path_factory):
    """The metrics of the undisturbed run."""
    folder = tmp_path_factory.mktemp("calm")
    run_once(tiny_config(folder, {}), folder)
    return (folder / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def stopped_runs(tmp_path_factory):
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture
def stopped(make_config, run_once, stopped_runs, tmp_path):
    """`stopped(7, 9)`: a copy of a run that a signal stopped at step 7, and once more at 9."""

    def copy(*steps):
        trained = stopped_runs / "-".join(map(str, steps))
        if not trained.exists():
            if steps[:-1]:
                shutil.copytree(copy(*steps[:-1]), trained)
                shutil.rmtree(tmp_path / "run")
            run_once(make_config(), trained, stop_at=steps[-1])
        return shutil.copytree(trained, tmp_path / "run")

    return copy


@pytest.mark.parametrize("shift_s", [-(10**9), 10**9])
def test_a_stepping_clock_changes_nothing(
    make_config, run_once, stopped, calm, monkeypatch, shift_s
):
    run = stopped(10)
    assert (read_status(run)["state"], len(list_checkpoints(run))) == ("preempted", 2)
    for age, path in enumerate(sorted(run.rglob("*"), reverse=True)):
        os.utime(path, (10**9 + age, 10**9 + age))  # the newest looks oldest
    now, calls = time.time, itertools.count(1)  # and the clock goes on stepping
    monkeypatch.setattr(time, "time", lambda: now() + shift_s * next(calls))
    ended, _ = run_once(make_config(), run)
    assert (ended.state, ended.step) == ("finished", 12)
    assert (run / "metrics.jsonl").read_bytes() == calm
    timing = read_rows(run / "timing.jsonl")
    assert [(row["attempt"], row["step"]) for row in timing] == [
        (0, 3), (0, 4), (0, 6), (0, 8), (0, 9), (0, 10), (1, 12)
    ]  # fmt: skip
    assert all(row["wall_s"] >= 0 and row["step_ms"] > 0 for row in timing)
    assert all(0 <= row["data_wait"] <= 1 and row["images_per_s"] > 0 for row in timing)


DAMAGE = {
    "NUL": b"\0" * 512 + b"\n",
    "half a row": b'{"attempt": 0, "po\n',
    "half a character": b'{"note": "\xc3\n',
    "no map": b"[]\n",
    "deep": b"[" * 10**5 + b"\n",
    "torn end": b'{"attempt": 0',
}


def test_damage_in_attempts_and_skips_does_not_stop_a_resume(make_config, run_once, stopped, calm):
    run = stopped(7)
    for name in ("attempts", "skips"):
        path = run / f"{name}.jsonl"
        *lines, torn = DAMAGE.values()
        rest = path.read_bytes() if path.exists() else b""
        path.write_bytes(b"".join(lines) + rest + torn)
    ended, _ = run_once(make_config(), run)
    assert ended.state == "finished"
    assert (run / "metrics.jsonl").read_bytes() == calm
    rows, _ = scan_rows(run / "attempts.jsonl")
    assert rows[-1]["attempt"] > rows[0]["attempt"] == 0
    streams = sorted(path.name for path in (run / "tensors").glob("*.arrows"))
    assert streams == ["0000.arrows", f"{rows[-1]['attempt']:04d}.arrows"]


@pytest.mark.parametrize("kept", [None, 0, 10], ids=["deleted", "empty", "cut"])
def test_lost_attempts_lose_no_step(make_config, run_once, stopped, calm, kept):
    run = stopped(7, 9)
    attempts = run / "attempts.jsonl"
    attempts.unlink() if kept is None else os.truncate(attempts, kept)
    assert run_once(make_config(), run)[0].state == "finished"
    assert (run / "metrics.jsonl").read_bytes() == calm
    recorded = [step for steps, _, _ in read_tensors(run) for step in steps.tolist()]
    assert recorded == list(range(1, 13))
    assert len(list((run / "tensors").glob("*.arrows"))) == 3


@pytest.mark.parametrize("moment", ["before a resume", "before the end"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "tensors/0000.arrows"])
def test_a_zeroed_file_is_named(make_config, run_once, stopped, name, moment):
    run = stopped(7)

    def zero(built=None):
        path = run / name
        path.write_bytes(bytes(path.stat().st_size))

    if moment == "before a resume":
        zero()
    lacking = run / name.split("/")[0]
    with pytest.raises(RecordError, match=f"{lacking} lacks .* steps, the first is 1"):
        run_once(make_config(), run, at={12: zero})
    assert read_status(run)["state"] != "finished"


def test_a_resume_names_the_file_whose_row_has_no_step_or_loss(make_config, run_once, stopped):
    path = stopped(7) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    for row in ("{}", '{"step": 2}', '{"step": [1], "loss": 1.0}', '{"step": 2.5}'):
        changed = [lines[0], row.ljust(len(lines[1])), *lines[2:]]
        path.write_text("\n".join(changed) + "\n")
        with pytest.raises(RecordError, match=f"{path} lacks 1 of 7 steps, the first is 2"):
            run_once(make_config(), path.parent)


def test_lost_checkpoints_are_an_error_never_step_0(make_config, run_once, stopped):
    run = stopped(7)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="was saved at step 7; its checkpoints are gone"):
        run_once(make_config(), run)
    (run / "status.json").unlink()
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="its checkpoints and status.json are gone"):
        run_once(make_config(), run)
    assert (run / "metrics.jsonl").read_bytes() == before
    (run / "metrics.jsonl").unlink()
    (run / "attempts.jsonl").write_text('{"attempt": 0, "saved": 4}\n')
    with pytest.raises(CheckpointError, match="was saved at step 4; its checkpoints are gone"):
        run_once(make_config(), run)


@pytest.mark.parametrize("made_anew", [True, False])
def test_nothing_is_written_into_another_run(make_config, run_once, tmp_path, made_anew):
    run, others = tmp_path / "run", {}

    def replace(built):
        shutil.rmtree(run)
        if made_anew:
            with contextlib.closing(Record(run)) as other:
                other.append_tensors([1], {"a": np.zeros((1, 1))}, ["a"], "blocks")
            others.update((path, path.read_bytes()) for path in run.rglob("*.*"))

    with pytest.raises(RecordError, match="was deleted or replaced"):
        run_once(make_config(), run, at={5: replace})
    assert {path: path.read_bytes() for path in run.rglob("*.*")} == others
    assert len(others) == 2 * made_anew


def strict(path):
    """The values of a .json or .jsonl file; Python's own NaN and Infinity are no JSON."""

    def refuse(text):
        raise AssertionError(f"{path}: {text}")

    texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    return [json.loads(text, parse_constant=refuse) for text in texts]


SPOILT = {  # a run with non-finite numbers in it
    "diverged": {"optimizer.lr": 1e30},
    "skipped": {"precision.autocast": "fp16", "scaler.name": "dynamic", "scaler.init_scale": 1e30},
}


@pytest.mark.parametrize("changes", SPOILT.values(), ids=SPOILT.keys())
def test_every_json_file_of_a_run_is_strict_json(make_config, squares, changes):
    config = make_config({**changes, "evaluation.name": "both", "num_steps": 3})
    train.main(config)
    (run,) = find_runs(config.run_dir)
    files = [path for path in run.rglob("*.json*")] + list(squares.glob(".index/*.json"))
    names = {path.name for path in files}
    needed = {"metrics.jsonl", "timing.jsonl", "attempts.jsonl", "status.json", "environment.json"}
    assert needed <= names
    assert ("manifest.json" in names) == (json.loads(
        (run / "status.json").read_text())["state"] == "finished")  # fmt: skip
    values = str([value for path in files for value in strict(path)])
    assert "'nan'" in values or "'inf'" in values
