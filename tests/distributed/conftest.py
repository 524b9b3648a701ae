"""`ranks(job, size, **options)`: what several processes do; they are forked from one server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowprec.runs.identity import to_dict

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def server():
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ranks.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",  # a GPU cannot be used after a fork
        },
    )
    assert json.loads(process.stdout.readline()) == "ready"
    yield process
    process.communicate(timeout=20)


@pytest.fixture(scope="module")
def ranks(server, tmp_path_factory):
    """Runs a job in so many ranks; its folder, exit codes, seconds and logs."""

    def run(job, size, *, signals=(), **options):
        folder = tmp_path_factory.mktemp(job)
        order = {"job": job, "size": size, "options": options, "folder": str(folder)}
        server.stdin.write(json.dumps(order | {"signals": list(signals)}) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline()) | {"folder": folder}

    return run


@pytest.fixture(scope="module")
def make(tiny_config, tmp_path_factory):
    """`make({"optimizer.lr": 1e-3, ...})`: a tiny config with some keys changed, as plain data."""
    folder, short = tmp_path_factory.mktemp("runs"), {"num_steps": 6, "log_every": 2}
    return lambda changes=None: to_dict(
        tiny_config(folder, {**short, "save_every": 3, **(changes or {})})
    )
