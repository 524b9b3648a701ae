"""The claims: every number is computed from runs, and no verdict goes beyond them."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import claims, make, paper
from analysis.evidence import (
    NO_RUNS,
    NOT,
    OUT,
    REPRODUCED,
    UNDECIDED,
    Evidence,
    Sample,
    equal,
    larger,
    share_interval,
)
from lowprec.config.compose import compose_command

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "experiments" / "results" / "bench"


def findings(root):
    evidence = Evidence([root])
    return {(c.number, c.text): claims.judge(c, evidence) for c in claims.CLAIMS}


def one(root, number, words):
    [claim] = [c for c in claims.CLAIMS if c.number == number and words in c.text]
    return claims.judge(claim, Evidence([root]))


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


def test_the_interval_is_students():
    # scipy.stats.t.interval(0.95, 3, 2.5, 1.2909944487358056 / 2)
    found = Sample.of(pd.Series([1.0, 2.0, 3.0, 4.0]))
    assert (found.mean, found.num) == (2.5, 4)
    np.testing.assert_allclose((found.low, found.high), (0.4457, 4.5543), atol=2e-3)
    assert np.isnan(Sample.of(pd.Series([1.0])).low)


def test_the_interval_of_a_share_is_wilsons():
    # statsmodels.stats.proportion.proportion_confint(28, 30, method="wilson")
    np.testing.assert_allclose(share_interval(28, 30), (0.7868, 0.9815), atol=1e-3)
    assert share_interval(3, 3)[1] == 1.0


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.05, 0.08, REPRODUCED), (-0.05, 0.2, UNDECIDED), (0.2, 0.3, NOT), (-0.4, -0.2, NOT)],
)
def test_equivalence_needs_the_whole_interval_within_the_margin(low, high, verdict):
    assert equal("", Sample((low + high) / 2, low, high, 3), 0.1).verdict == verdict


def test_one_seed_decides_nothing_that_needs_an_interval():
    alone = Sample(0.0, np.nan, np.nan, 1)
    assert equal("", alone, 0.1).verdict == larger("", alone).verdict == UNDECIDED


def test_all_claims_of_the_paper_are_judged():
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
    found = one(accuracies(high=[57.6, 57.5], fp8_tensorwise=[None]), "C3", "diverges")
    assert (found.verdict, found.why) == (UNDECIDED, "one seed")
    assert "1 of 1 runs diverged" in found.ours


def test_a_recipe_that_is_worse_is_not_reproduced(accuracies):
    root = accuracies(high=[57.6, 57.5, 57.7], switchback=[55.6, 55.5, 55.7], llm_int8=[57.0] * 3)
    assert one(root, "C1", "matches").verdict == NOT
    assert "-2.00" in one(root, "C1", "matches").ours
    assert one(root, "C1", "beats").verdict == NOT


def test_small_runs_never_decide_claims_of_accuracy(accuracies):
    root = accuracies("mini", "mini_l", high=[20.0, 20.1, 20.0], switchback=[20.0, 20.1, 20.0],
                      llm_int8=[15.0, 15.1, 15.0], fp8_tensorwise=[None] * 3,
                      fp8_switchback=[20.0, 20.1, 20.0])  # fmt: skip
    found = {text: f for (n, text), f in findings(root).items() if n in ("C1", "C2", "C3")}
    assert {f.verdict for f in found.values()} == {OUT}
    assert all("mini L" in f.ours and "paper scale" in f.why for f in found.values())


def test_only_runs_of_equal_settings_are_compared(accuracies, make_run):
    root = accuracies(high=[50.0], switchback=[49.0])
    for steps, value in ((40, 0.9), (30, 0.8)):  # other lengths, without a partner
        make_run(experiment="accuracy_vs_size", scale="paper", model="vit_h14",
                 recipe="switchback", num_steps=steps,
                 columns={"zero_shot/top1": np.full(steps, value)})  # fmt: skip
    assert "-1.00, one seed" in one(root, "C1", "matches").ours


def test_without_runs_each_claim_names_its_commands_with_the_keys_they_need(tmp_path):
    for found in findings(tmp_path).values():
        assert found.verdict == NO_RUNS and found.ours == ""
        commands = re.findall(r"python -m experiments\.([\w.]+)(?: -m)?((?: \S+=\S+)*)", found.why)
        assert commands
        for entry, keys in commands:
            assert (ROOT / "experiments" / f"{entry.replace('.', '/')}.py").exists()
            if entry == "train":
                name, *more = keys.split()
                file = ROOT / "conf" / name.replace("=", "/")
                is_mini = name.endswith("_mini")
                assert Path(f"{file}.yaml").exists()
                assert more == ([] if is_mini else ["data.train=...", "data.val=..."])
                assert is_mini or f"{name}_mini" in found.why


def test_without_lines_the_command_of_a_model_measures_the_papers_case(tmp_path):
    wanted = "ViT-H/14"
    found = [f for (n, text), f in findings(tmp_path).items() if n in "C7C8" and wanted in text]
    assert len(found) == 2
    for finding in found:
        keys = finding.why.partition("experiments.benchmarks.model ")[2].split()
        config = compose_command(keys)[0].config
        assert config.model.name == "vit_h14" and config.checkpointing and config.compile
        assert config.batch_size == 256 and config.model.patch_dropout == 0.5


@pytest.mark.skipif(not BENCH.exists(), reason="no recorded lines")
def test_speed_is_that_of_the_recorded_lines():
    found = one(BENCH.parent, "C7", "standard model")
    numbers = [float(n) for n in re.findall(r"([-\d.]+)%", found.ours)]
    assert numbers and all(-100 < n < 100 for n in numbers)
    assert (min(numbers) >= paper.END_TO_END[0]) == (found.verdict == REPRODUCED)


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


def test_the_command_writes_a_table_with_a_row_a_claim(make_run, tmp_path, capsys):
    make_run(experiment="update_clipping", scale="mini")
    root, out = tmp_path / "runs", tmp_path / "out"
    arguments = ["claims", "--runs", str(root), str(tmp_path), "--out", str(out)]
    assert make.main(arguments) == 0
    printed = capsys.readouterr().out
    table = (out / "claims.md").read_text()
    assert table.count("\n| C") == len(claims.CLAIMS)
    assert printed.count("\nC") == len(claims.CLAIMS) - 1
    assert "28 of 30" in table and "no loss spike in 1 run" in table and "From 1 runs" in table
    train = "python -m experiments.train -m experiment=accuracy_vs_size"
    for code in (f"{train} data.train=... data.val=...", f"{train}_mini"):
        assert f"`{code}`" in table


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path):
    with pytest.raises(SystemExit, match="2"):
        make.main(["claims", "--runs", str(tmp_path / "absent"), "--out", str(tmp_path)])
