"""The report in a browser: its scripts run without errors, and links zoom to spikes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from analysis.report.__main__ import main

RUNS = Path(__file__).parents[2] / "experiments" / "results" / "update_clipping_mini"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
@pytest.mark.parametrize(
    ("fragment", "selection"), [("", ""), ("#spike-2-188", "bf16, AdamW (beta2=0.999), step 188")]
)
def test_page_draws_without_errors_and_a_link_selects_its_spike(tmp_path, fragment, selection):
    out = tmp_path / "report.html"
    assert main(["--runs", str(RUNS), "--out", str(out)]) == 0
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--virtual-time-budget=5000", "--dump-dom", f"file://{out}{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert "CONSOLE" not in done.stderr  # where errors of scripts are logged
    page = done.stdout
    assert 'class="main-svg"' in page and 'class="trace scatter' in page and "<image" in page
    assert re.search(r'id="selection"[^>]*>([^<;]*)', page).group(1) == selection
