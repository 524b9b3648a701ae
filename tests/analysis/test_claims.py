"""Tests the claims: runs decide each verdict, and no verdict goes beyond its runs.

The claims about spikes are in test_spike_claims.py.
"""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import claims, make, paper
from analysis.evidence import (
    MINI,
    NO_RUNS,
    NO_VERDICT,
    NOT,
    REPRODUCED,
    UNDECIDED,
    Evidence,
    Finding,
    Sample,
    share_interval,
    share_over_runs,
)
from lowprec.config.schema import InterventionConfig
from tests.analysis.conftest import write_rows

ROOT = Path(__file__).parents[2]
HELD, FAILED = f"{REPRODUCED} at mini scale", f"{NOT} at mini scale"


def one(root, number, words):
    """The finding on the claim with a number whose text contains the words, at mini scale first."""
    found = [c for c in claims.CLAIMS if c.number == number and words in c.text]
    found = [c for c in found if c.scale == MINI] or found
    [claim] = [c for c in found if c.text.removesuffix(", mini scale").endswith(words)] or found
    return claims.judge(claim, root if isinstance(root, Evidence) else Evidence([root]))


def test_interval_of_a_mean_is_students():
    # scipy.stats.t.interval(0.95, 3, 2.5, 1.2909944487358056 / 2)
    sample = Sample.of(pd.Series([1.0, 2.0, 3.0, 4.0]))
    assert (sample.mean, sample.num) == (2.5, 4)
    np.testing.assert_allclose((sample.low, sample.high), (0.4457, 4.5543), atol=2e-3)
    assert np.isnan(Sample.of(pd.Series([1.0])).low)


def test_interval_of_a_share_is_wilsons_and_widens_where_runs_differ():
    # statsmodels.stats.proportion.proportion_confint(28, 30, method="wilson")
    np.testing.assert_allclose(share_interval(28, 30), (0.7868, 0.9815), atol=1e-3)
    alike, unlike = pd.Series([10, 10, 10, 10]), pd.Series([20, 20, 0, 0])
    totals = pd.Series([20] * 4)
    assert share_over_runs(alike, totals) == share_interval(40, 80)
    assert share_over_runs(unlike, totals) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "judge", "num"),
    [
        ([-0.2, 1.0, 0.4], "larger", 42),
        ([0.1, -0.7, 0.3], "equal", 24),
        ([0.2, 0.9, 0.4], "equal", None),  # at its margin
        ([0.2, 0.9, 0.7], "equal", 160),  # refuted by then
    ],
)
def test_an_undecided_row_says_how_many_seeds_would_decide_it(tmp_path, values, judge, num):
    finding = getattr(Evidence([tmp_path]), judge)("", pd.Series(values))
    assert finding.verdict == UNDECIDED
    by = f"{num} seeds would decide it" if num else "not by 1,000 seeds"
    assert f"; {by} if the difference stays as it is" in finding.why
    limit = np.std(values, ddof=1) * math.sqrt(2 / 0.44629)  # chi2.ppf(0.2, 2)
    for seeds, is_open in ((num - 1, True), (num, False)) if num else ():
        more = np.resize([1.0, -1.0], seeds)
        more = np.mean(values) + (more - more.mean()) / more.std(ddof=1) * limit
        found = getattr(Evidence([tmp_path]), judge)("", pd.Series(more)).verdict
        assert (found == UNDECIDED) == is_open


def arms(key, *values):
    return [{key: value} for value in values]


BF16, LOWER = (57.6, 57.5, 57.7), (52.6, 52.55, 52.65)
EQUAL = [(57.61, 57.52, 57.68), BF16], [LOWER, BF16]
HIGHER = [BF16, LOWER], [LOWER, BF16]
LESS_AT_LARGEST = [BF16, BF16, LOWER, BF16], [LOWER, BF16, BF16, BF16]
RECALL = ("retrieval/image_to_text_r1", "retrieval/text_to_image_r1")
H14 = {"model": "vit_h14"}
BY_SIZE = {"experiment": "accuracy_vs_size"}
SIZES = [dict(model=m, recipe=r) for m in ("vit_b32", "vit_h14") for r in ("llm_int8", "high")]
INT8 = {"format": "int8", "g": "columnwise", "x": "columnwise"}
ALONE = {"recipe": "custom", "products": {"grad_weight": INT8}}
PRODUCT = {"experiment": "one_product"} | H14
OF_ACCURACY = {  # claim: runs that it compares, and the accuracies with which it holds and fails
    ("C1", "int8 matches bf16's accuracy"): (
        BY_SIZE | H14,
        arms("recipe", "switchback", "high"),
        EQUAL,
    ),
    ("C1", "beats"): (BY_SIZE | H14, arms("recipe", "switchback", "llm_int8"), HIGHER),
    ("C2", "more accuracy at larger"): (BY_SIZE, SIZES, LESS_AT_LARGEST),
    ("C6", "alone in int8 costs"): (PRODUCT, [{"recipe": "high"}, ALONE], HIGHER),
}


@pytest.fixture(name="accuracies")
def accuracies_fixture(write_run, tmp_path):
    """A function: runs of some arms with their mean R@1, a seed each; None: diverged.

    `losses` are the validation losses of the first seeds of each arm.
    """

    def make(arms, accuracies, folder="runs", losses=((0.06,) * 3,) * 4, **keys):
        for arm, values, ends in zip(arms, accuracies, losses, strict=False):
            for seed, value in enumerate(values):
                state = "diverged" if value is None else "finished"
                columns = {name: np.full(20, (value or 0) / 100) for name in RECALL}
                if seed < len(ends):
                    columns["retrieval/loss"] = np.full(20, ends[seed])
                write_run(tmp_path / folder, num_steps=20, seed=seed, scale="mini", state=state,
                          columns=columns if value else {}, tables={}, **keys | arm)  # fmt: skip
        return tmp_path / folder

    return make


@pytest.mark.parametrize("claim", OF_ACCURACY, ids=str)
def test_claims_about_accuracy_are_decided_by_their_runs(accuracies, claim):
    keys, compared, (holding, failing) = OF_ACCURACY[claim]
    keys = {"experiment": "stability"} | keys
    for verdict, values in ((HELD, holding), (FAILED, failing)):
        assert one(accuracies(compared, values, verdict, **keys), *claim).verdict == verdict
    few = accuracies(compared, [values[:1] for values in holding], "one seed", **keys)
    assert one(few, *claim)[1:] == (UNDECIDED, "one seed")


def test_a_diverged_run_counts_as_an_accuracy_of_0(accuracies):
    compared = arms("recipe", "high", "fp8_tensorwise")
    root = accuracies(compared, [BF16, [None, None]], **BY_SIZE, model="mini_l")
    finding = one(root, "C3", "loses accuracy")
    assert finding.verdict == HELD and "mini_l +57.55" in finding.ours


def test_only_runs_of_equal_settings_are_compared(accuracies):
    compared = [*arms("recipe", "high", "switchback"), dict(recipe="switchback", batch_size=64)]
    root = accuracies(compared, [[50.0], [49.0], [90.0]], **BY_SIZE | H14)
    assert "-1.00, one seed" in one(root, "C1", "int8 matches bf16's accuracy").ours


def test_without_runs_each_claim_names_the_command_that_makes_them(tmp_path):
    evidence = Evidence([tmp_path])
    for claim in claims.CLAIMS:
        finding = claims.judge(claim, evidence)
        assert finding.verdict == NO_RUNS and finding.ours == ""
        commands = re.findall(r"python -m experiments\.(\w+)(?: -m (\S+))?", finding.why)
        assert commands, finding.why
        for entry, study in commands:
            assert list((ROOT / "experiments").glob(f"{entry}*"))
            assert (ROOT / "conf" / f"{study.replace('=', '/')}.yaml").exists() or not study


AT_256 = "vit_h14 batch 256"
TIMES = {"open_clip": 100, "high": 92, "autograd_high": 90, "switchback": 80, "llm_int8": 101}


def write_times(file, shapes, **keys):
    write_rows(file, (
        {"shape": shape, "case": case, "ms": ms, "device": "a GPU", **keys}
        for shape, times in shapes.items()
        for case, ms in times.items()
    ))  # fmt: skip


def test_speed_is_judged_by_the_newest_file_that_has_case_and_baseline(tmp_path):
    folder = tmp_path / "bench" / "model"
    write_times(folder / "1.jsonl", {AT_256: TIMES})
    write_times(folder / "2.jsonl", {AT_256: {"open_clip": 50, "high": 50, "switchback": 40}})
    assert "20.0% of the time" in one(tmp_path, "C7", "nn.Linear").ours
    assert "11.1% of the time" in one(tmp_path, "C7", "autograd function").ours
    assert one(tmp_path, "C7", "whole training steps").verdict == NO_RUNS
    folder.rename(tmp_path / "bench" / "step")
    assert "20.0% of the time" in one(tmp_path, "C7", "whole training steps").ours


@pytest.mark.parametrize(
    ("windows", "verdict"),
    [([84, 85, 86], REPRODUCED), ([84, 85, 88], UNDECIDED), ([88, 89, 90], NOT)],
)
def test_speed_is_undecided_if_windows_lie_on_both_sides_of_13_percent(tmp_path, windows, verdict):
    row = {"shape": AT_256, "device": "a GPU"}
    times = {"high": [100, 100, 100], "open_clip": [120] * 3, "switchback": windows}
    rows = [row | {"case": c, "ms": sorted(ms)[1], "windows_ms": ms} for c, ms in times.items()]
    rows = [rows[0] | {"windows_ms": [1, 1, 1]}, *rows, row | {"case": "llm_int8", "ms": None}]
    write_rows(tmp_path / "bench/step/1.jsonl", rows)
    finding = one(tmp_path, "C7", "whole training steps")
    assert finding.verdict == verdict
    assert f"over its windows {100 - windows[2]}.0% to {100 - windows[0]}.0%" in finding.ours


@pytest.fixture(name="grown")
def grown_fixture(make_run, tmp_path):
    """A function: a run whose blocks have these features at steps 1 and 20."""

    def make(kind, seed, features):
        blocks = [paper.BLOCK.format(k) for k in range(len(features[0]))]
        frame = pd.DataFrame(features, [1, 20], blocks)
        make_run(experiment="feature_magnitude", scale="mini", seed=seed, num_steps=20,
                 intervention=InterventionConfig(kind),
                 tables={"blocks": {"feature_mean": frame}})  # fmt: skip
        return tmp_path / "runs"

    return make


@pytest.mark.parametrize(
    ("first", "last", "verdict"),
    [
        (1.0, 1.1, HELD),
        (0.1, 0.5, UNDECIDED),  # a larger ratio of smaller numbers
        (9.0, 12.5, UNDECIDED),  # a smaller ratio, a larger difference
        (1.0, 9.0, FAILED),
    ],
)
def test_growth_with_depth_is_judged_by_ratio_and_difference(grown, first, last, verdict):
    for seed in (0, 1):
        for kind, ends in (("none", (1.0, 3.0)), ("zero_init", (first, last))):
            root = grown(kind, seed, [ends, ends])
    assert one(root, "C5", "the growth with depth").verdict == verdict


@pytest.mark.parametrize(("power", "verdict"), [(1.0, NO_VERDICT), (0.5, NOT)])
def test_noise_of_independent_numbers_is_a_check_without_a_verdict(tmp_path, power, verdict):
    row = {"ms": None, "case": "int8", "device": ""}
    sizes = (64, 1024, 16384)
    rows = [row | {"inner_dim": k, "measured": k**power, "predicted": k} for k in sizes]
    write_rows(tmp_path / "bench/quantization_variance/1.jsonl", rows)
    assert one(tmp_path, "C6", "quantization noise").verdict == verdict


@pytest.mark.slow  # reads all records; part of .ci/run
def test_the_committed_page_of_claims_is_what_the_command_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert make.main(["claims", "--runs", "experiments/results", "--out", str(tmp_path)]) == 0
    written = (tmp_path / "claims.md").read_text()
    assert (ROOT / "experiments" / "results" / "claims.md").read_text() == written
    numbers = re.findall(r"^\| (C\d+) ", written, re.M)
    assert list(dict.fromkeys(numbers)) == [f"C{i}" for i in range(1, 13)]  # of the short table


@pytest.mark.parametrize(
    ("verdicts", "cell"),
    [
        ([("a", HELD), ("b", HELD)], "holds"),
        ([("a", FAILED), ("a", HELD)], "fails"),
        ([("a", HELD), ("a", UNDECIDED), ("b", HELD)], "holds: b; open: a"),
        ([("b", UNDECIDED), ("a", FAILED), ("c", HELD)], "holds: c; fails: a; open: b"),
        ([("a", UNDECIDED)], "open: a"),
        ([("a", NO_RUNS), ("b", NO_RUNS)], "open: no runs"),
        ([("", HELD)], "-"),
    ],
)
def test_verdicts_in_short_are_the_worst_of_their_rows(verdicts, cell):
    rows = [
        (claims.Claim("C9", "", "", "", None, short=short), Finding("", verdict))
        for short, verdict in verdicts
    ]
    [row] = [line for line in claims.summary(rows).splitlines() if line.startswith("| C9 ")]
    assert row.endswith(f" | open: needs all 30 runs of ViT-L/14 | {cell} |")
