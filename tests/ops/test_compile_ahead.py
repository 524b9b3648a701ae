"""All kernels compile for sm_80 and sm_90, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_ahead.py")


@pytest.mark.parametrize(
    "capability, shared_bytes", [(90, 232_448), pytest.param(80, 166_912, marks=pytest.mark.slow)]
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
    assert capability < 90 or compiled == set(report["kernels"])
    for key, cost in report["measured"].items():
        assert cost["spilled"] == 0 and cost["shared"] <= shared_bytes, key
