"""The benchmark of training steps on a tiny model: both loops, and which cases count."""

import pytest

from experiments.benchmarks import step as bench_step
from experiments.benchmarks.configs import StepConfig
from experiments.benchmarks.step import Measured
from lowprec.config.schema import ModelConfig, PrecisionConfig
from tests.benchmarks.conftest import by_case
from tests.small import MODEL

CASES = ["open_clip eager", "high", "switchback"]


def config_of(**keys):
    keys |= {"model": ModelConfig(**MODEL), "precision": PrecisionConfig(autocast="fp32")}
    return StepConfig(device="cpu", batch_size=8, log_every=2, num_workers=1, cases=CASES, **keys)


@pytest.mark.parametrize("preloaded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_both_loops_are_timed_in_windows(lines_of, squares, preloaded):
    config = config_of(preloaded=preloaded)
    config.data.train, config.data.augment = str(squares / "train-*.tar"), "crop_flip"
    rows = by_case(lines_of(bench_step.main, config))
    assert list(rows) == CASES
    for case, row in rows.items():
        assert row["correct"] and len(row["windows_ms"]) == bench_step.REPEATS
        assert sorted(row["windows_ms"])[1] == pytest.approx(row["ms"], rel=1e-4)
        assert row["rate"] == pytest.approx(8000 / row["ms"], rel=1e-4)
        assert row["ratio"] == pytest.approx(row["rate"] / rows[CASES[0]]["rate"], rel=1e-3)
        assert row["batches"] == ("in memory" if preloaded else "loaded")
        assert 0 <= row["data_wait"] <= 1
        assert ("ratio_to_high" in row) == (case != CASES[0])


def result(*losses):
    return Measured(list(losses), {"ms": 1.0})


def test_loop_with_other_losses_has_no_number(lines_of, monkeypatch):
    results = {CASES[0]: result(5, 5, 5), "high": result(5, 5, 5.01), "switchback": result(5, 5, 6)}
    monkeypatch.setattr(bench_step, "measure", lambda config, case: results[case])
    with pytest.raises(SystemExit, match="switchback"):
        lines_of(bench_step.main, config_of())
    rows = by_case(lines_of.lines)
    assert rows["switchback"]["correct"] is False and rows["switchback"]["ms"] is None
    assert rows["high"]["ratio"] == 1
