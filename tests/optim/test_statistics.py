"""Statistics without gradients or elements, and for torch's AdamW."""

import pytest
import torch

from lowprec.optim import StableAdamW, second_moment_statistics

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(5, 7), (16,), (3, 2, 2), ()]


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [torch.nn.Parameter(value) for value in values]


def set_grads(params, step):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        grad = torch.randn(p.shape, generator=generator) * (50.0 if step == 4 else 1.0)
        p.grad = grad.to(p.dtype)


def assert_shows_no_gradient(row):
    assert row[0].isnan() and (row[1:] == 0).all()


def test_a_step_without_gradients_clears_the_last_statistics():
    params = make_params()
    optimizer = StableAdamW(params)
    set_grads(params, 1)
    optimizer.step()
    assert optimizer.statistics[:, 0].isfinite().all()
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.statistics.shape == (4, 10) and optimizer.all_finite
    assert optimizer.grad_norm == optimizer.clipped_grad_norm == 0
    for row in optimizer.statistics:
        assert_shows_no_gradient(row)
    assert optimizer.steps == [1] * 4


def test_an_empty_tensor_counts_as_one_without_a_gradient():
    empty, other = torch.nn.Parameter(torch.empty(0, 3)), torch.nn.Parameter(torch.ones(2))
    empty.grad, other.grad = torch.empty(0, 3), torch.ones(2)
    optimizer = StableAdamW([empty, other])
    optimizer.step()
    assert_shows_no_gradient(optimizer.statistics[0])
    assert optimizer.statistics[1].isfinite().all() and optimizer.all_finite


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_statistics_of_torchs_adamw_equal_ours_without_clipping(options):
    ours, theirs = make_params(), make_params()
    optimizer = StableAdamW(ours, clip_threshold=None, **OPTIONS)
    adamw = torch.optim.AdamW(theirs, **OPTIONS, **options)
    for step in range(1, 7):
        for params, o in ((ours, optimizer), (theirs, adamw)):
            set_grads(params, step)
            if step < 3:
                params[1].grad = None
            o.step()
        found, expected = second_moment_statistics(adamw), optimizer.statistics
        assert found.shape == (4, 10) and found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7, equal_nan=True)
        assert step != 4 or found[:, 0].min() > 1.3  # the jump shows


def test_a_stable_adamw_returns_its_own_statistics():
    params = make_params()
    optimizer = StableAdamW(params, **OPTIONS)
    set_grads(params, 1)
    optimizer.step()
    assert second_moment_statistics(optimizer) is optimizer.statistics


def test_an_optimizer_without_a_second_moment_is_refused():
    params = make_params()
    sgd = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    set_grads(params, 1)
    sgd.step()
    with pytest.raises(ValueError, match="no tensor has a gradient and a second moment"):
        second_moment_statistics(sgd)
