"""The benchmark of loading on tiny runs, and compact copies of runs."""

import json

import pytest

from analysis import load_runs
from experiments import compact
from experiments.benchmarks import load as bench_load
from experiments.benchmarks.load import BenchLoadConfig

TINY = {"runs": [1, 2, 3], "generated": 2, "steps": 60, "tensors": 5, "repeats": 1}


@pytest.mark.slow
def test_each_case_has_a_line_and_extrapolated_ones_are_marked(tmp_path, capsys):
    bench_load.main(BenchLoadConfig(**TINY, run_dir=str(tmp_path)))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = {(line["case"], line["shape"][0]): line for line in lines}
    assert set(told) == {(case, n) for case in ("ended", "ended, cold", "running") for n in "123"}
    guessed = told.pop(("ended, cold", "3"))
    assert guessed["extrapolated"] and guessed["correct"] is None
    assert all(line["correct"] and not line["extrapolated"] for line in told.values())
    assert all(line["ms"] > 0 and line["peak_gib"] > 0.01 for line in told.values())
    assert [path.name for path in (tmp_path / "bench").iterdir()] == ["load"]  # no runs are left


def test_wrong_reading_is_detected(tmp_path):
    config = BenchLoadConfig(**TINY, run_dir=str(tmp_path))
    sums = [bench_load.generate(tmp_path / f"run-{i:03d}", i, config) for i in range(2)]
    folder = bench_load.link(tmp_path, "ended", 2, 2)
    assert len(load_runs(folder).tensors("*conv1*")) == 120
    *_, right = bench_load.read(folder, sums, config, cold=False)
    *_, wrong = bench_load.read(folder, [sums[0], 2 * sums[1]], config, cold=False)
    assert right and not wrong


def test_compact_keeps_selected_tensors_of_ended_runs(make_run, tmp_path, capsys):
    runs = [make_run(num_steps=20, seed=seed) for seed in (0, 1)]
    left_out = make_run(num_steps=20, seed=2, steps=10, state="running")
    config = compact.CompactConfig(run=str(tmp_path / "runs"), out=str(tmp_path / "small"))
    compact.main(config)
    small = load_runs(tmp_path / "small")
    assert sorted(small.runs["run"]) == sorted(run.name for run in runs)
    assert list(small.tensors("*").columns) == ["run", "step", "visual.conv1.weight"]
    assert f"{left_out}: left out" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="exists already"):
        compact.main(config)
