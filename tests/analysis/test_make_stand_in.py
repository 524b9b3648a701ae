"""Where a figure's own study has no runs, those of its stand-in are drawn, and marked."""

import pytest

from analysis import figures, make
from analysis.load import EXPERIMENTS
from lowprec.config.schema import DiagnosticsConfig, SpikeConfig

LEADS = ("spike_lead_batch", "spike_lead_lr", "spike_lead_size")
WATCHED = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=5, window=10))
KEYS = {"num_steps": 40, "scale": "mini", "model": "mini_l", "diagnostics": WATCHED}


@pytest.fixture(name="draw")
def draw_fixture(tmp_path):
    def draw(slug, **keys):
        return make.draw(slug, tmp_path / "runs", tmp_path / "out", "", **keys)[1]

    return draw


def test_all_draws_the_figures_that_another_study_supports(make_run, tmp_path, capsys):
    make_run(experiment="update_clipping", beta2=0.99, batch_size=1024, lr=4e-3, **KEYS)
    out = tmp_path / "out"
    assert make.main(["all", "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 0
    slugs = {"update_clipping", "rms_and_loss", *LEADS}
    assert {path.stem for path in out.glob("*.png")} == {f"{slug}_mini" for slug in slugs}
    assert "not drawn: fp8_fixes" in capsys.readouterr().err


@pytest.mark.parametrize("slug", LEADS)
def test_a_stand_in_with_some_cells_of_the_study_is_marked(make_cells, draw, slug):
    study, where = slug.replace("spike_lead", "spikes_vs"), {"optimizer.beta2": 0.999}
    where |= {"model.name": "mini_l", "batch_size": 1024, "optimizer.lr": 2e-3}
    make_cells(study, where, experiment="update_clipping")
    about = draw(slug)
    assert about["mark"] == "runs of update_clipping; 8 of the study's 9 runs are missing"
    assert about["mark"] in about["caption"] and about["missing"]


def test_a_stand_in_with_every_cell_of_the_study_has_no_mark(make_cells, draw):
    make_cells("rms_and_loss", experiment="update_clipping")
    assert draw("rms_and_loss")["mark"] == ""


def test_a_studys_own_runs_go_before_the_stand_ins(make_run, make_cells, draw):
    make_run(experiment="update_clipping", beta2=0.99, **KEYS)
    [own] = make_cells("rms_and_loss", {"optimizer.beta2": 0.999})
    about = draw("rms_and_loss")
    assert [run["path"] for run in about["runs"]] == [str(own)]
    assert about["mark"] == "1 of the study's 2 runs are missing"
    other = draw("rms_and_loss", experiment="update_clipping")
    assert other["mark"].startswith("runs of update_clipping")


def test_every_stand_in_is_a_study():
    drawn = [figures.load(slug) for slug in figures.slugs()]
    names = {figure.STAND_IN for figure in drawn if hasattr(figure, "STAND_IN")}
    assert names == {"update_clipping"}
    assert all((EXPERIMENTS / f"{name}.yaml").exists() for name in names)
