"""Tests the claims at true size and the scored predictions on runs with planted losses."""

import math

import numpy as np
import pandas as pd
import pytest

from analysis import claims, make, paper, size_judges
from analysis.evidence import ALPHA, NO_RUNS, NOT, REPRODUCED, UNDECIDED, Evidence, num_seeds
from analysis.measures import RECALL, VALIDATION_LOSS
from lowprec.config.schema import InterventionConfig, ModelConfig
from tests.analysis.test_block_figures import INT8
from tests.analysis.test_claims import one

HELD, FAILED = f"{REPRODUCED} at true size", f"{NOT} at true size"
FP8, KQ_NORM = size_judges.FP8, InterventionConfig("kq_norm")
BLOCKS = [paper.BLOCK.format(k) for k in (0, ModelConfig().vision_layers - 1)]
BASE = (0.2, 0.21, 0.19)  # validation losses of bf16, a seed each
MATCHES, WORSE, BETTER, LARGER = (
    "int8 matches bf16's validation loss, true size",
    "higher validation loss than bf16",
    "lower validation loss than LLM.int8()",
    "more at larger models, true size",
)


@pytest.fixture(name="train")
def train_fixture(make_run, tmp_path):
    """A function: runs of a recipe by their validation losses, from seed 1; None: diverged.

    `sizes`: E[abs(x)] of the first and last block at steps 20 and 300 (one more for each seed).
    """

    def train(recipe, losses, recall=70.0, sizes=None, **keys):
        num_steps, tables = 20, {}
        if sizes is not None:
            num_steps = 300
            tables = {"blocks": {"feature_mean": pd.DataFrame(sizes, [20, 300], BLOCKS)}}
        keys = {"experiment": "weight_gradient", "scale": "true_size", "lr": 5e-4, "recipe": recipe,
                "model": "vit_h14", "flush": num_steps} | keys  # fmt: skip
        for seed, loss in enumerate(losses, 1):
            columns = {} if loss is None else {VALIDATION_LOSS: np.full(num_steps, loss)}
            columns |= dict.fromkeys(RECALL, np.full(num_steps, recall / 100))
            state = "diverged" if loss is None else "finished"
            make_run(seed=seed, state=state, num_steps=num_steps, columns=columns, tables=tables,
                     **keys)  # fmt: skip
        return tmp_path / "runs"

    return train


def changed(*percents):
    """Losses whose logarithms differ from bf16's by these hundredths."""
    return [base * math.exp(x / 100) for base, x in zip(BASE, percents, strict=False)]


@pytest.mark.parametrize(
    ("percents", "verdict", "words"),
    [
        ((0.1, 0.3, -0.1), HELD, "ViT-H/14 +0.10 [-0.24, +0.44], 3 seeds"),
        ((4.9, 5.1, 5.0), FAILED, "ViT-H/14 +5.13"),
        ((-4.9, -5.1, -5.0), FAILED, "ViT-H/14 -4.88"),  # better is not equal
        ((-2, 0, 2), UNDECIDED, "14 seeds would decide it if the difference stays as it is"),
        ((2.8, 2.96, 3.1), UNDECIDED, "not by 1,000 seeds"),
        ((0.1,), UNDECIDED, "one seed"),
    ],
)
def test_equality_needs_two_one_sided_tests_within_3_percent(train, percents, verdict, words):
    train("high", BASE)
    root = train("switchback", changed(*percents))
    train("switchback", [0.9, 0.9, 0.9], model="vit_b14")  # the largest model is judged
    train("high", BASE, model="vit_b14")
    finding = one(root, "C1", MATCHES)
    assert finding.verdict == verdict and words in f"{finding.ours} ({finding.why})"


@pytest.mark.parametrize(
    ("percents", "verdict", "words"),
    [
        ((2.9, 3.0, 3.1), HELD, "ViT-H/14 +3.05 [+2.87, +3.22]"),
        ((-2.9, -3.0, -3.1), FAILED, "p = 1 "),
        ((-2, 1, 4), UNDECIDED, "206 seeds would decide it"),
        ((-4, -1, 2), UNDECIDED, "111 seeds would decide it"),  # against it, without correction
        ((3.0,), UNDECIDED, "one seed"),
    ],
)
def test_a_higher_loss_needs_a_mean_above_0(train, percents, verdict, words):
    train("high", BASE)
    train("switchback", BASE)
    root = Evidence([train("llm_int8", changed(*percents))])
    for number, text in (("C2", WORSE), ("C1", BETTER)):
        finding = one(root, number, text)
        assert finding.verdict == verdict and words in f"{finding.ours} ({finding.why})"


def test_holms_correction_is_over_four_comparisons_and_no_other(train):
    train("high", BASE)
    root = train("llm_int8", changed(1.8, 2.8, 3.8))  # p = 0.02
    train("custom", changed(1.8, 2.8, 3.8), products=INT8)
    finding = one(root, "C2", WORSE)
    assert "p = 0.08 by Holm" in finding.ours and finding.verdict == UNDECIDED
    alone = one(root, "C6", "alone in int8 raises")
    assert alone.ours.endswith("p = 0.02") and alone.verdict == HELD
    for recipe in ("switchback", FP8):  # with three smaller or equal p-values
        train(recipe, changed(0, 0.01, -0.01))
    assert "p = 0.04 by Holm" in (finding := one(root, "C2", WORSE)).ours
    assert finding.verdict == HELD


def test_runs_of_the_study_of_equality_alone_decide_the_family(train):
    for experiment, percents in (("weight_gradient", (9, 9, 9)), ("equality", (0.1, 0.3, -0.1))):
        train("high", BASE, experiment=experiment, lr=3.5e-4)
        for recipe in ("switchback", FP8):
            root = train(recipe, changed(*percents), experiment=experiment, lr=3.5e-4)
    assert one(root, "C1", MATCHES).verdict == HELD
    assert one(root, "C3", OVER).verdict == FAILED


@pytest.mark.parametrize(
    ("percents", "verdict"),
    [
        ((0.1, 0.3, -0.1), FAILED),
        ((4.9, 5.1, 5.0), HELD),
        ((-4.9, -5.1, -5.0), FAILED),
        ((-2, 0, 2), UNDECIDED),
    ],
)
def test_fp8_is_worse_beyond_the_margin_and_not_if_it_is_equal(train, percents, verdict):
    train("high", BASE)
    root = train(FP8, changed(*percents))
    assert one(root, "C3", OVER).verdict == verdict


def test_as_many_seeds_are_needed_as_the_protocol_plans():
    deviation = 1.7 * math.sqrt(2) / 100  # of differences of two arms, at the upper 80% limit
    factor = 3.9470  # 1 / sqrt(chi2.ppf(0.2, 1))
    values = pd.Series([1, -1]) * deviation / factor / math.sqrt(2)
    assert num_seeds(values, size_judges.LOG_MARGIN, ALPHA / 4) == 7
    assert num_seeds(values, -size_judges.LOG_MARGIN, ALPHA / 4) == 7
    assert num_seeds(values[:1], size_judges.LOG_MARGIN, ALPHA / 4) is None
    assert num_seeds(values, size_judges.LOG_MARGIN, ALPHA) < 7


def test_the_most_seeds_counted_are_1000():
    deviation = 3.9470  # at the upper 80% limit, of two values with one of 1
    for num, needed in ((999, 1000), (1000, None)):
        room = 1.96234 * deviation / math.sqrt(num)  # t.ppf(0.975, 999)
        values = pd.Series([1, -1]) / math.sqrt(2)
        assert num_seeds(values, room * 0.99999, 0.025) == needed


def test_a_pair_with_a_diverged_run_decides_nothing(train):
    train("high", BASE)
    root = train("llm_int8", [None, *changed(0, 5, 5)[1:]])
    finding = one(root, "C2", WORSE)
    assert finding.verdict == UNDECIDED and "ViT-H/14 +5.13 [+5.13, +5.13], 2" in finding.ours
    assert finding.why == "one run of a pair diverged in 1 of its seeds"
    train("switchback", changed(0, 0.1, 0.9))  # p = 0.006
    finding = one(root, "C1", MATCHES)
    assert "p = 0.023 by Holm" in finding.ours and finding.verdict == HELD


@pytest.mark.parametrize("keys", [{"gpu": "H100"}, {"lr": 1e-3}, {"batch_size": 64}])
def test_kinds_of_gpus_and_other_settings_are_not_pooled(train, keys):
    train("high", BASE, gpu="H200")
    root = train("switchback", BASE, **{"gpu": "H200"} | keys)
    assert one(root, "C1", MATCHES).verdict == NO_RUNS


OVER = "ends more than 3% above"
FAILS = "C3", "fails where bf16 trains"


@pytest.mark.parametrize(
    ("loss", "word"),
    [(0.29, "trains"), (0.31, "degraded"), (1.19, "degraded"), (1.21, "fails"), (None, "fails")],
)
def test_outcomes_are_nats_above_the_best_bf16_run_of_any_rate(train, loss, word):
    train("high", [0.25, 0.26])
    train("high", [0.2], experiment="interventions", lr=1e-3)
    train("high", [0.01], experiment="interventions", lr=1e-3, intervention=KQ_NORM)
    train("high", [0.01], model="vit_l14")
    root = train(FP8, [loss, 0.2])
    assert one(root, *FAILS).ours == (
        f"ViT-H/14 at 0.0005: {word}{', trains' if word != 'trains' else ' 2x'}"
    )


@pytest.mark.parametrize(
    ("bf16", "fp8", "verdict"),
    [
        ([0.2, 0.2], [1.3, None], HELD),
        ([0.2, 0.2], [1.3], UNDECIDED),
        ([0.2], [1.3, 1.3], UNDECIDED),
        ([0.2, 0.2], [1.3, 0.2], UNDECIDED),
        ([0.2, 0.4], [None, None], UNDECIDED),  # bf16 does not train in both
        ([0.2, 0.2], [0.2, 0.2], UNDECIDED),
    ],
)
def test_failing_where_bf16_trains_needs_two_of_two_seeds(train, bf16, fp8, verdict):
    train("high", bf16)
    train("high", bf16, experiment="lr_map")  # the same runs again
    root = train(FP8, fp8)
    train(FP8, fp8, experiment="lr_map")
    train("high", [0.2, 0.2], model="vit_b14")  # not the paper's largest model
    train(FP8, [None, None], model="vit_b14")
    finding = one(root, *FAILS)
    assert finding.verdict == verdict and "ViT-B/14 at 0.0005: fails 2x" in finding.ours
    at_some = verdict == UNDECIDED and 1 in map(len, (bf16, fp8))
    assert finding.why.endswith("one seed at some") == at_some


def test_a_run_that_ended_without_an_evaluation_has_no_outcome(train):
    train("high", [0.2, 0.2])
    root = train(FP8, [math.nan, math.nan, 0.2])
    assert one(root, *FAILS).ours == "ViT-H/14 at 0.0005: trains"


def test_rates_at_which_bf16_does_not_train_do_not_count(train):
    for lr, bf16, fp8 in ((5e-4, [0.2, 0.2], [0.2, 0.2]), (1e-3, [0.4, 0.4], [2.0, 2.0])):
        train("high", bf16, lr=lr)
        root = train(FP8, fp8, lr=lr)
    finding = one(root, *FAILS)
    assert finding.verdict == UNDECIDED and "0.001" not in finding.ours
    assert "was trained at 1 rate at which" in finding.why


WIDTHS = size_judges.WIDTHS


@pytest.mark.parametrize(
    ("penalties", "verdict", "p_value"),
    [
        (((1, 2, 3), (0, 3, 5)), HELD, 0.028),
        (((3, 2, 1), (9, 3, 2)), FAILED, 1),
        (((1, 3, 2), (3, 2, 1)), UNDECIDED, 0.75),
        (((1, 2, 3),), UNDECIDED, None),
        (((1, 2), (1, 2)), UNDECIDED, None),
    ],
)
def test_the_penalty_grows_with_size_by_pages_test(train, penalties, verdict, p_value):
    for model, percents in zip(WIDTHS, zip(*penalties, strict=True), strict=False):
        train("high", BASE[:2], model=model)
        root = train("llm_int8", changed(*percents), model=model)
    for model, percents in (("vit_b32", (9, 9)), ("vit_b16", (-9, -9))):  # levels of no study
        train("high", BASE[:2], model=model)
        train("llm_int8", changed(*percents), model=model)
    for recipe, losses in (("high", BASE), ("llm_int8", changed(-9, -9, -9))):
        train(recipe, losses, model="vit_h14", experiment="accuracy_vs_size", lr=1e-3)
    finding = one(root, "C2", LARGER)
    assert finding.verdict == verdict
    if p_value is None:
        assert finding.why == "a trend needs three models and two seeds"
    else:
        assert f"Page's test p = {p_value} (2 seeds)" in finding.ours


def test_the_page_has_predictions_and_rows_of_both_scales(train, tmp_path):
    for recipe in ("high", "switchback", "llm_int8", FP8):
        train(recipe, BASE[:1])
    assert make.main(["claims", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "claims.md").read_text()
    rows, predicted = page.split("## Predictions")
    for number_of_claim in ("C1", "C2", "C3"):  # undecided, in the column of true size
        in_short = rows.partition(f"| {number_of_claim} | ")[2].split(" | ")
        assert in_short[1] != "open: no runs" and in_short[2].startswith("open: no runs")
    assert claims.PREDICTED in predicted and predicted.count("\n| ") == 1 + 5
    assert page.count("matches bf16's validation loss, true size | ") == 1
    assert page.count("int8 matches bf16's accuracy, mini scale | ") == 1


@pytest.mark.parametrize(
    ("fp8", "score"),
    [
        ([0.2, 0.2], "true"),
        ([0.2], "open: more seeds"),
        ([0.5, 0.2], "open: more seeds"),
        ([0.5, 0.5], "false"),
    ],
)
def test_the_prediction_of_fp8_is_judged_where_bf16_trains(train, fp8, score):
    for lr in (2.5e-4, 5e-4):
        train("high", [0.2, 0.2], lr=lr)
        train(FP8, fp8, lr=lr)
    train("high", [2.0, 2.0], lr=2e-3)
    root = train(FP8, [0.2, 0.2], lr=2e-3)  # trains where bf16 does not
    assert size_judges.predictions(Evidence([root]))[3][2] == score
