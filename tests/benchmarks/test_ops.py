"""The benchmark of operations on tiny sizes; a wrong operation gets no number."""

import pytest

from experiments.benchmarks import ops as bench_ops
from experiments.benchmarks.configs import OpsConfig
from lowprec.ops import reference

OURS = {"output", "grad_input", "quantize_x", "quantize_g", "quantize_w"}


@pytest.fixture
def measure(lines_of):
    """`measure(dims=[...], ...)`: the lines of one measurement on the CPU."""

    def run(**keys):
        tiny = {"dims": [16], "tokens": 32, "repeats": 1, "device": "cpu"}
        return lines_of(bench_ops.main, OpsConfig(**tiny | keys))

    return run


def test_operations_of_both_directions_have_lines(measure):
    lines = measure()
    for direction, shape in (("up", "32x16x64"), ("down", "32x64x16")):
        some = [line for line in lines if line["direction"] == direction]
        assert {line["shape"] for line in some} == {shape}
        for dtype in ("int8", "fp8"):
            assert {line["case"] for line in some if line["dtype"] == dtype} >= OURS
        others = {"output, torch._int_mm", "grad_input, torch._scaled_mm rowwise"}
        assert others <= {line["case"] for line in some}
        base = next(line for line in some if (line["case"], line["dtype"]) == ("output", "bf16"))
        for line in some:
            if line["case"].startswith("output"):
                assert line["ratio_to"] == "output, bf16"
                assert line["ratio"] == pytest.approx(base["ms"] / line["ms"], rel=1e-3)
            if line["case"].startswith("quantize"):
                assert line["ratio"] is None and line["rate_unit"] == "GB/s"
    assert all(line["correct"] and line["ms"] > 0 and line["rate"] > 0 for line in lines)


def test_wrong_operation_has_no_number(measure, lines_of, monkeypatch):
    right = reference.quantize_rows_and_sum

    def without_last_row(g_MN, format):
        q_MN, scale, _ = right(g_MN, format)
        return q_MN, scale, right(g_MN[:-1], format)[2]

    monkeypatch.setattr(reference, "quantize_rows_and_sum", without_last_row)
    with pytest.raises(SystemExit, match="quantize_g int8 at 32x16x64, quantize_g fp8"):
        measure()
    wrong = {line["case"] for line in lines_of.lines if line["correct"] is False}
    assert wrong == {"quantize_g"}
    assert all(line["ms"] is None for line in lines_of.lines if line["case"] in wrong)


@pytest.mark.gpu
def test_each_operation_of_ours_has_a_number_on_a_gpu(measure):
    lines = measure(dims=[128], tokens=512, device="auto", repeats=3)
    assert all(line["correct"] for line in lines if "," not in line["case"])
