"""The report in a browser: its scripts run without errors, and links zoom to spikes."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.report.__main__ import main
from tests.analysis.conftest import spiking

STUDY = Path(__file__).parents[2] / "experiments" / "results" / "stability_mini"
RUN = STUDY / "mini_l-bf16-adamw-s2-34a7d6b39f"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def in_chromium(test):
    return pytest.mark.slow(
        pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")(test)
    )


def opened(runs, out, script="", fragment="", width=1280):
    """The report of some runs, with one more script, as Chromium leaves it without errors."""
    assert main(["--runs", str(runs), "--out", str(out)]) == 0
    out.write_text(out.read_text() + script)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--window-size={width},900", "--virtual-time-budget=20000", "--dump-dom"]
    command += [f"file://{out}{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert "CONSOLE" not in done.stderr  # where errors of scripts are logged
    return done.stdout


@in_chromium
@pytest.mark.parametrize(
    ("fragment", "selection"), [("", ""), ("#spike-0-626", "bf16, AdamW, step 626")]
)
def test_page_draws_without_errors_and_a_link_selects_its_spike(tmp_path, fragment, selection):
    page = opened(RUN, tmp_path / "report.html", fragment=fragment)
    assert 'class="main-svg"' in page and 'class="trace scatter' in page
    assert re.search(r'id="selection"[^>]*>([^<;]*)', page).group(1) == selection


CLICKS = """<script>setTimeout(() => {
  const range = () => document.getElementById("curves-plot").layout.yaxis.range.join();
  const before = range(), at = [];
  for (const id of ["log", "log"]) {
    document.getElementById(id).click();
    at.push(range());
  }
  for (const control of document.querySelectorAll("#curves button, thead button, tr[data-run]")) {
    control.click();
  }
  document.querySelector("tr[data-step]").click();  // zooms
  document.getElementById("unified").click();
  document.body.dataset.hover = document.getElementById("curves-plot").layout.hovermode;
  document.getElementById("reset").click();
  const changed = at[0] !== before, back = at[1] === before;
  document.body.dataset.clicked = [changed, back, range() === before].join();
}, 1500)</script>"""


@in_chromium
def test_each_control_can_be_clicked_and_switched_back(tmp_path):
    page = opened(RUN, tmp_path / "report.html", CLICKS)
    assert 'data-clicked="true,true,true"' in page
    assert 'data-hover="x unified"' in page


ROWS = """<script>setTimeout(() => {
  const plot = document.getElementById("curves-plot"), seen = [];
  const look = () => seen.push(document.getElementById("selection").textContent,
    Math.round(plot.layout.xaxis.range[0]), plot.layout.shapes.length);
  look();
  document.querySelector("tr[data-step]").click();
  document.getElementById("unified").click();
  look();
  document.querySelectorAll("#runs tr[data-run]")[1].click();
  look();
  document.querySelectorAll("#runs tr[data-run]")[1].click();
  look();
  document.body.dataset.seen = seen.join("|");
}, 1500)</script>"""


@in_chromium
def test_a_row_shows_its_whole_run_after_a_zoom_and_the_label_names_what_is_shown(
    make_run, tmp_path
):
    for seed in range(2):
        make_run(num_steps=400, seed=seed, losses=spiking(400, [300] * (not seed)))
    page = opened(tmp_path / "runs", tmp_path / "report.html", ROWS)
    [seen] = re.findall(r'data-seen="([^"]+)"', page)
    everything, spike, row, again = zip(*[iter(seen.split("|"))] * 3, strict=True)
    assert everything[0] == "" and again == everything
    assert spike == ("bf16, AdamW, seed 0, step 300", "260", "3")
    assert row == ("bf16, AdamW, seed 1", *everything[1:])


ZOOM = """<script>setTimeout(() => {
  const plot = document.getElementById("curves-plot"), seen = [];
  const look = () => {  // how many points of the loss are in the panel
    const [x, y] = [plot.layout.xaxis.range, plot.layout.yaxis.range];
    const log = plot.layout.yaxis.type === "log";
    const shown = plot.data.filter((trace) => trace.meta.kind === "loss" && trace.visible);
    const inside = (value, range) => value >= range[0] && value <= range[1];
    seen.push(shown.map((trace) => Array.from(trace.x).filter((step, i) => inside(step, x) &&
      inside(log ? Math.log10(trace.y[i]) : trace.y[i], y)).length).reduce((a, b) => a + b, 0));
  };
  document.querySelector("tr[data-step]").click();
  look();
  const which = document.getElementById("which");
  which.value = "max";
  which.dispatchEvent(new Event("change"));
  look();
  for (const id of ["unified", "log", "log"]) {
    document.getElementById(id).click();
    look();
  }
  document.body.dataset.seen = seen.join();
}, 1500)</script>"""


@in_chromium
def test_no_control_empties_the_curves_after_a_zoom(tmp_path):
    page = opened(RUN, tmp_path / "report.html", ZOOM)
    seen = [int(num) for num in re.search(r'data-seen="([\d,]+)"', page).group(1).split(",")]
    assert len(seen) == 5 and min(seen) >= 70  # of 81 steps


MEASURE = """<script>setTimeout(() => document.querySelectorAll(".scroll").forEach((box) => {
  box.dataset.beyond = box.scrollWidth - box.clientWidth;
  box.dataset.below = box.scrollHeight - box.clientHeight;
}), 1500)</script>"""


@in_chromium
@pytest.mark.parametrize("width", [1280, 500])  # Chromium has no narrower window
def test_no_table_of_a_study_scrolls_sideways_on_a_small_screen(tmp_path, width):
    page = opened(STUDY, tmp_path / "report.html", MEASURE, width=width)
    beyond = re.findall(r'data-beyond="(-?\d+)"', page)
    assert len(beyond) >= 3 and set(beyond) == {"0"}


@in_chromium
@pytest.mark.parametrize("width", [1280, 500])
def test_long_names_of_tensors_and_files_break_in_their_columns(make_run, tmp_path, width):
    name = "vision_model.encoder.layers.23.self_attention." + "projection_" * 9 + "weight"
    rms = pd.DataFrame({name: np.ones(400)}, range(1, 401))
    rms.loc[297] = 9.0
    tables = {"tensors": {"rms": rms}}
    make_run(num_steps=400, losses=spiking(400, [300]), tables=tables)
    failed = make_run(num_steps=400, seed=1, steps=300, state="failed")
    status = {"state": "failed", "step": 300, "reason": "in /a" + "/long/path" * 12}
    (failed / "status.json").write_text(json.dumps(status))
    page = opened(tmp_path / "runs", tmp_path / "report.html", MEASURE, width=width)
    beyond = re.findall(r'data-beyond="(-?\d+)"', page)
    assert name in page and status["reason"] in page
    assert len(beyond) >= 3 and set(beyond) == {"0"}


@in_chromium
@pytest.mark.parametrize("width", [1280, 500])
def test_only_long_tables_scroll_in_a_box(make_run, tmp_path, width):
    for seed in range(6):
        make_run(num_steps=60, seed=seed)
    page = opened(tmp_path / "runs", tmp_path / "report.html", MEASURE, width=width)
    below = re.findall(r'data-below="(-?\d+)"', page)
    assert len(below) >= 2 and set(below) == {"0"}
    for seed in range(6, 21):
        make_run(num_steps=60, seed=seed)
    page = opened(tmp_path / "runs", tmp_path / "report.html", MEASURE, width=width)
    assert any(int(num) > 0 for num in re.findall(r'data-below="(-?\d+)"', page)) == (width == 500)
