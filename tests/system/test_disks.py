"""A disk that fills up and one that may not be written: real file systems, so root is needed."""

import contextlib
import subprocess
import sys

import pytest

from lowprec.config.compose import CONF
from lowprec.runs.read import find_runs, read_rows, read_status
from lowprec.train.checkpoint import list_checkpoints
from tests.small import WORDS, python

pytestmark = pytest.mark.system
TINY = (*WORDS, "num_workers=0", "batch_size=16", "log_every=2", "optimizer.lr=1e-3")
TINY += ("evaluation=none", "data=shards", "data.val=null", "save_every=5")


@pytest.fixture
def disk(tmp_path):
    """`disk(options)`: a small file system in memory, mounted at a folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with contextlib.ExitStack() as stack:

        def mount(options):
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True
            )
            if done.returncode:
                pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
            stack.callback(subprocess.run, ["umount", folder], check=True)
            return folder

        yield mount


def train(*overrides, code):
    return run("train", *TINY, *overrides, code=code)


def run(entry, *overrides, code, cwd=CONF.parent):
    done = python("-m", f"experiments.{entry}", *overrides, cwd=cwd)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert "Traceback" not in output
    return output


def test_a_disk_that_fills_up_ends_the_run_in_a_sentence_and_it_goes_on_later(
    disk, squares, tmp_path
):
    folder = disk("size=40m")
    keys = (f"data.train={squares}/train-*.tar", f"run_dir={folder}")
    filler = folder / "filler"
    script = (  # fills the disk once the first checkpoint is there
        "import time, sys, pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "while not list(folder.glob('run/*/checkpoints/step_*')): time.sleep(0.01)\n"
        "with open(folder / 'filler', 'wb', buffering=0) as file:\n"
        "    try:\n"
        "        while True: file.write(bytes(4096))\n"
        "    except OSError: time.sleep(60)\n"
    )
    filling = subprocess.Popen([sys.executable, "-c", script, str(folder)])
    try:
        output = train(*keys, "num_steps=2000", code=1)
    finally:
        filling.kill()
        filling.wait()
    assert "No space left on device" in output and "bytes are free" in output
    [run] = find_runs(folder)
    before = list_checkpoints(run)
    assert before and read_status(run)["saved"] == int(before[-1].name[-9:])
    assert all(row["loss"] for row in read_rows(run / "metrics.jsonl"))
    filler.unlink()
    assert "finished at step 2000" in train(*keys, "num_steps=2000", code=0)
    steps = [row["step"] for row in read_rows(run / "metrics.jsonl")]
    assert steps == list(range(1, 2001))


def test_a_read_only_run_dir_is_refused_before_anything_is_built(disk, squares):
    folder = disk("size=2m,ro")
    output = train(f"data.train={squares}/train-*.tar", f"run_dir={folder}/runs", code=2)
    assert f"run_dir={folder}/runs: {folder} is not writable" in output


@pytest.mark.parametrize(
    ("entry", "keys", "path"),
    [
        ("train", (*TINY, "data.train={squares}/train-*.tar", "data.index={disk}"), "{disk}/."),
        ("make_shapes", ("out={disk}/shapes", "num_train=500"), "{disk}/shapes/"),
        ("train", TINY[:-3], "data/.shapes.tmp/"),
    ],
    ids=["indexing", "rendering shards", "rendering to train"],
)
def test_a_disk_that_is_full_while_data_are_prepared_is_named(disk, squares, entry, keys, path):
    folder = disk("size=64k")
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
        for _ in range(16 if entry == "train" else 13):  # make_shapes has room for its first files
            file.write(bytes(4096))
    places = {"disk": folder, "squares": squares}
    keys = [key.format(**places) for key in keys]
    output = run(entry, *keys, code=1 if entry != "train" else 2, cwd=folder)
    assert path.format(**places) in output and "bytes are free there" in output
    assert "No space left on device" in output
