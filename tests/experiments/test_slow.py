"""Benchmarks on tiny inputs, so that they cannot rot."""

import json
import subprocess
import sys

import pytest

from lowprec.config.compose import CONF

pytestmark = pytest.mark.slow


def test_bench_step_writes_a_correct_line_a_case(tmp_path):
    keys = ("model.vision_width=64", "model.text_width=64", "model.vocab_size=512", "device=cpu")
    keys += ("batch_size=8", f"run_dir={tmp_path}")
    done = subprocess.run(
        [sys.executable, "-m", "experiments.benchmarks", "step", *keys],
        cwd=CONF.parent, check=True, timeout=250, capture_output=True, text=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == ["eager", "compiled"]
    assert all(line["correct"] and line["ms"] > 0 for line in lines)
