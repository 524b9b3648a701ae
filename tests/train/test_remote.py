"""A copy behind a URL: complete, up to date, never the end of a run."""

import contextlib
import shutil
import threading
import time
from pathlib import Path

import fsspec
import pytest

from experiments import train as entry
from lowprec.config.check import ConfigError, RunError
from lowprec.config.preflight import preflight
from lowprec.runs.read import find_runs, read_rows, read_status
from lowprec.runs.record import Record
from lowprec.train import remote
from lowprec.train.step import TrainStep


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    }


@pytest.fixture
def traffic(monkeypatch):
    """What is said and done, in order: ("put", name), ("rm", name), ("said", line)."""
    store, log = fsspec.get_filesystem_class("file"), []
    put, remove = store.put_file, store.rm_file

    def put_file(self, source, target, **options):
        log.append(("put", target.partition("/copy/run/")[2].partition("/")[2]))
        return put(self, source, target, **options)

    def rm_file(self, path):
        log.append(("rm", path.partition("/copy/run/")[2].partition("/")[2]))
        return remove(self, path)

    monkeypatch.setattr(store, "put_file", put_file)
    monkeypatch.setattr(store, "rm_file", rm_file)
    monkeypatch.setattr(
        remote, "print", lambda line, **options: log.append(("said", line)), raising=False
    )
    return log


@pytest.fixture
def record(tmp_path):
    record = Record(tmp_path / "runs" / "run" / "one")
    record.status("running")
    yield record
    record.close()


def test_the_copy_of_a_finished_run_is_the_run(make_config, tmp_path):
    entry.main(make_config({"remote_sync": f"file://{tmp_path}/copy"}))
    [run] = find_runs(tmp_path / "runs")
    copy = tmp_path / "copy" / run.parent.name / run.name
    assert files(copy) == files(run)  # retired checkpoints are gone there, too
    assert read_status(copy)["state"] == "finished"


def test_a_failing_store_is_an_event_and_the_run_continues(
    make_config, tmp_path, monkeypatch, capsys
):
    def refuse(*arguments, **options):
        raise ConnectionError("the store is gone")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", refuse)
    entry.main(make_config({"remote_sync": "memory://copy"}))
    [run] = find_runs(tmp_path / "runs")
    assert read_status(run)["state"] == "finished"
    events = read_rows(run / "events.jsonl")
    assert any("the store is gone" in event.get("not copied", "") for event in events)
    assert "memory://copy/run/" in capsys.readouterr().out


def test_a_later_attempt_copies_what_has_changed_and_removes_what_is_gone(
    make_config, tmp_path, traffic
):
    for num_steps in (4, 8, 12):
        traffic.clear()
        changes = {"remote_sync": f"file://{tmp_path}/copy", "schedule.name": "constant"}
        entry.main(make_config({**changes, "num_steps": num_steps, "keep_checkpoints": 2}))
    [run] = find_runs(tmp_path / "runs")
    assert files(tmp_path / "copy" / "run" / run.name) == files(run)
    put = {name for kind, name in traffic if kind == "put"}
    assert "metrics.jsonl" in put and "checkpoints/step_000000012/manifest.json" in put
    assert not any(name.startswith("checkpoints/step_000000008/") for name in put)
    removed = [name for kind, name in traffic if kind == "rm"]
    assert removed[0] == "checkpoints/step_000000004/manifest.json" and len(removed) > 3


def test_a_new_machine_without_checkpoints_removes_none_from_the_copy(make_config, tmp_path):
    url = f"file://{tmp_path}/copy"
    entry.main(make_config({"remote_sync": url}))
    [run] = find_runs(tmp_path / "runs")
    copy = tmp_path / "copy" / "run" / run.name
    before = {name for name in files(copy) if name.startswith("checkpoints/")}
    shutil.rmtree(run)
    with contextlib.closing(Record(run)) as record:
        remote.RemoteCopy(url, record).close()
    assert before and before <= set(files(copy))


def test_a_failed_attempt_prints_its_reason_before_it_is_copied(
    make_config, tmp_path, traffic, monkeypatch
):
    call, calls = TrainStep.__call__, iter(range(1, 100))

    def fail_at_6(step, batch):
        if next(calls) == 6:
            raise MemoryError("as told")
        return call(step, batch)

    monkeypatch.setattr(TrainStep, "__call__", fail_at_6)
    with pytest.raises(RunError, match="out of memory"):
        entry.main(make_config({"remote_sync": f"file://{tmp_path}/copy"}))
    [run] = find_runs(tmp_path / "runs")
    copy = tmp_path / "copy" / "run" / run.name
    assert read_status(copy)["state"] == "failed"
    copied, there = files(copy), files(run)
    assert set(copied) == set(there)
    assert all(copied[name] == there[name] for name in there if not name.endswith(".arrows"))
    [said] = [number for number, (kind, _) in enumerate(traffic) if kind == "said"]
    assert "failed: MemoryError: as told" in traffic[said][1]
    assert ("put", "status.json") in traffic[said:]


def test_a_stopped_run_does_not_wait_for_a_store_that_hangs(record, monkeypatch):
    going_on = threading.Event()

    def hang(*arguments):
        going_on.wait()
        raise ConnectionError("the store is gone")

    monkeypatch.setattr(remote, "STOPPED_S", 0.2)
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", hang)
    copy = remote.remote_copy("memory://copy", record)
    copy.start()
    before = time.monotonic()
    copy.close("stopped")
    assert time.monotonic() - before < 2
    events = Path(record.run / "events.jsonl").read_bytes()
    assert b"not done in 0.2 s" in events
    going_on.set()
    copy._thread.join(5)
    assert not copy._thread.is_alive()
    assert (record.run / "events.jsonl").read_bytes() == events  # it may be another process's


def test_a_missing_bucket_is_reported(record, monkeypatch):
    def refuse(*arguments):
        raise FileNotFoundError("no such bucket")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", refuse)
    remote.remote_copy("memory://copy", record).close()
    [event] = read_rows(record.run / "events.jsonl")
    assert "no such bucket" in event["not copied"]


def test_an_unknown_store_is_refused(make_config):
    with pytest.raises(ConfigError, match="remote_sync=nowhere://copy"):
        preflight(make_config({"remote_sync": "nowhere://copy"}))
