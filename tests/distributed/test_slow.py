"""Compiled blocks under several processes, captured steps on GPUs, and the benchmark of them."""

import json
from pathlib import Path

import pytest
import torch

from lowprec.runs.read import find_runs, read_rows
from tests.small import WORDS, python


@pytest.mark.slow
def test_compiled_and_recomputed_blocks_give_the_losses_of_one_eager_process(ranks, make):
    eager = make({"name": "eager"})
    ranks("train", 1, configs=[eager])
    expected = [row["loss"] for row in rows_of(eager)]
    for kind in ("ddp", "fsdp2"):
        for recomputed in (False, True):
            name = f"{kind}_{recomputed}"
            config = make({"name": name, "distributed.name": kind, "compile": True,
                           "checkpointing": recomputed})  # fmt: skip
            ranks("train", 2, configs=[config])
            assert [row["loss"] for row in rows_of(config)] == pytest.approx(expected, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_captured_steps_of_two_gpus_record_what_eager_ones_do(make, tmp_path, name, recomputed):
    """Also after evaluations, a resume and, where it can change, a change of the precision."""
    changes = {"device": "cuda", "compile": True, "distributed.name": name, "deterministic": True}
    changes |= {"model.patch_dropout": 0.5, "precision.autocast": "bf16"}
    changes |= {"checkpointing": recomputed}
    if name == "ddp":
        changes |= {"precision_change": {"step": 3, "recipe": "switchback"}}
    else:
        changes |= {"precision.recipe": "switchback"}
    changes |= {"schedule.name": "constant", "schedule.warmup_steps": 0}
    changes |= {"evaluation.name": "both", "eval_every": 2}
    changes |= {"diagnostics.block_every": 2, "diagnostics.detail_every": 2}
    eager, whole, cut = (make(changes | {"name": name}) for name in ("eager", "whole", "cut"))
    file, script = tmp_path / "configs.json", Path(__file__).with_name("captured.py")
    beginnings = [("eager", eager), ("captured", whole), ("captured", cut | {"num_steps": 4})]
    for trained in (beginnings, [("captured", cut)]):
        file.write_text(json.dumps(trained))
        free_port = ("--standalone", "--local-addr", "127.0.0.1")
        torchrun = ("-m", "torch.distributed.run", *free_port, "--nproc-per-node", "2")
        ended = python(*torchrun, script, file)
        assert ended.returncode == 0, ended.stderr
    assert len(rows_of(eager)) == 6
    assert rows_of(eager) == rows_of(whole) == rows_of(cut)


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
