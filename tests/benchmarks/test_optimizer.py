"""The benchmark of optimizers on a tiny model; ours counts only if it moves as its definition."""

import sys

import pytest

from experiments.benchmarks import optimizer as bench_optimizer
from lowprec.config.schema import Config, ModelConfig
from lowprec.optim import StableAdamW
from tests.benchmarks.conftest import by_case
from tests.small import MODEL


@pytest.fixture
def measure(lines_of, monkeypatch):
    """`measure()`: the lines by case."""
    monkeypatch.setattr(bench_optimizer, "REPEATS", 1)
    for library in ("torchao", "torchao.optim"):  # compiles for minutes
        monkeypatch.setitem(sys.modules, library, None)

    def run():
        config = Config(device="cpu", model=ModelConfig(**MODEL))
        return by_case(lines_of(bench_optimizer.main, config))

    return run


def test_cases_are_compared_with_torchs_fused_adamw(measure):
    lines = measure()
    base = lines[bench_optimizer.BASE]
    assert base["ratio"] == 1 and base["correct"] is None
    for case in bench_optimizer.OURS:
        line = lines[case]
        assert line["correct"] is True
        assert line["ratio"] == pytest.approx(base["ms"] / line["ms"], rel=1e-3)
    for line in lines.values():
        assert line["ms"] or "ModuleNotFoundError" in line["reason"]


def test_optimizer_that_differs_from_its_definition_has_no_number(measure, lines_of, monkeypatch):
    class Wrong(StableAdamW):
        def __init__(self, params, lr, fused=None, **options):
            super().__init__(params, lr=lr if fused is False else 2 * lr, fused=fused, **options)

    monkeypatch.setattr(bench_optimizer, "StableAdamW", Wrong)
    with pytest.raises(SystemExit, match="StableAdamW float32 .*, AdamW float32"):
        measure()
    wrong = {line["case"] for line in lines_of.lines if line["correct"] is False}
    assert wrong == {case for case in bench_optimizer.OURS if "definition" not in case}
