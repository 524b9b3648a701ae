"""A copy behind a URL: complete, up to date, never the end of a run."""

import contextlib
import shutil
import threading
import time
from pathlib import Path

import fsspec
import pytest

from experiments import train as entry
from lowprec.config.check import ConfigError
from lowprec.runs.attempts import step_of
from lowprec.runs.read import find_runs, read_rows, read_status
from lowprec.runs.record import Record
from lowprec.train.checkpoint import list_checkpoints, retire, verify
from lowprec.train.preflight import preflight
from lowprec.train.remote import RemoteCopy
from lowprec.train.snapshots import list_snapshots


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    }


@pytest.fixture
def record(tmp_path):
    record = Record(tmp_path / "runs" / "run" / "one")
    record.status("running")
    yield record
    record.close()


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Names in the copy of the files that were uploaded, in this order."""
    store, names = fsspec.get_filesystem_class("file"), []
    put = store.put_file

    def put_file(self, source, target, **options):
        names.append(Path(target).relative_to(tmp_path / "copy").as_posix())
        return put(self, source, target, **options)

    monkeypatch.setattr(store, "put_file", put_file)
    return names


def test_the_copy_of_a_run_of_several_attempts_is_the_run(make_config, tmp_path, names):
    url = f"file://{tmp_path}/copy"
    changes = {"remote_sync": url, "schedule.name": "constant", "keep_checkpoints": 2}
    for num_steps in (2, 4, 6):
        names.clear()
        entry.main(make_config({**changes, "num_steps": num_steps, "save_every": 2}))
    [run] = find_runs(tmp_path / "runs")
    copy = tmp_path / "copy" / run.parent.name / run.name
    assert files(copy) == files(run)  # retired checkpoints are gone there, too
    assert read_status(copy)["state"] == "finished"
    saved = [name.split("/")[3:] for name in names if "/checkpoints/" in name]
    assert saved[-1][1] == "manifest.json"
    shutil.rmtree(run)  # as on a new machine
    with contextlib.closing(Record(run)) as record:
        RemoteCopy(url, record).close(5)
    assert list(copy.glob("checkpoints/*"))


def test_the_copy_of_a_finished_run_keeps_the_weights_alone_too(make_config, tmp_path):
    changes = {"keep_checkpoints": None, "num_steps": 4, "save_every": 2}
    entry.main(make_config({**changes, "remote_sync": f"file://{tmp_path}/copy"}))
    [run] = find_runs(tmp_path / "runs")
    copy = tmp_path / "copy" / run.parent.name / run.name
    assert files(copy) == files(run)
    [checkpoint] = list_checkpoints(copy)
    assert not list(checkpoint.glob("exp_avg*")) and verify(checkpoint)["step"] == 4


@pytest.mark.parametrize("error", [ConnectionError("is gone"), FileNotFoundError("is gone")])
def test_a_failing_store_is_an_event_and_the_run_continues(
    make_config, tmp_path, monkeypatch, capsys, error
):
    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", refuse)
    entry.main(make_config({"remote_sync": "memory://copy", "num_steps": 2}))
    [run] = find_runs(tmp_path / "runs")
    assert read_status(run)["state"] == "finished"
    assert any(
        "is gone" in event.get("not copied", "") for event in read_rows(run / "events.jsonl")
    )
    assert "memory://copy/run/" in capsys.readouterr().out


def test_a_run_does_not_wait_for_a_store_that_hangs(record, monkeypatch):
    released = threading.Event()

    def hang(*arguments):
        released.wait()
        raise ConnectionError("the store is gone")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", hang)
    copy = RemoteCopy("memory://copy", record)
    copy.start()
    before = time.monotonic()
    copy.close(0.2)
    assert time.monotonic() - before < 2
    [event] = read_rows(record.run / "events.jsonl")
    assert "not finished within 0.2 s" in event["not copied"]
    released.set()
    copy._update.join(5)
    assert read_rows(record.run / "events.jsonl") == [event]  # it may be another process's


def save(run, step, kind="checkpoints"):
    folder = run / kind / f"step_{step:09d}"
    folder.mkdir(parents=True)
    for name in ("manifest.json", "model.safetensors"):
        (folder / name).write_text("1")


def update(remote):
    remote.start()
    remote._update.join(5)
    assert not remote._update.is_alive()


def test_a_checkpoint_that_is_retired_during_an_upload_does_not_end_it(
    record, tmp_path, monkeypatch, capsys
):
    for step in range(1, 5):
        save(record.run, step)
    store = fsspec.get_filesystem_class("file")
    put = store.put_file

    def put_file(self, source, target, **options):
        if "checkpoints" in target:
            retire(record.run / "checkpoints", 1)
        return put(self, source, target, **options)

    monkeypatch.setattr(store, "put_file", put_file)
    update(RemoteCopy(f"file://{tmp_path}/copy", record))
    assert capsys.readouterr().out == ""
    assert files(tmp_path / "copy" / "run" / "one") == files(record.run)


def test_a_copy_loses_what_the_run_has_retired_and_keeps_later_states_and_files_of_others(
    record, tmp_path
):
    copy = tmp_path / "copy" / "run" / "one"
    for step, kind in ((500, "checkpoints"), (50_000, "checkpoints"), (2, "snapshots"),
                       (3, "snapshots"), (900, "snapshots"), (5000, "snapshots")):  # fmt: skip
        save(copy, step, kind)
    for name in ("notes.txt", "checkpoints/notes.txt"):
        (copy / name).write_text("mine")
    before = files(copy)
    save(record.run, 1000)
    remote = RemoteCopy(f"file://{tmp_path}/copy", record)
    update(remote)
    assert len(list_snapshots(copy)) == 4  # the run has none: this may be a new disk
    save(record.run, 3, "snapshots")
    update(remote)
    after = files(copy)
    assert files(record.run).items() <= after.items()
    lost = {step_of(Path(name).parent) for name in before.keys() - after.keys()}
    assert lost == {500, 2, 900}


def test_a_failing_copy_of_a_replaced_run_directory_is_only_a_warning(record, monkeypatch, capsys):
    copy = RemoteCopy("memory://copy", record)
    monkeypatch.setattr(copy, "_copy", lambda: threading.Event().wait(1))
    shutil.rmtree(record.run)
    copy.close(0.1)
    assert "not finished within 0.1 s" in capsys.readouterr().out


def test_an_unknown_store_is_refused(make_config):
    with pytest.raises(ConfigError, match="remote_sync=nowhere://copy"):
        preflight(make_config({"remote_sync": "nowhere://copy"}))
