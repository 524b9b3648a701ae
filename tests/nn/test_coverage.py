"""What the report of `apply_recipe` says."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowprec.clip import open_clip
from lowprec.nn import apply_recipe
from lowprec.nn.replace import NoLayerError
from tests.nn.models import with_subclass_weight


def flags(module):
    """The conditions of PyTorch's fast paths, and other numbers that a module keeps."""
    return {n: x for n, x in vars(module).items() if isinstance(x, int) and n != "training"}


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("layers", [None, 2])
def test_pytorchs_encoder_calls_its_layers_in_evaluation(layers):
    model = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    if layers:
        model = nn.TransformerEncoder(model, layers)
    before = [flags(module) for module in model.modules()]
    x, padding = torch.randn(2, 5, 64), torch.arange(5).repeat(2, 1) > 2
    with torch.no_grad():
        expected = model.eval()(x, src_key_padding_mask=padding)
        apply_recipe(model, "switchback", ["linear1", "linear2"])
        outputs = [model(x, src_key_padding_mask=padding)[:, :3] for _ in range(2)]
        for recipe in ("switchback", "high"):  # the second call finds it off
            apply_recipe(model, recipe, ["linear1", "linear2"])
        restored = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(restored[:, :3], expected[:, :3])
    assert before == [flags(module) for module in model.modules()]
    assert torch.equal(*outputs)
    error = (outputs[0] - expected[:, :3]).norm() / expected[:, :3].norm()
    assert 1e-4 < error < 0.02


class Conv1D(nn.Module):
    """As in transformers' GPT-2: a linear layer with a transposed weight."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.zeros(s)) for s in ((width, 64), (64,)))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.zeros(4, 64, 16))

    def forward(self, x):
        return x


def test_report_names_products_outside_of_linear_layers_and_their_share():
    layers = {"c_fc": nn.Linear(64, 64), "c_proj": Conv1D(64), "experts": Experts()}
    model = nn.Sequential(nn.Sequential(OrderedDict(layers)), nn.Conv1d(1, 1, 1))
    inputs = torch.zeros(2, 64)
    model.config = SimpleNamespace(num_experts_per_tok=2)  # 64 * 64 of 5 * 2,048
    model[1].forward = lambda x: x
    report = apply_recipe(model, "switchback", inputs=(inputs,))
    assert report.share == pytest.approx(0.4)
    assert "60% of the multiply-adds per token: c_proj, experts.up_proj" in repr(report)
    model.config = None  # a token may meet all four
    assert apply_recipe(model, "switchback", inputs=(inputs,)).share == pytest.approx(1 / 3)
    with pytest.raises(NoLayerError, match=r"0\.c_proj and 1 more are no nn.Linear$"):
        apply_recipe(model, "switchback", ["c_proj"])


def test_a_list_of_inputs_is_refused_before_the_model_changes():
    model = nn.Sequential(open_clip.transformer.ResidualAttentionBlock(64, 2))
    before = repr(model)
    with pytest.raises(ValueError, match="inputs: a list; must be a tensor, a tuple of arguments"):
        apply_recipe(model, "switchback", inputs=[torch.zeros(2, 5, 64)])
    assert repr(model) == before


def test_report_counts_layers_under_any_recipe():
    block = open_clip.transformer.ResidualAttentionBlock(64, 2)
    model = nn.Sequential(OrderedDict(tower=nn.Sequential(block), head=nn.Linear(64, 7)))
    model.settings, x = {"depth": 1}, torch.randn(2, 5, 64)  # settings of its own
    for recipe, inputs in (("switchback", (x,)), ("fp8_rowwise", x), ("switchback", {"input": x})):
        layers = apply_recipe(model, recipe, inputs=inputs)  # also of quantized layers
        assert (layers.num_quantized, layers.num_layers) == (4, 5)
        assert all(layer.called for layer in layers)
    layers = apply_recipe(model, "switchback", ["c_fc"], inputs=x)  # others stay quantized
    assert (layers.num_quantized, layers.num_layers) == (4, 5)
    assert model.training and all(module.training for module in model.modules())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch.compile itself
@pytest.mark.parametrize("compile_blocks", [False, True])
def test_model_with_unchecked_layers_compiles_to_one_graph(compile_blocks):
    model = nn.Sequential(nn.Sequential(OrderedDict(c_fc=nn.Linear(8, 8))))
    x = torch.randn(2, 8)
    apply_recipe(model, "switchback")
    torch.compiler.reset()  # functions that earlier tests compiled would be compiled again
    (model[0] if compile_blocks else model).compile(fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        outputs = [model(x) for _ in range(3)]
    assert torch.equal(outputs[0], outputs[2])


def test_a_token_meets_some_of_the_experts_that_are_linear_layers():
    experts = nn.ModuleList(nn.Sequential(OrderedDict(fc1=nn.Linear(64, 64))) for _ in range(8))
    model = nn.Sequential(nn.ModuleDict({"gate": nn.Linear(64, 64), "experts": experts}))
    model.config = SimpleNamespace(num_experts_per_tok=2)
    assert apply_recipe(model, "switchback", "fc1").share == pytest.approx(2 / 3)
    model.config = None
    assert apply_recipe(model, "switchback", "fc1").share == pytest.approx(8 / 9)


def test_a_layer_whose_weight_became_a_tensor_subclass_is_not_reported_as_quantized():
    model = nn.Sequential(OrderedDict(c_fc=nn.Linear(8, 8), c_proj=nn.Linear(8, 8)))
    apply_recipe(model, "switchback")
    with_subclass_weight(model.c_fc)  # as torchao's quantize_ does
    assert apply_recipe(model, "switchback", ["c_proj"]).num_quantized == 1
