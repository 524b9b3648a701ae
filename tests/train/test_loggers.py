"""Dashboards copy the record; a broken one stops nothing."""

import threading
import time

import pytest

from lowprec.runs.read import read_rows
from lowprec.train import loggers
from lowprec.train.loggers import build_logger


def test_tensorboard_holds_the_recorded_losses(make_config, run_once, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = build_logger("tensorboard", tmp_path / "run", {})
    run_once(make_config(), tmp_path / "run", logger=logger)
    logger.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    copied = [event.value for event in events.Scalars("loss")]
    recorded = [row["loss"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert copied == pytest.approx(recorded)


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_writes_a_run(make_config, run_once, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "run").mkdir()
    logger = build_logger("wandb", tmp_path / "run", {"a": 1})
    run_once(make_config({"num_steps": 3}), tmp_path / "run", logger=logger)
    logger.close()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


class Dashboard:
    """Takes rows; the calls named in `raising` raise, those in `hanging` never return."""

    def __init__(self, raising=(), hanging=()):
        self.raising, self.hanging, self.rows = raising, hanging, []
        self._act("init")

    def _act(self, call):
        if call in self.hanging:
            threading.Event().wait()
        if call in self.raising:
            raise self.raising[call]

    def log(self, rows):
        self._act("log")
        self.rows += rows

    def close(self):
        self._act("close")


@pytest.fixture
def start(monkeypatch, tmp_path):
    """A function: a logger of a broken dashboard, with short patience."""
    monkeypatch.setattr(loggers, "START_S", 0.2)
    monkeypatch.setattr(loggers, "END_S", 0.2)

    def start(**faults):
        monkeypatch.setattr(loggers, "LOGGERS", {"wandb": lambda *_: Dashboard(**faults)})
        return build_logger("wandb", tmp_path, {})

    return start


BROKEN = [
    *({"raising": {call: ConnectionError("no route")}} for call in ("init", "log", "close")),
    {"raising": {"init": SystemExit("no key")}},
    *({"hanging": (call,)} for call in ("init", "log", "close")),
]


@pytest.mark.parametrize("faults", BROKEN, ids=str)
def test_a_broken_dashboard_is_dropped_with_one_message(start, capsys, faults):
    began = time.monotonic()
    logger = start(**faults)
    for step in range(5):
        logger.log([{"step": step}])
    logger.close()
    assert time.monotonic() - began < 5
    assert capsys.readouterr().out.count("logger=wandb stopped") == 1


@pytest.mark.parametrize("faults", BROKEN, ids=str)
def test_training_with_a_broken_dashboard_leaves_the_same_record(
    start, make_config, run_once, tmp_path, faults, healthy_record
):
    logger = start(**faults)
    ended, _ = run_once(make_config(), tmp_path / "run", logger=logger)
    logger.close()
    assert ended.state == "finished"
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == healthy_record


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The folder of a run that is made once."""
    return tmp_path_factory.mktemp("healthy") / "run"


@pytest.fixture
def healthy_record(make_config, run_once, healthy):
    if not healthy.exists():
        run_once(make_config(), healthy)
    return (healthy / "metrics.jsonl").read_bytes()


def test_every_row_reaches_the_dashboard_before_close_returns(start, monkeypatch, tmp_path):
    taken = Dashboard()
    monkeypatch.setattr(loggers, "LOGGERS", {"wandb": lambda *_: taken})
    logger = build_logger("wandb", tmp_path, {})
    for step in range(100):
        logger.log([{"step": step}])
    logger.close()
    assert [row["step"] for row in taken.rows] == list(range(100))
