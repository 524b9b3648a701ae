"""A run's record is complete, resumes to the byte, and ends where the run diverges."""

import itertools
import math
import os
import signal
import threading
import time

import numpy as np
import pyarrow.parquet
import pytest
import torch

from analysis import load_runs
from lowprec.diagnostics.blocks import BLOCK_STATISTICS
from lowprec.optim.stable_adamw import STATISTICS
from lowprec.runs.read import read_rows
from lowprec.runs.tables import read_tensors
from lowprec.train.checkpoint import Saver, list_checkpoints
from lowprec.train.distributed import Ranks
from lowprec.train.signals import stop_request
from tests.same import contents, differing

LOCKED = {"image": 0, "text_projection": 0.5}
SETTINGS = {
    "fp32 patch dropout": {"model.patch_dropout": 0.5},
    "bf16, locked": {"precision.autocast": "bf16", "optimizer.lr_scale": LOCKED},
    "fp16 dynamic": {"precision.autocast": "fp16", "scaler.name": "dynamic"},
    "fp16 fixed, 8-bit moments": {
        "precision.autocast": "fp16",
        "scaler.name": "fixed",
        "optimizer.optim_bits": 8,
        "optimizer.override_32bit": ["text"],
    },
    "pure bf16, locked": {"precision.autocast": "pure_bf16", "optimizer.lr_scale": LOCKED},
}


def tensors(folder, table="tensors"):
    flushes = list(read_tensors(folder, table))
    if not flushes:
        return {}
    return {
        "step": np.concatenate([steps for steps, _, _ in flushes]),
        **{
            name: np.concatenate([values[name] for _, values, _ in flushes])
            for name in flushes[0][1]
        },
    }


def test_every_step_is_recorded_once_with_all_its_numbers(make_config, run_once, tmp_path):
    dropped = {"model.patch_dropout": 0.5}
    config = make_config({"evaluation.name": "both", "eval_every": 6, **dropped})
    ended, built = run_once(config, tmp_path / "a")
    assert (ended.state, ended.step) == ("finished", 12)
    rows = read_rows(tmp_path / "a" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all({"loss", "lr", "logit_scale", "grad_norm"} <= set(row) for row in rows)
    evaluated = [row["step"] for row in rows if "zero_shot/top1" in row]
    assert evaluated == [6, 12] and "retrieval/text_to_image_r5" in rows[-1]
    run_once(make_config(dropped), tmp_path / "b")  # an evaluation leaves training alone
    alone = read_rows(tmp_path / "b" / "metrics.jsonl")
    assert [row["loss"] for row in alone] == [row["loss"] for row in rows]
    names = built.state.optimizer.names
    recorded = tensors(tmp_path / "a")
    assert recorded["rms"].shape == (12, len(names))
    norms = np.sqrt((recorded["grad_norm"].astype(float) ** 2).sum(axis=1))
    np.testing.assert_allclose(norms, [row["grad_norm"] for row in rows], rtol=1e-5)
    table = pyarrow.parquet.read_table(tmp_path / "a" / "tensors.parquet")
    column = table["rms/visual.conv1.weight"].to_numpy()
    np.testing.assert_array_equal(column, recorded["rms"][:, names.index("visual.conv1.weight")])


def test_details_and_blocks_are_recorded_when_they_are_due(make_config, run_once, tmp_path):
    changes = {"diagnostics.detail_every": 5, "diagnostics.block_every": 4, "log_every": 3}
    _, built = run_once(make_config(changes), tmp_path)
    details, of_blocks = tensors(tmp_path, "details"), tensors(tmp_path, "blocks")
    assert details["step"].tolist() == [1, 5, 10] and of_blocks["step"].tolist() == [1, 4, 8, 12]
    assert set(details) == {"step", *STATISTICS[3:]}
    assert set(of_blocks) == {"step", *BLOCK_STATISTICS}
    u_max, u_mean = details["u_max"], details["u_mean"]
    assert (u_max >= u_mean).all() and (u_mean > 0).all() and not details["grad_nan"].any()
    assert of_blocks["logit_max"].shape == (4, 2) and np.isfinite(of_blocks["logit_max"]).all()
    runs = load_runs(tmp_path)
    means = runs.tensors("visual.transformer.*", stat="feature_mean")
    assert list(means["step"]) == [1, 4, 8, 12] and means.shape[1] == 3
    assert "visual.conv1.weight" in runs.tensors("visual.conv1.weight", stat="u_max")


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """A folder for the undisturbed run of each setting, each made once."""
    return tmp_path_factory.mktemp("wholes")


@pytest.mark.parametrize(
    ("setting", "cut"),
    [*((setting, 6) for setting in SETTINGS), *(("fp32 patch dropout", cut) for cut in (1, 4, 7))],
)
def test_stop_and_resume_is_bitwise(make_config, run_once, tmp_path, wholes, setting, cut):
    often = {"diagnostics.detail_every": 3, "diagnostics.block_every": 4}
    config, whole = make_config(SETTINGS[setting] | often | {"num_steps": 8}), wholes / setting
    if not whole.exists():
        run_once(config, whole)
    ended, _ = run_once(config, tmp_path / "cut", stop_at=cut)
    assert (ended.state, ended.step) == ("preempted", cut)
    torch.manual_seed(12345)  # the resumed attempt must not depend on the process's random state
    ended, _ = run_once(config, tmp_path / "cut")
    assert ended.state == "finished"
    assert not differing(contents(whole), contents(tmp_path / "cut"))


@pytest.mark.parametrize("stall", [4, 6], ids=["after a save", "with unwritten steps"])
def test_a_signal_ends_waiting_for_data_and_loses_no_step(
    make_config, run_once, tmp_path, monkeypatch, stall
):
    config, doing, save = make_config({"num_steps": 8}), [], Saver.save
    run_once(config, tmp_path / "whole")
    monkeypatch.setattr(Ranks, "heartbeat", lambda self, step, what: doing.append(what))
    monkeypatch.setattr(Saver, "save", lambda *a: doing.append(f"{doing[-1]}: save") or save(*a))

    def wait(built):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(30)

    with stop_request() as stop:
        before = time.monotonic()
        ended, _ = run_once(config, tmp_path / "cut", at={stall + 1: wait}, stop=stop)
        assert time.monotonic() - before < 20
    assert (ended.state, ended.step) == ("preempted", stall)
    assert list_checkpoints(tmp_path / "cut")[-1].name == f"step_{stall:09d}"
    assert doing[-2:] == ["saving: save", "ending"]  # a watchdog knows that it may take long
    assert run_once(config, tmp_path / "cut")[0].state == "finished"
    assert not differing(contents(tmp_path / "whole"), contents(tmp_path / "cut"))


def poison_weight(built):
    """Makes the next loss NaN."""
    with torch.no_grad():
        built.task.model.visual.proj[0, 0] = math.nan


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_of_nan_ends_the_run_first(make_config, run_once, tmp_path, log_every):
    config = make_config({"log_every": log_every, "save_every": 100})
    ended, built = run_once(config, tmp_path / "a", at={6: poison_weight})
    assert (ended.state, ended.step) == ("diverged", 6) and "loss is nan" in ended.reason
    rows = read_rows(tmp_path / "a" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and math.isnan(rows[-1]["loss"])
    assert tensors(tmp_path / "a")["step"].tolist() == [1, 2, 3, 4, 5, 6]
    _, five = run_once(config, tmp_path / "five", stop_at=5)
    for (name, p), q in zip(
        built.task.model.named_parameters(), five.task.model.parameters(), strict=True
    ):
        if name != "visual.proj":  # the poisoned one
            assert torch.equal(p, q), name


def spoil_gradient(name, steps):
    """Makes one tensor's gradient infinite at the given backward passes (counted from 1)."""

    def spoil(built):
        counter = iter(range(1, 1000))
        parameter = dict(built.task.model.named_parameters())[name]
        parameter.register_hook(lambda g: g * math.inf if next(counter) in steps else g)

    return spoil


def test_fixed_scaling_skips_only_the_bad_tensor_and_counts_it(make_config, run_once, tmp_path):
    changes = {"precision.autocast": "fp16", "scaler.name": "fixed", "scaler.init_scale": 256.0}
    config = make_config(changes)
    ended, built = run_once(
        config, tmp_path / "a", spoil=spoil_gradient("visual.conv1.weight", {5})
    )
    assert ended.state == "finished"
    rows = read_rows(tmp_path / "a" / "metrics.jsonl")
    assert [row["skipped_tensors"] for row in rows] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    events = [event for event in read_rows(tmp_path / "a" / "events.jsonl") if "skipped" in event]
    assert events == [{"step": 5, "skipped": ["visual.conv1.weight"]}]
    updates = tensors(tmp_path / "a")["update_norm"][4]
    names = built.state.optimizer.names
    assert updates[names.index("visual.conv1.weight")] == 0
    assert (np.delete(updates, names.index("visual.conv1.weight")) > 0).mean() > 0.9


@pytest.mark.parametrize(("num_bad", "state"), [(11, "failed"), (10, "finished")])
def test_too_many_bad_samples_stop_the_run(make_config, run_once, tmp_path, num_bad, state):
    def claim_skips(built):
        batches_from, keys = built.batches_from, itertools.cycle(map(str, range(num_bad)))

        def skipping(first):
            for batch in batches_from(first):
                skip = {"position": 0, "shard": "t", "reason": "r"}
                batch.skips = [{**skip, "key": next(keys)} for _ in range(4)]
                yield batch

        built.batches_from = skipping

    ended, _ = run_once(make_config(), tmp_path / "a", spoil=claim_skips)
    assert ended.state == state
    if state == "failed":
        assert ended.reason.startswith("11 samples could not be read, ")
        assert "max_skip_rate" in ended.reason
    assert len(read_rows(tmp_path / "a" / "skips.jsonl")) == 4 * ended.step


def test_gradients_may_overflow_together(make_config, run_once, tmp_path):
    def spoil(built):
        counter = {}

        def huge(p, g):
            counter[p] = counter.get(p, 0) + 1
            return g * (1.2e19 / g.norm()) if counter[p] == 3 else g

        for p in built.task.model.parameters():
            p.register_hook(lambda g, p=p: huge(p, g))

    ended, built = run_once(make_config(), tmp_path / "a", spoil=spoil)
    assert ended.state == "finished"
    assert read_rows(tmp_path / "a" / "metrics.jsonl")[2]["grad_norm"] == math.inf
    assert (tensors(tmp_path / "a")["update_norm"][-2] > 0).all()


def test_skips_in_a_row_count_across_a_resume(make_config, run_once, tmp_path):
    changes = {"precision.autocast": "fp16", "scaler.name": "fixed", "scaler.max_skips": 4}
    config = make_config({**changes, "scaler.init_scale": 256.0})
    spoil = spoil_gradient("visual.conv1.weight", {5, 6})
    run_once(config, tmp_path / "a", stop_at=6, spoil=spoil)
    ended, _ = run_once(config, tmp_path / "a", spoil=spoil_gradient("visual.conv1.weight", {1, 2}))
    assert (ended.state, ended.step) == ("diverged", 8)


def test_a_constant_schedule_is_extended_without_a_break(make_config, run_once, tmp_path):
    changes = {"schedule.name": "constant", "schedule.warmup_steps": 2}
    run_once(make_config(changes), tmp_path / "whole")
    run_once(make_config({**changes, "num_steps": 6}), tmp_path / "grown")
    run_once(make_config(changes), tmp_path / "grown")
    assert not differing(contents(tmp_path / "whole"), contents(tmp_path / "grown"))


@pytest.mark.parametrize("start", [9.0, -9.0])
def test_the_logit_scale_is_kept_between_1_and_100(make_config, run_once, tmp_path, start):
    config = make_config({"optimizer.lr": 0.5, "optimizer.eps": 1.0})
    run_once(config, tmp_path / "a", spoil=lambda b: b.task.model.logit_scale.data.fill_(start))
    first, *others = (row["logit_scale"] for row in read_rows(tmp_path / "a" / "metrics.jsonl"))
    assert first == pytest.approx(math.exp(start), rel=1e-4)
    assert all(0.999 <= scale <= 100.001 for scale in others) and len(others) == 11
