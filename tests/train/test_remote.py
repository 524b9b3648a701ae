"""A copy behind a URL: complete, up to date, never the end of a run."""

import fsspec
import pytest

from experiments import train as entry
from experiments.preflight import preflight
from lowprec.run import find_runs, read_rows, read_status
from lowprec.validate import ConfigError


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    }


def test_the_copy_of_a_finished_run_is_the_run(make_config, tmp_path):
    entry.main(make_config({"remote_sync": f"file://{tmp_path}/copy"}))
    [run] = find_runs(tmp_path / "runs")
    copy = tmp_path / "copy" / run.parent.name / run.name
    assert files(copy) == files(run)  # retired checkpoints are gone there, too
    assert read_status(copy)["state"] == "finished"


def test_a_store_that_fails_is_an_event_and_the_run_goes_on(
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


def test_a_store_that_nobody_knows_is_refused(make_config):
    with pytest.raises(ConfigError, match="remote_sync=nowhere://copy"):
        preflight(make_config({"remote_sync": "nowhere://copy"}))
