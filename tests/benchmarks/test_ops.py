"""The benchmark of operations on tiny sizes, and that a wrong operation gets no number."""

import json

import pytest
import torch

from experiments.benchmarks import operations as bench_operations
from experiments.benchmarks import ops as bench_ops
from experiments.benchmarks.ops import BenchOpsConfig
from lowprec.ops import reference

OURS = {"output", "grad_input", "quantize_x", "quantize_g", "quantize_w"}


@pytest.fixture
def measure(tmp_path, capsys):
    """`measure(dims=[...], ...)`: the lines of one measurement on the CPU."""

    def run(**keys):
        defaults = {"dims": [16], "tokens": [32], "repeats": 1, "device": "cpu"}
        try:
            bench_ops.main(BenchOpsConfig(**{**defaults, "run_dir": str(tmp_path), **keys}))
        finally:
            run.lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return run.lines

    return run


def test_every_operation_of_both_directions_has_a_line(measure, tmp_path):
    lines = measure()
    for direction, shape in (("up", "32x16x64"), ("down", "32x64x16")):
        found = [line for line in lines if line["direction"] == direction]
        assert {line["shape"] for line in found} == {shape}
        for dtype in ("int8", "fp8"):
            cases = {line["case"] for line in found if line["dtype"] == dtype}
            assert cases >= OURS
        assert {"output, torch._int_mm", "grad_input, torch._scaled_mm rowwise"} <= {
            line["case"] for line in found
        }
    assert all(line["correct"] and line["ms"] > 0 and line["rate"] > 0 for line in lines)
    (file,) = (tmp_path / "bench" / "ops").glob("*.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines


def test_product_is_compared_with_the_16_bit_one_of_its_shape(measure):
    lines = [line for line in measure() if line["direction"] == "up"]
    base = next(line for line in lines if (line["case"], line["dtype"]) == ("output", "bf16"))
    for line in lines:
        if line["case"].startswith("output"):
            assert line["ratio_to"] == "output, bf16"
            assert line["ratio"] == pytest.approx(base["ms"] / line["ms"], rel=0.05)
        if line["case"].startswith("quantize"):
            assert line["ratio"] is None and line["rate_unit"] == "GB/s"


def test_sizes_that_are_no_multiple_of_16_are_ours_alone(measure):
    lines = measure(dims=[12])
    assert not any("torch" in line["case"] for line in lines)
    assert {line["case"] for line in lines} >= OURS


def test_wrong_operation_has_a_reason_and_no_number(measure, monkeypatch):
    right = reference.quantize_rows_and_sum

    def without_last_row(g_MN, format):
        q_MN, scale, _ = right(g_MN, format)
        return q_MN, scale, right(g_MN[:-1], format)[2]

    monkeypatch.setattr(reference, "quantize_rows_and_sum", without_last_row)
    with pytest.raises(SystemExit, match="no number for quantize_g int8 at 16, quantize_g fp8"):
        measure()
    broken = [line for line in measure.lines if line["case"] == "quantize_g"]
    assert broken and all(
        line["correct"] is False and line["ms"] is None and "differs by" in line["reason"]
        for line in broken
    )
    assert all(line["correct"] for line in measure.lines if line["case"] != "quantize_g")


def test_peer_that_fails_is_skipped_with_its_reason_and_ours_go_on(measure, monkeypatch):
    def missing(*tensors):
        raise RuntimeError("no int8 here\nsecond line")

    monkeypatch.setattr(bench_operations.torch, "_int_mm", missing)
    monkeypatch.setattr(reference, "_int8_sums", lambda a, b: a.float() @ b.float().T)
    lines = measure()
    skipped = [line for line in lines if line["ms"] is None]
    assert {line["case"] for line in skipped} == {
        f"{case}, torch._int_mm" for case in ("output", "grad_input")
    }
    assert all(line["reason"] == "RuntimeError: no int8 here" for line in skipped)
    assert all(line["correct"] is None for line in skipped)


def test_error_of_a_single_row_is_found():
    (first, *_) = bench_operations.operations(32, 16, 64, torch.device("cpu"))
    first.check()

    def wrong():
        output = first.run().clone()
        output[7] *= 1.5
        return output

    broken = bench_operations.Operation(
        "output", "bf16", wrong, first.part, first.right, first.most, first.work
    )
    with pytest.raises(bench_operations.Wrong, match="differs by"):
        broken.check()


@pytest.mark.gpu
def test_on_a_gpu_every_operation_of_ours_has_a_number(measure):
    lines = measure(dims=[128], tokens=[512], device="auto", repeats=3)
    assert all(line["correct"] for line in lines if "," not in line["case"])
