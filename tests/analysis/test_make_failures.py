"""`make all`: what fails is named with its reason, and the rest is drawn."""

import pandas as pd
import pytest

from analysis import figures, make
from analysis.figures import loss_curves, op_profile, rms_and_loss


@pytest.fixture(name="make_all")
def make_all_fixture(make_run, tmp_path, capsys):
    """A function: all figures of a folder with runs of two studies; status, errors, pictures."""
    make_run(num_steps=20, scale="mini")
    make_run(num_steps=20, scale="mini", experiment="rms_and_loss")

    def make_all():
        code = make.main(["all", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
        pictures = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
        return code, capsys.readouterr().err.splitlines(), pictures

    return make_all


def fail(*_, **__):
    raise IndexError("no row\n  of this")


@pytest.mark.parametrize("where", ["query", "draw", "caption"])
def test_a_figure_that_crashes_is_named_and_the_others_are_drawn(
    make_all, monkeypatch, tmp_path, where
):
    monkeypatch.setattr(loss_curves, where, fail)
    code, errors, pictures = make_all()
    assert code == 1 and pictures == ["rms_and_loss_mini.png"]
    assert "failed: loss_curves: IndexError: no row of this" in errors
    assert "- `loss_curves`: IndexError: no row of this" in (tmp_path / "out/index.md").read_text()


def test_a_full_disk_leaves_nothing_half_written(make_all, monkeypatch, tmp_path):
    monkeypatch.setattr(pd.DataFrame, "to_csv", fail)  # the pictures are there by then
    code, errors, _ = make_all()
    assert code == 1 and "failed: rms_and_loss: IndexError: no row of this" in errors
    assert not list((tmp_path / "out").iterdir())


def test_a_figure_that_cannot_be_imported_is_named(make_all, monkeypatch):
    monkeypatch.setattr(
        figures.importlib, "import_module", importer(figures.importlib.import_module)
    )
    code, errors, pictures = make_all()
    assert code == 1 and pictures == ["rms_and_loss_mini.png"]
    assert "failed: loss_curves: SyntaxError: invalid" in errors


def importer(importing):
    def import_module(name, *more):
        if name.endswith(".loss_curves"):
            raise SyntaxError("invalid")
        return importing(name, *more)

    return import_module


def test_where_all_fail_the_status_is_that_of_a_failure(make_all, monkeypatch, tmp_path):
    monkeypatch.setattr(loss_curves, "query", fail)
    monkeypatch.setattr(rms_and_loss, "query", fail)
    code, errors, pictures = make_all()
    assert (code, pictures) == (1, [])
    assert sum(line.startswith("failed: ") for line in errors) == 2


def test_a_damaged_file_of_lines_stops_its_figure_alone(make_all, tmp_path):
    lines = tmp_path / "runs" / "bench" / op_profile.LINES / "one.jsonl"
    lines.parent.mkdir(parents=True)
    lines.write_text('{"case": "output"}\n')  # lacks what every line has
    code, errors, pictures = make_all()
    assert code == 1 and pictures == ["loss_curves_mini.png", "rms_and_loss_mini.png"]
    assert any(line.startswith("failed: op_profile: KeyError: ") for line in errors)
