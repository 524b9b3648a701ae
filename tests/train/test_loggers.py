"""Dashboards copy the record; a broken one stops nothing."""

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


class Dashboard:
    """Keeps the rows; the call named `broken` raises the error, or never returns."""

    def __init__(self, broken=None, error=None):
        self.broken, self.error, self.rows = broken, error, []
        self._act("init")

    def _act(self, call):
        if call == self.broken and self.error is None:
            threading.Event().wait()
        if call == self.broken:
            raise self.error

    def log(self, step, values):
        self.rows.append((step, values["loss"]))
        self._act("log")

    def close(self):
        self.rows.append("closed")
        self._act("close")


@pytest.fixture
def train(make_config, run_once, tmp_path, monkeypatch):
    """`train(broken, error)`: a run with a dashboard, and whether it ended within 20 s."""
    monkeypatch.setattr(loggers, "END_S", 0.2)

    def train(*broken):
        monkeypatch.setitem(loggers.DASHBOARDS, "wandb", lambda *_: Dashboard(*broken))
        began, run = time.monotonic(), tmp_path / "-".join(map(str, broken or ["whole"]))
        logger = Logger("wandb", run, {})
        dashboard = logger._dashboard
        ended, _ = run_once(make_config({"num_steps": 3, "log_every": 2}), run, logger=logger)
        logger.close()
        assert ended.state == "finished" and time.monotonic() - began < 20
        return run / "metrics.jsonl", dashboard

    return train


def test_the_record_reaches_the_dashboard_and_a_broken_one_changes_nothing(train, capsys):
    path, dashboard = train()
    rows = [(row["step"], row["loss"]) for row in read_rows(path)]
    assert dashboard.rows == [*rows, "closed"]
    for call in ("init", "log", "close"):
        for error in (ConnectionError("no route"), SystemExit("no key")):
            assert train(call, error)[0].read_bytes() == path.read_bytes()
            assert capsys.readouterr().out.count(f"stopped ({type(error).__name__}: no ") == 1
    assert train("close", None)[0].read_bytes() == path.read_bytes()
    assert capsys.readouterr().out.count("logger=wandb did not end within 0.2 s") == 1
