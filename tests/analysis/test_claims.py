"""Tests the claims: runs decide each verdict, and no verdict goes beyond its runs."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import claims, make
from analysis.claims import OURS, PAPERS
from analysis.evidence import (
    NO_RUNS,
    NOT,
    OUT,
    REPRODUCED,
    UNDECIDED,
    Evidence,
    Sample,
    equal,
    share_interval,
)
from lowprec.config.schema import DiagnosticsConfig, InterventionConfig, ScalerConfig, SpikeConfig

ROOT = Path(__file__).parents[2]
STEPS = 400
SPIKES = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=20, window=20))
HELD, FAILED = f"{REPRODUCED} at mini scale", f"{NOT} at mini scale"


def one(root, number, words):
    """The finding on the claim with a number whose text contains the words."""
    [claim] = [c for c in claims.CLAIMS if c.number == number and words in c.text]
    return claims.judge(claim, Evidence([root]))


def findings(root):
    evidence = Evidence([root])
    return {(c.number, c.text): claims.judge(c, evidence) for c in claims.CLAIMS}


@pytest.fixture(name="accuracies")
def accuracies_fixture(make_run, tmp_path):
    """A function: runs of accuracy_vs_size whose accuracy is given by recipe, a seed each value."""

    def make(scale="paper", model="vit_h14", **by_recipe):
        for recipe, values in by_recipe.items():
            for seed, value in enumerate(values):
                state = "diverged" if value is None else "finished"
                columns = {} if value is None else {"zero_shot/top1": np.full(20, value / 100)}
                make_run(experiment="accuracy_vs_size", scale=scale, model=model, recipe=recipe,
                         seed=seed, num_steps=20, columns=columns, state=state)  # fmt: skip
        return tmp_path / "runs"

    return make


def test_interval_of_a_mean_is_students():
    # scipy.stats.t.interval(0.95, 3, 2.5, 1.2909944487358056 / 2)
    finding = Sample.of(pd.Series([1.0, 2.0, 3.0, 4.0]))
    assert (finding.mean, finding.num) == (2.5, 4)
    np.testing.assert_allclose((finding.low, finding.high), (0.4457, 4.5543), atol=2e-3)
    assert np.isnan(Sample.of(pd.Series([1.0])).low)


def test_interval_of_a_share_is_wilsons():
    # statsmodels.stats.proportion.proportion_confint(28, 30, method="wilson")
    np.testing.assert_allclose(share_interval(28, 30), (0.7868, 0.9815), atol=1e-3)
    assert share_interval(3, 3)[1] == 1.0


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.05, 0.08, REPRODUCED), (-0.05, 0.2, UNDECIDED), (0.2, 0.3, NOT), (-0.4, -0.2, NOT)],
)
def test_equivalence_needs_the_whole_interval_within_the_margin(low, high, verdict):
    assert equal("", Sample((low + high) / 2, low, high, 3), 0.1).verdict == verdict


def test_every_claim_of_the_paper_is_judged():
    assert list(dict.fromkeys(claim.number for claim in claims.CLAIMS)) == [
        f"C{i}" for i in range(1, 14)
    ]


def test_accuracies_at_paper_scale_are_decided_by_their_intervals(accuracies):
    root = accuracies(
        high=[57.6, 57.5, 57.7, 57.6],
        switchback=[57.61, 57.52, 57.68, 57.6],
        llm_int8=[51.5, 51.6, 51.4, 51.5],
        fp8_tensorwise=[None, None],
    )
    assert one(root, "C1", "matches").verdict == REPRODUCED
    assert "+0.00" in one(root, "C1", "matches").ours and "4 seeds" in one(root, "C1", "beats").ours
    assert one(root, "C1", "beats").verdict == REPRODUCED
    assert one(root, "C3", "diverges").verdict == REPRODUCED


def test_divergence_of_one_run_of_the_papers_model_decides_nothing(accuracies):
    finding = one(accuracies(high=[57.6, 57.5], fp8_tensorwise=[None]), "C3", "diverges")
    assert (finding.verdict, finding.why) == (UNDECIDED, "one seed")
    assert "1 of 1 runs diverged" in finding.ours


def test_a_recipe_that_is_worse_is_not_reproduced(accuracies):
    root = accuracies(high=[57.6, 57.5, 57.7], switchback=[55.6, 55.5, 55.7], llm_int8=[57.0] * 3)
    assert one(root, "C1", "matches").verdict == NOT
    assert "-2.00" in one(root, "C1", "matches").ours
    assert one(root, "C1", "beats").verdict == NOT


def test_only_runs_of_equal_settings_are_compared(accuracies, make_run):
    root = accuracies(high=[50.0], switchback=[49.0])
    for steps, value in ((40, 0.9), (30, 0.8)):  # other lengths, without a partner
        make_run(experiment="accuracy_vs_size", scale="paper", model="vit_h14",
                 recipe="switchback", num_steps=steps,
                 columns={"zero_shot/top1": np.full(steps, value)})  # fmt: skip
    assert "-1.00, one seed" in one(root, "C1", "matches").ours


def test_without_runs_each_claim_names_its_commands_with_the_keys_they_need(tmp_path):
    for finding in findings(tmp_path).values():
        assert finding.verdict == NO_RUNS and finding.ours == ""
        commands = re.findall(
            r"python -m experiments\.([\w.]+)(?: -m)?((?: \S+=\S+)*)", finding.why
        )
        assert commands
        for entry, keys in commands:
            assert (ROOT / "experiments" / f"{entry.replace('.', '/')}.py").exists()
            if entry == "train":
                name, *more = keys.split()
                file = ROOT / "conf" / name.replace("=", "/")
                is_mini = name.endswith("_mini")
                assert Path(f"{file}.yaml").exists()
                assert more == ([] if is_mini else ["data.train=...", "data.val=..."])
                assert is_mini or f"{name}_mini" in finding.why


def test_speed_is_judged_by_the_least_shape_and_no_speed_up_by_the_largest(tmp_path):
    folder = tmp_path / "bench" / "model"
    folder.mkdir(parents=True)
    rows = [
        {"shape": shape, "case": case, "ms": ms, "device": "a GPU"}
        for shape, times in (
            ("vit_h14 batch 256, checkpointing", (100, 90, 80, 101)),
            ("vit_h14 batch 256", (100, 98, 95, 90)),
        )
        for case, ms in zip(
            ("open_clip", "autograd_high", "switchback", "llm_int8"), times, strict=True
        )
    ]
    (folder / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    standard = one(tmp_path, "C7", "standard model")
    assert "20.0%" in standard.ours and "5.0%" in standard.ours and standard.verdict == NOT
    assert one(tmp_path, "C8", "no speed-up").verdict == NOT


def test_command_writes_a_table_with_a_row_per_claim(make_run, tmp_path, capsys):
    make_run(experiment="update_clipping", scale="mini")
    root, out = tmp_path / "runs", tmp_path / "out"
    arguments = ["claims", "--runs", str(root), str(tmp_path), "--out", str(out)]
    assert make.main(arguments) == 0
    table = (out / "claims.md").read_text()
    assert table.count("\n| C") == len(claims.CLAIMS)
    assert capsys.readouterr().out.count("\nC") == len(claims.CLAIMS) - 1
    assert "28 of 30" in table and "experiment=accuracy_vs_size_mini" in table


BF16, SWITCHBACK, LLM_INT8 = (57.6, 57.5, 57.7), (57.61, 57.52, 57.68), (51.5, 51.6, 51.4)


@pytest.fixture(name="make_model")
def make_model_fixture(make_run, tmp_path):
    """A function: runs whose model and numbers are the paper's, at a scale."""

    def accuracy(experiment, scale, model, values, **keys):
        for seed, value in enumerate(values):
            columns = {"zero_shot/top1": np.full(20, value / 100)}
            make_run(experiment=experiment, scale=scale, model=model, num_steps=20, seed=seed,
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
                     num_steps=20, recipe="fp8_tensorwise", state="diverged")  # fmt: skip
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
    finding = {claim: one(root, *claim) for claim in PAPER_SCALE}
    assert {f.verdict for f in finding.values()} == expected, finding
    assert all(("needs: " in f.why) == (scale == "mini") for f in finding.values())


def test_each_row_names_the_origin_of_its_margin():
    assert {claim.whose for claim in claims.CLAIMS} == {OURS, PAPERS}
    [papers] = [claim for claim in claims.CLAIMS if claim.whose == PAPERS]
    assert papers.number == "C1" and "matches" in papers.text
    rows = [(claim, claims.Finding("", OUT)) for claim in claims.CLAIMS]
    table = claims.markdown(rows, "")
    for line in [line for line in table.splitlines() if line.startswith("| C")]:
        assert line.split(" | ")[4].startswith((f"{OURS}: ", f"{PAPERS}: ")), line
    assert table.count(f"| {PAPERS}: ") == 1


@pytest.fixture(name="scaled")
def scaled_fixture(make_run, tmp_path):
    """A function: runs with loss spikes, whose scale halves and whose tensors are skipped at."""

    def make(kind, falls=(), skips=(), skipped=1, seeds=(0, 1), state="finished"):
        steps = np.arange(STEPS)
        losses = 2 + 0.01 * np.sin(steps)
        for step in (60, 120, 180):
            losses[step : step + 4] += 2
        scale = 65536.0 * 0.5 ** (steps[:, None] >= np.array([*falls, STEPS])).sum(axis=1)
        columns = {"loss_scale": scale, "skipped_tensors": skipped * np.isin(steps, skips)}
        for seed in seeds:
            make_run(experiment="loss_scaler", scale="mini", scaler=ScalerConfig(kind), seed=seed,
                     autocast="fp16", num_steps=STEPS, losses=losses, columns=columns,
                     diagnostics=SPIKES, state=state)  # fmt: skip
        return tmp_path / "runs"

    return make


@pytest.mark.parametrize(
    ("falls", "seeds", "verdict"),
    [
        ((62, 121, 181), (0, 1), HELD),
        ((62, 121, 181), (0,), UNDECIDED),
        ((30, 90, 150, 210, 230, 250, 270, 290, 310, 330, 350), (0, 1), FAILED),  # not at spikes
        ((), (0, 1), FAILED),
        ((62, 150), (0, 1), UNDECIDED),
    ],
)
def test_a_dynamic_scale_is_judged_by_its_falls_at_spikes_beside_chance(
    scaled, falls, seeds, verdict
):
    finding = one(scaled("dynamic", falls, seeds=seeds), "C12", "dynamic")
    assert finding.verdict == verdict, finding
    if len(falls) > 2 and 62 in falls:
        assert f"{3 * len(seeds)} of {3 * len(seeds)} falls" in finding.ours


def test_falls_in_one_stretch_count_once(scaled):
    finding = one(scaled("dynamic", (61, 62, 63, 64, 121)), "C12", "dynamic")
    assert "4 of 4 falls of the scale are at one of 6 loss spikes" in finding.ours
    assert "by chance 16.6%" in finding.ours  # 21 steps at each of 3 spikes, of 380


@pytest.mark.parametrize(
    ("skips", "skipped", "seeds", "state", "verdict"),
    [
        ((61, 122), 1, (0, 1), "finished", HELD),
        ((61, 122), 1, (0,), "finished", UNDECIDED),
        ((61, 122), 3, (0, 1), "finished", UNDECIDED),  # all three tensors there are
        ((), 1, (0, 1), "finished", UNDECIDED),
        ((61, 122), 1, (0, 1), "diverged", FAILED),
    ],
)
def test_a_fixed_scale_is_judged_by_runs_that_go_on_past_skips_of_single_tensors(
    scaled, skips, skipped, seeds, state, verdict
):
    root = scaled("fixed", (), skips, skipped, seeds, state)
    finding = one(root, "C12", "fixed")
    assert finding.verdict == verdict, finding


MANY = tuple(range(60, 390, 32))


@pytest.fixture(name="spiking")
def spiking_fixture(make_run, tmp_path):
    """A function: runs of update_clipping, spikes planted 3 steps after spikes of RMS_t."""

    def make(optimizer, beta2, at=(), seeds=(0, 1), rms_before=3, experiment="update_clipping",
             **keys):  # fmt: skip
        steps = np.arange(STEPS)
        losses = 2 + 0.01 * np.sin(steps)
        rms = 1 + 0.1 * np.cos(steps)
        for step in at:
            losses[step : step + 4] += 2
            rms[step - rms_before] = 5
        frame = pd.DataFrame({"visual.conv1.weight": rms}, steps + 1)
        keys = {"scale": "mini", "model": "mini_l", **keys}
        for seed in seeds:
            make_run(experiment=experiment, optimizer=optimizer, beta2=beta2, seed=seed,
                     num_steps=STEPS, losses=losses, diagnostics=SPIKES,
                     tables={"tensors": {"rms": frame}}, **keys)  # fmt: skip
        return tmp_path / "runs"

    return make


OF_BETA2 = [("C9", "beta2"), ("C10", "follows"), ("C11", "removes the"), ("C11", "lower beta2")]


@pytest.mark.parametrize(("seeds", "verdict"), [((0,), UNDECIDED), ((0, 1), HELD)])
def test_spikes_decide_with_two_seeds_and_are_shown_with_one(spiking, seeds, verdict):
    for beta2, at in ((0.9, ()), (0.99, (80,)), (0.999, MANY)):
        root = spiking("adamw", beta2, at, seeds)
    spiking("stable_adamw", 0.999, (), seeds)
    spiking("stable_adamw", 0.99, (), seeds)
    finding = {claim: one(root, *claim) for claim in OF_BETA2}
    assert {f.verdict for f in finding.values()} == {verdict}, finding
    assert {f.why for f in finding.values()} == {"" if len(seeds) > 1 else "one seed"}
    assert f"beta2 0.9: 0; beta2 0.99: 1; beta2 0.999: {len(MANY)}" in finding["C9", "beta2"].ours
    num = len(seeds) * (len(MANY) + 1)
    assert f"{num} of {num} follow" in finding["C10", "follows"].ours


def test_spikes_that_stay_or_do_not_follow_are_not_reproduced(spiking):
    spiking("adamw", 0.9, at=(60, 100, 150), rms_before=-20)
    root = spiking("adamw", 0.999, at=(80, 130), rms_before=-20)
    spiking("stable_adamw", 0.999, at=(60, 100, 150))
    assert one(root, "C9", "beta2").verdict == FAILED
    assert "0 of 10 follow" in one(root, "C10", "follows").ours
    assert one(root, "C10", "follows").verdict == FAILED
    assert one(root, "C11", "removes the").verdict == FAILED
    assert one(root, "C11", "lower beta2").verdict == FAILED


def test_a_few_spikes_that_all_follow_leave_the_share_open(spiking):
    finding = one(spiking("adamw", 0.999, at=(60,)), "C10", "follows")
    assert "2 of 2 follow (100% [34%" in finding.ours
    assert finding.verdict == UNDECIDED and "50%" in finding.why
    finding = one(spiking("adamw", 0.99, at=(80,)), "C10", "follows")
    assert "4 of 4 follow (100% [51%" in finding.ours and finding.verdict == HELD


def test_optimizers_are_compared_in_pairs_of_equal_settings(spiking):
    spiking("adamw", 0.999, at=(60,))
    spiking("adamw", 0.999, at=MANY, lr=4e-3)  # without a partner, as the two that follow
    spiking("stable_adamw", 0.99, at=(60, 100))
    spiking("adamw", 0.999, at=MANY, seeds=(2,))
    finding = one(spiking("stable_adamw", 0.999), "C11", "removes the")
    assert "StableAdamW: 0; AdamW: 1; last minus first +1.00" in finding.ours
    assert finding.verdict == HELD


def test_a_run_that_two_studies_share_counts_once(spiking):
    spiking("adamw", 0.9)
    root = spiking("adamw", 0.999, at=(60,), seeds=(0,))
    spiking("adamw", 0.999, at=(60,), seeds=(0,), experiment="rms_and_loss")
    assert "1 of 1 follow" in one(root, "C10", "follows").ours


def test_a_beta2_too_low_is_the_papers_pair_and_not_the_best_of_our_runs(make_run, tmp_path):
    for beta2, top1 in ((0.5, 0.57), (0.8, 0.60), (0.9, 0.57), (0.98, 0.65)):
        for seed in range(3):
            columns = {"zero_shot/top1": np.full(20, top1 + seed * (beta2 - 0.5) / 1000)}
            make_run(experiment="update_clipping", scale="paper", model="vit_h14", beta2=beta2,
                     seed=seed, num_steps=20, columns=columns)  # fmt: skip
    finding = one(tmp_path / "runs", "C11", "too low")
    assert "ViT-H/14 +0.04 [" in finding.ours
    assert finding.verdict == UNDECIDED


@pytest.fixture(name="fixes")
def fixes_fixture(make_run, tmp_path):
    """A function: runs of fp8_fixes by their last losses, a seed each; None: diverged."""

    def make(**losses):
        of = {
            "bf16": {},
            "plain": {"recipe": "fp8_tensorwise"},
            "zero_init": {
                "recipe": "fp8_tensorwise", "intervention": InterventionConfig("zero_init")
            },
        }  # fmt: skip
        for name, values in losses.items():
            for seed, loss in enumerate(values):
                state = "diverged" if loss is None else "finished"
                flat = np.full(100, 2.0 if loss is None else loss)
                make_run(experiment="fp8_fixes", scale="mini", num_steps=100, seed=seed,
                         losses=flat, state=state, **of[name])  # fmt: skip
        return tmp_path / "runs"

    return make


NONE = [None, None]


@pytest.mark.parametrize(
    ("plain", "changed", "verdict"),
    [
        (NONE, [2.0, 2.01], HELD),
        (NONE, NONE, FAILED),
        (NONE, [3.0, 3.01], FAILED),
        (NONE, [2.0, 2.15], UNDECIDED),  # within 5% on average, not each seed
        (NONE, [2.0, None], UNDECIDED),
        ([None], [2.0], UNDECIDED),
        ([2.0, 2.01], [2.0, 2.01], OUT),
    ],
)
def test_a_fix_is_judged_by_two_seeds_and_only_where_fp8_fails_without(
    fixes, plain, changed, verdict
):
    root = fixes(bf16=[2.0, 2.01], plain=plain, zero_init=changed)
    finding = one(root, "C4", "zero-init")
    assert finding.verdict == verdict
    assert finding.why == "one seed" or len(plain) > 1
    assert one(root, "C4", "KQ").verdict == NO_RUNS


@pytest.mark.parametrize(("seeds", "verdict"), [(1, UNDECIDED), (2, HELD)])
def test_features_that_grow_in_every_run_need_two_seeds(make_run, tmp_path, seeds, verdict):
    for seed in range(seeds):
        for kind, slope in (("none", 1.0), ("zero_init", 0.1)):
            blocks = [f"visual.transformer.resblocks.{k}" for k in range(3)]
            values = np.outer([1.0, 2.0], 1 + slope * np.arange(3))
            frame = pd.DataFrame(values, [1, 20], blocks)
            make_run(experiment="feature_magnitude", scale="mini", seed=seed, num_steps=20,
                     intervention=InterventionConfig(kind),
                     tables={"blocks": {"feature_mean": frame}})  # fmt: skip
    for words in ("grows with depth", "stops that"):
        finding = one(tmp_path / "runs", "C5", words)
        assert finding.verdict == verdict and "3 [3 to 3] times" in finding.ours
        assert finding.why == ("one seed" if seeds == 1 else "")


def test_the_committed_page_of_claims_is_what_the_command_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert make.main(["claims", "--runs", "experiments/results", "--out", str(tmp_path)]) == 0
    written = (tmp_path / "claims.md").read_text()
    assert (ROOT / "experiments" / "results" / "claims.md").read_text() == written
