"""`ranks(job, size, **options)`: what several processes do; they are forked from one server."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Server:
    """The process that forks those of jobs, see `ranks.py`."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("ranks.py"))],
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
        assert json.loads(self.process.stdout.readline()) == "ready"

    def __call__(self, job, size, folder, *, signals=(), **options):
        """Does a job in so many processes; their exit codes, seconds and logs."""
        order = {"job": job, "size": size, "options": options, "folder": str(folder)}
        self.process.stdin.write(json.dumps(order | {"signals": list(signals)}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.communicate(timeout=20)


@pytest.fixture(scope="session")
def server():
    with contextlib.closing(Server()) as server:
        yield server


@pytest.fixture(scope="module")
def ranks(server, tmp_path_factory):
    """Runs a job in so many ranks, in a new folder; it, their seconds and logs.

    `codes`: the exit codes that are asserted, by default 0; None: they are returned, too.
    """

    def run(job, size, *, folder=None, codes=(0,), **order):
        folder = folder or tmp_path_factory.mktemp(job)
        folder.mkdir(exist_ok=True)
        answer = server(job, size, folder, **order) | {"folder": folder}
        if codes is not None:
            assert answer["codes"] == list(codes) * (size // len(codes)), answer["logs"]
        return answer

    return run


@pytest.fixture(scope="module")
def make(tiny_config, tmp_path_factory):
    """`make({"optimizer.lr": 1e-3, ...})`: a tiny config with some keys changed, as plain data."""
    folder, short = tmp_path_factory.mktemp("runs"), {"num_steps": 6, "log_every": 2}
    return lambda changes=None: asdict(
        tiny_config(folder, {**short, "save_every": 3, **(changes or {})})
    )
