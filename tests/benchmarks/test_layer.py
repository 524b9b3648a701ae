"""The benchmark of a layer on tiny sizes; wrong numbers get no time."""

import dataclasses

import pytest
import torch

from experiments.benchmarks import layer as bench_layer
from experiments.benchmarks.configs import OURS, LayerConfig
from experiments.benchmarks.peers import LINEAR_PEERS, Dinov3Linear, LinearPeer
from lowprec.formats import E4M3
from lowprec.nn.linear import LowPrecisionLinear
from lowprec.nn.timing import Step
from lowprec.ops import reference


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
    monkeypatch.setitem(LINEAR_PEERS, "torchao_rowwise_with_gw_hp", plain)
    lines = measure(cases=["torchao_rowwise_with_gw_hp", "switchback"])
    [skipped] = [line for line in lines if line["case"] == "torchao_rowwise_with_gw_hp"]
    assert skipped["correct"] is False and skipped["ms"] is None
    assert any(line["ms"] for line in lines if line["case"] == "switchback")


def test_fp8_layers_of_other_libraries_are_as_near_as_their_formats_allow(measure, monkeypatch):
    pytest.importorskip("torchao.float8")
    peers = [name for name in LINEAR_PEERS if name != "bnb_switchback"]
    for name in peers:  # compiling takes seconds
        plain = dataclasses.replace(LINEAR_PEERS[name], compiled=False)
        monkeypatch.setitem(LINEAR_PEERS, name, plain)
    lines = measure(cases=peers)
    assert {line["case"]: line["correct"] for line in lines} == dict.fromkeys(
        ["linear", *peers], True
    )


def test_dinov3s_products_have_its_scales():
    rows = torch.arange(1, 65)[:, None]
    x, g = ((torch.randn(64, width) * rows).bfloat16() for width in (32, 48))
    linear = torch.nn.Linear(32, 48, dtype=torch.bfloat16)
    weight = linear.weight.detach()
    weight[5] *= 1000  # which scales the other rows in grad_input alone
    layer = Dinov3Linear.like(linear)
    output, grad_input, grad_weight, grad_bias = Step(layer, x.requires_grad_(), g)()

    def product(a, b, granularity):
        a, a_scale = reference.quantize(a.detach(), E4M3, "rowwise")
        b, b_scale = reference.quantize(b, E4M3, granularity)
        return reference.matmul(a, b, a_scale, b_scale, None, torch.float32)

    for actual, expected in (
        (output - linear.bias, product(x, weight, "rowwise")),
        (grad_input, product(g, weight.T, "tensorwise")),
    ):
        for dim in (0, 1):
            error = (actual - expected).norm(dim=dim) / expected.norm(dim=dim)
            assert error.max() < 1e-2  # of bf16
    assert torch.equal(grad_weight, g.T @ x) and torch.equal(grad_bias, g.sum(dim=0))
