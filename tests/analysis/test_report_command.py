"""The command that writes the report: planned runs, and pages that are written again."""

import time
from contextlib import closing

import pytest

from analysis.report import __main__ as report_main
from lowprec import waiting
from lowprec.runs import durable
from lowprec.sweep.plan import MARKS, Plan, PlannedRun


def test_planned_runs_that_have_not_begun_are_counted_and_named(make_run, tmp_path, capsys):
    run, out = make_run(num_steps=60), tmp_path / "report.html"
    plan = Plan.open(run.parent.parent / "sweeps" / f"{run.parent.name}_mini")
    places = (f"{run.parent.name}/{run.name}", f"{run.parent.name}/later", "another/run")
    plan.add([PlannedRun(0, place, place, [], {"num_steps": 60}) for place in places])
    assert report_main.main(["--runs", str(run.parent), "--out", str(out)]) == 0
    assert "2 runs: 1 finished, 1 not begun" in out.read_text()
    assert "Not begun: later." in out.read_text()
    assert "1 run (1 finished) of loss_curves (demo) and 1 not begun, " in capsys.readouterr().out


@pytest.mark.parametrize("last", ["finished", "failed"])
def test_a_watched_page_is_reloaded_until_its_runs_end(
    make_run, tmp_path, monkeypatch, capsys, last
):
    run, pages, wait = make_run(num_steps=60), [], time.sleep
    monkeypatch.setattr(waiting, "SILENT_S", 0.01)
    status = run / "status.json"
    status.write_text(status.read_text().replace("finished", "running"))

    def sleep(seconds):
        assert not pages
        pages.append(out.read_text())
        capsys.readouterr()
        wait(0.05)
        assert capsys.readouterr().err == ""  # says nothing while it waits
        status.write_text(status.read_text().replace("running", last))

    monkeypatch.setattr(report_main.time, "sleep", sleep)
    out = tmp_path / "report.html"
    with closing(waiting.Waiting("reading runs")):
        assert report_main.main(["--runs", str(run), "--out", str(out), "--watch", "5"]) == 0
    tag = '<meta http-equiv="refresh" content="5">'
    assert [tag in page for page in [*pages, out.read_text()]] == [True, False]


@pytest.mark.parametrize("mark", MARKS)
def test_a_watched_page_does_not_wait_for_runs_that_do_not_go_on(
    make_run, tmp_path, monkeypatch, mark
):
    monkeypatch.setattr(report_main.time, "sleep", None)
    run = make_run(num_steps=60, steps=40, state="preempted")
    plan = Plan.open(run.parent.parent / "sweeps" / run.parent.name)
    for index, name in enumerate((run.name, "never")):
        plan.add([PlannedRun(0, name, f"{run.parent.name}/{name}", [], {"num_steps": 60})])
        plan.mark(index, mark).touch()
    out = tmp_path / "report.html"
    assert report_main.main(["--runs", str(run.parent), "--out", str(out), "--watch", "5"]) == 0
    assert "1 run: 1 preempted" in out.read_text()


def test_a_cancelled_run_goes_on_until_it_has_saved(make_run):
    run = make_run(num_steps=60, steps=40, state="preempted")
    plan = Plan.open(run.parent.parent / "sweeps" / run.parent.name)
    plan.add([PlannedRun(0, "", f"{run.parent.name}/{run.name}", [], {"num_steps": 60})])
    plan.mark(0, "cancelled").touch()
    with durable.locked(run / ".lock"):
        assert report_main.planned_runs(run.parent) == {run.name: True}
    assert report_main.planned_runs(run.parent) == {run.name: False}
