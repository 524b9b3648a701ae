"""Every kernel compiles for the GPUs we name, without one, and stays within its recorded budget."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

SCRIPT = Path(__file__).with_name("compile_ahead.py")
BUDGETS = json.loads(SCRIPT.with_name("budgets.json").read_text())
SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448}  # what one program may have
SHOWN = "python tests/ops/compile_ahead.py --record, if it is worth its cost"


@pytest.fixture(scope="module")
def found() -> dict:
    """Compiled in a process of its own: here the kernels may be interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(SCRIPT.parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_all_kernels_have_a_case(found):
    compiled = {key.split()[1].rstrip(":") for key in found["measured"]}
    assert compiled == set(found["kernels"])
    assert len(compiled) >= 5


def test_no_kernel_spills_registers(found):
    spilling = {key: m["spilled"] for key, m in found["measured"].items() if m["spilled"]}
    assert not spilling


def test_kernels_fit_in_shared_memory(found):
    for key, measured in found["measured"].items():
        assert measured["shared"] <= SHARED_BYTES[key.split()[0]], key


def test_kernels_stay_within_recorded_budgets(found):
    if BUDGETS["triton"] != triton.__version__:
        pytest.skip(f"budgets are of triton {BUDGETS['triton']}")
    assert set(found["measured"]) == set(BUDGETS["measured"]), SHOWN
    for key, measured in found["measured"].items():
        for unit, number in measured.items():
            assert number <= BUDGETS["measured"][key][unit], f"{key}: {unit}. {SHOWN}"
