"""What a resume refuses, and what a full disk costs: nothing that was committed."""

import errno
import os
import shutil

import pytest

from lowprec.runs import durable
from lowprec.runs.attempts import CheckpointError
from lowprec.runs.read import read_rows
from lowprec.train.checkpoint import list_checkpoints

ORIGIN = {
    "config": {"optimizer": {"lr": 0.001, "eps": 1e-6}},
    "sources": {"data": "aa"},
    "code": {"train/loop.py": "11", "clip/model.py": "22"},
    "layout": {"workers": 2},
}


KEYS = {"save_every": 4, "log_every": 2}


@pytest.fixture(scope="module")
def killed(tiny_config, run_once, tmp_path_factory):
    """The folder of a run that was killed at step 7."""
    folder = tmp_path_factory.mktemp("killed")
    run_once(tiny_config(folder, KEYS), folder, provenance=ORIGIN, kill_at=7)
    return folder


@pytest.fixture
def run(make_config, run_once, tmp_path, killed):
    """`run(changes, **options)`: one attempt in one folder, with provenance ORIGIN by default."""

    def attempt(keys=None, *, provenance=ORIGIN, **options):
        config = make_config(KEYS | (keys or {}))
        return run_once(config, tmp_path / "run", provenance=provenance, **options)[0]

    attempt.folder = tmp_path / "run"
    attempt.killed_at_7 = lambda: shutil.copytree(killed, attempt.folder)
    return attempt


@pytest.mark.parametrize(
    ("group", "change", "line"),
    [
        ("config", {"optimizer": {"lr": 0.001}}, "config.optimizer.eps: 1e-06 -> absent"),
        ("sources", {"data": "bb"}, "sources.data: aa -> bb"),
        ("code", {"train/loop.py": "12", "clip/model.py": "22"}, "code.train/loop.py: 11 -> 12"),
        ("layout", {"workers": 3}, "layout.workers: 2 -> 3"),
    ],
)
def test_a_provenance_mismatch_is_refused_field_by_field_or_recorded_if_allowed(
    run, group, change, line
):
    run.killed_at_7()
    changed = {**ORIGIN, group: change}
    before = (run.folder / "metrics.jsonl").read_bytes()
    keys = {"code": "resume.allow_drift", "layout": "resume.allow_reshard"}
    with pytest.raises(CheckpointError) as error:  # another group's key does not help
        run({key: True for of, key in keys.items() if of != group}, provenance=changed)
    listed = [text.strip() for text in str(error.value).splitlines()[1:-1]]
    assert listed == [line] and "step_000000004" in str(error.value)
    assert (run.folder / "metrics.jsonl").read_bytes() == before
    if group not in keys:
        assert run().state == "finished"
        return
    assert run({keys[group]: True}, provenance=changed).state == "finished"
    [event] = read_rows(run.folder / "events.jsonl")
    assert event["step"] == 4 and line in " ".join(event["drift"])


def fill_disk(monkeypatch, is_full):
    """Makes every write to a path for which `is_full(path)` is true fail half done."""
    write = os.write

    def limited(descriptor, data):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if is_full(path):
            write(descriptor, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", limited)


def test_a_full_disk_at_the_record_stops_the_run_with_a_clean_record(run, monkeypatch):
    fill_disk(monkeypatch, lambda path: path.endswith("metrics.jsonl") and full)
    full = False

    def fill(built):
        nonlocal full
        full = True

    message = r"metrics\.jsonl cannot be written: No space left.*bytes are free"
    with pytest.raises(durable.DiskError, match=message):
        run({"save_every": 2, "keep_checkpoints": None}, at={8: fill})
    rows = read_rows(run.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert (run.folder / "metrics.jsonl").read_bytes().endswith(b"\n")
    assert [p.name for p in list_checkpoints(run.folder)] == ["step_000000004", "step_000000006"]
    full = False
    assert run().state == "finished"


def test_checkpoints_that_do_not_fit_leave_nothing_and_are_tried_again(run, monkeypatch):
    """As long as no three in a row fail."""
    failing = [f".tmp.step_{step:09d}/exp_avg_sq.safetensors" for step in (2, 4, 8, 10)]
    fill_disk(monkeypatch, lambda path: path.endswith(tuple(failing)))
    assert run({"save_every": 2}).state == "finished"
    assert [p.name for p in list_checkpoints(run.folder)] == ["step_000000006", "step_000000012"]
    assert not list((run.folder / "checkpoints").glob(".tmp*"))
    events = read_rows(run.folder / "events.jsonl")
    assert [event["step"] for event in events] == [2, 4, 8, 10]
    assert all("No space left" in event["not saved"] for event in events)


def test_the_third_failure_in_a_row_ends_the_run_and_keeps_the_old_checkpoint(run, monkeypatch):
    def full(path):
        return "checkpoints/.tmp" in path and not path.count("step_000000002")

    fill_disk(monkeypatch, full)
    with pytest.raises(CheckpointError, match=r"step_000000008 cannot be saved.*No space left"):
        run({"save_every": 2})
    assert [p.name for p in list_checkpoints(run.folder)] == ["step_000000002"]
    monkeypatch.undo()
    assert run({"save_every": 2}).state == "finished"


def test_a_run_killed_after_its_last_save_is_finished_and_refuses_fewer_steps(run):
    for _ in range(2):  # `train` itself does not ask whether the run has ended
        assert run().state == "finished"
    assert len(read_rows(run.folder / "metrics.jsonl")) == 12
    with pytest.raises(CheckpointError, match="is at step 12, beyond num_steps=11"):
        run({"num_steps": 11})
