"""The figure of memory, from synthetic lines of layers and of models."""

import json

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis import make
from analysis.bench import load_lines
from analysis.figures import memory_by_recipe
from analysis.load import NoRunsError
from lowprec.runs.read import encode_row

SAVED = {"linear": 1.0, "switchback": 1.05, "switchback_m": 0.55}
PEAKS = {"open_clip eager": 60.0, "open_clip": 50.0, "high": 45.0, "switchback_m": 30.0}
SHAPES = ("vit_h14 batch 256", "vit_h14 batch 256, checkpointing", "vit_b32 batch 256")
FIRST, SECOND = "20260101-000000", "20260102-000000"


def line(slug, case, **more):
    row = {"slug": slug, "device": "SYNTHETIC GPU", "case": case, "shape": "64x16x64", "ms": None}
    return encode_row(row | more)


def layer_lines(dims=(4096, 768), saved=SAVED):
    for dim in dims:
        at = {"dim": dim, "tokens": 32768, "saved_mib": 100.0, "peak_mib": 200.0}
        for case, share in saved.items():
            yield line("layer_memory", case, ratio=share, direction="both", **at)
            yield line("layer_memory", case, ratio=99.0, direction="up", **at)


def model_lines(shapes=SHAPES):
    for shape in shapes:
        for case, peak in PEAKS.items():
            if (case, shape) != ("switchback_m", SHAPES[1]):
                yield line("model", case, shape=shape, memory_gib=peak)
    yield line("model", "llm_int8", shape=shapes[0], memory_gib=None)  # a CPU has no such number


def write(root, slug, lines, name=FIRST):
    (root / slug).mkdir(parents=True, exist_ok=True)
    (root / slug / f"{name}.jsonl").write_text("".join(lines))


@pytest.fixture
def both(tmp_path):
    write(tmp_path, "layer_memory", layer_lines())
    write(tmp_path, "model", model_lines())
    return tmp_path


def query(root):
    return memory_by_recipe.query(load_lines(root, *memory_by_recipe.LINES.split()))


def values(root):
    return query(root).set_index(["panel", "group", "series"])["value"].sort_index()


def drawn(root):
    figure = Figure(layout="constrained")
    memory_by_recipe.draw(query(root), figure)
    return figure


def test_layer_has_the_share_of_both_directions_and_a_model_its_peak(both):
    value = values(both)
    assert value["layer", "768", "switchback_m"] == 0.55
    assert value["model", SHAPES[0], "open_clip"] == 50
    assert set(value["layer"].index.get_level_values("series")) == {"switchback", "switchback_m"}
    assert len(value) == 2 * 2 + 3 * len(PEAKS) - 1


def test_layer_or_model_of_a_newer_file_replaces_the_older_whole(both):
    write(both, "layer_memory", layer_lines((768,), {"switchback": 2.1}), SECOND)
    write(both, "model", [line("model", "high", shape=SHAPES[0], memory_gib=7.0)], SECOND)
    value = values(both)
    assert value["layer", "768"].to_dict() == {"switchback": 2.1}
    assert value["layer", "4096"].to_dict() == {"switchback": 1.05, "switchback_m": 0.55}
    assert value["model", SHAPES[0]].to_dict() == {"high": 7.0}
    assert len(value["model", SHAPES[2]]) == len(PEAKS)


def test_groups_go_from_small_to_large_and_bars_stand_at_their_group(both):
    layer, model = drawn(both).axes
    assert [text.get_text() for text in layer.get_xticklabels()] == ["768", "4096"]
    names = [text.get_text().split("\n") for text in model.get_xticklabels()]
    assert names[0] == ["ViT-B/32", "batch 256"]
    assert names[1:] == [["ViT-H/14", "batch 256"], ["ViT-H/14", "batch 256", "checkpointing"]]
    bars = {bar.get_label(): bar for bar in model.containers if hasattr(bar, "patches")}
    middles = [patch.get_center()[0] for patch in bars["SwitchBackM int8"]]
    assert [round(middle) for middle in middles] == [0, 1]  # none with checkpointing
    assert [patch.get_height() for patch in bars["ours, 16 bit"]] == [45.0] * 3


def test_models_of_other_settings_are_groups_of_their_own(tmp_path):
    lines = [
        line("model", "high", shape=SHAPES[0], memory_gib=peak, image_size=224, patch_dropout=share)
        for share, peak in ((0.0, 9.0), (0.5, 5.0))
    ]
    write(tmp_path, "model", lines)
    value = values(tmp_path)["model"]
    assert value.to_dict() == {
        (f"{SHAPES[0]}, 224 px, patch dropout 0", "high"): 9,
        (f"{SHAPES[0]}, 224 px, patch dropout 0.5", "high"): 5,
    }
    (ax,) = drawn(tmp_path).axes
    names = [text.get_text().split("\n") for text in ax.get_xticklabels()]
    assert names[1] == ["ViT-H/14", "batch 256", "224 px", "patch", "dropout 0.5"]


def test_bar_that_has_no_line_is_named(both):
    text = memory_by_recipe.caption(query(both))
    assert text.endswith(f"No lines of: switchback_m, {SHAPES[1]}.") and "32,768 tokens" in text


@pytest.mark.parametrize(
    ("slug", "lines", "label"),
    [("layer_memory", layer_lines, "nn.Linear"), ("model", model_lines, "GiB")],
)
def test_one_kind_of_line_alone_is_one_panel(tmp_path, slug, lines, label):
    write(tmp_path, slug, lines())
    (ax,) = drawn(tmp_path).axes
    assert label in ax.get_ylabel()


def test_figure_names_the_files_of_both_kinds(both, tmp_path):
    out = tmp_path / "figures"
    assert make.main(["memory_by_recipe", "--runs", str(both), "--out", str(out)]) == 0
    about = json.loads((out / "memory_by_recipe.json").read_text())
    files = [str(both / slug / f"{FIRST}.jsonl") for slug in ("layer_memory", "model")]
    assert [file["path"] for file in about["files"]] == files and about["left_out"] == []
    assert np.isfinite(pd.read_csv(out / "memory_by_recipe.csv")["value"]).all()


def test_lines_of_a_cpu_hold_no_peak_and_say_so(tmp_path):
    write(tmp_path, "model", [line("model", "high", memory_gib=None)])
    with pytest.raises(NoRunsError, match="a model's is measured on a GPU alone"):
        query(tmp_path)


def test_no_lines_of_either_kind_name_the_commands_of_both(tmp_path):
    with pytest.raises(
        NoRunsError, match="experiments.benchmarks.layer and .*experiments.benchmarks.model$"
    ):
        query(tmp_path)
