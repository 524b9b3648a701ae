"""Compiled blocks under several processes, and the benchmark of them."""

import json

import pytest

from lowprec.runs.read import find_runs, read_rows
from tests.small import WORDS, python


@pytest.mark.slow
def test_compiled_and_recomputed_blocks_give_the_losses_of_one_eager_process(ranks, make):
    eager = make({"name": "eager"})
    assert ranks("train", 1, configs=[eager])["codes"] == [0]
    expected = [row["loss"] for row in rows_of(eager)]
    for kind in ("ddp", "fsdp2"):
        for recomputed in (False, True):
            name = f"{kind}_{recomputed}"
            config = make({"name": name, "distributed.name": kind, "compile": True,
                           "checkpointing": recomputed})  # fmt: skip
            answer = ranks("train", 2, configs=[config])
            assert answer["codes"] == [0, 0], answer["logs"]
            assert [row["loss"] for row in rows_of(config)] == pytest.approx(expected, rel=1e-4)


def rows_of(config):
    [run] = find_runs(f"{config['run_dir']}/{config['name']}")
    return read_rows(run / "metrics.jsonl")


@pytest.mark.slow
def test_bench_scale_writes_a_correct_line_a_case(tmp_path):
    keys = [*WORDS, "batch_size=8", "num_steps=2", "evaluation=none"]
    python("-m", "experiments.benchmarks", "scale", *keys, cwd=tmp_path).check_returncode()
    [file] = (tmp_path / "runs" / "bench" / "scale").glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["case"] for line in lines] == ["one process", "ddp x 2", "fsdp2 x 2"]
    assert all(line["correct"] and line["ms"] > 0 for line in lines)
    assert lines[1]["loss"] == pytest.approx(lines[2]["loss"], rel=1e-4)
