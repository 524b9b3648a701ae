"""A killed figure script leaves whole files and unchanged inputs, and can be rerun."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("csv", "json", "pdf", "png")

# Draws again and again, each time in a fork, and kills itself before the n-th change of `out`.
PROGRAM = """
import contextlib, io, os, signal, sys
import matplotlib.backends.backend_agg, matplotlib.backends.backend_pdf
from analysis import make
import analysis.figures.loss_curves, analysis.style

runs, out = sys.argv[1:]
arguments = ["loss_curves", "--runs", runs, "--out", out]

def draw(kill_before=None):
    changes = 0

    def watch(event, values):
        nonlocal changes
        writing = event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR)
        if event not in ("os.rename", "os.remove", "os.mkdir") and not writing:
            return
        path = str(values[0])
        if path.startswith(runs):
            os._exit(5)
        if path.startswith(out):
            if writing and not os.path.basename(path).startswith("."):
                os._exit(6)
            if changes == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
            changes += 1

    child = os.fork()
    if not child:
        sys.addaudithook(watch)
        with contextlib.redirect_stdout(io.StringIO()):
            code = make.main(arguments)
        os._exit(code)
    return os.waitpid(child, 0)[1]

for line in sys.stdin:
    print(draw(int(line) if line.strip() else None), flush=True)
"""


@pytest.fixture
def draw(make_run, tmp_path):
    """A function that draws into `out`, killed before its n-th change; returns the exit status."""
    make_run(num_steps=60)
    make_run(num_steps=60, steps=30, seed=1, state="diverged")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path / "runs", tmp_path / "out"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip

    def draw(kill_before=""):
        print(kill_before, file=process.stdin, flush=True)
        return int(process.stdout.readline())

    yield draw
    process.stdin.close()
    process.stdout.close()
    assert process.wait(20) == 0


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_kill_before_any_write_leaves_whole_files_and_a_rerun_completes_them(draw, tmp_path):
    out, inputs = tmp_path / "out", contents(tmp_path / "runs")
    assert draw() == 0
    fresh = contents(out)
    assert sorted(fresh) == [f"loss_curves_demo.{kind}" for kind in KINDS]
    old = {name: b"old" for name in fresh}
    point, killed = 0, signal.SIGKILL
    while killed == signal.SIGKILL:
        shutil.rmtree(out)
        if point:
            out.mkdir()
            for name, data in old.items():
                (out / name).write_bytes(data)
        killed = draw(point)
        if out.exists():
            files = {name: data for name, data in contents(out).items() if not name[0] == "."}
            assert all(data in (old[name], fresh[name]) for name, data in files.items())
        if point % 3 == 0:
            assert draw() == 0 and contents(out) == fresh
        point += 1
    assert killed == 0 and point >= 9  # mkdir, four files, four names
    assert contents(tmp_path / "runs") == inputs


def test_provenance_identifies_files_that_belong_together(draw, tmp_path):
    assert draw() == 0
    about = json.loads((tmp_path / "out" / "loss_curves_demo.json").read_text())
    for kind, digest in about["sha256"].items():
        data = (tmp_path / "out" / f"loss_curves_demo.{kind}").read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest
    assert sorted(about["sha256"]) == ["csv", "pdf", "png"]
