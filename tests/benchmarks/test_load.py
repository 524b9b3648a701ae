"""The benchmark of reading runs, on tiny ones."""

import json

import pytest

from experiments.benchmarks import load as bench_load
from experiments.benchmarks.load import LoadConfig

TINY = {"runs": [1, 2], "steps": 60, "tensors": 5, "repeats": 1}


@pytest.mark.slow
def test_each_case_has_a_line_and_no_run_is_left(tmp_path, capsys):
    bench_load.main(LoadConfig(**TINY, run_dir=str(tmp_path)))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = {(line["case"], line["shape"][0]) for line in lines}
    assert cases == {(case, n) for case in ("ended", "running") for n in "12"}
    assert all(line["correct"] for line in lines)
    assert all(line["ms"] > 0 and line["peak_gib"] > 0.01 for line in lines)
    assert [path.name for path in (tmp_path / "bench").iterdir()] == ["load"]


@pytest.mark.slow
def test_wrong_reading_has_no_number(tmp_path, capsys, monkeypatch):
    right = bench_load.generate
    monkeypatch.setattr(bench_load, "generate", lambda *run: 2 * right(*run))
    with pytest.raises(SystemExit, match="ended"):
        bench_load.main(LoadConfig(**{**TINY, "runs": [1]}, run_dir=str(tmp_path)))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line["ms"] is None and line["correct"] is False for line in lines)
