"""The benchmark of a layer on tiny sizes; wrong numbers get no time."""

import weakref

import pytest
import torch

from experiments.benchmarks import layer as bench_layer
from experiments.benchmarks.configs import MODES, OURS, LayerConfig
from experiments.benchmarks.peers import LINEAR_PEERS, LinearPeer
from lowprec.nn.linear import LowPrecisionLinear


@pytest.fixture
def measure(lines_of):
    """`measure(cases=[...], ...)`: the lines of one measurement on the CPU."""

    def run(**keys):
        tiny = {"dims": [16], "tokens": 64, "repeats": 1, "device": "cpu", "cases": list(OURS)}
        tiny["modes"] = ["eager"]
        return lines_of(bench_layer.main, LayerConfig(**tiny | keys))

    return run


def test_recipes_have_times_and_memory(measure, tmp_path):
    lines = measure()
    for slug in ("layer", "layer_memory"):
        measured = {line["case"]: line for line in lines if line["slug"] == slug}
        assert list(measured) == ["linear", *OURS]
        for line in measured.values():
            assert line["correct"] and line["direction"] == "both"
            assert line["shape"] == "64x16x64 + 64x64x16"
            sizes = [measured["linear"], line]
            name = "ms" if slug == "layer" else "saved_mib"
            of_linear, own = (size[name] for size in (sizes if slug == "layer" else sizes[::-1]))
            assert line["ratio"] == pytest.approx(of_linear / own, rel=0.02)
    assert len(list((tmp_path / "bench").glob("layer*/*.jsonl"))) == 2


def test_memory_counts_what_an_eager_layer_saves_and_not_the_parameters(measure, monkeypatch):
    class Wasteful(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x) * torch.ones(64, 1, requires_grad=True)  # saves the output

    monkeypatch.setattr(torch, "compile", lambda module, dynamic: Wasteful(module))
    monkeypatch.setattr(bench_layer, "ON_GPU", ("graph",))
    lines = measure(cases=["autograd_high", "switchback_m"], modes=["eager", "compiled"])
    lines = [line for line in lines if line["slug"] == "layer_memory"]
    saved = {line["case"]: line["saved_mib"] * 2**20 for line in lines}
    inputs = 64 * (16 + 64)  # of both layers
    assert saved["linear"] == saved["autograd_high"] == pytest.approx(2 * inputs, rel=0.02)
    weights, scales = 2 * 64 * 16, 2 * (4 * 64 + 4)  # int8, and float32 scales of rows and weight
    assert saved["switchback_m"] == pytest.approx(inputs + weights + scales, rel=0.02)


def test_one_layer_is_in_memory_at_a_time(measure, monkeypatch):
    made, alive = [], weakref.WeakSet()
    make = torch.nn.Linear.__init__

    def counted(self, *args, **kwargs):
        make(self, *args, **kwargs)
        alive.add(self)
        made.append({layer.in_features for layer in alive})

    monkeypatch.setattr(torch.nn.Linear, "__init__", counted)
    measure(cases=["switchback"])
    assert {16} in made and {64} in made and {16, 64} not in made


def test_wrong_layer_has_no_number(measure, lines_of, monkeypatch):
    right = LowPrecisionLinear.forward

    def wrong(self, input):
        return right(self, input) * (1.2 if self.recipe.name == "switchback" else 1.0)

    monkeypatch.setattr(LowPrecisionLinear, "forward", wrong)
    with pytest.raises(SystemExit, match="switchback bf16 at 64x16x64 .*"):
        measure(cases=["switchback", "switchback_q"])
    [broken] = [line for line in lines_of.lines if line["case"] == "switchback"]  # no memory
    assert broken["ms"] is None and broken["correct"] is False
    assert broken["reason"].startswith("Wrong: output differs by 0.2")
    assert any(line["ms"] for line in lines_of.lines if line["case"] == "switchback_q")


def test_peer_that_is_not_quantized_has_no_number_and_ours_go_on(measure, monkeypatch):
    plain = LinearPeer(torch.nn.Sequential, like="switchback_q", compiled=False)
    monkeypatch.setitem(LINEAR_PEERS, "torchao_fp8_rowwise", plain)
    lines = measure(cases=["torchao_fp8_rowwise", "switchback"])
    [skipped] = [line for line in lines if line["case"] == "torchao_fp8_rowwise"]
    assert skipped["correct"] is False and skipped["ms"] is None
    assert [line["slug"] for line in lines if line["case"] == "switchback"] == [
        "layer",
        "layer_memory",
    ]


def test_host_time_is_measured_once_on_a_small_layer(measure, monkeypatch):
    monkeypatch.setattr(bench_layer, "HOST_DIM", 8)
    lines = measure(dims=[16, 32], cases=["switchback"], modes=["host", "graph"])
    assert [(line["case"], line["mode"], line["shape"]) for line in lines] == [
        (case, "host", "128x8x32") for case in ("linear", "switchback")
    ]
    assert lines[1]["ratio"] == pytest.approx(lines[0]["ms"] / lines[1]["ms"], rel=1e-4)


@pytest.mark.gpu
def test_ours_is_also_a_graph_on_a_gpu(measure):
    sizes = {"dims": [128], "tokens": 512, "device": "auto", "repeats": 3}
    lines = measure(**sizes, cases=["switchback"], modes=list(MODES))
    times = {(line["case"], line["mode"]) for line in lines if line["slug"] == "layer"}
    modes = ("eager", "graph", "host")
    assert times == {
        *((case, mode) for case in ("linear", "switchback") for mode in modes),
        ("switchback", "compiled"),
    }
