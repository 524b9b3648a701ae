"""The data benchmark on tiny sets; it gives no number for a loader with other samples."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.benchmarks import data as bench_data
from experiments.benchmarks.configs import DataConfig

pytestmark = [  # webdataset leaves its shards open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture
def measure(squares, lines_of):
    """`measure(train=..., ...)`: the lines of one measurement, by default of the squares."""

    def run(**keys):
        tiny = {"train": str(squares / "train-*.tar"), "image_size": [16], "augment": ["none"]}
        tiny |= {"batch_size": 10, "num_batches": 3, "workers": 0}
        return lines_of(bench_data.main, DataConfig(**tiny | keys))

    return run


def test_loaders_are_compared_in_one_process_and_with_workers(measure):
    lines = measure(workers=2)
    assert [line["case"] for line in lines] == ["webdataset", "lowprec"] * 2
    assert [line["shape"][-9:] for line in lines] == ["0 workers"] * 2 + ["2 workers"] * 2
    for line in lines:
        assert line["correct"] is True and line["ms"] > 0 and line["rate"] > 0
        assert {"torch", "pillow", "webdataset"} <= line["versions"].keys()
    for plain, ours in zip(lines[::2], lines[1::2], strict=True):
        assert plain["ratio"] == 1
        assert ours["ratio"] == pytest.approx(ours["rate"] / plain["rate"], 0.01)


def test_set_is_rendered_if_none_is_given(measure):
    shapes = [line["shape"] for line in measure(train=None, image_size=[128])]
    assert shapes[0].startswith("shapes of 146 px to 128 px")


WRONG = {  # name of a function of webdataset's pipeline: its replacement
    "other pixels": ("decode_image", lambda *_: np.zeros((3, 16, 16), np.uint8)),
    "other captions": ("decode_caption", lambda data: f"not {data.decode()}"),
}


@pytest.mark.parametrize(("name", "other"), WRONG.values(), ids=WRONG.keys())
def test_different_samples_give_no_number(measure, lines_of, monkeypatch, name, other):
    assert measure(augment=["crop_flip"])  # random crops may differ
    monkeypatch.setattr(bench_data, name, other)
    with pytest.raises(SystemExit, match="none, batch 10, 0 workers"):
        measure()
    [line] = lines_of.lines
    assert line["ms"] is None and line["correct"] is False and "samples" in line["reason"]


def test_set_with_a_bad_sample_is_refused(measure, lines_of, squares, tmp_path):
    data = (squares / "train-0.tar").read_bytes()
    (tmp_path / "bad.tar").write_bytes(data.replace(b"\x89PNG", b"\0PNG", 1))
    with pytest.raises(SystemExit):
        measure(train=str(tmp_path / "bad.tar"))
    assert re.search(r"bad\.tar.*s00000\.png", lines_of.lines[0]["reason"])


def test_rate_counts_images_between_equal_leads_of_the_workers(monkeypatch):
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]  # 1 + 2 to warm up, 3 timed, 2 ahead

    def loader(case, count):
        assert count == len(sizes)
        return iter([SimpleNamespace(images=range(size)) for size in sizes])

    times = iter([100.0, 104.0])
    monkeypatch.setattr(bench_data.time, "perf_counter", lambda: next(times))
    assert bench_data.images_per_second(SimpleNamespace(workers=1), loader, 3) == (8 + 16 + 32) / 4
