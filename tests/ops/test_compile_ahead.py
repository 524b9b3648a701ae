"""All kernels compile for sm_90, the general ones also for other GPUs, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_ahead.py")


OTHERS = {80: 166_912, 89: 101_376, 100: 232_448, 120: 101_376}  # of a program's shared memory


@pytest.mark.parametrize(
    "capability, shared_bytes",
    [(90, 232_448), *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS.items())],
)
def test_kernels_compile_without_spills_into_shared_memory(capability, shared_bytes):
    # in a subprocess, because kernels may be interpreted in this one
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(SCRIPT.parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    compiled = {key.split(":")[0] for key in report["measured"]}
    assert capability != 90 or compiled == set(report["kernels"])
    for key, cost in report["measured"].items():
        assert cost["spilled"] == 0 and cost["shared"] <= shared_bytes, key
