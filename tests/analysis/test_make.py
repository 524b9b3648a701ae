import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from analysis import load_runs, make
from analysis.figures import loss_curves

ROOT = Path(__file__).parents[2]


@pytest.fixture(name="run_make")
def run_make_fixture(tmp_path, capsys):
    def run_make(*extra, slug="loss_curves", out="out"):
        arguments = [slug, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / out), *extra]
        code = make.main(arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_make


def test_it_writes_four_files_and_says_where(make_run, run_make, tmp_path):
    make_run(num_steps=60)
    code, out, err = run_make()
    assert code == 0 and err == ""
    assert out.startswith(f"Wrote {tmp_path}/out/loss_curves_demo.png, .pdf, .csv, .json\n")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [f"loss_curves_demo.{kind}" for kind in ("csv", "json", "pdf", "png")]
    assert (tmp_path / "out" / "loss_curves_demo.png").read_bytes()[:4] == b"\x89PNG"


def test_the_csv_is_exactly_the_plotted_numbers(make_run, run_make, tmp_path):
    make_run(num_steps=60)
    make_run(num_steps=60, steps=30, seed=1, state="diverged")
    run_make()
    written = pd.read_csv(tmp_path / "out" / "loss_curves_demo.csv")
    plotted = loss_curves.query(load_runs(tmp_path / "runs"))
    # pandas 2 parses a decimal to within one unit in the last place, pandas 3 exactly
    pd.testing.assert_frame_equal(written, plotted, rtol=1e-15, atol=0, check_dtype=False)


def test_the_same_runs_give_the_same_bytes(make_run, run_make, tmp_path):
    make_run(num_steps=60)
    files = []
    for epoch in ("0", "1000000000"):
        run_make()
        folder = sorted((tmp_path / "out").iterdir())
        files.append({path.name: path.read_bytes() for path in folder})
        os.utime(tmp_path / "out" / "loss_curves_demo.csv", (int(epoch), int(epoch)))
    assert files[0] == files[1]
    assert b"CreationDate" not in files[0]["loss_curves_demo.pdf"]


def test_the_provenance_names_runs_states_versions_and_command(make_run, run_make, tmp_path):
    run = make_run(num_steps=60, steps=30, state="running")
    empty = make_run(num_steps=60, steps=0, seed=1, state="failed")
    code, _, err = run_make()
    about = json.loads((tmp_path / "out" / "loss_curves_demo.json").read_text())
    (row,) = about["runs"]
    assert code == 0
    assert (row["path"], row["digest"]) == (str(run), run.name[-10:])
    assert (row["state"], row["step"], row["num_steps"]) == ("running", 30, 60)
    assert about["command"].startswith("python -m analysis.make loss_curves --runs ")
    assert about["versions"]["pandas"] == pd.__version__
    assert "(incomplete: 30 of 60 steps)" in about["caption"]
    assert about["left_out"] == [f"{empty} (failed: 0 of 60 steps)"]
    assert err == f"left out: {empty} (failed: 0 of 60 steps)\n"


def test_an_unknown_slug_names_the_nearest(run_make):
    code, _, err = run_make(slug="loss_curve")
    assert code == 2
    assert err.startswith("error: no figure 'loss_curve'; nearest: loss_curves; there are: ")
    assert err.count("\n") == 1


def test_runs_of_another_experiment_are_named_with_the_command(make_run, run_make):
    make_run(num_steps=20, experiment="fp8_fixes", scale="mini")
    code, _, err = run_make()
    assert code == 2 and err.count("\n") == 1
    assert "there are fp8_fixes (mini)" in err
    assert "python -m experiments.train -m experiment=loss_curves" in err


def test_the_runs_of_another_experiment_are_drawn_on_demand(make_run, run_make, tmp_path):
    make_run(num_steps=20, experiment="update_clipping")
    code, out, _ = run_make("--experiment", "update_clipping")
    assert code == 0 and "loss_curves" in out


def test_an_empty_folder_names_the_command_of_the_scale(run_make):
    code, _, err = run_make("--scale", "demo")
    assert code == 2 and err.count("\n") == 1
    assert "experiment=loss_curves_demo" in err


def test_several_scales_ask_for_one(make_run, run_make, tmp_path):
    make_run(num_steps=20)
    make_run(num_steps=20, scale="mini")
    code, _, err = run_make()
    assert code == 2
    assert "scales demo, mini; choose one: --scale demo or --scale mini" in err
    assert run_make("--scale", "mini")[0] == 0
    assert set(pd.read_csv(tmp_path / "out" / "loss_curves_mini.csv")["scale"]) == {"mini"}


def test_runs_without_steps_are_nothing_to_draw(make_run, run_make, tmp_path):
    make_run(num_steps=20, steps=0, state="running")
    code, _, err = run_make()
    assert code == 2 and "nothing to draw yet" in err and "running: 0 of 20 steps" in err
    assert not (tmp_path / "out").exists()


def test_only_damaged_configs_are_an_error(make_run, run_make):
    (make_run(num_steps=20) / "config.yaml").write_text("{")
    code, _, err = run_make()
    assert code == 2 and "damaged config" in err


def test_a_failure_leaves_the_old_figure(make_run, run_make, tmp_path, monkeypatch):
    make_run(num_steps=60)
    run_make()
    before = (tmp_path / "out" / "loss_curves_demo.png").read_bytes()

    def fail(frame, figure):
        raise RuntimeError("no")

    monkeypatch.setattr(loss_curves, "draw", fail)
    with pytest.raises(RuntimeError):
        run_make()
    assert (tmp_path / "out" / "loss_curves_demo.png").read_bytes() == before


def test_the_command_is_silent_under_errors_for_warnings(make_run, tmp_path):
    make_run(num_steps=1000, steps=40, state="diverged")
    command = [sys.executable, "-W", "error", "-m", "analysis.make", "loss_curves"]
    done = subprocess.run(
        [*command, "--runs", tmp_path / "runs", "--out", tmp_path / "out"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("slug", ["loss_curves", "all", "claims"])
@pytest.mark.parametrize("below", ["", "/below"])
def test_a_file_in_the_place_of_the_folder_is_one_sentence(make_run, tmp_path, capsys, slug, below):
    make_run(num_steps=20)
    (tmp_path / "file").write_text("mine")
    arguments = ["--runs", str(tmp_path / "runs"), "--out", f"{tmp_path}/file{below}"]
    assert make.main([slug, *arguments]) == 2
    err = capsys.readouterr().err.splitlines()
    assert [line for line in err if line.startswith("error: ")] == [err[-1]]
    assert "/file" in err[-1] and "is not a folder" in err[-1]
    assert (tmp_path / "file").read_text() == "mine"
