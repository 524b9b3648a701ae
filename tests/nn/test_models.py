"""What each verb keeps to, for models of all libraries: apply_recipe and preparing."""

import pytest
import torch

from lowprec.nn import apply_recipe, prepare_for_training
from lowprec.nn.linear import LowPrecisionLinear
from lowprec.nn.recipe import LINEAR_LAYERS, matches
from tests.nn.models import MODELS

each = pytest.mark.parametrize("name", MODELS)
TRAINED = [name for name, row in MODELS.items() if row.blocks]


def error(result, expected):
    return ((result - expected).norm() / expected.norm()).item()


@each
@torch.no_grad()
def test_apply_recipe_converts_the_layers_that_the_model_calls(name):
    row = MODELS[name]
    model = row.build().eval()
    exact, before = row.output(model), {n: id(p) for n, p in model.named_parameters()}
    layers = apply_recipe(model, "switchback", row.where, inputs=row.inputs())
    assert {n: id(p) for n, p in model.named_parameters()} == before
    assert all(layer.name.endswith(tuple(row.layers.split())) for layer in layers)
    ends = {end for layer in layers for end in row.layers.split() if layer.name.endswith(end)}
    assert ends == {*row.layers.split()}
    uncalled = tuple(row.uncalled.split())
    for layer in layers:
        assert layer.called == layer.swapped == (not uncalled or not layer.name.endswith(uncalled))
        if not layer.name.endswith(".in_proj"):
            module = model.get_submodule(layer.name)
            assert isinstance(module, LowPrecisionLinear) == layer.swapped
        text = "16 bit, because the forward pass does not call them"
        assert (layers.treatments[layer.name] == text) != layer.called
    assert 1e-5 < error(row.output(model), exact) < 0.1
    apply_recipe(model, "high", row.where)
    assert error(row.output(model), exact) < 1e-5


@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
@pytest.mark.parametrize("name", TRAINED)
def test_a_prepared_model_equals_apply_recipes(name, graphs):
    row = MODELS[name]
    model = row.build().train()
    apply_recipe(model, "switchback", row.where)
    names, expected = list(model.state_dict()), row.gradients(model)
    compiles = "trunk" not in name  # each of its towers is compiled in another row
    for compile, checkpointing in ((False, False), (False, True), (compiles, "own")):
        model, options = row.build().train(), {"checkpointing": checkpointing}
        if checkpointing == "own":
            options = {"checkpointing": True} if name == "torch" else {}
            getattr(model, "set_grad_checkpointing", bool)(True)
        layers = prepare_for_training(
            model, "switchback", row.where, compile=compile, skip_slow=False, **options
        )
        assert all(layer.swapped for layer in layers)
        assert len(layers.blocks) == row.blocks and len(layers.fused) == row.blocks * row.fuses
        assert layers.compiled == (layers.blocks if compile else [])
        assert layers.checkpointed == (layers.blocks if checkpointing else [])
        flags = ("grad_checkpointing", "gradient_checkpointing")
        assert not any(getattr(m, flag, False) for m in model.modules() for flag in flags)
        assert list(model.state_dict()) == names
        results = row.gradients(model)
        assert results.keys() == expected.keys()
        for key, result in results.items():
            torch.testing.assert_close(result, expected[key], rtol=1e-3, atol=1e-4, msg=key)


# of ViTamin, LLMs
OTHER_NAMES = "mlp.w0 mlp.w1 mlp.w2 mlp.gate_proj mlp.up_proj mlp.down_proj self_attn.o_proj"


def test_names_of_layers_that_no_model_here_has():
    assert all(matches(f"layers.0.{name}", LINEAR_LAYERS) for name in OTHER_NAMES.split())
