"""Learning rates by hand."""

import pytest

from lowprec.optim.schedules import learning_rate


@pytest.mark.parametrize(
    ("step", "expected"), [(1, 0.2), (5, 1.0), (10, 2.0), (60, 1.0), (35, 1.7071068), (110, 0.0)]
)
def test_warmup_then_cosine(step, expected):
    lr = learning_rate(step, peak=2.0, num_steps=110, warmup_steps=10)
    assert lr == pytest.approx(expected, abs=1e-6)


def test_warmup_then_constant():
    rates = [learning_rate(s, peak=2.0, num_steps=9, warmup_steps=4, shape="constant")
             for s in range(1, 10)]  # fmt: skip
    assert rates == [0.5, 1.0, 1.5] + [2.0] * 6


def test_default_warmup_is_a_tenth_and_for_a_constant_rate_not_of_the_length():
    assert learning_rate(5, peak=1.0, num_steps=100, warmup_steps=None) == 0.5
    long, short = (
        learning_rate(5, peak=1.0, num_steps=n, warmup_steps=None, shape="constant")
        for n in (10, 10**6)
    )
    assert long == short == 0.05
