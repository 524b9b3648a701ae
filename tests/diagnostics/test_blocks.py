"""The probe measures what a plain forward pass computes, without side effects."""

import copy

import pytest
import torch

from lowprec.clip.model import blocks, build_model, set_precision
from lowprec.config.schema import ModelConfig, PrecisionConfig
from lowprec.diagnostics.blocks import BLOCK_STATISTICS, BlockProbe
from lowprec.nn.blocks import compile_blocks

TINY = dict(vision_width=64, vision_layers=2, text_width=64, text_layers=1, vocab_size=512)


def make_model(intervention="none", patch_dropout=0.0):
    torch.manual_seed(0)
    model = build_model(ModelConfig(**TINY, patch_dropout=patch_dropout), intervention)
    set_precision(model, PrecisionConfig())
    return model


def make_batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 510, (4, 16), generator=generator)
    tokens[:, -1] = 511
    return torch.randn(4, 3, 32, 32, generator=generator), tokens


def make_probe(model):
    return BlockProbe(model, blocks(model), lambda batch: model(*batch))


def logits_of(block, x, mask):
    """Largest attention logit of open_clip's block, written out for its first layer's input."""
    attention = block.attn
    qkv = block.ln_1(x) @ attention.in_proj_weight.T + attention.in_proj_bias
    heads = attention.num_heads
    q, k = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1)[:2])
    q, k = attention.ln_q(q), attention.ln_k(k)
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return (logits if mask is None else logits + mask).max()


@pytest.mark.parametrize("intervention", ["none", "kq_norm"])
@torch.no_grad()
def test_statistics_match_the_blocks(intervention):
    model = make_model(intervention).eval()
    seen = {}
    for block in blocks(model):
        block.register_forward_hook(lambda m, inputs, output: seen.update({m: (inputs[0], output)}))
    statistics = make_probe(model)(make_batch())
    assert statistics.shape == (3, len(BLOCK_STATISTICS)) and statistics.dtype == torch.float32
    for row, block in zip(statistics, blocks(model), strict=True):
        x, output = seen[block]
        mask = model.attn_mask if block is blocks(model)[2] else None
        expected = (output.abs().mean(), output.abs().max(), logits_of(block, x, mask))
        torch.testing.assert_close(row, torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_probe_changes_neither_mode_nor_random_state_nor_hooks():
    model = make_model(patch_dropout=0.5).train()
    model.transformer.eval()  # as for a frozen tower
    modes = [module.training for module in model.modules()]
    product = {"format": "e4m3", "x": "rowwise", "w": "rowwise", "stochastic": ["x"]}
    set_precision(model, PrecisionConfig(recipe="custom", products={"output": product}))
    probe, state = make_probe(model), torch.get_rng_state()
    first = probe(make_batch())
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(probe(make_batch()), first)
    assert [module.training for module in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(TypeError):
        probe(None)
    assert [module.training for module in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
def test_compiled_and_checkpointed_blocks_give_the_same_statistics():
    model = make_model()
    expected = make_probe(model)(make_batch())
    compiled = copy.deepcopy(model)
    compiled.set_grad_checkpointing(True)
    compile_blocks(compiled, blocks(compiled))
    torch.testing.assert_close(make_probe(compiled)(make_batch()), expected)


def test_logit_is_missing_for_foreign_attention():
    torch.manual_seed(0)
    model = build_model(ModelConfig(**TINY))
    statistics = make_probe(model)(make_batch())
    assert statistics[:, 2].isnan().all() and statistics[:, :2].isfinite().all()
