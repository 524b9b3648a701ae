"""Muon moves matrices as torch's does, and the rest as AdamW, whatever is skipped or clipped."""

import pytest
import torch
from torch import nn

from lowprec.optim.muon import MuonAdamW
from lowprec.optim.stable_adamw import STATISTICS, StableAdamW
from tests.optim.optimizers import RULE, make_groups, params_of, set_grads, take


def test_statistics_that_the_state_does_not_give_are_nan(build):
    ours = take(build("muon"), [1, 2])
    missing = ours.statistics.isnan().sum(dim=0).tolist()
    for column, count in zip(STATISTICS, missing, strict=True):
        assert count == 2 * (column == "rms" or column.startswith("u_")), column


@pytest.mark.parametrize("clip_norm", [None, 25.0])
def test_parameters_move_as_under_each_optimizer_alone(clip_norm, build, device):
    decayed, others = make_groups(device=device)
    hidden = [p for _, p in decayed["params"]]
    options = {"lr": RULE["lr"], "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(hidden, **options)
    adamw = StableAdamW([others], **RULE, clip_threshold=None, fused=False)
    ours, params = build("muon", clip_norm=clip_norm), [*hidden, *params_of(adamw)]
    for step in range(1, 51):
        before = [p.detach() * (1 - 0.1 * RULE["lr"]) for p in ours.hidden]
        set_grads(ours, step, 30.0 if step % 7 == 0 else 1.0)
        norm = torch.stack([p.grad.norm() for p in params_of(ours)]).norm()
        factor = 1.0 if clip_norm is None else (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for p, own in zip(params, params_of(ours), strict=True):
            p.grad = own.grad * factor
        for optimizer in (ours, muon, adamw):
            optimizer.step()
        torch.testing.assert_close(ours.clipped_grad_norm, norm * factor)
        torch.testing.assert_close(ours.statistics[2:, 0], adamw.statistics[:, 0])
        moved = [(p - old).norm() for p, old in zip(ours.hidden, before, strict=True)]
        found = ours.statistics[:2, STATISTICS.index("update_norm")]
        torch.testing.assert_close(found, torch.stack(moved))
    near = {"rtol": 0, "atol": 0} if clip_norm is None else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(params_of(ours), params, **near)
    assert all(p.isfinite().all() for p in params)


def test_a_parameter_without_elements_is_left_alone():
    weight, gain, empty = (nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (3,), (0,)))
    named = [("blocks.0.weight", weight), ("gain", gain), ("empty", empty)]
    optimizer = MuonAdamW([{"params": named}], RULE, clip_norm=1.0)
    for p in (weight, gain, empty):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert (gain < 1).all() and not torch.equal(weight, torch.ones(4, 4))


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest(built):
    optimizer = built({"optimizer.name": "muon", "model.text_layers": 2}).state.optimizer
    muon, adamw = optimizer.muon, optimizer.adamw
    hidden = {name for group in muon.param_groups for name in group["param_names"]}
    block = "attn.in_proj_weight attn.out_proj.weight mlp.c_fc.weight mlp.c_proj.weight".split()
    blocks = ["visual.transformer.resblocks.0", *(f"transformer.resblocks.{i}" for i in (0, 1))]
    assert hidden == {f"{prefix}.{name}" for prefix in blocks for name in block}
    assert {g["weight_decay"] for g in muon.param_groups} == {0.2}
    assert {g["weight_decay"] for g in adamw.param_groups} == {0.2, 0.0}
    rest = {name for group in adamw.param_groups for name in group["param_names"]}
    assert {"visual.conv1.weight", "token_embedding.weight", "visual.proj", "logit_scale"} <= rest
    assert f"; AdamW updates the other {len(rest)} tensors" in optimizer.summary()
    prompts = [("blocks.0.weight", nn.Parameter(torch.ones(4, 4)))]
    prompts += [("prompts.0", nn.Parameter(torch.ones(4, 4)))]  # a number is its own name
    assert len(MuonAdamW([{"params": prompts}], RULE).others) == 1
    with pytest.raises(ValueError, match="matrices in numbered blocks"):
        MuonAdamW([make_groups()[1]], RULE)
