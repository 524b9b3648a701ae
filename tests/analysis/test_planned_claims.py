"""Tests the claims that a study judges once all runs that its file names have ended."""

import numpy as np
import pandas as pd
import pytest

from analysis import make, paper
from analysis.evidence import NO_RUNS, UNDECIDED, Evidence
from analysis.load import NoRunsError
from analysis.measures import RECALL, VALIDATION_LOSS
from lowprec.config.schema import DiagnosticsConfig, InterventionConfig, ModelConfig, SpikeConfig
from tests.analysis.conftest import spiking
from tests.analysis.test_claims import FAILED, HELD, one

SEEDS = range(5, 25)
IN_BLOCKS = {"format": "e1m6", "g": "32x32", "x": "32x32"}
BLOCKS = {"recipe": "custom", "products": {"grad_weight": IN_BLOCKS}}
LAST_BLOCK = paper.BLOCK.format(ModelConfig().vision_layers - 1)
EQUAL, IN_32 = "int8 matches bf16's accuracy", "blocks of 32 x 32"


@pytest.fixture(name="equality")
def equality_fixture(make_run, tmp_path):
    """A function: runs of `equality_mini`, or another study, by seed with their mean R@1.

    `size`: E[abs(x)] of the last block at step 20.
    """

    def make(recipe, recalls, seeds=SEEDS, experiment="equality", size=2.0, **keys):
        features = pd.DataFrame({LAST_BLOCK: [1.0, size]}, [10, 20])
        for seed, recall in zip(seeds, recalls, strict=False):
            columns = dict.fromkeys(RECALL, np.full(20, recall / 100))
            columns[VALIDATION_LOSS] = np.full(20, 0.06)
            make_run(experiment=experiment, scale="mini", model="mini_l", seed=seed, num_steps=20,
                     columns=columns, tables={"blocks": {"feature_mean": features}},
                     **{"recipe": recipe} | keys)  # fmt: skip
        return tmp_path / "runs"

    return make


def around(mean):
    """Twenty values of R@1 with this mean, which differ from others' by the same amount or 0.1."""
    return [mean + 0.05 * (-1) ** i for i in range(20)]


def test_equality_is_judged_by_the_twenty_seeds_once_all_are_in(equality):
    for recipe, recalls in (("high", [70.0, 70.1]), ("switchback", [67.0, 67.2])):
        equality(recipe, recalls, (0, 1), "accuracy_vs_size")
    equality("high", [70.0] * 20)
    root = equality("switchback", around(69.9)[:-1])
    finding = one(root, "C1", EQUAL)
    assert finding.verdict == FAILED and "mini_l -2.95" in finding.ours
    equality("switchback", [69.9], SEEDS[-1:], state="running")
    assert one(root, "C1", EQUAL) == finding
    equality("switchback", [69.9], SEEDS[-1:])
    finding = one(root, "C1", EQUAL)
    assert finding.verdict == HELD and finding.ours.startswith("mini_l -0.10 ")
    assert finding.ours.count("20 seeds") == 3
    assert one(root, "C3", "SwitchBack fp8 matches").verdict == NO_RUNS


def test_a_planned_run_is_known_by_what_its_study_varies(equality):
    root = equality("high", [70.0] * 20)
    plan = ("equality", "precision.label", ("bf16",))
    Evidence([root]).need_all(*plan)
    for label, num in (("switchback", 20), ("grad_weight e1m6", 5)):
        with pytest.raises(NoRunsError, match=f"{num} of {num} runs: .*=equality_mini"):
            Evidence([root]).need_all("equality", "precision.label", (label,))
    equality("custom", [70.0] * 5, products={"grad_weight": IN_BLOCKS | {"g": "rowwise"}})
    with pytest.raises(NoRunsError, match="5 of 5 runs"):  # of other blocks
        Evidence([root]).need_all("equality", "precision.label", ("grad_weight e1m6",))


def test_an_int8_gradient_in_blocks_is_compared_with_bf16_of_the_same_seeds(equality):
    equality("high", [70.0] * 5 + [10.0] * 14)
    root = equality("custom", [69.0, 69.1, 69.2, 68.9, 68.8], size=3.0, products=BLOCKS["products"])
    assert one(root, "C6", IN_32).verdict == NO_RUNS
    equality("high", [10.0], SEEDS[-1:])
    finding = one(root, "C6", IN_32)
    assert finding.verdict == HELD and finding.ours.startswith("mini_l +1.00 [+0.80, +1.20], 5 se")
    assert finding.ours.endswith("at the end: 1.50 times bf16's (1.50 to 1.50)")


STEPS, STRONG = 200, (0.98, 0.99, 0.999)
WITH, WITHOUT = "kq_norm", "none"
PROTOCOL = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=20, window=20))
LOWERS = "KQ layer norm lowers the highest"


@pytest.fixture(name="spiked")
def spiked_fixture(make_run, tmp_path):
    """A function: five runs of AdamW at a beta2, with loss spikes of a height at some steps."""

    def make(intervention, beta2, height, at=(100,), seeds=range(5), recall=50.0, **keys):
        keys = {"experiment": "kq_norm" if intervention == WITH else "stability"} | keys
        for seed in seeds:
            losses = spiking(STEPS, at, height * (1 + 0.01 * seed), 4)
            make_run(model="mini_l", scale="mini", beta2=beta2, seed=seed, num_steps=STEPS,
                     intervention=InterventionConfig(intervention), diagnostics=PROTOCOL,
                     losses=losses, flush=STEPS, tables={},
                     columns=dict.fromkeys(RECALL, np.full(STEPS, recall / 100)),
                     **{"gpu": "H200" if intervention == WITH else "H100"} | keys)  # fmt: skip
        return tmp_path / "runs"

    return make


@pytest.mark.parametrize(
    ("heights", "verdict"),
    [((0.5, 0.5, 0.5), HELD), ((0.5, 0.5, 4.0), FAILED), ((4.0, 4.0, 4.0), FAILED)],
)
def test_kq_norm_must_lower_the_highest_spike_at_each_beta2(spiked, heights, verdict):
    for beta2, height in zip(STRONG, heights, strict=True):
        spiked(WITH, beta2, height, recall=60.0)
        root = spiked(WITHOUT, beta2, 2.0, at=(60, 100))
    spiked(WITHOUT, 0.9, 9.0)
    spiked(WITHOUT, 0.99, 9.0, lr=4e-3)
    spiked("zero_init", 0.99, 9.0)
    finding = one(root, "C11", LOWERS)
    assert finding.verdict == verdict
    of_98, _, of_999 = finding.ours.split("; beta2 ")
    assert "beta2 0.98: 0.521 instead of 2.05 nats, lower by +1.53 [" in of_98 or heights[0] > 1
    assert "per run 1; over" not in of_98 and "loss spikes per run 1 instead of 2, over" in of_98
    assert "R@1, %, 60 instead of 50" in of_98 and "5 seeds" in of_999


def test_kq_norm_is_undecided_where_an_interval_contains_0(spiked):
    for beta2 in STRONG:
        for seed in range(5):
            height = 2.0 + (-1) ** seed if beta2 == 0.99 else 0.5
            spiked(WITH, beta2, height, seeds=(seed,))
        root = spiked(WITHOUT, beta2, 2.0)
    finding = one(root, "C11", LOWERS)
    assert finding.verdict == UNDECIDED and finding.why.startswith("an interval contains 0")


def test_nothing_is_said_of_kq_norm_until_all_of_its_runs_are_in(spiked, tmp_path):
    for beta2 in STRONG:
        spiked(WITH, beta2, 0.5, seeds=range(5 if beta2 < 0.999 else 4))
    root = spiked(WITHOUT, 0.98, 2.0)
    assert one(root, "C11", LOWERS).why.startswith("1 of 15 runs: python -m experiments.train")
    assert make.main(["claims", "--runs", str(root), "--out", str(tmp_path)]) == 0
    assert "KQ layer norm lowers" not in (tmp_path / "claims.md").read_text()
    spiked(WITH, 0.999, 0.5, seeds=(4,))
    assert one(root, "C11", LOWERS).why.startswith("runs at each beta2: ")  # of stability
    for beta2 in STRONG[1:]:
        spiked(WITHOUT, beta2, 2.0)
    assert one(root, "C11", LOWERS).verdict == HELD
