"""The report page: complete, with the numbers of the runs, self-contained, and safe to open."""

import base64
import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_rgb

from analysis import load_runs, style
from analysis.measures import named_heads
from analysis.report import page as report_page
from analysis.report.collect import speed_of, thin
from analysis.report.page import compare_settings, make_page, named
from analysis.report.plots import looks
from lowprec.config.schema import PrecisionChangeConfig
from lowprec.diagnostics import watch
from lowprec.diagnostics.spikes import Protocol
from tests.analysis.conftest import spiking as planted
from tests.analysis.conftest import write_rows

CONV = "visual.conv1.weight"
VOID = {"meta", "img", "input", "br", "line", "link"}
LOADS = {"src", "srcset", "poster", "data", "action", "formaction", "background"}
HOSTILE = "<img src=x onerror=alert(1)>\"'&amp;{{ 7*7 }}<b>"


class Page(HTMLParser):
    """The elements of a page, the contents of its scripts, and what it would load."""

    def __init__(self, html):
        super().__init__()
        self.open, self.ids, self.loads, self.tags, self.scripts = [], [], [], [], {}
        self.text, self.html = "", html
        self.feed(html)
        self.close()
        assert not self.open and not self.loads
        assert len(self.ids) == len(set(self.ids))
        self.data = json.loads(self.scripts["data"])
        self.figure = json.loads(self.scripts["curves-figure"])

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        sources = [value for name, value in attributes if name in LOADS]
        self.loads += [value for value in sources if not value.startswith("data:image/jpeg;")]
        self.loads += [values["href"]] if not values.get("href", "#").startswith("#") else []
        assert not [name for name in values if name.startswith("on")]
        self.ids += [values["id"]] if "id" in values else []
        if tag not in VOID:
            self.open.append((tag, values.get("id")))

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop()[0] == tag

    def handle_data(self, data):
        tag, name = self.open[-1] if self.open else ("", None)
        if tag == "script":
            self.scripts[name] = self.scripts.get(name, "") + data
        elif tag != "style":
            self.text += data

    def section(self, heading):
        """The text from a heading on, with single spaces."""
        return " ".join(self.text[self.text.index(heading) :].split())


@pytest.fixture
def page_of(make_run, tmp_path, monkeypatch):
    """A function: the page of the runs made so far, without plotly's own code."""
    monkeypatch.setattr(report_page, "get_plotlyjs", lambda: "")
    return lambda: Page(make_page(load_runs(tmp_path / "runs")))


def numbers(array):
    return np.frombuffer(base64.b64decode(array["bdata"]), array["dtype"])


def trace(page, run, kind, median=False):
    meta = {"run": run, "kind": kind} | ({"median": True} if median else {})
    (match,) = [trace for trace in page.figure["data"] if trace["meta"] == meta]
    return numbers(match["x"]), numbers(match["y"])


def spiking(steps=1500):
    """A loss with a spike at step 1200, and RMS_t with a spike 3 steps before."""
    rms = pd.DataFrame(0.9, np.arange(1, steps + 1), [CONV, "logit_scale"])
    rms.loc[1197, CONV] = 4.0
    losses = planted(steps, [1200], 3.0, length=6)
    return {"losses": losses, "tables": {"tensors": {"rms": rms}}, "num_steps": steps}


def test_page_loads_nothing_and_holds_the_plotted_numbers(make_run, tmp_path):
    for seed in range(3):
        make_run(num_steps=60, seed=seed)
    runs = load_runs(tmp_path / "runs")
    page = Page(make_page(runs))
    for i, name in enumerate(runs.runs["run"]):
        one = runs.only(name)
        rms = one.tensors("*")
        for kind, values in (
            ("loss", one.metrics["loss"]),
            ("rms", rms[CONV]),
            ("max", rms.drop(columns=["run", "step"]).max(axis=1)),
        ):
            steps, drawn = trace(page, i, kind)
            assert steps.tolist() == list(range(1, 61))
            np.testing.assert_array_equal(drawn, values.to_numpy(np.float32))
    median = runs.metrics.groupby("step")["loss"].median().to_numpy(np.float32)
    drawn = trace(page, 0, "loss", median=True)[1]
    np.testing.assert_allclose(drawn, median, rtol=1e-6)  # float32
    assert "3 runs: 3 finished" in page.text and "thinned" not in page.text


def test_panels_are_those_with_data_and_short_runs_are_not_examined(make_run, page_of):
    make_run(num_steps=60, steps=40, seed=1, state="failed")  # without an evaluation
    steps = np.arange(1, 61)
    accuracy = np.select([steps == 20, steps == 60], [0.25, 0.5], np.nan)
    columns = {"zero_shot/top1": accuracy, "lr": np.full(60, 0.1), "grad_norm": 1 / steps}
    make_run(num_steps=60, columns=columns)
    page = page_of()
    i = next(i for i, fields in enumerate(page.data["labels"]) if "seed 0" in fields)
    assert trace(page, i, "accuracy")[1].tolist() == [0.25, 0.5]
    assert trace(page, i, "grad_norm")[1].tolist() == pytest.approx([1 / n for n in range(1, 61)])
    titles = [axis["title"]["text"] for name, axis in page.figure["layout"].items()
              if name.startswith("yaxis")]  # fmt: skip
    assert titles == [
        "training loss",
        "RMS<sub>t</sub>",
        "gradient norm",
        "learning rate",
        "accuracy",
    ]
    sentence = "2 of 2 runs were not examined: 40 to 60 steps are recorded, and a spike needs"
    assert sentence in page.section("Loss spikes")
    assert "mean over the last tenth of the steps, at most 40" in page.section("Results, and")
    assert page.section("Results, and").count("not examined") == 5  # runs, setting
    make_run(num_steps=1200, seed=2)
    assert "in 0 of 1 examined runs" in page_of().text


def test_a_change_of_precision_is_marked_and_told_apart(make_run, page_of):
    for change in ({}, {"step": 30, "recipe": "high"}, {"step": 45, "recipe": "high"}):
        change = PrecisionChangeConfig(**change)
        make_run(num_steps=60, recipe="switchback", precision_change=change)
    page = page_of()
    marks = [s["x0"] for s in page.figure["layout"]["shapes"] if s["x0"] == s["x1"]]
    texts = {note["text"] for note in page.figure["layout"]["annotations"]}
    assert sorted(marks) == [30, 45] and texts == {"switchback until here"}
    steps = [label.partition("precision_change.step=")[2][:4] for label in page.data["labels"]]
    assert sorted(steps) == ["30, ", "45, ", "null"]


def test_seeds_are_folded_into_means_and_accuracies_are_percentages(make_run, page_of):
    for seed, lr, top1 in ((0, 1e-3, 0.5), (1, 1e-3, 0.7), (0, 2e-3, 0.25)):
        columns = {"zero_shot/top1": np.full(60, top1)}
        make_run(num_steps=60, seed=seed, lr=lr, columns=columns)
    page = page_of()
    assert page.data["folded"] == [True, True, False]
    text = page.section("Results, and")
    assert "bf16, AdamW (lr=0.001) 2 " in text and "bf16, AdamW (lr=0.002) 1 " in text
    assert "60.0% \u00b1 14.1%" in text and " 25.0% " in text and " 70.0% " in text


def test_settings_average_loss_spikes_over_the_seeds_that_are_long_enough(make_run, page_of):
    for seed in (0, 1):
        make_run(num_steps=60, seed=seed, beta2=0.9)
        make_run(**spiking(), seed=seed)
    make_run(**spiking(), seed=2, steps=60, state="failed")
    text = page_of().section("Results, and").partition("Mean \u00b1")[0]
    assert "2 0.6089 \u00b1 0.0089 50.0% \u00b1 0.0% not examined bf16" in text
    assert text.endswith(" 50.0% \u00b1 0.0% 1.0 \u00b1 0.0 (2 of 3 seeds) ")


def test_the_lowest_final_loss_comes_first_if_runs_compare(make_run, page_of):
    for seed, loss in ((0, 3.0), (1, 2.0), (2, np.nan), (3, 1.0)):
        make_run(num_steps=60, seed=seed, losses=np.full(60, loss))
    for order in ((3, 1, 0, 2), range(5)):
        if len(order) == 5:
            make_run(num_steps=60, seed=4, data="cd" * 32)
        text = page_of().section("Results, and")
        places = [text.index(f"seed {seed}") for seed in order]
        assert places == sorted(places)


def test_labels_and_colors_show_the_settings_that_differ(make_run, tmp_path):
    make_run(num_steps=20, lr=1e-3)
    make_run(num_steps=20, lr=2e-3)
    summaries = named(load_runs(tmp_path / "runs").summaries)
    (first, one), (second, same) = looks(summaries)
    assert one == same == "solid"  # though AdamW's lines are dashed beside other optimizers'
    contrast = np.abs(np.subtract(to_rgb(first), to_rgb(second)))
    assert contrast.max() > 0.5  # not two shades of the method's color
    other = summaries.assign(**{"optimizer.name": "stable_adamw"})
    two = looks(pd.concat([summaries, other]))  # a color for each setting, a dash for an optimizer
    assert [color for color, _ in two] == [first, second] * 2
    assert two[0][1] == two[1][1] != two[2][1] == two[3][1]
    alone = pd.concat([summaries[:1], other[:1]]).assign(variant=0)
    assert [color for color, _ in looks(alone)] == [
        style.OPTIMIZERS[name][2].lower() for name in ("adamw", "stable_adamw")
    ]
    differing, shared = compare_settings(summaries)
    assert differing == ["optimizer.lr"] and shared["optimizer.beta2"] == 0.99
    assert "remote_sync" in summaries and "remote_sync" not in shared  # a removed key
    old = summaries.assign(remote_sync="s3://bucket")
    assert compare_settings(old)[1]["remote_sync"] == "s3://bucket"
    assert set(summaries["label"]) == {"bf16, AdamW (lr=0.001)", "bf16, AdamW (lr=0.002)"}


def test_the_table_of_runs_names_precisions_as_a_command_does(make_run, page_of):
    for recipe in ("high", "switchback"):
        make_run(num_steps=20, recipe=recipe)
    section = page_of().section("Runs").partition("Failures")[0]
    assert "spikesprecision" in section  # headings
    assert " bf16 " in section and " high " not in section


def test_spikes_have_rows_that_link_to_them_and_long_runs_are_thinned(
    make_run, page_of, monkeypatch
):
    monkeypatch.setattr(report_page, "MAX_POINTS", 200)
    make_run(**spiking())
    make_run(**spiking(), beta2=0.8)
    page = page_of()
    assert {"spike-0-1200", "spike-1-1200"} <= set(page.ids)
    section = page.section("Loss spikes")
    assert "2 of 2 begin 1 to 8 steps after an RMS spike" in section
    assert "counted from the onset, 2 of 2" in section
    assert "In 1 of 2 runs RMSt cannot reach the threshold" in section
    marks = [trace for trace in page.figure["data"] if trace["meta"]["kind"] == "spike"]
    assert [numbers(mark["x"]).tolist() for mark in marks] == [[1200], [1200]]
    assert "longer than 200 steps are thinned" in page.text
    steps, loss = trace(page, 0, "loss")
    assert len(steps) < 400 and loss.max() > 4.9


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run of an MLP that `watch` recorded: batches 200 to 204 are too large."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    monitor = watch(model, optimizer, protocol=Protocol(ignore_steps=100, window=50))
    for step in range(1, 301):
        x = torch.randn(32, 8) * (500 if 200 <= step < 205 else 1)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        monitor.loss(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    monitor.save(tmp_path_factory.mktemp("watched") / "mlp")
    return tmp_path_factory.getbasetemp() / "watched0" / "mlp"


def test_losses_above_the_axis_are_counted_and_marked_at_its_edge(make_run, page_of):
    make_run(**spiking())
    page = page_of()
    marked, edge = trace(page, 0, "above")
    assert marked.tolist() == [*range(1200, 1206)]
    assert set(edge) == {page.figure["layout"]["yaxis"]["range"][1]} and max(edge) < 2.1
    text = page.section("RMSt of")
    assert re.search(r"6 losses up to 5\.\d+ are above the axis: tick logarithmic loss to", text)


def test_a_tensor_that_is_not_recorded_has_no_counts(watched, monkeypatch):
    monkeypatch.setattr(report_page, "get_plotlyjs", lambda: "")
    page = Page(make_page(load_runs(watched)))
    section, choose = page.section("Loss spikes"), "choose with --tensor, such as 0.weight"
    assert f"{CONV} is not recorded: {choose}, " in section and "0 of 1" not in section
    assert "RMSt of the largest of all" in page.section("RMSt of")  # the only choice
    assert "RMS spikes" not in page.section("Results, and")  # a column without values is left out
    assert "experiments.replay" not in page.text  # it needs checkpoints
    assert re.search(r"A loss of \d.*e5 is above the axis: tick logarithmic loss", page.text)
    rate = page.figure["layout"]["yaxis4"]
    assert rate["title"]["text"] == "learning rate" and rate["rangemode"] == "tozero"
    lines = [shape["y0"] for shape in page.figure["layout"]["shapes"] if shape["yref"] == "y"]
    assert not lines  # chance, ln(batch size), is not this loss's
    assert named_heads(load_runs(watched))["batch_size"].tolist() == [0]  # nor in figures
    assert page.data["labels"] == ["mlp"] and "unknown, " not in page.section("RMSt of")
    section = Page(make_page(load_runs(watched), "0.weight")).section("Loss spikes")
    assert "0 of 1 begin 1 to 8 steps after an RMS spike of 0.weight" in section
    assert "1 coincides with an RMS spike, which therefore cannot be the cause" in section
    assert "is not recorded" not in section


def test_thinning_keeps_extremes_gaps_and_the_steps_around_spikes():
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


def test_hostile_names_and_reasons_never_become_markup(make_run, page_of):
    run, other, _ = (make_run(num_steps=20, seed=i, steps=10, state="running") for i in range(3))
    (run / "config.yaml").write_text("[")
    status = {"state": "failed", "step": 10, "reason": f"</script>{HOSTILE}"}
    (run / "status.json").write_text(json.dumps(status))
    run.rename(run.parent / HOSTILE)
    name = json.dumps(f"</script>{HOSTILE}")  # a folder's name has no slash, a model's may
    text = (other / "config.yaml").read_text().replace("name: nano", f"name: {name}")
    (other / "config.yaml").write_text(text)
    rms = pd.DataFrame(1.0, range(1, 21), [CONV, "<b onclick=x>"])
    make_run(num_steps=20, seed=4, tables={"tensors": {"rms": rms}})
    page = page_of()
    assert page.tags.count("script") == 4 and "img" not in page.tags
    assert HOSTILE in page.text and HOSTILE in page.data["labels"]
    assert any("</script>" in label for label in page.data["labels"])
    drawn = json.dumps([trace["name"] for trace in page.figure["data"]])
    assert "<" not in drawn  # plotly would read it as markup


def test_remarks_and_retrieved_captions_are_shown(make_run, page_of):
    run, other = make_run(seed=0, remark=f"warm {HOSTILE}"), make_run(seed=1)
    assert page_of().tags.count("img") == 0
    good = {"sample": 0, "jpeg": "/9j/", "caption": HOSTILE, "nearest": ["a cat", HOSTILE]}
    rows = [good, good | {"jpeg": 7}, {"jpeg": "/9j/"}, good | {"jpeg": "/" * 20_000}]
    write_rows(run / "retrieved.jsonl", rows)
    of = {"caption": "other", "step": 70, "val": f"{HOSTILE}.tar"}
    write_rows(other / "retrieved.jsonl", [good | of] * 9)
    page = page_of()
    assert page.tags.count("img") == 9 and page.tags.count("li") == 18
    section = page.section("Retrieved captions")
    assert section.count("a cat") == 9 and section.count(f", step 70, {HOSTILE}.tar") == 1
    assert page.tags.count("b") == 3  # two of the cards, and one caption that is the image's own
    assert f"warm {HOSTILE}" in page.text


def test_failures_and_damage_are_listed_with_their_reasons(make_run, page_of):
    make_run(num_steps=20)
    diverged = make_run(num_steps=20, seed=1, steps=10, state="diverged")
    damaged = make_run(num_steps=20, seed=2)
    with open(damaged / "metrics.jsonl", "a") as file:
        file.write("garbage\n")
    make_run(num_steps=200, losses=np.where(np.arange(200) < 80, 3.0, np.log(128) + 0.05))
    never = make_run(num_steps=200, seed=5, losses=np.full(200, np.log(128)))
    late = np.where(np.arange(200) < 80, np.log(128), 2.0)  # at chance level at first: no failure
    make_run(num_steps=200, seed=6, losses=late)
    warmup = np.full(1200, np.log(128))  # at chance level in its warmup: not collapsed
    make_run(num_steps=20_000, steps=1200, state="preempted", losses=warmup)
    running = make_run(num_steps=20, seed=4, steps=10, state="running")
    bare = make_run(num_steps=20, seed=3)
    shutil.rmtree(bare / "tensors")
    (bare / "tensors.parquet").unlink()
    page = page_of()
    failures = page.section("Failures and damage")
    assert "need attention6" in page.text and str(running) not in failures
    assert "loss is nan" in failures and str(diverged) in failures
    assert "metrics.jsonl: line 21" in failures and str(damaged) in failures
    assert failures.count("the loss has been at chance level, 4.85, since step 81") == 1
    assert failures.count("finished, collapsed") == failures.count("collapsed") == 1
    assert f"the loss has not left chance level, 4.85 {never}" in failures
    assert failures.count("finished, not learning") == 1
    colors = set(re.findall(r'class="state (\w+)">finished, (collapsed|not learning)<', page.html))
    assert colors == {("bad", "collapsed"), ("warn", "not learning")}
    assert failures.count("tensors are not there") == 1
    assert failures.count("finished, damaged") == 1


def test_speed_is_the_median_and_hours_cover_all_attempts():
    timing = {"attempt": [0, 1, 1], "wall_s": [3600, 1800, 3600], "memory_gib": [2, 3, 1]}
    timing["images_per_s"] = [3, 90, 91]
    speed = speed_of(pd.DataFrame(timing))
    assert np.isnan(speed.pop("data_wait"))
    assert speed == {"images_per_s": 90, "memory_gib": 3, "hours": 2}
