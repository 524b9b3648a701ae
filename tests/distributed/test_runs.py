"""The record of several processes is that of one, through resumes in other numbers of them."""

import functools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lowprec.runs.read import find_runs, read_rows, read_status
from lowprec.runs.tables import TABLES, read_tensors
from lowprec.train.checkpoint import list_checkpoints

RECORDED = {
    "diagnostics.block_every": 2,
    "diagnostics.detail_every": 2,
    "optimizer.name": "stable_adamw",
    "optimizer.clip_threshold": 1.0,
    "optimizer.skip_sigmas": 6.0,
    "optimizer.lr": 1e-3,
    "model.patch_dropout": 0.5,
    "schedule.name": "constant",  # so that num_steps may grow
    "evaluation.name": "both",
    "eval_every": 3,
}
LOCKED = {
    "optimizer.lr_scale": {"image": 0, "text_projection": 0.5},
    "optimizer.name": "adamw",
    "optimizer.clip_threshold": None,
    "optimizer.skip_sigmas": None,
}
MUON = {"optimizer.name": "muon", "optimizer.clip_threshold": None}
CHANGED = {"precision_change": {"step": 2, "recipe": "autograd_high"}}
STOCHASTIC = {
    "precision.recipe": "nvfp4_rht_sr",
    "optimizer.optim_bits": 8,
    "optimizer.min_8bit_size": 300,
}


@pytest.fixture(scope="module")
def finished(ranks, make, once):
    """Runs by name: of one process; of two; of two, then one, then two, from the same directory."""
    folder = once("of_ranks", functools.partial(train_all, ranks, make))
    return {path.parent.name: path for path in find_runs(folder)}


def train_all(ranks, make, folder):
    kinds = ("ddp", "fsdp2")

    def config_of(name, kind, steps, changes=None):
        keys = {"distributed.name": kind, "name": name, "num_steps": steps, "run_dir": str(folder)}
        return make({**RECORDED, **keys, **(changes or {})})

    def quiet(name, kind, steps, changes=None):
        """Without an evaluation."""
        changes = {"evaluation.name": "none", **(changes or {})}
        return config_of(f"{name}_{kind}", kind, steps, changes)

    def stochastic(name, steps):
        return quiet(f"stochastic_{name}", "ddp", steps, STOCHASTIC)

    def changing(steps):
        return [quiet("changing", kind, steps) for kind in kinds]

    def others(*kinds):
        """Runs of three steps whose configs differ more."""
        locked = [quiet("locked", kind, 3, LOCKED) for kind in kinds]
        return [*locked, quiet("changed", kinds[0], 3, CHANGED), quiet("muon", kinds[0], 3, MUON)]

    two = [config_of(f"two_{kind}", kind, 6) for kind in kinds]
    answer = ranks("train", 2, configs=[*two, *others(*kinds), *changing(2)])
    ranks("train", 2, configs=[stochastic("whole", 4), stochastic("parts", 2)])
    assert "finished at step 6" in answer["logs"][0] and not answer["logs"][1]
    ranks("train", 1, configs=[config_of("one", "none", 6), *others("none"), *changing(4)])
    ranks("train", 2, configs=[stochastic("parts", 4), *changing(6)])


def assert_close_records(a, b):
    left, right = read_rows(a / "metrics.jsonl"), read_rows(b / "metrics.jsonl")
    assert [row["step"] for row in left] == [row["step"] for row in right]
    for x, y in zip(left, right, strict=True):
        assert {"loss", "grad_norm", "logit_scale"} <= set(x) & set(y)
        both = set(x) & set(y)
        assert all(x[key] == pytest.approx(y[key], rel=2e-5) for key in both), (x, y)
    for table in TABLES:
        tables = [list(read_tensors(path, table)) for path in (a, b)]
        assert tables[0] and tables[0][0][2] == tables[1][0][2]
        for name in tables[0][0][1]:
            x, y = (np.concatenate([values[name] for _, values, _ in t]) for t in tables)
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-6, err_msg=f"{table} {name}")


@pytest.mark.parametrize("name", ["two_ddp", "two_fsdp2", "changing_ddp", "changing_fsdp2"])
def test_the_record_of_several_processes_is_that_of_one(finished, name):
    status = read_status(finished[name])
    assert (status["state"], status["step"]) == ("finished", 6)
    assert_close_records(finished["one"], finished[name])


@pytest.mark.parametrize("name", ["locked_ddp", "locked_fsdp2", "changed_ddp"])
def test_a_locked_or_changed_run_of_several_processes_is_that_of_one(finished, name):
    assert_close_records(finished[f"{name.partition('_')[0]}_none"], finished[name])


def test_ranks_round_differently_without_bias_and_one_process_as_before(ranks):
    saved = {}
    for size in (1, 2):
        folder = ranks("stochastic_rounding", size)["folder"]
        saved |= {(size, r): torch.load(folder / f"{r}.pt") for r in range(size)}
    torch.manual_seed(0)
    before = (torch.rand(20_000) < 0.3).float()
    for (_, rank), (rounded, compiled, next_draw) in saved.items():
        assert torch.equal(rounded, compiled)
        assert torch.equal(rounded, before) == (rank == 0)
        assert rounded.mean().item() == pytest.approx(0.3, abs=0.015)  # 4.6 standard deviations
        assert torch.equal(next_draw, saved[1, 0][2])  # which their patch dropout shares
    both = (saved[2, 0][0] * saved[2, 1][0]).mean()
    assert both < 0.3 * 0.3  # not the same errors twice


def test_stochastic_rounding_and_8_bit_moments_of_several_processes_resume_to_the_bit(finished):
    whole, parts = (
        finished[f"stochastic_{name}_ddp"] / "metrics.jsonl" for name in ("whole", "parts")
    )
    assert whole.read_bytes() == parts.read_bytes() and len(read_rows(whole)) == 4


def test_muon_in_several_processes_follows_that_of_one(finished):
    rows = [read_rows(finished[f"muon_{kind}"] / "metrics.jsonl") for kind in ("none", "ddp")]
    for x, y in zip(*rows, strict=True):
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-3)  # it multiplies in bfloat16
        assert x["clipped_grad_norm"] == pytest.approx(y["clipped_grad_norm"], rel=1e-2)


def test_a_sharded_checkpoint_holds_whole_tensors_like_a_replicated_one(finished):
    one, ddp, fsdp2 = (
        list_checkpoints(finished[name])[-1] for name in ("one", "two_ddp", "two_fsdp2")
    )
    assert {path.name for path in fsdp2.iterdir()} == {path.name for path in ddp.iterdir()}
    for name in ("model", "exp_avg", "exp_avg_sq"):
        own, other = (load_file(folder / f"{name}.safetensors") for folder in (fsdp2, one))
        assert {n: x.shape for n, x in own.items()} == {n: x.shape for n, x in other.items()}
