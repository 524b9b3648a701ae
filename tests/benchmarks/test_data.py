"""The data benchmark on tiny sets; it gives no number for a loader with other samples."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.benchmarks import data as bench_data
from experiments.benchmarks.data import DataBenchConfig
from lowprec.config.compose import CONF

pytestmark = [  # webdataset leaves its shards open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture
def measure(squares, tmp_path, capsys):
    """`measure(train=..., ...)`: the lines of one measurement, by default of the squares."""

    def run(**keys):
        defaults = {"train": str(squares / "train-*.tar"), "image_size": [16], "augment": ["none"]}
        defaults |= {"batch_size": 10, "num_batches": 3, "workers": 0, "shards": []}
        try:
            bench_data.main(DataBenchConfig(**{**defaults, "run_dir": str(tmp_path), **keys}))
        finally:
            run.lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return run.lines

    return run


def test_loaders_are_compared_and_start_up_is_timed(measure):
    lines = measure(augment=["none", "crop_flip"], shards=[10, 100])
    loaders = ["webdataset", "lowprec"]
    assert [line["case"] for line in lines] == [*loaders * 2, *["start-up"] * 2]
    for line in lines:
        assert line["correct"] is True and line["ms"] > 0 and line["rate"] > 0
        assert {"torch", "pillow", "webdataset"} <= line["versions"].keys()
    plain, ours = lines[:2]
    assert plain["ratio"] == 1
    assert ours["ratio"] == pytest.approx(ours["rate"] / plain["rate"], 0.01)
    assert [line["shape"] for line in lines[-2:]] == ["10 shards", "100 shards"]


def test_set_is_rendered_if_none_is_given(measure):
    shapes = [line["shape"] for line in measure(train=None, image_size=[16, 128])]
    assert shapes[0].startswith("shapes of 16 px, noise 0 to 16 px")
    assert shapes[2].startswith("shapes of 146 px, noise 12 to 128 px")


def test_workers_are_measured_beside_one_process(measure):
    shapes = [line["shape"] for line in measure(workers=2)]
    assert [shape[-9:] for shape in shapes] == ["0 workers"] * 2 + ["2 workers"] * 2


WRONG = {  # name of a function of webdataset's pipeline: its replacement
    "other pixels": ("decode_image", lambda *_: np.zeros((3, 16, 16), np.uint8)),
    "other captions": ("decode_caption", lambda data: f"not {data.decode()}"),
}


@pytest.mark.parametrize(("name", "other"), WRONG.values(), ids=WRONG.keys())
def test_different_samples_give_no_number(measure, monkeypatch, name, other):
    monkeypatch.setattr(bench_data, name, other)
    with pytest.raises(SystemExit, match="none, batch 10, 0 workers"):
        measure()
    [line] = measure.lines
    assert line["ms"] is None and line["correct"] is False and "samples" in line["reason"]


def test_random_crops_may_differ_and_captions_may_not(measure, monkeypatch):
    assert measure(augment=["crop_flip"])
    monkeypatch.setattr(bench_data, *WRONG["other captions"])
    with pytest.raises(SystemExit, match="crop_flip"):
        measure(augment=["crop_flip"])


def test_set_with_a_bad_sample_is_refused(measure, squares, tmp_path):
    data = (squares / "train-0.tar").read_bytes()
    (tmp_path / "bad.tar").write_bytes(data.replace(b"\x89PNG", b"\0PNG", 1))
    with pytest.raises(SystemExit):
        measure(train=str(tmp_path / "bad.tar"))
    assert re.search(r"bad\.tar.*s00000\.png", measure.lines[0]["reason"])


def test_missing_set_is_refused(measure, tmp_path):
    with pytest.raises(SystemExit, match="no file matches"):
        measure(train=str(tmp_path / "none-*.tar"))


def test_rate_counts_images_between_equal_leads_of_the_workers(monkeypatch):
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]  # 1 + 2 to warm up, 3 timed, 2 ahead

    def loader(case, count):
        assert count == len(sizes)
        return iter([SimpleNamespace(images=range(size)) for size in sizes])

    times = iter([100.0, 104.0])
    monkeypatch.setattr(bench_data.time, "perf_counter", lambda: next(times))
    assert bench_data.images_per_second(SimpleNamespace(workers=1), loader, 3) == (8 + 16 + 32) / 4


@pytest.mark.slow
def test_command_measures_standard_sets_with_workers(tmp_path):
    keys = ("batch_size=64", "num_batches=8", "workers=2", "shards=[100,3000]")
    done = subprocess.run(
        [sys.executable, "-m", "experiments.benchmarks.data", *keys, f"run_dir={tmp_path}"],
        cwd=CONF.parent, check=True, timeout=280, capture_output=True, text=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2 * (2 * 2 * 2) + 2
    assert all(line["correct"] for line in lines)
    small, large = lines[-2:]
    assert large["ms"] < 1000 * 3000 / 10000  # ten times what it takes undisturbed
    assert large["memory_mib"] < 50 and small["memory_mib"] < 20
