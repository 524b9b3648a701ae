"""Which MLPs run as one function, and that it equals the modules it replaces."""

import copy

import pytest
import torch
from torch import nn

from lowprec.clip import open_clip
from lowprec.nn import apply_recipe
from lowprec.nn.mlp import LowPrecisionMLP, unfuse
from tests.nn.models import mlp_of, timm, transformers_mlp


@pytest.mark.parametrize("recipe, dtype, autocast", [
    ("switchback", torch.float32, False), ("switchback", torch.bfloat16, False),
    ("hw_fp8_switchback", torch.float32, True),
])  # fmt: skip
@pytest.mark.parametrize("build", [mlp_of, lambda: timm.layers.Mlp(64, 256), transformers_mlp])
def test_mlp_of_any_library_is_fused(build, recipe, dtype, autocast):
    torch.manual_seed(0)
    fused = build().to(dtype)
    plain, kind = copy.deepcopy(fused), type(fused)
    x, results = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True), []
    apply_recipe(fused, recipe, ["*"])
    apply_recipe(plain, recipe, ["*"])
    assert isinstance(fused, LowPrecisionMLP)
    stale = plain.forward
    unfuse(plain)
    for forward in (fused, plain, stale):
        with torch.autocast("cpu", enabled=autocast):
            output = forward(x)
        output.square().sum().backward()
        module = fused if forward is fused else plain
        results.append([output, x.grad, *[p.grad for p in module.parameters()]])
        module.zero_grad()
        x.grad = None
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
    with torch.no_grad():
        assert torch.equal(fused(x), plain(x))
    for other in ("switchback_m", "llm_int8", "high"):
        apply_recipe(fused, other, ["*"])
        assert not isinstance(fused, LowPrecisionMLP)
    assert type(fused) is type(plain) is kind and not hasattr(fused, "original")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch.compile itself
def test_fused_mlp_compiles_for_any_number_of_rows():
    torch._dynamo.reset()
    mlp = mlp_of()
    apply_recipe(mlp, "switchback", ["*"])
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend="aot_eager")
    for number in (3, 70):
        x, g = torch.randn(number, 64, requires_grad=True), torch.randn(number, 64)
        eager, other = (torch.autograd.grad(module(x), x, g)[0] for module in (mlp, compiled))
        assert torch.equal(other, eager)
    with pytest.raises(ValueError, match=r"input \[70, 63\]: must have 64 features"):
        mlp(x[:, 1:])


class Tripled(nn.Identity):
    def forward(self, x):
        return 3 * x


class OwnActivation(nn.Module):
    act = staticmethod(nn.functional.gelu)

    def forward(self, x):
        return 1.7 * self.act(x)


class OwnMlp(timm.layers.Mlp):
    def forward(self, x):
        return x + super().forward(x)


def patched():
    mlp = mlp_of()
    mlp[1].forward = lambda x: 2 * x
    return mlp


@pytest.mark.parametrize(
    "build",
    [
        lambda: mlp_of(nn.GELU(approximate="tanh")),
        lambda: mlp_of(open_clip.transformer.QuickGELU()),
        lambda: mlp_of(OwnActivation()),
        lambda: mlp_of(None, Tripled()),
        lambda: mlp_of(None, nn.Dropout(0.1)),
        lambda: timm.layers.Mlp(64, 256, norm_layer=nn.LayerNorm),
        lambda: timm.layers.Mlp(64, 256, bias=False),
        lambda: OwnMlp(64, 256),
        patched,
    ],
)
def test_other_mlp_is_not_fused(build):
    mlp, x = build(), torch.randn(2, 64)
    kind, expected = type(mlp), mlp.eval()(x)
    apply_recipe(mlp, "switchback", ["*"])
    assert type(mlp) is kind
    assert (mlp(x) - expected).norm() < 0.05 * expected.norm()


def test_parts_of_a_fused_mlp_are_called_if_patched_or_sliced_off():
    mlp, x = mlp_of(), torch.randn(2, 64, requires_grad=True)
    apply_recipe(mlp, "switchback", ["*"])
    part, before, plain = mlp[:2], mlp(x), mlp[2].forward
    assert torch.equal(part(x), mlp[1](mlp[0](x)))
    mlp[2].forward = lambda x: 10 * plain(x)
    torch.testing.assert_close(mlp(x), 10 * before)
    apply_recipe(part, "high", ["*"])
    assert type(part) is nn.Sequential and part(x).shape == (2, 256)


def test_global_hooks_see_the_parts_of_a_fused_mlp():
    mlp, x, seen = mlp_of(), torch.randn(2, 64, requires_grad=True), []
    apply_recipe(mlp, "switchback", ["*"])
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        mlp(x)
    finally:
        hook.remove()
    assert seen == [*mlp, mlp]
