"""advise: numbers by their definitions, verdicts by example, and a model that stays the same."""

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowprec.nn import advice, advise, apply_recipe, prepare_for_training
from lowprec.nn.advice import Advice, verdict
from lowprec.nn.recipe import PRODUCTS, RECIPES
from lowprec.nn.replace import NoLayerError
from tests.nn.models import MODELS, clip, pair


class Net(nn.Module):
    """Every kind of state that a forward pass changes, a shared layer and one without gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(8, 16), nn.Linear(16, 16, bias=False)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.unused = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x, scale=1.0):
        self.calls = self.calls + 1
        self.kept.resize_(5)
        self.register_buffer("late", torch.ones(2))
        x = self.norm(self.first(x))
        with torch.no_grad():
            self.unused(x)
        return self.dropout(self.shared(input=torch.tanh(self.shared(x)))) * scale


def batch(seed=0):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def mean_square(output):
    return output.square().mean()


def row(ms_16bit=2.0, ms=1.0, output=40.0, grad_input=40.0, grad_weight=None, **facts):
    noise = {"output_sqnr_db": output, "grad_input_sqnr_db": grad_input}
    times = {"ms_16bit": ms_16bit, "ms": ms, "grad_weight_sqnr_db": grad_weight}
    return noise | times | facts


def test_errors_are_those_of_the_definition_in_float64():
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 16).double(), batch().double()
    target = torch.randn(6, 16, dtype=torch.float64)
    x[0, 0], x[1, 1] = 12.0, 1e-4
    [found] = advise(layer, x, lambda y: (y * target).sum(), recipes=["llm_int8"]).rows
    operands = {"x": x, "w": layer.weight.detach(), "g": target}

    def rounded(tensor, dim):  # LLM.int8(): a scale for each vector that is summed over
        scale = tensor.abs().amax(dim, keepdim=True) / 127
        return (tensor / scale).round() * scale

    for product, letters in PRODUCTS.items():
        exact = [operands[letter] for letter in letters]
        # as stored: x [rows, in], w [out, in], g [rows, out]
        dims = {"output": (1, 1), "grad_input": (1, 0), "grad_weight": (0, 0)}[product]
        used = [rounded(t, dim) for t, dim in zip(exact, dims, strict=True)]
        equation = {"output": "mk,nk->mn", "grad_input": "mn,nk->mk", "grad_weight": "mn,mk->nk"}
        value, wrong = (torch.einsum(equation[product], *pair) for pair in (exact, used))
        db = 10 * math.log10(value.square().sum() / (value - wrong).square().sum())
        lost = max(((b == 0) & (a != 0)).double().mean().item() for a, b in zip(exact, used))  # noqa: B905
        peak = max((t.abs().max() / t.square().mean().sqrt()).item() for t in exact)
        assert found[f"{product}_sqnr_db"] == pytest.approx(db, abs=1e-3)
        assert found[f"{product}_underflowed"] == pytest.approx(lost, abs=1e-6)
        assert found[f"{product}_peak"] == pytest.approx(peak, rel=1e-5)


def test_a_row_for_each_recipe_and_layer_counts_all_calls_and_takes_the_worst(monkeypatch):
    def times(shapes, recipes, device):
        ms = {"high": 1.0, "switchback": 0.5}
        recipes = (RECIPES["high"], *recipes)
        return {(s, r): ms.get(r.name, 3.0) * s.dim_in for s in shapes for r in recipes}

    monkeypatch.setattr(advice, "_times", times)
    model = Net().eval()
    small, large = (batch(),), {"x": batch(1) * 100, "scale": 2.0}
    options = {"loss": mean_square, "recipes": ["switchback", "hw_fp8_switchback"]}
    result = advise(model, [small, large], **options)
    assert [(r["recipe"], r["layer"]) for r in result.rows] == [
        (recipe, layer) for recipe in options["recipes"] for layer in ("first", "shared")
    ]
    first, shared = result.rows[:2]
    assert [(r["ms_16bit"], r["ms"]) for r in (first, shared)] == [(8, 4), (32, 16)]  # in a step
    assert (result.recipe, result.saved_ms["switchback"]) == ("switchback", 20)
    assert (first["share"], shared["share"]) == (0.2, 0.8)  # 8 * 16, twice 16 * 16
    assert first["grad_weight_sqnr_db"] is None
    each = [advise(model, one, **options).rows[1]["output_sqnr_db"] for one in (small, large)]
    assert shared["output_sqnr_db"] == min(each)
    assert json.loads(json.dumps(result.rows)) == result.rows
    printed = repr(result)
    assert all(text in printed for text in ("16 bit (ms)", "20.000 ms", "shared", "80.0%", "gain"))
    assert "not timed" not in printed


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (row(), ("gain", "1.000 ms")),
        (row(ms=2.5, output=3.0), ("loses time", "0.500 ms")),
        (row(grad_input=19.9), ("noisy", "grad_input 19.9 dB")),
        (row(grad_weight=math.nan, output=3.0), ("noisy", "grad_weight nan dB")),
        (row(output=20.0), ("gain", "1.000 ms")),
        (row(ms=None, grad_weight=math.inf), ("not timed", "grad_input 40.0 dB")),
    ],
)
def test_verdicts(of, expected):
    assert verdict(of, min_sqnr_db=20.0) == expected


@pytest.mark.parametrize(("third", "shown"), [(31.0, "30.2"), (math.nan, "nan")])
def test_layers_of_one_name_are_a_line_with_the_noise_of_the_worst(third, shown):
    others = {f"{part}_{key}": None for part in PRODUCTS for key in ("underflowed", "peak")}
    others |= {"recipe": "switchback", "verdict": "gain", "share": 0.2}
    rows = [
        row(
            layer=f"blocks.{i}.fc",
            output=db,
            **others | {"output_underflowed": i / 10, "output_peak": 9 - i},
        )
        for i, db in enumerate((31.5, 30.25, third))
    ]
    line = repr(Advice(rows)).splitlines()[-1].split()
    assert line == ["blocks.*.fc", "3", "x", "60.0%", "6.000", "3.000", shown, "40.0", "16", "bit",
                    "20.0%", "9", "gain"]  # fmt: skip


def test_layers_that_gain_are_a_filter_for_prepare_for_training():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    facts = [
        *(row(recipe="llm_int8", layer=str(i), verdict="gain", ms=1.9) for i in range(3)),
        row(recipe="switchback", layer="0", verdict="loses time", ms=3.0),
        row(recipe="switchback", layer="1", verdict="gain", ms=0.5),
        row(recipe="switchback", layer="2", verdict="noisy", ms=0.1),
    ]
    result = Advice(facts)
    assert result.saved_ms == {"llm_int8": pytest.approx(0.3), "switchback": 1.5}
    assert result.recipe == "switchback"
    options = {"skip_slow": False, "compile": False}
    report = prepare_for_training(model, result.recipe, where=result.gains, **options)
    assert [layer.name for layer in report if layer.swapped] == ["1"]
    untimed = advise(model, batch(), mean_square)
    assert untimed.saved_ms == {} and untimed.recipe == advice.NATIVE[0]
    with pytest.raises(ValueError, match="no layer was timed"):
        untimed.gains(model[0], "0")
    none = Advice(facts[3:4])
    assert any(result.saved_ms.values()) and not any(none.saved_ms.values())
    with pytest.raises(NoLayerError):
        prepare_for_training(model, none.recipe, where=none.gains, **options)


def state(model):
    """Everything that advise could change, as values that compare."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors |= {
        f"{n}.grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    tensors["rng"] = torch.get_rng_state()
    modules = {
        name: (type(m), m.training, sorted(vars(m)), list(m._modules), len(m._forward_hooks))
        for name, m in model.named_modules()
    }
    return tensors, modules, {name: id(buffer) for name, buffer in model.named_buffers()}


def prepared_clip():
    model = clip()
    apply_recipe(model, "switchback", inputs=pair())
    return model


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("make", [Net, clip, prepared_clip])
def test_model_is_left_as_it_was_also_after_an_exception(make, fails):
    model, inputs = make(), batch() if make is Net else pair()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    next(model.children()).eval()
    tensors, *modules = state(model)

    def loss(output):
        assert not fails
        return sum(mean_square(x) for x in output[:2])

    try:
        advise(model, inputs, loss, recipes=["switchback"])
    except AssertionError:
        assert fails
    now, *modules_now = state(model)
    assert modules_now == modules
    assert now.keys() == tensors.keys()
    assert all(torch.equal(now[name], tensors[name]) for name in tensors)


def test_reentrant_checkpoints_give_the_rows_of_plain_calls_and_leave_no_gradients():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), batch().requires_grad_()
    scale, steps = torch.ones((), requires_grad=True), []
    plain = advise(model, x, lambda y: mean_square(y * scale), recipes="switchback")
    model[1].weight.register_post_accumulate_grad_hook(steps.append)  # an optimizer's step

    def forward(x):
        return checkpoint(model[1], model[0](x), use_reentrant=True)

    model.forward = forward
    again = advise(model, x, lambda y: mean_square(y * scale), recipes="switchback")
    assert again.rows == plain.rows and len(plain.rows) == 2
    assert {tensor.grad for tensor in (x, scale, *model.parameters())} == {None} and not steps
    mean_square(model(x)).backward()
    assert len(steps) == 1


def frozen():
    return Net().requires_grad_(False)


def sharded():
    model = nn.Linear(8, 8)
    model.weight.__class__ = type("DTensor", (nn.Parameter,), {})
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (frozen, "no parameter of the model requires a gradient"),
        (sharded, "weight is sharded: call advise before .* fully_shard"),
        (Net, "the model is in DDP: call advise before DistributedDataParallel"),
    ],
)
def test_frozen_and_distributed_models_are_refused(make, message, monkeypatch):
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Net)
    with pytest.raises(ValueError, match=message):
        advise(make(), batch().requires_grad_(), mean_square)


@pytest.mark.parametrize("name", ["timm siglip", "timm beit", "transformers Llama"])
def test_layers_that_a_forward_calls_have_a_row(name):
    kind = MODELS[name]

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = kind.build()

        def forward(self, inputs):
            return {"loss": kind.loss(self.model, inputs)}

    rows = advise(WithLoss(), {"inputs": kind.inputs()}, recipes="switchback").rows
    found = {end for end in kind.layers.split() if any(r["layer"].endswith(end) for r in rows)}
    assert found == set(kind.layers.split()) - set(kind.uncalled.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipes": ["fp8_rowwise"]}, "'fp8_rowwise' is not native: must be one of switchback, "),
        ({"recipes": []}, r"recipes=\[\]: cpu multiplies none of them natively"),
        ({"inputs": 3}, "inputs: int; must be a tensor"),
        ({"inputs": [torch.ones(6, 8), 3]}, "inputs: int; must be"),
        ({"loss": None}, "the model's output has no loss with a gradient: pass loss="),
        ({"loss": lambda y: y.sum().detach()}, "loss returns no 0-d tensor with a gradient"),
        ({"model": nn.Conv1d(6, 6, 1)}, "no linear layer was called and got a gradient"),
    ],
)
def test_unsuitable_arguments_are_refused(change, message):
    options = {"model": Net(), "inputs": batch(), "loss": mean_square} | change
    with pytest.raises(ValueError, match=message):
        advise(**options)


def test_recipes_that_a_gpu_does_not_multiply_are_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))  # no fp8
    found = advice._find_native(advice.NATIVE, torch.device("cuda"))
    names = [recipe.name for recipe in found]
    assert names == ["switchback", "switchback_m", "switchback_q", "llm_int8"]
    with pytest.raises(ValueError, match="cuda multiplies none of them natively"):
        advice._find_native(["hw_fp8_switchback"], torch.device("cuda"))


def test_a_step_that_waits_for_the_host_is_said(monkeypatch):
    gain = row(recipe="switchback", layer="0", verdict="gain", share=1.0)
    gain |= {f"{product}_{key}": 0.0 for product in PRODUCTS for key in ("underflowed", "peak")}
    for kernels, waits in ((35.6, True), (60.0, False), (math.nan, False)):
        found = Advice([gain], 64.3, kernels)
        assert found.waits_for_host == waits == ("of 64.3 ms, kernels take 35.6" in repr(found))
        assert found.saved_ms == {"switchback": 1.0}
    assert not Advice([gain]).waits_for_host


def test_the_step_is_timed_without_its_gradients_and_hooks(monkeypatch):
    model, calls = Net(), []
    model.first.weight.grad = grad = torch.ones_like(model.first.weight)
    model.first.weight.register_post_accumulate_grad_hook(lambda p: calls.append("hook"))
    model.register_forward_hook(lambda *_: calls.append("forward"))
    monkeypatch.setattr(advice, "kernel_ms", lambda step, device: step() or 1.5)
    elapsed, kernels = advice._step_times(model, batch(), mean_square, torch.device("cpu"))
    assert elapsed > 0 and kernels == 1.5
    assert (
        model.first.weight.grad is grad and (grad == 1).all() and model.shared.weight.grad is None
    )
    assert calls == ["forward"] * (1 + 3 + advice.STEPS + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_every_layer_has_times(dtype):
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda", dtype)
    result = advise(model, torch.randn(1024, 256, device="cuda", dtype=dtype), mean_square)
    assert {r["recipe"] for r in result.rows} >= {"switchback", "llm_int8"}
    for each in result.rows:
        assert 0 < each["ms"] < 10 and 0 < each["ms_16bit"] < 10
        assert each["verdict"] in ("gain", "loses time", "noisy")
    chosen = [r["layer"] for r in result.rows if result.gains(model, r["layer"])]
    assert set(chosen) <= {"0", "2"} and "16 bit" in repr(result)
    assert result.step_ms > 0 and not result.kernel_ms > 1.1 * result.step_ms


def test_calls_without_rows_are_left_out():
    experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    experts.forward = lambda x: experts[0](x).sum() + experts[1](x[:0]).sum()
    assert [r["layer"] for r in advise(experts, batch(), recipes="switchback").rows] == ["0"]
