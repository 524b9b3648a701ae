"""All kernels compile for sm_80 and sm_90, without a GPU, within their recorded budgets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

SCRIPT = Path(__file__).with_name("compile_ahead.py")
BUDGETS = json.loads(SCRIPT.with_name("budgets.json").read_text())
SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448}  # limits per program
HINT = "python tests/ops/compile_ahead.py --record, if the change is worth its cost"


@pytest.fixture(scope="module")
def report() -> dict:
    """Measurements of a subprocess, because kernels may be interpreted in this process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(SCRIPT.parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_all_kernels_have_a_case(report):
    compiled = {key.split()[1].rstrip(":") for key in report["measured"]}
    assert compiled == set(report["kernels"])
    assert len(compiled) >= 5


def test_no_kernel_spills_registers(report):
    spilling = {key: m["spilled"] for key, m in report["measured"].items() if m["spilled"]}
    assert not spilling


def test_kernels_fit_in_shared_memory(report):
    for key, measured in report["measured"].items():
        assert measured["shared"] <= SHARED_BYTES[key.split()[0]], key


def test_kernels_stay_within_recorded_budgets(report):
    if BUDGETS["triton"] != triton.__version__:
        pytest.skip(f"budgets are for triton {BUDGETS['triton']}")
    assert set(report["measured"]) == set(BUDGETS["measured"]), HINT
    for key, measured in report["measured"].items():
        for unit, number in measured.items():
            assert number <= BUDGETS["measured"][key][unit], f"{key}: {unit}. {HINT}"
