"""Dashboards copy the record; a broken one stops nothing."""

import pytest

from lowprec.run import read_rows
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


def test_a_logger_that_raises_is_left_out_loudly(capsys, monkeypatch, tmp_path):
    class Broken:
        def __init__(self, run, config):
            pass

        def log(self, rows):
            raise ConnectionError("no route")

        def close(self):
            raise ConnectionError("no route")

    monkeypatch.setattr("lowprec.train.loggers.LOGGERS", {"wandb": Broken})
    logger = build_logger("wandb", tmp_path, {})
    logger.log([{"step": 1}])
    logger.log([{"step": 2}])
    logger.close()
    assert capsys.readouterr().out.count("no route") == 1
