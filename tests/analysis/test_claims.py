"""The claims: every number is computed from runs, and no verdict goes beyond them."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import claims, make, paper
from analysis.evidence import Evidence, Sample, paired, sample, wilson
from analysis.verdicts import NO_RUNS, NOT, OUT, REPRODUCED, UNDECIDED, equal, larger
from lowprec.config import DiagnosticsConfig, InterventionConfig, ScalerConfig, SpikeConfig

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "experiments" / "results" / "bench"
STEPS = 200
SPIKES = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=20, window=20))


def findings(root):
    evidence = Evidence([root])
    return {(c.number, c.text): claims.judge(c, evidence) for c in claims.CLAIMS}


def one(root, number, words):
    [found] = [f for (n, text), f in findings(root).items() if n == number and words in text]
    return found


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
    found = sample(pd.Series([1.0, 2.0, 3.0, 4.0]))
    assert (found.mean, found.num) == (2.5, 4)
    np.testing.assert_allclose((found.low, found.high), (0.4457, 4.5543), atol=2e-3)
    assert np.isnan(sample(pd.Series([1.0])).low)


def test_the_interval_of_a_share_is_wilsons():
    # statsmodels.stats.proportion.proportion_confint(28, 30, method="wilson")
    np.testing.assert_allclose(wilson(28, 30), (0.7868, 0.9815), atol=1e-3)
    assert wilson(3, 3)[1] == 1.0


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
        fp8_tensorwise=[None],
    )
    assert one(root, "C1", "matches").verdict == REPRODUCED
    assert "+0.00" in one(root, "C1", "matches").ours and "4 seeds" in one(root, "C1", "beats").ours
    assert one(root, "C1", "beats").verdict == REPRODUCED
    assert one(root, "C3", "diverges").verdict == REPRODUCED


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


def test_pairs_are_made_by_seed():
    rows = [
        {"precision.label": label, "seed": seed, "model.name": "m", "accuracy": value}
        for label, values in (("a", (5.0, 7.0)), ("b", (4.0, 6.5, 9.0)))
        for seed, value in enumerate(values)
    ]
    runs = pd.DataFrame(rows).assign(**{
        key: 0 for key in ("scale", "data.digest", "data.train", "num_steps", "batch_size",
                           "optimizer.name", "optimizer.lr", "optimizer.beta2",
                           "optimizer.beta2_decay", "intervention.name")
    })  # fmt: skip
    [found] = paired(runs, "precision.label", "a", "b", "accuracy").values()
    assert (found.mean, found.num) == (0.75, 2)


@pytest.fixture(name="spiking")
def spiking_fixture(make_run, tmp_path):
    """A function: a run of update_clipping with spikes planted 3 steps after spikes of RMS_t."""

    def make(optimizer, beta2, at=(), rms_before=3, experiment="update_clipping", **keys):
        steps = np.arange(STEPS)
        losses = 2 + 0.01 * np.sin(steps)
        rms = 1 + 0.1 * np.cos(steps)
        for step in at:
            losses[step : step + 4] += 2
            rms[step - rms_before] = 5
        frame = pd.DataFrame({"visual.conv1.weight": rms}, steps + 1)
        make_run(experiment=experiment, scale="mini", model="mini_l", optimizer=optimizer,
                 beta2=beta2, num_steps=STEPS, losses=losses, diagnostics=SPIKES,
                 tables={"tensors": {"rms": frame}}, **keys)  # fmt: skip
        return tmp_path / "runs"

    return make


def test_spikes_by_beta2_are_counted_and_followed(spiking):
    spiking("adamw", 0.9)
    spiking("adamw", 0.99, at=(80,))
    root = spiking("adamw", 0.999, at=(60, 100, 150))
    spiking("stable_adamw", 0.999)
    spiking("stable_adamw", 0.99)
    grows = one(root, "C9", "beta2")
    assert "beta2 0.9: 0; beta2 0.99: 1; beta2 0.999: 3" in grows.ours
    assert grows.verdict == f"{REPRODUCED} at mini scale"
    assert "4 of 4 follow" in one(root, "C10", "follows").ours
    assert one(root, "C10", "follows").verdict == f"{REPRODUCED} at mini scale"
    assert one(root, "C11", "removes the spikes").verdict == f"{REPRODUCED} at mini scale"
    assert one(root, "C11", "lower beta2").verdict == f"{REPRODUCED} at mini scale"


def test_spikes_that_stay_or_do_not_follow_are_not_reproduced(spiking):
    spiking("adamw", 0.9, at=(60, 100, 150), rms_before=-20)
    root = spiking("adamw", 0.999, at=(80, 130), rms_before=-20)
    spiking("stable_adamw", 0.999, at=(60, 100, 150))
    assert one(root, "C9", "beta2").verdict == f"{NOT} at mini scale"
    assert "0 of 5 follow" in one(root, "C10", "follows").ours
    assert one(root, "C10", "follows").verdict == f"{NOT} at mini scale"
    assert one(root, "C11", "removes the spikes").verdict == f"{NOT} at mini scale"


def test_a_run_that_two_studies_share_counts_once(spiking):
    spiking("adamw", 0.9)
    root = spiking("adamw", 0.999, at=(60,))
    spiking("adamw", 0.999, at=(60,), experiment="rms_and_loss")
    assert "1 of 1 follow" in one(root, "C10", "follows").ours


def test_a_fix_is_judged_only_where_fp8_fails_without_it(make_run, tmp_path):
    root, zero = tmp_path / "runs", InterventionConfig("zero_init")
    keys = {"experiment": "fp8_fixes", "scale": "mini", "num_steps": 100}
    flat = np.full(100, 2.0)
    make_run(losses=flat, **keys)
    make_run(recipe="fp8_tensorwise", intervention=zero, losses=flat, **keys)
    plain = make_run(recipe="fp8_tensorwise", losses=flat, **keys)
    assert one(root, "C4", "zero-init").verdict == OUT
    (plain / "status.json").write_text('{"state": "diverged", "step": 100, "reason": ""}')
    assert one(root, "C4", "zero-init").verdict == f"{REPRODUCED} at mini scale"
    assert one(root, "C4", "KQ").verdict == NO_RUNS


def test_a_dynamic_scale_that_falls_is_told_from_a_fixed_one(make_run, tmp_path):
    steps = np.arange(STEPS)
    losses = 2 + 0.01 * np.sin(steps)
    losses[100:104] += 2
    for name, scale in (("dynamic", np.where(steps < 100, 65536.0, 32768.0)),
                        ("fixed", np.full(STEPS, 65536.0))):  # fmt: skip
        columns = {"loss_scale": scale, "skipped_tensors": (steps == 101).astype(int)}
        make_run(experiment="loss_scaler", scale="mini", scaler=ScalerConfig(name), autocast="fp16",
                 num_steps=STEPS, losses=losses, columns=columns, diagnostics=SPIKES)  # fmt: skip
    root = tmp_path / "runs"
    dynamic, fixed = one(root, "C12", "dynamic"), one(root, "C12", "fixed")
    assert "the scale falls 1 times; in 1 of 200 steps" in dynamic.ours
    assert "the scale falls 0 times" in fixed.ours
    assert dynamic.verdict == fixed.verdict == f"{REPRODUCED} at mini scale"


def test_without_runs_each_claim_names_a_command_that_exists(tmp_path):
    for found in findings(tmp_path).values():
        assert found.verdict == NO_RUNS and found.ours == ""
        study = re.search(r"-m experiment=(\w+)", found.why)
        if study:
            assert (ROOT / "conf" / "experiment" / f"{study[1]}.yaml").exists()
        else:
            module = re.search(r"python -m experiments\.(\w+)", found.why)[1]
            assert (ROOT / "experiments" / f"{module}.py").exists()


@pytest.mark.skipif(not BENCH.exists(), reason="no recorded lines")
def test_speed_is_that_of_the_recorded_lines():
    found = {text: f for (n, text), f in findings(BENCH.parent).items() if n == "C7"}
    rows = [f for text, f in found.items() if "standard model" in text]
    numbers = [float(n) for n in re.findall(r"([-\d.]+)%", rows[0].ours)]
    assert numbers and all(-100 < n < 100 for n in numbers)
    assert (max(numbers) >= paper.END_TO_END[0]) == (rows[0].verdict == REPRODUCED)


def test_the_command_writes_a_table_and_a_page_that_loads_nothing(spiking, tmp_path, capsys):
    root, out = spiking("adamw", 0.999, at=(60,)), tmp_path / "out"
    arguments = ["claims", "--runs", str(root), str(tmp_path), "--out", str(out)]
    assert make.main(arguments) == 0
    printed = capsys.readouterr().out
    page, table = (out / "claims.html").read_text(), (out / "claims.md").read_text()
    assert table.count("\n| C") == page.count("<tr><td>") == len(claims.CLAIMS)
    assert printed.count("\nC") == len(claims.CLAIMS) - 1
    assert "28 of 30" in table and "1 of 1 follow" in table and "From 1 runs" in table
    assert not re.search(r"src=|href=|url\(|<script", page)
    assert "`python -m experiments.train -m experiment=accuracy_vs_size`" in table
    assert "<code>python -m experiments.train -m experiment=accuracy_vs_size</code>" in page


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path):
    with pytest.raises(SystemExit, match="2"):
        make.main(["claims", "--runs", str(tmp_path / "absent"), "--out", str(tmp_path)])
