"""Dashboards copy the record; a broken one stops nothing."""

import json
import subprocess
import sys
import threading
import time

import pytest

from lowprec.runs.read import read_rows
from lowprec.train import loggers
from lowprec.train.loggers import Logger


def test_tensorboard_holds_the_recorded_losses(make_config, run_once, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = Logger("tensorboard", tmp_path / "run", {})
    run_once(make_config({"num_steps": 3}), tmp_path / "run", logger=logger)
    logger.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    copied = [event.value for event in events.Scalars("loss")]
    recorded = [row["loss"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert copied == pytest.approx(recorded)


def test_trackio_holds_the_recorded_losses(make_config, run_once, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read at the first import
    pytest.importorskip("trackio")
    for num_steps in (2, 4):  # the second attempt continues the run
        logger = Logger("trackio", tmp_path / "run", {"num_steps": num_steps})
        run_once(make_config({"num_steps": num_steps}), tmp_path / "run", logger=logger)
        logger.close()
    command = [sys.executable, "-m", "trackio.cli", "get", "metric", "--json"]
    command += ["--project", "lowprec", "--run", "run", "--metric", "loss"]
    done = subprocess.run(command, capture_output=True, check=True)
    copied = {row["step"]: row["value"] for row in json.loads(done.stdout)["values"]}
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert copied == pytest.approx({row["step"]: row["loss"] for row in rows})


class Dashboard:
    """The call named `broken` raises the error, or never returns."""

    def __init__(self, broken, error):
        self.broken, self.error = broken, error
        self._act("init")

    def _act(self, call):
        if call == self.broken and self.error is None:
            threading.Event().wait()
        if call == self.broken:
            raise self.error

    def log(self, step, values):
        self._act("log")

    def close(self):
        self._act("close")


SHORT = {"num_steps": 3, "log_every": 1}


@pytest.fixture(scope="module")
def healthy(tiny_config, run_once, tmp_path_factory):
    """The metrics of the run without a dashboard."""
    folder = tmp_path_factory.mktemp("healthy")
    run_once(tiny_config(folder, SHORT), folder)
    return (folder / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        *((call, ConnectionError("no route")) for call in ("init", "log", "close")),
        ("init", SystemExit("no key")),
        *((call, None) for call in ("init", "log", "close")),
    ],
    ids=str,
)
def test_training_with_a_broken_dashboard_leaves_the_same_record(
    make_config, run_once, tmp_path, healthy, monkeypatch, capsys, broken, error
):
    monkeypatch.setattr(loggers, "START_S", 0.2)
    monkeypatch.setattr(loggers, "END_S", 0.2)
    monkeypatch.setitem(loggers.DASHBOARDS, "wandb", lambda *_: Dashboard(broken, error))
    began = time.monotonic()
    logger = Logger("wandb", tmp_path / "run", {})
    ended, _ = run_once(make_config(SHORT), tmp_path / "run", logger=logger)
    logger.close()
    assert ended.state == "finished" and time.monotonic() - began < 20
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == healthy
    assert capsys.readouterr().out.count("logger=wandb stopped") == 1


class Taken(list):
    """A dashboard that keeps the rows."""

    def log(self, step, values):
        self.append((step, values))

    def close(self):
        self.append("closed")


def test_every_row_reaches_the_dashboard_before_close_returns(monkeypatch, tmp_path):
    taken = Taken()
    monkeypatch.setitem(loggers.DASHBOARDS, "wandb", lambda *_: taken)
    logger = Logger("wandb", tmp_path, {})
    for step in range(0, 100, 2):
        logger.log([{"step": step, "loss": 1.0}, {"step": step + 1, "loss": 2.0}])
    logger.close()
    assert taken == [(step, {"loss": 1.0 + step % 2}) for step in range(100)] + ["closed"]


def test_a_dashboard_that_lags_far_behind_is_dropped(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(loggers, "PENDING", 3)
    monkeypatch.setattr(loggers, "END_S", 0.2)
    monkeypatch.setitem(loggers.DASHBOARDS, "wandb", lambda *_: Dashboard("log", None))
    logger = Logger("wandb", tmp_path, {})
    logger.log([{"step": step} for step in range(10)])
    logger.close()
    assert capsys.readouterr().out.count("3 rows behind") == 1
