"""The report in a browser: no errors, no requests, links that zoom to spikes."""

import shutil
from pathlib import Path

import pytest

from analysis.report.__main__ import main

RUNS = Path(__file__).parents[2] / "experiments" / "results" / "update_clipping_mini"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
]


@pytest.fixture
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    """A function: the page at a window's width, and lists of its complaints and requests."""
    out = tmp_path / "report.html"
    assert main(["--runs", str(RUNS), "--out", str(out)]) == 0

    def opened(width, fragment=""):
        page, complaints, requests = (
            browser.new_page(viewport={"width": width, "height": 900}),
            [],
            [],
        )
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"file://{out}{fragment}")
        page.wait_for_selector("#curves-plot .main-svg")
        page.wait_for_function("document.getElementById('curves-plot').layout !== undefined")
        return page, complaints, requests

    return opened


def visible_steps(page):
    return page.evaluate("document.getElementById('curves-plot').layout.xaxis.range")


@pytest.mark.parametrize("width", [1280, 390])
def test_page_draws_without_errors_or_requests_and_fits_the_window(opened, width):
    page, complaints, requests = opened(width)
    assert page.locator("#curves-plot .scatterlayer .trace").count() > 9
    assert page.locator("#heat-plot .heatmaplayer image").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.check("#log")
    page.select_option("#which", "max")
    page.locator("#runs tbody tr").first.click()
    page.locator("#runs thead button").nth(3).click()
    losses = page.locator("#runs tbody td:nth-child(4)").all_inner_texts()
    assert losses == sorted(losses, key=float)
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_click_and_address_zoom_to_a_spike(opened):
    page, complaints, _ = opened(1280)
    assert visible_steps(page)[1] - visible_steps(page)[0] > 900
    page.locator("#spikes tbody a").first.click()
    page.wait_for_timeout(500)
    assert visible_steps(page) == [148, 228]
    assert "step 188" in page.inner_text("#selection")
    page.click("#reset")
    page.wait_for_timeout(500)
    assert visible_steps(page)[1] - visible_steps(page)[0] > 900
    linked, more, _ = opened(1280, "#spike-2-188")
    linked.wait_for_timeout(500)
    assert visible_steps(linked) == [148, 228]
    assert complaints == more == []
