"""The figure of quantized dot products: which lines it takes, what it draws, what it says."""

import json

import pytest
from matplotlib.figure import Figure

from analysis.bench import load_lines
from analysis.figures import quantization_variance
from analysis.make import main


@pytest.fixture
def write(tmp_path):
    """A function: a file of lines below tmp_path, a line a case and inner dimension."""

    def write(name, inner_dims, ratio=1.0, cases=("e4m3", "int8")):
        folder = tmp_path / "bench" / "quantization_variance"
        folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {"device": "a", "case": case, "inner_dim": dim, "measured": dim * ratio,
             "predicted": float(dim), "ratio": ratio, "ms": None, "rate": None}
            for dim in inner_dims for case in cases
        ]  # fmt: skip
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path

    return write


def frame_of(root):
    return quantization_variance.query(load_lines(root, quantization_variance.LINES))


def test_the_newest_line_of_a_case_and_dimension_counts(write):
    write("1.jsonl", [64, 128], ratio=2.0, cases=("int8", "e4m3", "unknown"))
    frame = frame_of(write("2.jsonl", [128], ratio=1.0, cases=("int8",)))
    assert frame[["case", "inner_dim", "ratio"]].values.tolist() == [
        ["int8", 64, 2.0], ["int8", 128, 1.0], ["e4m3", 64, 2.0], ["e4m3", 128, 2.0],
    ]  # fmt: skip


def test_points_are_measured_and_lines_predicted(write):
    figure = Figure()
    quantization_variance.draw(frame_of(write("1.jsonl", [64, 4096], ratio=1.5)), figure)
    [ax] = figure.axes
    predicted, measured = ax.lines[:2]
    assert predicted.get_ydata().tolist() == [64, 4096] and predicted.get_marker() == "None"
    assert measured.get_ydata().tolist() == [96, 6144] and measured.get_linestyle() == "None"
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    names = [text.get_text() for text in ax.legend_.get_texts()]
    assert names == ["int8", "fp8, both e4m3"]
    assert {text.get_text() for text in ax.texts} == set(quantization_variance.VIT_H)


def test_the_caption_says_how_far_the_prediction_is_off(write):
    caption = quantization_variance.caption(frame_of(write("1.jsonl", [64, 4096], ratio=0.96)))
    assert "at most 4.0%" in caption and "64 to 4,096" in caption


def test_make_draws_it_from_lines(write, tmp_path):
    root = write("1.jsonl", [64, 4096])
    out = tmp_path / "out"
    assert main(["quantization_variance", "--runs", str(root), "--out", str(out)]) == 0
    about = json.loads((out / "quantization_variance.json").read_text())
    assert [file["path"].endswith("1.jsonl") for file in about["files"]] == [True]
