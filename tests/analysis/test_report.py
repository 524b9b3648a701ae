"""The report of a sweep: a page that is whole, holds the numbers, loads nothing, trusts no name."""

import base64
import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from analysis import load_runs, report, style
from analysis.report import MAX_BYTES, main, make_page
from analysis.report_cell import Budget, heat_of, layer_of, read_cell, thin

CONV = "visual.conv1.weight"
VOID = {"meta", "img", "input", "br", "line", "link"}
LOADS = {"src", "srcset", "poster", "data", "action", "formaction", "background"}
HOSTILE = "<img src=x onerror=alert(1)>\"'&amp;<b>"


class Page(HTMLParser):
    """The elements of a page, what its scripts hold, and what it would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.loads, self.tags, self.scripts = [], [], [], [], {}
        self.text, self.cells = "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        self.loads += [value for name, value in attributes if name in LOADS]
        self.loads += [found["href"]] if not found.get("href", "#").startswith("#") else []
        assert not [name for name in found if name.startswith("on")]
        if "id" in found:
            self.ids.append(found["id"])
        if tag not in VOID:
            self.open.append((tag, found.get("id")))

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop()[0] == tag

    def handle_data(self, data):
        tag, name = self.open[-1] if self.open else ("", None)
        if tag == "script":
            self.scripts[name] = self.scripts.get(name, "") + data
        elif tag != "style":
            self.text += data


def page_of(runs, **keys):
    text = make_page(load_runs(runs), **keys)
    page = Page(text)
    assert not page.open and not page.loads and len(text) < MAX_BYTES
    assert len(page.ids) == len(set(page.ids))
    page.data = json.loads(page.scripts["data"])
    page.figure = json.loads(page.scripts["curves-figure"])
    return page


def numbers(array):
    return np.frombuffer(base64.b64decode(array["bdata"]), array["dtype"])


def trace(page, run, kind, smooth=False):
    meta = {"run": run, "kind": kind, "smooth": smooth}
    (found,) = [trace for trace in page.figure["data"] if trace["meta"] == meta]
    return numbers(found["x"]), numbers(found["y"])


def spiking(steps=1500):
    """A loss with a spike at step 1200, and RMS_t with one 3 steps before."""
    rng = np.random.default_rng(0)
    loss = 2 + 0.01 * rng.standard_normal(steps)
    loss[1199:1205] += 3
    rms = pd.DataFrame(0.9, np.arange(1, steps + 1), [CONV, "logit_scale"])
    rms.loc[1197, CONV] = 4.0
    return {"losses": loss, "tables": {"tensors": {"rms": rms}}, "num_steps": steps}


def test_the_page_is_whole_and_holds_the_plotted_numbers(make_run, tmp_path):
    make_run(num_steps=60)
    make_run(num_steps=60, seed=1, optimizer="stable_adamw")
    page = page_of(tmp_path / "runs")
    runs = load_runs(tmp_path / "runs")
    for i, name in enumerate(runs.summaries["run"]):
        metrics = runs.metrics[runs.metrics["run"] == name]
        rms = runs.tensors("*")[lambda frame, name=name: frame["run"] == name]
        for kind, values in (
            ("loss", metrics["loss"]),
            ("rms", rms[CONV]),
            ("max", rms.drop(columns=["run", "step"]).max(axis=1)),
        ):
            steps, drawn = trace(page, i, kind)
            assert steps.tolist() == list(range(1, 61))
            np.testing.assert_array_equal(drawn, values.to_numpy(np.float32))
    assert "2 runs: 2 finished" in page.text and "thinned" not in page.text


def test_colors_are_those_of_the_methods_in_every_figure(make_run, tmp_path):
    make_run(num_steps=20, recipe="switchback", optimizer="stable_adamw")
    make_run(num_steps=20, recipe="switchback", optimizer="stable_adamw", lr=2e-3)
    make_run(num_steps=20, optimizer="adamw")
    colors = {trace["line"]["color"] for trace in page_of(tmp_path / "runs").figure["data"]}
    switchback = style.PRECISIONS["switchback"][1].lower()
    assert {"#000000", switchback} < colors and len(colors) == 3  # the third is a paler one


def test_only_settings_that_differ_are_in_the_table(make_run, tmp_path):
    make_run(num_steps=20, lr=1e-3)
    make_run(num_steps=20, lr=2e-3)
    runs = load_runs(tmp_path / "runs")
    heads = report.named(runs.summaries)
    assert report.differences(heads) == ["optimizer.lr"]
    assert report.common(heads)["optimizer.beta2"] == 0.99
    assert set(heads["label"]) == {"AdamW (lr=0.001)", "AdamW (lr=0.002)"}


def test_a_spike_has_a_row_that_leads_to_its_moment(make_run, tmp_path):
    make_run(**spiking())
    page = page_of(tmp_path / "runs")
    assert "spike-0-1200" in page.ids
    assert re.search(r"1 of 1\s+come 1 to 8 steps after an RMS spike", page.text)
    marks = [trace for trace in page.figure["data"] if trace["meta"]["kind"] == "spike"]
    assert [numbers(mark["x"]).tolist() for mark in marks] == [[1200]]


def test_thinning_keeps_extremes_gaps_and_what_is_around_a_spike():
    steps = 10_000
    curves = pd.DataFrame({"step": range(1, steps + 1), "loss": 1.0, "rms": 1.0, "max": 1.0})
    curves.loc[4321, "loss"], curves.loc[77, "rms"], curves.loc[8765, "max"] = 9.0, 5.0, 7.0
    curves.loc[5000:5010, "loss"] = np.nan
    kept = thin(curves, 400, [2000])
    assert {0, 77, 4321, 8765, steps - 1} <= set(kept)
    assert set(range(1960, 2040)) <= set(kept)
    assert curves["loss"].iloc[kept].isna().any()
    assert len(kept) < 400 + 90 and (np.diff(kept) > 0).all()
    assert len(thin(curves.iloc[:400], 400, [])) == 400


def test_a_long_run_is_thinned_and_the_page_says_so(make_run, tmp_path, monkeypatch):
    make_run(**spiking())
    monkeypatch.setattr(report, "MAX_POINTS", 200)
    page = page_of(tmp_path / "runs")
    assert "Curves longer than 200 steps are thinned" in page.text
    steps, loss = trace(page, 0, "loss")
    assert len(steps) < 400 and loss.max() > 4.9 and set(range(1161, 1240)) <= set(steps.tolist())


def test_a_heat_map_has_the_largest_of_each_bucket_and_layer():
    names = [
        f"visual.transformer.resblocks.{i}.{part}" for i in range(20) for part in ("w", "b", "c")
    ]
    rms = pd.DataFrame(1.0, np.arange(1, 1001), names[::-1])
    rms.loc[500, "visual.transformer.resblocks.7.b"] = 9.9
    rms["logit_scale"], rms["visual.conv1.weight"] = np.nan, 0.05
    heat = heat_of(rms, 2200)
    assert heat.rows[0] == "visual.conv1" and heat.rows[-1] == "logit_scale"
    assert heat.rows[8] == "visual.transformer.resblocks.7" and len(heat.rows) == 22
    assert heat.codes.shape == (22, 100)
    assert np.argwhere(heat.codes > 200).tolist() == [[8, 49]] and heat.steps[49] == 491
    assert (heat.codes[-1] == 0).all() and (heat.codes[0] == 1).all()
    assert heat_of(rms[["logit_scale"]], 2200) is None
    assert layer_of("transformer.resblocks.11.ln_1.bias") == "transformer.resblocks.11"


def test_nothing_of_a_hostile_run_becomes_markup(make_run, tmp_path):
    run, other, _ = (make_run(num_steps=20, seed=i, steps=10, state="running") for i in range(3))
    (run / "config.yaml").write_text("[")
    status = {"state": "failed", "step": 10, "reason": f"</script>{HOSTILE}"}
    (run / "status.json").write_text(json.dumps(status))
    run.rename(run.parent / HOSTILE)
    name = json.dumps(f"</script>{HOSTILE}")  # a folder's name has no slash, a model's may
    text = (other / "config.yaml").read_text().replace("name: nano", f"name: {name}")
    (other / "config.yaml").write_text(text)
    page = page_of(tmp_path / "runs")
    assert page.tags.count("script") == 5 and "img" not in page.tags
    assert HOSTILE in page.text and HOSTILE in page.data["labels"]
    assert any("</script>" in label for label in page.data["labels"])
    drawn = json.dumps([trace["name"] for trace in page.figure["data"]])
    assert "<" not in drawn  # plotly would read it as markup


def test_failed_and_damaged_runs_are_listed_with_their_reasons(make_run, tmp_path):
    make_run(num_steps=20)
    diverged = make_run(num_steps=20, seed=1, steps=10, state="diverged")
    damaged = make_run(num_steps=20, seed=2)
    with open(damaged / "metrics.jsonl", "a") as file:
        file.write("garbage\n")
    page = page_of(tmp_path / "runs")
    listed = page.text[page.text.index("Failures and damage") :]
    assert "loss is nan" in listed and str(diverged) in listed
    assert "metrics.jsonl: line 21" in listed and str(damaged) in listed
    assert "need attention2" in page.text


@pytest.mark.parametrize("wreck", ["config", "empty", "no tensors", "timing"])
def test_a_wrecked_run_alone_still_gives_a_page(make_run, tmp_path, wreck):
    run = make_run(num_steps=20, steps=0 if wreck == "empty" else 20, state="running")
    if wreck == "config":
        (run / "config.yaml").write_text("")
    if wreck == "no tensors":
        shutil.rmtree(run / "tensors")
    if wreck == "timing":
        (run / "timing.jsonl").write_text('{"step": 1, "step_ms": "fast", "wall_s": null}\n')
    assert "1 run: 1 running" in page_of(tmp_path / "runs").text


def test_speed_is_the_median_and_hours_are_of_all_attempts(make_run):
    run = make_run(num_steps=20)
    rows = [
        {"step": 1, "attempt": 0, "wall_s": 3600, "step_ms": 900.0, "memory_gib": 2.0},
        {"step": 2, "attempt": 1, "wall_s": 1800, "step_ms": 30.0, "memory_gib": 3.0},
        {"step": 3, "attempt": 1, "wall_s": 3600, "step_ms": 31.0, "memory_gib": 1.0},
    ]
    (run / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    speed = read_cell(load_runs(run), CONV, Budget(100, 1, 1000)).speed
    assert (speed["step_ms"], speed["memory_gib"], speed["hours"], speed["attempts"]) == (
        31,
        3,
        2,
        2,
    )
    assert np.isnan(speed["images_per_s"])


def test_the_same_runs_give_the_same_page(make_run, tmp_path):
    make_run(num_steps=40)
    make_run(num_steps=40, seed=1)
    assert make_page(load_runs(tmp_path / "runs")) == make_page(load_runs(tmp_path / "runs"))


def test_a_page_that_would_be_too_large_is_refused(make_run, tmp_path, monkeypatch, capsys):
    make_run(num_steps=20)
    monkeypatch.setattr(report, "MAX_BYTES", 1000)
    out = tmp_path / "page.html"
    assert main(["--runs", str(tmp_path / "runs"), "--out", str(out)]) == 2
    assert "choose fewer" in capsys.readouterr().err and not out.exists()


def test_no_runs_exits_with_what_to_do(tmp_path, capsys):
    assert main(["--runs", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert "no runs at or below" in capsys.readouterr().err
