"""Runs by optimizers and clipping policies: recorded, and resumed to the byte."""

import pytest
import torch

from lowprec.config.check import ConfigError
from lowprec.config.schema import TORCH_OPTIMIZERS
from lowprec.runs.attempts import CheckpointError
from lowprec.runs.read import scan_rows
from lowprec.train.checkpoint import list_checkpoints
from tests.same import contents, differing

MOMENTS = {"exp_avg", "exp_avg_sq"}
FP16 = {"scaler.name": "fixed", "precision.autocast": "fp16"}
RUNS = {  # optimizer: keys, kinds of its state
    "muon": ({"optimizer.zclip": 1.0, **FP16}, {*MOMENTS, "momentum"}),
    "adamw_zclip": ({"optimizer.zclip": 0.5}, MOMENTS),
    "adamw_skip_step": ({"optimizer.skip_sigmas": 1.5}, MOMENTS),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_resumes_to_the_bit(name, make_config, run_once, tmp_path, monkeypatch):
    monkeypatch.setattr("lowprec.optim.clipping.ZCLIP_FIRST", 3)
    monkeypatch.setattr("lowprec.optim.clipping.WINDOW", 6)
    changes = {"optimizer.name": name, "diagnostics.statistics": ["grad_norm"]}
    changes |= {"diagnostics.detail_every": 3, "diagnostics.block_every": 4}
    config = make_config(changes | RUNS[name][0])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_once(config, whole)
    run_once(config, cut, kill_at=7)
    torch.manual_seed(12345)  # the resumed attempt must not lean on the process's random state
    assert run_once(config, cut)[0].state == "finished"
    assert not differing(contents(whole), contents(cut))
    files = {path for path in contents(whole) if path.endswith((".parquet", ".safetensors"))}
    kinds = {"blocks", "details", "tensors", "model", "rng", "clipping", *RUNS[name][1]}
    assert {file.partition(".")[0] for file in files} == kinds
    rows = scan_rows(whole / "metrics.jsonl")[0]
    clipped = [row["clipped_grad_norm"] < 0.9999 * row["grad_norm"] for row in rows]
    assert name in TORCH_OPTIMIZERS or any(clipped) and not all(clipped)
    skipped = any(row["clipped_grad_norm"] == 0 for row in rows)
    assert skipped == (name == "adamw_skip_step")


def test_the_state_of_another_optimizer_is_refused(built, make_config, run_once, tmp_path):
    run_once(make_config({"optimizer.name": "muon", "num_steps": 1}), tmp_path / "muon")
    run_once(make_config({"num_steps": 1}), tmp_path / "adamw")
    for saved, name, kinds in (("muon", "adamw", "momentum"), ("adamw", "muon", "exp_avg")):
        state = built({"optimizer.name": name}).state
        with pytest.raises(CheckpointError, match=f"another optimizer's: it has exp_avg.*{kinds}"):
            state.load(list_checkpoints(tmp_path / saved)[-1])


def test_a_pattern_without_a_match_is_a_fault_of_the_config(built):
    with pytest.raises(ConfigError, match="override_32bit: 'visaul' matches no module"):
        built({"optimizer.optim_bits": 8, "optimizer.override_32bit": ["visaul"]})
