"""The benchmark of a layer on tiny sizes; wrong numbers get no time."""

import pytest
import torch

from experiments.benchmarks import layer as bench_layer
from experiments.benchmarks.configs import OURS, LayerConfig
from experiments.benchmarks.peers import LINEAR_PEERS, LinearPeer
from lowprec.nn.linear import LowPrecisionLinear


@pytest.fixture
def measure(lines_of):
    """`measure(cases=[...], ...)`: the lines of one measurement on the CPU."""

    def run(**keys):
        tiny = {"dims": [16], "tokens": 64, "repeats": 1, "device": "cpu", "cases": list(OURS)}
        return lines_of(bench_layer.main, LayerConfig(**tiny | keys))

    return run


def test_recipes_have_times(measure):
    measured = {line["case"]: line for line in measure()}
    assert list(measured) == ["linear", *OURS]
    for line in measured.values():
        assert line["correct"] and line["direction"] == "both"
        assert line["shape"] == "64x16x64 + 64x64x16"
        ratio = measured["linear"]["ms"] / line["ms"]
        assert line["ratio"] == pytest.approx(ratio, rel=1e-4)


def test_wrong_layer_has_no_number(measure, lines_of, monkeypatch):
    right = LowPrecisionLinear.forward

    def wrong(self, input):
        return right(self, input) * (1.2 if self.recipe.name == "switchback" else 1.0)

    monkeypatch.setattr(LowPrecisionLinear, "forward", wrong)
    with pytest.raises(SystemExit, match="switchback bf16 at 64x16x64 .*"):
        measure(cases=["switchback", "switchback_q"])
    [broken] = [line for line in lines_of.lines if line["case"] == "switchback"]
    assert broken["ms"] is None and broken["correct"] is False
    assert broken["reason"].startswith("Wrong: output differs by 0.2")
    assert any(line["ms"] for line in lines_of.lines if line["case"] == "switchback_q")


@pytest.mark.gpu
def test_ours_is_also_a_graph_on_a_gpu(measure):
    sizes = {"dims": [128], "tokens": 512, "device": "auto", "repeats": 3}
    lines = measure(**sizes, cases=["switchback"])
    times = {(line["case"], line["mode"]) for line in lines}
    assert times == {
        (case, mode) for case in ("linear", "switchback") for mode in ("eager", "graph")
    }


def test_peer_that_is_not_quantized_has_no_number_and_ours_go_on(measure, monkeypatch):
    plain = LinearPeer(torch.nn.Sequential, like="switchback_q", compiled=False)
    monkeypatch.setitem(LINEAR_PEERS, "torchao_fp8_rowwise", plain)
    lines = measure(cases=["torchao_fp8_rowwise", "switchback"])
    [skipped] = [line for line in lines if line["case"] == "torchao_fp8_rowwise"]
    assert skipped["correct"] is False and skipped["ms"] is None
    assert any(line["ms"] for line in lines if line["case"] == "switchback")
