"""Tests the claims that a study judges once all runs that its file names have ended."""

import numpy as np
import pandas as pd
import pytest

from analysis import evidence, make, paper
from analysis.evidence import NO_RUNS, UNDECIDED, Evidence
from analysis.load import NoRunsError
from analysis.measures import RECALL, VALIDATION_LOSS
from lowprec.config.schema import DiagnosticsConfig, InterventionConfig, ModelConfig, SpikeConfig
from tests.analysis.conftest import spiking
from tests.analysis.test_claims import FAILED, HELD, one

SEEDS = range(5, 25)
PLANNED = {"scale": "mini", "model": "mini_l", "batch_size": 1024, "num_steps": 2000, "lr": 2e-3}
IN_BLOCKS = {"format": "e1m6", "g": "32x32", "x": "32x32"}
BLOCKS = {"recipe": "custom", "products": {"grad_weight": IN_BLOCKS}}
LAST_BLOCK = paper.BLOCK.format(ModelConfig().vision_layers - 1)
CONV1 = "visual.conv1.weight"
EQUAL, IN_32 = "int8 matches bf16's accuracy", "blocks of 32 x 32"


@pytest.fixture(name="equality")
def equality_fixture(make_run, tmp_path):
    """A function: runs of `equality_mini`, or another study, by seed with their mean R@1.

    `size`: E[abs(x)] of the last block at the last of the `steps` written.
    """

    def make(recipe, recalls, seeds=SEEDS, experiment="equality", size=2.0, steps=20, **keys):
        features = pd.DataFrame({LAST_BLOCK: [1.0, size]}, [10, steps])
        keys = PLANNED | {"optimizer": "stable_adamw", "recipe": recipe} | keys
        for seed, recall in zip(seeds, recalls, strict=False):
            columns = dict.fromkeys(RECALL, np.full(steps, recall / 100))
            columns[VALIDATION_LOSS] = np.full(steps, 0.06)
            make_run(experiment=experiment, seed=seed, columns=columns, steps=steps, flush=steps,
                     tables={"blocks": {"feature_mean": features}}, **keys)  # fmt: skip
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
    equality("switchback", [69.9], SEEDS[-1:], scale="demo")
    assert one(root, "C1", EQUAL) == finding
    equality("switchback", [69.9], SEEDS[-1:])
    finding = one(root, "C1", EQUAL)
    assert finding.verdict == HELD and finding.ours.startswith("mini_l -0.10 ")
    assert finding.ours.count("20 seeds") == 3
    assert one(root, "C3", "SwitchBack fp8 matches").verdict == NO_RUNS


def test_equality_needs_the_runs_in_bf16_too(equality):
    for recipe in ("high", "switchback"):
        equality(recipe, [67.0, 67.2], (0, 1), "accuracy_vs_size")
    equality("switchback", [70.0] * 20)
    root = equality("high", [70.0] * 19)
    assert "2 seeds" in one(root, "C1", EQUAL).ours
    equality("high", [70.0], SEEDS[-1:])
    assert "20 seeds" in one(root, "C1", EQUAL).ours


def test_a_smoke_test_of_a_study_is_no_planned_run(equality):
    others = {"num_steps": 20, "batch_size": 64, "model": "mini_b", "lr": 1e-3}
    for key, value in (others | {"optimizer": "adamw"}).items():
        root = equality("high", [70.0], **{key: value})
    with pytest.raises(NoRunsError, match="20 of 20 runs: "):
        Evidence([root]).need_all("equality", "precision.label", ("bf16",))


def test_a_value_that_no_planned_run_has_is_refused(equality, spiked):
    root = equality("high", [70.0] * 20)
    with pytest.raises(ValueError, match="_mini has precision.label bf16, .*, not bf61$"):
        Evidence([root]).need_all("equality", "precision.label", ("bf16", "bf61"))
    for beta2 in STRONG:
        spiked(WITHOUT, beta2, 2.0, experiment="kq_norm")
    with pytest.raises(NoRunsError, match="15 of 15 runs"):  # all without KQ norm
        Evidence([root]).need_all("kq_norm", "intervention.name", (WITH,))


def test_a_study_without_a_plan_needs_none(equality):
    for recipe in ("high", "fp8_switchback"):
        equality(recipe, [70.0, 70.2], (0, 1), "accuracy_vs_size")
        root = equality(recipe, [70.0], experiment="")
    assert one(root, "C3", "SwitchBack fp8 matches").verdict == HELD


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
    equality("high", [70.0] * 4, steps=2000)
    recalls, products = [69.0, 69.1, 69.2, 68.9, 68.8], BLOCKS["products"]
    root = equality("custom", recalls, size=3.0, steps=2000, products=products)
    assert one(root, "C6", IN_32).verdict == NO_RUNS
    equality("high", [70.0, 10.0], SEEDS[4:], steps=2000)
    finding = one(root, "C6", IN_32)
    assert finding.verdict == HELD and finding.ours.startswith("mini_l +1.00 [+0.80, +1.20], 5 se")
    assert finding.ours.endswith("at the end: 1.50 times bf16's (1.50 to 1.50)")


STEPS, STRONG = 200, (0.98, 0.99, 0.999)  # steps written of 2,000
WITH, WITHOUT = "kq_norm", "none"
PROTOCOL = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=20, window=20))
LOWERS = "KQ layer norm lowers the highest"


@pytest.fixture(name="spiked")
def spiked_fixture(make_run, tmp_path):
    """A function: five runs of AdamW at a beta2, with loss spikes of a height at some steps."""

    def make(intervention, beta2, height, at=(100,), seeds=range(5), recall=50.0, **keys):
        experiment, gpu = ("kq_norm", "H200") if intervention == WITH else ("stability", "H100")
        keys = {"experiment": experiment, "gpu": gpu} | keys
        for seed in seeds:
            losses = spiking(STEPS, at, height * (1 + 0.01 * seed), 4)
            make_run(beta2=beta2, seed=seed, steps=STEPS, losses=losses, flush=STEPS, tables={},
                     intervention=InterventionConfig(intervention), diagnostics=PROTOCOL,
                     columns=dict.fromkeys(RECALL, np.full(STEPS, recall / 100)),
                     **PLANNED | keys)  # fmt: skip
        return tmp_path / "runs"

    return make


@pytest.mark.parametrize(
    ("heights", "verdict"),
    [((0.5, 0.5, 0.5), HELD), ((0.5, 0.5, 4.0), FAILED)],
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


SIZED = {"scale": "true_size", "model": "vit_l14", "batch_size": 1024, "num_steps": 1500}
BUMPS = {0.98: [60], 0.99: [60, 100], 0.999: [60, 100, 140]}  # by beta2
AT_SIZE = {  # verdicts if AdamW alone spikes, more often at a larger beta2, not at half the rate
    ("C9", "loss spikes grow with beta2, true"): "reproduced",
    ("C9", "loss spikes grow with the learning rate, true"): "reproduced",
    ("C10", "a loss spike follows an RMS spike of the patch embedding by 1 to 8 steps, true"):
        "not reproduced",
    ("C11", "StableAdamW removes the spikes, true"): "reproduced",
    ("C11", "loss spikes are rarer with gradient clipping at norm 1, true"): "reproduced",
    ("C11", "a lower beta2 also removes spikes, true"): "reproduced",
}  # fmt: skip


def test_spikes_of_vit_l14_are_judged_once_all_thirty_runs_are_in(make_run, tmp_path):
    names = ["optimizer.name", "optimizer.beta2", "optimizer.lr", "seed"]
    *plan, last = evidence.planned("stability_true_size")[names].itertuples(index=False)
    tables = {"tensors": {"rms": pd.DataFrame({CONV1: np.ones(STEPS)}, range(1, STEPS + 1))}}

    def make_planned(optimizer, beta2, lr, seed):
        spikes = (optimizer, lr) == ("adamw", 5e-4)
        losses = spiking(STEPS, BUMPS.get(beta2, []) if spikes else [], 2 + 0.01 * seed, 4)
        make_run(
            optimizer=optimizer, beta2=beta2, lr=lr, seed=seed, losses=losses, steps=STEPS,
            clip_norm=1.0 if optimizer == "adamw_clip" else None,
            clip_threshold=1.0 if optimizer == "stable_adamw" else None, experiment="stability",
            flush=STEPS, tables=tables, diagnostics=PROTOCOL, **SIZED,
        )  # fmt: skip

    for row in plan:
        make_planned(*row)
    for words in AT_SIZE:
        assert one(tmp_path / "runs", *words).why.startswith("1 of 30 runs: ")
    make_planned(*last)
    for words, verdict in AT_SIZE.items():
        assert one(tmp_path / "runs", *words).verdict == f"{verdict} at true size", words
