"""The figure of a resumed run: pairs, differences, where it went on."""

import json

import pytest
from matplotlib.figure import Figure

from analysis import load_runs
from analysis.figures import resume
from analysis.load import NoRunsError


@pytest.fixture
def pair(make_run, tmp_path):
    """A function: an undisturbed run, and one resumed after step 40 with changed losses."""

    def make(change=0.0):
        for name in ("whole", "killed"):
            root = make_run(num_steps=100, experiment="resume", name=name).parent
            root.rename(tmp_path / "runs" / name)
        [killed] = (tmp_path / "runs" / "killed").iterdir()
        timing = [json.loads(line) for line in (killed / "timing.jsonl").read_text().splitlines()]
        for row in timing:
            row["attempt"] = int(row["step"] > 40)
        (killed / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timing))
        rows = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
        rows[60]["loss"] += change
        (killed / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_runs(tmp_path / "runs")

    return make


def test_an_exact_resume_is_said_to_be_one(pair):
    frame = resume.query(pair())
    assert sorted(frame["attempts"].unique()) == [1, 2] and (frame["difference"] == 0).all()
    assert frame.loc[frame["resumed"], "step"].tolist() == [41]
    assert "killed once" in resume.caption(frame)
    assert "every loss is the same" in resume.caption(frame)


def test_a_difference_is_drawn_and_named(pair):
    frame = resume.query(pair(0.25))
    assert "differ by up to 0.25" in resume.caption(frame)
    figure = Figure()
    resume.draw(frame, figure)
    line = figure.axes[1].lines[1]
    assert line.get_ydata().max() == pytest.approx(0.25)


def test_without_a_pair_the_way_to_make_one_is_said(make_run, tmp_path):
    make_run(num_steps=40, experiment="resume")
    with pytest.raises(NoRunsError, match="resume_mini"):
        resume.query(load_runs(tmp_path / "runs"))
