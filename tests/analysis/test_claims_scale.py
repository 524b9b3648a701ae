"""Claims of accuracy at paper scale are out of reach of small runs, and margins say whose."""

import numpy as np
import pytest

from analysis import claims
from analysis.claims import OURS, PAPERS
from analysis.evidence import NOT, OUT, REPRODUCED, Evidence

STEPS = 20
BF16, SWITCHBACK, LLM_INT8 = (57.6, 57.5, 57.7), (57.61, 57.52, 57.68), (51.5, 51.6, 51.4)


def verdict(root, number, words):
    [claim] = [c for c in claims.CLAIMS if c.number == number and words in c.text]
    return claims.judge(claim, Evidence([root]))


@pytest.fixture(name="make_model")
def make_model_fixture(make_run, tmp_path):
    """A function: runs whose model and numbers are the paper's, at a scale."""

    def accuracy(experiment, scale, model, values, **keys):
        for seed, value in enumerate(values):
            columns = {"zero_shot/top1": np.full(STEPS, value / 100)}
            make_run(experiment=experiment, scale=scale, model=model, num_steps=STEPS, seed=seed,
                     columns=columns, **keys)  # fmt: skip

    def make(scale):
        for model, loss in (("vit_b32", 0.0), ("vit_h14", 4.0)):
            at = ("accuracy_vs_size", scale, model)
            accuracy(*at, BF16)
            accuracy(*at, [value - loss for value in BF16], recipe="llm_int8")
        accuracy(*at, SWITCHBACK, recipe="switchback")
        accuracy(*at, SWITCHBACK, recipe="fp8_switchback")
        for seed in range(2):
            make_run(experiment="accuracy_vs_size", scale=scale, model="vit_h14", seed=seed,
                     num_steps=STEPS, recipe="fp8_tensorwise", state="diverged")  # fmt: skip
        at = ("update_clipping", scale, "vit_h14")
        accuracy(*at, BF16, optimizer="stable_adamw")
        accuracy(*at, [value - 1 for value in BF16], optimizer="adamw_clip")
        accuracy(*at, BF16, beta2=0.9)
        accuracy(*at, [value - 1 for value in BF16], beta2=0.5)
        return tmp_path / "runs"

    return make


PAPER_SCALE = [
    ("C1", "matches"),
    ("C1", "beats"),
    ("C2", "more at larger"),
    ("C3", "diverges"),
    ("C3", "matches"),
    ("C11", "beats gradient"),
    ("C11", "too low costs"),
]


@pytest.mark.parametrize(("scale", "expected"), [("paper", {REPRODUCED}), ("mini", {OUT})])
def test_runs_of_the_papers_model_decide_only_at_paper_scale(make_model, scale, expected):
    root = make_model(scale)
    found = {claim: verdict(root, *claim) for claim in PAPER_SCALE}
    assert {f.verdict for f in found.values()} == expected, found
    assert all(("needs: " in f.why) == (scale == "mini") for f in found.values())


def test_a_result_against_the_paper_is_no_verdict_at_a_small_scale_either(make_run, tmp_path):
    for recipe, value in (("high", 0.57), ("switchback", 0.5), ("fp8_tensorwise", 0.57)):
        for seed in range(3):
            columns = {"zero_shot/top1": np.full(STEPS, value + seed / 1000)}
            make_run(experiment="accuracy_vs_size", scale="mini", model="vit_h14", seed=seed,
                     num_steps=STEPS, recipe=recipe, columns=columns)  # fmt: skip
    for claim in (("C1", "matches"), ("C3", "diverges")):
        assert verdict(tmp_path / "runs", *claim).verdict == OUT != NOT


def test_each_row_says_whose_its_margin_is_and_only_one_is_the_papers():
    assert {claim.whose for claim in claims.CLAIMS} == {OURS, PAPERS}
    [papers] = [claim for claim in claims.CLAIMS if claim.whose == PAPERS]
    assert papers.number == "C1" and "matches" in papers.text
    rows = [(claim, claims.Finding("", OUT)) for claim in claims.CLAIMS]
    table = claims.markdown(rows, "")
    for line in [line for line in table.splitlines() if line.startswith("| C")]:
        assert line.split(" | ")[4].startswith((f"{OURS}: ", f"{PAPERS}: ")), line
    assert table.count(f"| {PAPERS}: ") == 1
