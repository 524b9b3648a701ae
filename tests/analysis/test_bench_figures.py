"""Tests the figures of benchmark lines: which lines they take, and what they compute."""

import hashlib
import json

import numpy as np
import pandas as pd
import pytest

from analysis import bench, make, paper
from analysis.bench import load_lines
from analysis.figures import end_to_end_speed, op_profile, quantize_share, weak_scaling
from analysis.load import NoRunsError
from tests.analysis.conftest import drawn, legend, write_rows

DEVICE = "SYNTHETIC GPU"
DIMS = (768, 1280, 4096)
LEFT_OUT = ("llm_int8", "vit_b32")
SPEED = {"int8": 1.5, "fp8": 1.8}  # of synthetic products


def line(slug, case, ms, device=DEVICE, **more):
    row = {"slug": slug, "device": device, "versions": {}, "commit": None, "case": case}
    return row | {"shape": "synthetic", "dtype": "bf16", "ms": ms, "rate": 1.0} | more


def op_lines(dims=DIMS, tokens=32768, quantize=0.1):
    """Products take dim^2 (16 bit) and quantize operations `quantize` * dim, up and down."""
    for dim in dims:
        for direction in ("up", "down"):
            at = {"dim": dim, "tokens": tokens, "direction": direction}
            product = dim**2 * 1e-6
            for case in ("output", "grad_input", "grad_weight"):
                yield line("ops", case, product, **at)
            for dtype, speed in SPEED.items():
                for case in ("output", "grad_input"):
                    yield line("ops", case, product / speed, dtype=dtype, **at)
                for case in ("quantize_x", "quantize_g", "quantize_w"):
                    yield line("ops", case, quantize * dim * 1e-3, dtype=dtype, **at)
            yield line("ops", "output, torch._int_mm", 1e-9, dtype="int8", **at)


def model_lines():
    times = {"open_clip eager": 100.0, "open_clip": 110.0, "autograd_high": 90.0, "high": 80.0}
    for model in ("vit_h14", "vit_b32"):
        for case, ms in (times | {"switchback": 72.0, "llm_int8": 85.0}).items():
            yield line("model", case, ms, shape=f"{model} batch 256")
    yield line("model", "autograd_high", 1e-3, shape="vit_h14 batch 256, checkpointing")


def scale_lines(device=DEVICE):
    """Two machines, the second of half the speed; on it, one process was not timed in fp8."""
    times = {
        ("bf16", 1): {"one process": 100.0, "ddp x 2": 105.0, "ddp x 4": 110.0, "fsdp2 x 4": 125.0},
        ("switchback", 1): {"one process": 80.0, "ddp x 4": 96.0, "ddp x 4, separate kernels": 1.0},
        ("bf16", 2): {"one process": 200.0, "ddp x 4": 210.0},
        ("hw_fp8_switchback", 2): {"ddp x 4": 100.0},
    }
    for (precision, host), cases in times.items():
        shape = f"vit_h14-{precision}-adamw-s0, batch 128 a process, checkpointing"
        for case, ms in cases.items():
            yield line("scale", case, ms, device, shape=shape, host=host)


def write(root, slug, lines, name="20260101-000000"):
    write_rows(root / slug / f"{name}.jsonl", lines)
    return root


def ours(frame):
    """The measured rows."""
    return frame[frame["source"] != paper.SOURCE]


def test_saved_time_and_quantize_share_cover_all_operations(tmp_path):
    lines = load_lines(write(tmp_path, "ops", op_lines()), "ops")
    saved = ours(op_profile.query(lines)).set_index(["series", "dim"])["value"]
    share = ours(quantize_share.query(lines)).set_index(["series", "dim"])["value"]
    for dtype, speed in SPEED.items():
        for dim in DIMS:
            product, quantize = dim**2 * 1e-6, 3 * 0.1 * dim * 1e-3
            total = product * (2 / speed + 1) + quantize
            assert saved[dtype, dim] == pytest.approx(100 * (1 - total / (3 * product)))
            assert share[dtype, dim] == pytest.approx(100 * quantize / total)


def test_times_of_two_files_are_never_divided_by_each_other(tmp_path):
    at = {"shape": "vit_h14 batch 256"}
    write(tmp_path, "model", [line("model", "high", 80.0, **at)], "20260101-000000")
    write(tmp_path, "model", [line("model", "switchback", 40.0, **at)], "20260102-000000")
    with pytest.raises(NoRunsError, match="no line of high, switchback"):
        end_to_end_speed.query(load_lines(tmp_path, "model"))
    write(tmp_path, "model", [line("model", c, 1.0, **at) for c in ("open_clip", "switchback")])
    with pytest.raises(NoRunsError, match="no line of a recipe has one of high"):
        end_to_end_speed.query(load_lines(tmp_path, "model"))


def test_lines_of_two_devices_are_refused_by_name(tmp_path):
    mixed = [*op_lines(), line("ops", "output", 1.0, device="OTHER", dim=1, tokens=1)]
    with pytest.raises(NoRunsError, match="ops was measured on OTHER, SYNTHETIC GPU"):
        load_lines(write(tmp_path, "ops", mixed), "ops")


def test_incomplete_dim_is_left_out(tmp_path):
    lines = [row for row in op_lines() if not (row["dim"] == 768 and row["case"] == "quantize_g")]
    frame = op_profile.query(load_lines(write(tmp_path, "ops", lines), "ops"))
    assert set(ours(frame)["dim"]) == {1280, 4096}


def test_model_is_compared_with_the_faster_open_clip_and_16_bits_of_its_shape(tmp_path):
    frame = bench.end_to_end(load_lines(write(tmp_path, "model", model_lines()), "model"))
    value = frame.set_index(["model", "baseline", "series"])["value"]
    assert value["vit_h14", "open_clip", "switchback"] == pytest.approx(28)
    assert value["vit_h14", "high", "switchback"] == pytest.approx(10)
    assert set(frame["series"]) == {"high", "switchback", "llm_int8"}
    assert set(frame["shape"]) == {"vit_h14 batch 256", "vit_b32 batch 256"}


def test_bars_name_the_number_of_8_bit_layers_and_what_was_not_measured(tmp_path):
    lines = [row for row in model_lines() if (row["case"], row["shape"][:7]) != LEFT_OUT]
    counts = {"high": "0 of 224", "switchback": "224 of 224", "llm_int8": "128 of 224"}
    lines = [row | {"quantized": counts.get(row["case"], "")} for row in lines]
    frame = end_to_end_speed.query(load_lines(write(tmp_path, "model", lines), "model"))
    assert set(frame["baseline"]) == {"high"}
    [ax] = drawn(end_to_end_speed, frame)
    assert [text.get_text() for text in ax.texts].count("not measured") == 1
    assert {"SwitchBack int8", "LLM.int8(), 128 of 224 layers"} < {*legend(ax)}


def test_models_of_other_settings_are_not_compared_with_each_other(tmp_path):
    settings = [{"image_size": 224, "patch_dropout": share} for share in (0.0, 0.5)] + [{}]
    lines = [
        line("model", case, ms / (k + 1), shape="vit_h14 batch 256", **more)
        for k, more in enumerate(settings)
        for case, ms in (("high", 100.0), ("switchback", 80.0 - 10 * k))
    ]
    frame = end_to_end_speed.query(load_lines(write(tmp_path, "model", lines), "model"))
    assert frame.set_index("shape")["value"].to_dict() == pytest.approx({
        "vit_h14 batch 256, 224 px, patch dropout 0": 20,
        "vit_h14 batch 256, 224 px, patch dropout 0.5": 30,
        "vit_h14 batch 256": 40,
    })  # fmt: skip


def test_figure_of_lines_names_its_files_with_their_digests(tmp_path):
    runs = write(tmp_path / "runs" / "bench", "ops", op_lines()).parent
    out = tmp_path / "figures"
    assert make.main(["quantize_share", "--runs", str(runs), "--out", str(out)]) == 0
    about = json.loads((out / "quantize_share.json").read_text())
    (file,) = (runs / "bench" / "ops").glob("*.jsonl")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert about["files"] == [{"path": str(file), "sha256": digest}]
    assert DEVICE in about["caption"] and about["left_out"] == {}
    assert np.isfinite(pd.read_csv(out / "quantize_share.csv")["value"]).all()


def test_each_number_of_gpus_is_compared_with_one_gpu_of_its_run_and_machine(tmp_path):
    write(tmp_path, "scale", [*scale_lines(), *scale_lines("OTHER")])
    frame = weak_scaling.query(load_lines(tmp_path, "scale"))
    of_one = frame[frame["source"] == DEVICE]
    ratios = of_one.set_index(["host", "precision", "kind", "processes"])["ratio"].to_dict()
    assert {at: ratio for at, ratio in ratios.items() if at[3] > 1} == pytest.approx({
        (1, "bf16", "ddp", 2): 100 / 105,
        (1, "bf16", "ddp", 4): 100 / 110,
        (1, "bf16", "fsdp2", 4): 100 / 125,
        (1, "switchback", "ddp", 4): 80 / 96,
        (2, "bf16", "ddp", 4): 200 / 210,
    })  # fmt: skip
    assert {ratio for at, ratio in ratios.items() if at[3] == 1} == {1}
    [[case, reason]] = frame.attrs["left_out"].items()
    assert "hw_fp8_switchback" in case and "no line of one process" in reason
    axes = drawn(weak_scaling, frame)
    titles = [f"ViT-H/14, AdamW, {name}" for name in ("SYNTHETIC", "OTHER")]
    assert [ax.get_title().split("\n")[0] for ax in axes] == titles
    for ax in axes:
        earlier, line_of_ddp = ax.get_lines()[:2]
        assert earlier.get_ydata() == pytest.approx([1, 100 / 105, 100 / 110])
        assert earlier.get_ls() == "None"
        assert line_of_ddp.get_ydata() == pytest.approx([1, 200 / 210])
    assert {*legend(axes[0])} == {"bf16, DDP", "bf16, FSDP2", "SwitchBack int8, DDP"}
    assert weak_scaling.title(frame).startswith("Each of 4 GPUs trains at 80 to 95% of")


def test_a_panel_has_its_settings_below_each_other_where_one_line_is_too_long(tmp_path):
    lines = [row | {"shape": row["shape"] + ", patch dropout 0.5"} for row in scale_lines()]
    frame = weak_scaling.query(load_lines(write(tmp_path, "scale", lines), "scale"))
    [ax] = drawn(weak_scaling, frame)
    titles = ax.get_title().replace("\xa0", " ").split("\n")
    assert titles[1:] == ["128 images per GPU,", "checkpointing,", "patch dropout 0.5"]


def test_lines_of_another_shape_are_left_out_of_the_scaling(tmp_path):
    odd = [row | {"shape": "a model"} for row in scale_lines()]
    write(tmp_path, "scale", [*scale_lines(), *odd])
    frame = weak_scaling.query(load_lines(tmp_path, "scale"))
    assert frame["model"].notna().all()
    assert "its shape is not" in frame.attrs["left_out"]["ddp x 4 of a model"]


def test_without_a_line_of_one_process_no_scaling_is_drawn(tmp_path):
    alone = [row | {"case": "ddp x 4"} for row in scale_lines()]
    with pytest.raises(NoRunsError, match="no line of ddp or fsdp2 has one of one process"):
        weak_scaling.query(load_lines(write(tmp_path, "scale", alone), "scale"))
