"""`compare` finds what differs between runs, and pairs them by seed."""

import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from analysis import NoRunsError, load_runs, measures
from analysis import compare as compare_module
from analysis.compare import compare


@pytest.fixture
def runs(make_run, tmp_path):
    """Two optimizers with two values of beta2 and three seeds; the last run diverged."""
    for optimizer, beta2, more in (("adamw", 0.9, 0), ("adamw", 0.99, 1), ("stable_adamw", 0.9, 2)):
        for seed in (0, 1, 2):
            losses = 2.0 + more + seed * (1 + more) / 10 + np.zeros(40)
            recall = {f"retrieval/{way}_r1": np.full(40, 0.5 - more / 10) for way in WAYS}
            keys = {"optimizer": optimizer, "beta2": beta2, "seed": seed, "columns": recall}
            state = "diverged" if optimizer == "stable_adamw" and seed == 2 else "finished"
            make_run(num_steps=40, losses=losses, state=state, **keys)
    make_run(seed=9, num_steps=40, steps=10, state="running")
    return load_runs(tmp_path / "runs")


WAYS = ("image_to_text", "text_to_image")


def test_differences_are_between_runs_of_one_seed_and_equal_other_settings(runs):
    found = compare(runs, "optimizer.beta2", "0.9")
    assert found.keys == ["optimizer.name", "optimizer.beta2"]
    assert len(found.runs) == 9  # the unfinished run does not count
    [difference] = found.differences["final loss"]  # StableAdamW has no second beta2
    assert list(found.differences.index) == ["adamw, beta2=0.99"]
    assert difference.mean == pytest.approx(1.1) and difference.num == 3  # 1.0, 1.1, 1.2
    assert difference.low == pytest.approx(1.1 - 4.303 * 0.1 / 3**0.5, abs=1e-3)
    means = found.means.loc["stable_adamw, beta2=0.9"]
    assert str(means["final loss"]) == "inf [nan, nan], 3 seeds"  # of which one diverged
    assert means["recall"].mean == pytest.approx(20.0)  # 30% twice, 0 for the diverged run
    assert pd.isna(found.runs["spikes"]).all()  # too short for any
    assert found.unpaired == ["stable_adamw, beta2=0.9"]
    text = "Unpaired, because no run with the same seed differs in optimizer.beta2 alone: "
    assert str(found).endswith(f"\n{text}stable_adamw, beta2=0.9")


def test_differences_are_from_the_default_value_and_printed_with_it_and_their_units(runs):
    found = compare(runs)
    assert (found.varied, found.baseline) == ("optimizer.name", "adamw")
    assert found.means.index[0] == "stable_adamw, beta2=0.9"  # in the order of figures
    means, differences = str(found).split("\nMinus optimizer.name = adamw, by seed")
    assert "final loss (nats)" in means and "R@1 (%)" in means
    assert "R@1 (points)" in differences and "%" not in differences.partition("\n")[2]
    assert compare(runs, "optimizer.beta2").baseline == "0.9"  # no run has 0.98


def test_runs_of_one_setting_have_a_mean_and_no_difference(runs):
    found = compare(runs.where(runs.summaries["optimizer.name"] == "stable_adamw"))
    assert found.keys == ["model.name"] and len(found.means) == 1
    assert found.differences.empty and not found.unpaired
    assert str(found.means["recall"].iloc[0]).startswith("20.00 [")


def test_the_command_prints_the_comparison(runs, capsys):
    assert compare_module.main(["--runs", str(runs.root)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{compare(runs)}\n"
    assert printed.err == "left out: 1 run (running: 10 of 40 steps)\n"
    command = [sys.executable, "-m", "analysis.compare"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "--runs" in done.stderr


def test_another_setting_or_value_is_refused_with_the_nearest(runs, make_run, tmp_path):
    with pytest.raises(ValueError, match="differ in optimizer.name.*nearest: optimizer.beta2"):
        compare(runs, "optimizer.beta")
    with pytest.raises(ValueError, match="varied=seed: the runs .*; seeds are averaged$"):
        compare(runs, "seed")
    assert compare(runs, "optimizer").varied == "optimizer.name"
    with pytest.raises(ValueError, match="baseline=0.8: one of 0.9, 0.99"):
        compare(runs, "optimizer.beta2", "0.8")
    with pytest.raises(NoRunsError, match=r"no run has ended yet \(running: 10 of 40"):
        compare(runs.where(runs.summaries["state"] == "running"))


@pytest.mark.parametrize(
    ("losses", "mean"),
    [
        ([9.0] * 380 + [1.0, 3.0] * 20, 2.0),  # a tenth of 420 steps would be 42
        ([9.0] * 18 + [1.0, 3.0], 2.0),
        ([9.0] * 18 + [1.0, math.inf], 1.0),
        ([5.0], 5.0),
        ([math.nan], math.nan),
    ],
)
def test_the_final_loss_is_a_mean_over_a_tenth_of_the_steps_at_most_40(losses, mean):
    assert measures.final_loss(losses) == pytest.approx(mean, nan_ok=True)
