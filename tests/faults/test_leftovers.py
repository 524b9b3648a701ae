"""Temporary files of a killed run are removed by the next start."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lowprec.config.compose import CONF

KEYS = ("model.vision_width=64", "model.vision_layers=1", "model.text_width=64", "device=cpu")
KEYS += ("model.text_layers=1", "model.vocab_size=512", "num_workers=2", "precision=fp32")
KEYS += ("batch_size=16", "log_every=1", "evaluation=none", "data=shards", "data.val=null")


@pytest.fixture
def shared():
    """The folder of temporary files; the name of a socket in it must be short."""
    folder = tempfile.mkdtemp(dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_the_next_start_removes_the_temporary_files_of_a_killed_run(squares, tmp_path, shared):
    def start(*keys):
        own = {"TMPDIR": shared, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "experiments.train", *KEYS, f"run_dir={tmp_path}"]
        command += [f"data.train={squares}/train-*.tar", "logger=wandb"]
        return subprocess.Popen(
            [*command, *keys], cwd=CONF.parent, env={**os.environ, **own},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def left():
        names = [path.name for path in Path(shared).rglob("*")]
        return [name for name in names if "wandb" in name or "pymp" in name]

    killed = start("num_steps=100000")
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("run/*/metrics.jsonl")) or len(left()) < 2:
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.1)
    killed.kill()
    killed.communicate()
    assert any("pymp" in name for name in left()) and any("wandb" in name for name in left())
    output, _ = start("num_steps=2").communicate(timeout=200)
    assert "finished at step 2" in output
    assert left() == []


def test_only_temporary_folders_of_killed_runs_are_removed(shared):
    use = "from lowprec.runs.scratch import use_own_temporary_folder as use; use()"

    def start(program):
        command, environment = [sys.executable, "-c", program], {**os.environ, "TMPDIR": shared}
        subprocess.run(command, cwd=CONF.parent, env=environment, timeout=60, check=True)

    others = [Path(shared) / name for name in ("lowprec-index", ".lowprec-tmp-index")]
    for folder in others:
        folder.mkdir()
        (folder / ".lock").touch()
        (folder / "my-results.csv").touch()
    start(f"{use}; import os; os._exit(0)")  # as after a kill, nothing is removed
    assert len(list(Path(shared).iterdir())) == len(others) + 1
    start(use)
    assert sorted(Path(shared).iterdir()) == sorted(others)
    assert all(len(list(folder.iterdir())) == 2 for folder in others)
