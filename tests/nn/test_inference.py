import copy

import pytest
import torch
from torch import nn

from lowprec import ops
from lowprec.clip import open_clip
from lowprec.clip.model import blocks
from lowprec.formats import INT8
from lowprec.nn import inference
from lowprec.nn.inference import (
    Int8Attention,
    Int8Linear,
    load_int8,
    memory_ratio,
    save_int8,
    to_int8,
)
from lowprec.nn.replace import apply_recipe
from lowprec.ops import reference
from tests.nn.models import TEXT, VISION, clip, pair

PAIR = pair()


@pytest.fixture
def model():
    return clip().eval()


def features(model):
    with torch.no_grad():
        return torch.cat(model(*PAIR)[:2]).float()


def converted(linear):
    return to_int8(nn.Sequential(linear), ["0"])[0]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (63, 100)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_int8_linear_multiplies_quantized_operands(shape, bias):
    linear, x = nn.Linear(shape[-1], 11, bias=bias), torch.randn(shape)
    x_hat = reference.fake_quantize(x.flatten(0, -2), INT8, "rowwise", torch.float32)
    w_hat = reference.fake_quantize(linear.weight.detach(), INT8, "rowwise", torch.float32)
    expected = nn.functional.linear(x_hat, w_hat, linear.bias).view(*shape[:-1], 11)
    torch.testing.assert_close(converted(linear)(x), expected, atol=1e-5, rtol=1e-5)


def test_features_stay_close_with_grad_and_compiled(model):
    exact = features(model)
    apply_recipe(model, "switchback")
    in_int8 = features(to_int8(model))
    assert torch.equal(model(*PAIR)[1], in_int8[4:])  # with grad
    assert nn.functional.cosine_similarity(in_int8, exact).min() > 0.998
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    assert torch.equal(features(compiled), in_int8)
    kinds = {(type(block.attn), block.attn.causal) for block in blocks(model)}
    assert kinds == {(Int8Attention, False), (Int8Attention, True)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_converted_model_runs_under_autocast_and_can_be_cast(model, dtype):
    block = blocks(to_int8(model))[1]
    assert block.get_weight_dtype() == torch.float32
    with torch.no_grad(), torch.autocast("cpu", dtype):
        assert block.mlp.c_fc(torch.randn(2, 64)).dtype == dtype
    model.to(dtype)
    assert block.get_weight_dtype() == dtype
    assert block.mlp.c_fc.weight_scale.dtype == torch.float32
    assert block.attn.in_proj_weight_scale.dtype == torch.float32
    with torch.no_grad():
        outputs = model(PAIR[0].to(dtype), PAIR[1])
    assert {output.dtype for output in outputs[:2]} == {dtype}


def test_a_converted_model_on_meta_gets_memory_and_weights(model):
    model = to_int8(model)
    with torch.device("meta"):
        empty = to_int8(clip().eval())
    assert {x.device.type for x in empty.state_dict().values()} == {"meta"}
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(model.state_dict())
    for name, buffer in model.named_buffers():  # also those that are not saved
        if not name.endswith("original"):
            filled.get_buffer(name).copy_(buffer)
    assert filled.state_dict()["visual.transformer.resblocks.0.mlp.c_fc.weight_scale"].dtype == (
        torch.float32
    )
    assert torch.equal(features(filled), features(model))


def test_int8_backward_is_refused_and_nothing_is_saved():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = converted(nn.Linear(64, 4))(torch.randn(2, 64, requires_grad=True))
    assert not saved
    with pytest.raises(RuntimeError, match="no backward"):
        output.sum().backward()


def test_shared_layers_and_tied_weights_are_converted_saved_and_loaded(tmp_path):
    def build():
        model = nn.Module()
        model.a, model.b, model.tied = nn.Linear(8, 8), nn.Embedding(8, 8), nn.Linear(8, 8)
        model.again, model.tied.weight = model.a, model.b.weight
        return model

    model, fresh = to_int8(build(), ["a"]), build()
    assert isinstance(model.a, Int8Linear) and model.again is model.a
    save_int8(model, tmp_path / "a.safetensors")
    load_int8(fresh, tmp_path / "a.safetensors")
    assert fresh.again is fresh.a and fresh.tied.weight is fresh.b.weight
    x = torch.randn(2, 8)
    assert torch.equal(fresh.again(x), model.again(x))
    assert torch.equal(fresh.tied(x), model.tied(x))


@pytest.mark.parametrize("grad", [True, False])
def test_int8_empty_batch_gives_empty_output(monkeypatch, grad):
    layer = converted(nn.Linear(64, 4))
    monkeypatch.setattr(ops, "quantize", None)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        output = layer(torch.randn(2, 0, 64))
    assert output.shape == (2, 0, 4) and output.dtype == torch.bfloat16


@pytest.mark.parametrize("where", [["in_proj"], ["c_fc"]])
def test_recipe_for_int8_layers_is_refused(model, where):
    to_int8(model, where)
    before = [type(module) for module in model.modules()]
    for change in (lambda: apply_recipe(model, "switchback"), lambda: to_int8(model)):
        with pytest.raises(ValueError, match=f"{where[0]} is already int8"):
            change()
    assert [type(module) for module in model.modules()] == before
    apply_recipe(model, "switchback", ["out_proj"])  # other layers can still change


def test_memory_ratio_is_below_0_3(model):
    with pytest.raises(ValueError, match="no layer of the model is int8"):
        memory_ratio(model)
    originals = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.MultiheadAttention))]
    linears = {id(p): p for m in originals for p in m.parameters()}.values()
    original = sum(p.nbytes for p in linears)
    ratio = memory_ratio(to_int8(model))
    state = model.state_dict()
    scaled = [name.removesuffix("_scale") for name in state if name.endswith("weight_scale")]
    names = [n for s in scaled for n in (s, f"{s}_scale", s.removesuffix("weight") + "bias")]
    assert ratio == sum(state[name].nbytes for name in names) / original <= 0.30


def test_a_file_that_cannot_be_written_leaves_the_old_one(model, tmp_path, monkeypatch):
    def fail(state, path, **_):
        path.write_bytes(b"half")
        raise OSError("the disk is full")

    path = tmp_path / "a.safetensors"
    save_int8(to_int8(model), path)
    old = path.read_bytes()
    monkeypatch.setattr(inference, "save_file", fail)
    with pytest.raises(OSError, match="disk is full"):
        save_int8(model, path)
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


def test_save_and_load_round_trip(model, tmp_path):
    path, fresh = tmp_path / "a.safetensors", clip().eval()
    save_int8(to_int8(model, ["in_proj", "visual.*.c_fc"]), path)
    load_int8(fresh, path)
    assert torch.equal(features(fresh), features(model))
    assert fresh.state_dict().keys() == model.state_dict().keys()
    again = load_int8(copy.deepcopy(fresh), path)
    assert torch.equal(features(again), features(model))
    save_int8(to_int8(model, ["c_proj"]), path)  # more layers than `again` has in int8
    assert torch.equal(features(load_int8(again, path)), features(model))


def test_load_names_what_is_wrong(model, tmp_path):
    path = tmp_path / "a.safetensors"
    save_int8(to_int8(model), path)
    with pytest.raises(ValueError, match="written as .safetensors"):
        save_int8(model, tmp_path / "a.pt")
    other = open_clip.model.CLIP(16, VISION, TEXT)
    with pytest.raises(ValueError, match=r"text_projection is \(64, 32\), not \(64, 16\)"):
        load_int8(other, path)
    deeper = clip({"layers": 3})
    with pytest.raises(ValueError, match="resblocks.2.* is absent, not"):
        load_int8(deeper, path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load_int8(model, path)
