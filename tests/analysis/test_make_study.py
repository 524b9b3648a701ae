"""The marks of figures drawn from incomplete or mixed runs."""

import itertools
import json
import shutil

import pytest
from matplotlib.figure import Figure

from analysis import make, panels
from analysis.load import load_all
from lowprec.config.schema import DiagnosticsConfig, SpikeConfig

pytestmark = pytest.mark.usefixtures("no_pictures")
WATCHED = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=5, window=10))
OF_STUDY = {"num_steps": 20, "scale": "mini", "model": "mini_l", "diagnostics": WATCHED}


def the_mark(tmp_path, slug="rms_and_loss", **keys):
    return make.draw(slug, load_all(tmp_path / "runs"), tmp_path / "out", "", **keys)[1]["mark"]


def test_a_figure_without_runs_of_its_own_at_a_scale_shows_those_of_its_fallback(
    make_run, tmp_path
):
    run = make_run(beta2=0.999, experiment="stability", **OF_STUDY)
    own = make_run(beta2=0.999, experiment="rms_and_loss", **OF_STUDY | {"scale": "demo"})
    runs = load_all(tmp_path / "runs")
    pairs = make._slugs_and_scales(runs.summaries, None, None)
    assert {("rms_and_loss", "mini"), ("rms_and_loss", "demo")} <= set(pairs)
    for scale, shown in (("mini", run), ("demo", own), (None, own)):
        _, about = make.draw("rms_and_loss", runs, tmp_path / "out", "", scale)
        assert [row["path"] for row in about["runs"]] == [str(shown)]


def test_what_marks_a_figure_stands_above_its_title_and_its_panels():
    for mark in (
        "2 of 5 runs incomplete",
        "2 of 5 runs incomplete or damaged; 2 different data sets",
    ):
        figure = Figure(layout="constrained", figsize=(2.5, 2))
        ax = figure.subplots()
        ax.set_title("panel")
        panels.add_title(figure, "A title that is longer than one line of its figure", mark)
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in (*figure.texts, ax.title)]
        assert all(above.y0 > below.y1 for above, below in itertools.pairwise(boxes))


def test_marks_state_what_is_incomplete_or_mixed(make_run, tmp_path):
    keys = {"experiment": "rms_and_loss"} | OF_STUDY
    make_run(beta2=0.999, **keys)
    make_run(beta2=0.9, **keys)
    make_run(beta2=0.8, **keys, state="diverged", steps=12)
    assert the_mark(tmp_path) == ""
    make_run(seed=2, **keys, steps=12, state="running")
    holed = make_run(seed=3, data="cd" * 32, **keys)
    rows = (holed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (holed / "metrics.jsonl").write_text("".join(rows[:5] + rows[8:]))
    mark = "2 of 5 runs incomplete or damaged; 2 different data sets"
    assert the_mark(tmp_path) == the_mark(tmp_path, experiment="rms_and_loss") == mark
    written = json.loads((tmp_path / "out" / "rms_and_loss_mini.json").read_text())
    assert written["mark"] == mark and written["caption"].endswith(f" Marked: {mark}.")
    assert the_mark(tmp_path, "loss_curves", experiment="rms_and_loss") == mark


def no_rows(run):
    (run / "metrics.jsonl").unlink()
    (run / "status.json").write_text('{"state": "failed", "step": 0, "reason": "no GPU"}')


def half_the_tensors(run):
    shutil.rmtree(run / "tensors")
    path = run / "tensors.parquet"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "no rows": no_rows,
    "half the tensors": half_the_tensors,
    "no metrics": lambda run: (run / "metrics.jsonl").write_text(""),
    "no config": lambda run: (run / "config.yaml").write_text("{"),
}


@pytest.mark.filterwarnings("ignore:.*tensors left out")
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_run_that_cannot_be_drawn_is_marked(make_run, tmp_path, damage):
    for beta2 in (0.9, 0.999):
        run = make_run(experiment="rms_and_loss", beta2=beta2, **OF_STUDY)
    damage(run)
    assert the_mark(tmp_path).startswith("1 of 2 runs not drawn")
