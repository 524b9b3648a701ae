"""The non-finite rule on a table of records."""

import math

import numpy as np
import pytest

from lowprec.train.divergence import judge

NAMES = ["a", "b"]


def rows(*losses):
    return [{"step": i, "loss": loss} for i, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("losses", "bad_steps", "scaler", "skips", "expected"),
    [
        ((1, 1, 1), (), "none", 0, (3, False, 0)),
        ((1, math.nan, 1), (), "none", 0, (2, True, 0)),
        ((1, math.inf, 1), (), "fixed", 0, (2, True, 0)),
        ((1, 1, 1), (2,), "none", 0, (2, True, 1)),
        ((1, 1, 1), (2,), "dynamic", 0, (3, False, 0)),
        ((1, 1, 1), (2, 3), "dynamic", 0, (3, False, 2)),
        ((1, 1, 1), (1,), "fixed", 2, (1, True, 3)),
        ((1, 1, 1), (1, 3), "fixed", 1, (3, False, 1)),
    ],
)
def test_where_a_run_ends(losses, bad_steps, scaler, skips, expected):
    norms = np.ones((len(losses), 2))
    for step in bad_steps:
        norms[step - 1, 1] = math.inf
    verdict = judge(rows(*losses), norms, NAMES, scaler=scaler, max_skips=3, skips=skips)
    assert (verdict.last, verdict.reason is not None, verdict.skips) == expected


def test_the_reason_names_step_and_tensors():
    norms = np.array([[1.0, math.nan]])
    verdict = judge(rows(1.0), norms, NAMES, scaler="none", max_skips=3)
    assert "step 1" in verdict.reason and "(b)" in verdict.reason
