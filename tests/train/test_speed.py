"""Arithmetic of a model, MFU, and traces."""

import json

import pytest
import torch

from experiments import train as entry
from lowprec.clip.model import build_model
from lowprec.runs.read import find_runs, read_rows
from lowprec.train.speed import Speed, flops_per_pair


def test_flops_per_pair_are_those_of_its_matrix_products(make_config):
    model = make_config().model
    with torch.device("meta"):
        found = flops_per_pair(build_model(model), model.image_size, model.context_length)

    def tower(width, layers, tokens):
        linear = 12 * width**2  # q, k, v, out, two of the MLP
        return layers * 2 * tokens * (linear + 2 * tokens * width)

    image = tower(64, 2, 17) + 2 * 16 * 64 * 3 * 8 * 8 + 2 * 64 * 32
    text = tower(64, 1, 8) + 2 * 64 * 32
    assert found == 3 * (image + text)


def test_dropped_patches_do_not_count(make_config):
    whole, half = make_config().model, make_config({"model.patch_dropout": 0.5}).model
    with torch.device("meta"):
        costs = [flops_per_pair(build_model(m), 32, 8) for m in (whole, half)]
    assert 0.5 < costs[1] / costs[0] < 0.8


def test_mfu_is_that_of_one_rank(monkeypatch):
    monkeypatch.setattr("lowprec.train.speed.peak_flops", lambda device: 1e12)
    found = Speed(64, 2, torch.device("cpu"), 10**9).of(steps_per_s=10)
    assert found["images_per_s"] == 640 and found["images_per_s_per_gpu"] == 320
    assert found["mfu"] == pytest.approx(0.32)
    monkeypatch.undo()
    assert Speed(64, 2, torch.device("cpu"), 10**9).of(10)["mfu"] is None


def test_a_profiled_run_has_a_trace_of_three_steps(make_config, tmp_path):
    entry.main(make_config({"profile": True, "num_steps": 9, "save_every": 9}))
    [run] = find_runs(tmp_path / "runs")
    trace = json.loads((run / "traces" / "0000.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert sum(str(name).startswith("ProfilerStep#") for name in names) >= 3
    assert any("addmm" in str(name) for name in names)
    assert len(read_rows(run / "metrics.jsonl")) == 9
