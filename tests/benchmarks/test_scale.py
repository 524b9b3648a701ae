"""The benchmark of weak scaling: its cases.

tests/distributed/test_slow.py runs its processes.
"""

import signal

import pytest

from experiments.benchmarks import scale
from lowprec.config.schema import Config

CASES = ["one process", "ddp x 8", "fsdp2 x 8", "ddp x 4", "fsdp2 x 4", "ddp x 2", "fsdp2 x 2"]


@pytest.fixture
def measured(lines_of, monkeypatch):
    """`measured(failing)`: the lines, and the cases that were measured."""
    monkeypatch.setattr(scale.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(scale, "pick_device", lambda name: scale.torch.device("cuda"))

    def run(failing=(), **keys):
        cases = []

        def measure(config, kind, size):
            cases.append(f"{kind} x {size}" if size > 1 else "one process")
            if cases[-1] in failing:
                raise RuntimeError("out of memory")
            return {"ms": 10.0 + size, "communication_ms": 0.5, "loss": 1.0, "memory_gib": 2.0}

        monkeypatch.setattr(scale, "measure", measure)
        try:
            lines = lines_of(scale.main, Config(batch_size=64, **keys))
        except SystemExit:
            lines = lines_of.lines
        return lines, cases

    return run


def test_first_comes_one_process_then_the_largest_number(measured):
    lines, cases = measured()
    assert cases == [line["case"] for line in lines] == CASES
    assert lines[0]["shape"] == "nano-bf16-adamw-s0, batch 64 a process, eager"
    assert lines[1]["rate"] == pytest.approx(1000 * 8 * 64 / 18, rel=1e-5)
    assert lines[1]["ratio"] == pytest.approx(11 / 18, rel=1e-5)
    assert lines[1]["communication"] == round(0.5 / 18, 4)


def test_a_case_that_fails_has_no_number_and_without_one_process_there_is_no_ratio(measured):
    lines, _ = measured(failing=CASES[2:4])
    assert [line["ms"] is None for line in lines[2:5]] == [True, True, False]
    lines, _ = measured(failing=CASES[:1])
    assert [line["ratio"] for line in lines[-7:]] == [None] * 7


def test_a_signal_ends_the_benchmark_without_a_line(lines_of, monkeypatch):
    def launch(launcher, work):
        raise scale.SignalException("stopped", signal.SIGTERM)

    monkeypatch.setattr(scale, "elastic_launch", launch)
    with pytest.raises(SystemExit) as ended:
        lines_of(scale.main, Config(device="cpu"))
    assert ended.value.code == 128 + signal.SIGTERM and not lines_of.lines
