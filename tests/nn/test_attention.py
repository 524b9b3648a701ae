"""Attention against the modules that it replaces: nn.MultiheadAttention and open_clip's."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from lowprec import ops
from lowprec.clip import open_clip
from lowprec.nn.attention import is_replaceable, replace
from lowprec.ops import triton_attention

TOLERANCE = 2e-6  # float32: the same sums in another order


def mask_of(kind, tokens):
    causal = torch.full((tokens, tokens), float("-inf")).triu(1)
    return {"none": None, "causal": causal, "bool": causal.isinf()}[kind]


def gradients(output, module, x):
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(output.shape, generator=generator).to(output)
    named = dict(module.named_parameters())
    values = torch.autograd.grad(output, [x, *named.values()], g)
    return dict(zip(["x", *named], values, strict=True))


@pytest.mark.parametrize("kind", ["none", "causal", "bool"])
@pytest.mark.parametrize("qk_norm", [None, False, True], ids=["multihead", "custom", "qk_norm"])
def test_attention_equals_the_module_it_replaces(qk_norm, kind):
    torch.manual_seed(0)
    if qk_norm is None:
        replaced = nn.MultiheadAttention(48, 3, batch_first=True)
    else:
        replaced = open_clip.transformer.Attention(48, 3, qk_norm=qk_norm)
    nn.init.normal_(replaced.in_proj_bias)
    nn.init.normal_(replaced.out_proj.bias)
    x = torch.randn(2, 5, 48, requires_grad=True)
    mask = mask_of(kind, 5)

    def run(module):
        if qk_norm is not None:
            return module(x, attn_mask=mask)
        output, weights = module(x, x, x, need_weights=False, attn_mask=mask)
        assert weights is None
        return output

    expected = run(replaced)
    expected_gradients = gradients(expected, replaced, x)
    ours, names = replaced, [name for name, _ in replaced.named_parameters()]
    replace(ours)
    assert [name for name, _ in ours.named_parameters()] == names
    for causal in {False, kind == "causal"}:
        ours.causal = causal
        output = run(ours)
        torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)
        for name, gradient in gradients(output, ours, x).items():
            torch.testing.assert_close(gradient, expected_gradients[name], atol=2e-5, rtol=0)


@pytest.fixture
def short_attention(monkeypatch, right_interpreter):
    """Makes attention take the kernels on any device; counts the calls."""
    calls = []

    def count(kernel):
        return lambda *arguments: calls.append(kernel.__name__) or kernel(*arguments)

    monkeypatch.setattr(ops, "takes_attention", lambda *_: True)
    for kernel in (triton_attention.attention, triton_attention.attention_backward):
        monkeypatch.setattr(ops, kernel.__name__, count(kernel))
    return calls


@pytest.mark.parametrize("causal", [False, True])
def test_short_attention_equals_torch(device, short_attention, monkeypatch, causal):
    module, x = make().to(device), torch.randn(2, 5, 32, device=device, requires_grad=True)
    module.causal = causal
    mask = mask_of("causal", 5).to(device) if causal else None
    output, _ = module(x, x, x, attn_mask=mask)
    results = gradients(output, module, x)
    assert short_attention == ["attention", "attention_backward"]
    monkeypatch.setattr(ops, "takes_attention", lambda *_: False)
    expected, _ = module(x, x, x, attn_mask=mask)
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(results, gradients(expected, module, x), atol=2e-5, rtol=0)
    assert len(short_attention) == 2


def test_masks_and_norms_of_keys_use_torch(device, short_attention):
    x = torch.randn(2, 5, 32, device=device)
    make().to(device)(x, x, x, attn_mask=mask_of("bool", 5).to(device))
    normed = open_clip.transformer.Attention(32, 2, qk_norm=True).to(device)
    replace(normed)
    normed(x)
    assert not short_attention
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(make().to(device)(x.requires_grad_(), x)[0].sum(), x, create_graph=True)


def make():
    module = nn.MultiheadAttention(32, 2, batch_first=True)
    replace(module)
    return module


def test_other_keys_or_weights_are_refused():
    module = make()
    x = torch.randn(2, 3, 32)
    assert torch.equal(module(x, k_x=x, v_x=x)[0], module(x, x, x)[0])  # as open_clip 4 calls it
    for name in ("key", "value", "k_x", "v_x"):
        with pytest.raises(ValueError, match="self-attention"):
            module(x, **{name: torch.randn(2, 3, 32)})
    with pytest.raises(ValueError, match="need_weights"):
        module(x, x, x, need_weights=True)
    module.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="full backward hooks"):
        module(*[x.requires_grad_()] * 3)


def patched(change):
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    assert is_replaceable(module)
    change(module)
    return module


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(4, 4),
        type("Own", (nn.MultiheadAttention,), {})(8, 2, batch_first=True),
        patched(lambda m: parametrize.register_parametrization(m, "in_proj_weight", nn.Identity())),
        patched(lambda m: setattr(m, "forward", lambda *x: x)),
        nn.MultiheadAttention(8, 2),
        nn.MultiheadAttention(8, 2, batch_first=True, kdim=4, vdim=4),
        nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1),
        nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True),
        open_clip.transformer.Attention(8, 2, scaled_cosine=True),
        open_clip.transformer.Attention(8, 2, inner_norm=True),
        open_clip.transformer.Attention(8, 2, scale_heads=True),
    ],
)
def test_unsupported_attention_is_not_replaceable(module):
    assert not is_replaceable(module)
