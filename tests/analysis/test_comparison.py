"""Runs are compared only if they agree in every setting that changes weights."""

import pandas as pd
import yaml

from analysis import comparison, evidence, load_runs
from analysis.run_files import DEFAULTS, flatten
from lowprec.config.schema import Config
from lowprec.runs.identity import identity

BASE = {
    **DEFAULTS,
    **{"data.digest": "ab", "init.digest": "", "gpu": "H100", "digest": "0" * 10},
    **{"precision.label": "bf16", "model.name": "mini_l", "accuracy": 50.0},
}
SWITCHBACK = {"precision.recipe": "switchback", "precision.label": "switchback", "accuracy": 51.0}
RECIPES = ("precision.label", "switchback", "bf16", "accuracy")
FREE = {
    *("name", "experiment", "scale", "seed", "eval_every", "evaluation.name", "optimizer.paged"),
    *(f"diagnostics.{name}" for name in ("statistics", "every", "detail_every", "block_every")),
}
CHANGES = {
    "schedule.name": "constant",
    "num_steps": 7,
    "optimizer.clip_norm": 1.0,  # null otherwise
    "optimizer.on_warning.action": "skip",  # these are in no digest unless set
    "optimizer.optim_bits": 8,
    "precision_change.step": 900,
    "optimizer.lr": 1.0000001e-3,
    "precision.where": ("c_fc",),
    "compile": True,
    "deterministic": True,  # no part of the identity
    "data.digest": "cd",
    "init.digest": "cd",
    "gpu": "A100",
}


def table(*rows):
    return pd.DataFrame([{**BASE, **row} for row in rows])


def test_key_holds_every_setting_of_a_runs_identity_but_those_that_change_no_weights():
    assert set(flatten(identity(Config()))) - set(comparison.KEY) == FREE


def test_runs_that_differ_in_any_setting_of_the_key_are_distinct():
    grouped = {f"precision_change.{name}" for name in ("step", "recipe", "autocast")}
    for key in grouped.union(comparison.KEY):
        assert len(comparison.distinct(table({}, {key: "other"}))) == 2, key


def test_runs_are_paired_unless_they_differ_in_a_setting_that_changes_weights():
    for key, value in CHANGES.items():
        runs = table({}, SWITCHBACK, {"seed": 1}, {**SWITCHBACK, "seed": 1, key: value})
        pairs = evidence.differences(runs, *RECIPES)
        assert pairs["mini_l"].index.tolist() == [0], key
        assert len(comparison.distinct(table({}, {key: value}))) == 2, key
    for key in [*FREE - {"seed"}, "data.train", "run_dir", "save_every"]:
        runs = table({}, {**SWITCHBACK, key: "other"})
        assert evidence.differences(runs, *RECIPES), key


STABLE = {"optimizer.name": "stable_adamw", "optimizer.clip_threshold": 1.0, "accuracy": 53.0}


def test_settings_that_belong_to_the_varied_one_change_with_it():
    runs = table({}, STABLE)
    by_seed = evidence.difference(runs, "optimizer.name", "stable_adamw", "adamw", "accuracy")
    assert by_seed.to_dict() == {0: 3.0}
    large = {"model.name": "mini_h", "model.vision_width": 512, "model.vision_layers": 12}
    assert len(comparison.matched(table({}, large), "model.name", ("mini_l", "mini_h"))) == 2
    fp16 = {"precision.label": "fp16", "precision.autocast": "fp16", "scaler.name": "dynamic"}
    assert len(comparison.matched(table({}, fp16), "precision.label", ("bf16", "fp16"))) == 2


def test_two_variants_of_one_value_are_not_averaged():
    other = {**STABLE, "optimizer.clip_threshold": 2.0, "accuracy": 90.0}
    runs = table({}, {"seed": 1}, STABLE, {**STABLE, "seed": 1}, other)
    by_seed = evidence.difference(runs, "optimizer.name", "stable_adamw", "adamw", "accuracy")
    assert by_seed.to_dict() == {0: 3.0, 1: 3.0}


def test_differences_are_paired_by_seed():
    rows = [{"seed": seed, "accuracy": value} for seed, value in enumerate((4.0, 6.5, 9.0))]
    rows += [{**SWITCHBACK, "seed": seed, "accuracy": v} for seed, v in enumerate((5.0, 7.0))]
    assert evidence.differences(table(*rows), *RECIPES)["mini_l"].to_dict() == {0: 1.0, 1: 0.5}


def test_records_with_a_key_that_is_gone_are_compared_with_new_ones(make_run, tmp_path):
    make_run(num_steps=20)
    old = make_run(num_steps=20, recipe="switchback") / "config.yaml"
    config = yaml.safe_load(old.read_text())
    config["optimizer"]["stable_embedding"] = False
    config["distributed"]["gather_with_grad"] = True
    old.write_text(yaml.dump(config))
    heads = load_runs(tmp_path / "runs").runs
    assert len(comparison.matched(heads, "precision.label", ("bf16", "switchback"))) == 2


def test_kind_of_gpu_is_read_from_the_attempts(make_run, tmp_path):
    run = make_run(num_steps=20)
    text = '{"attempt": 1, "gpu": "A100", "sources": {"data": "aa", "init_from": "bb"}}\n'
    with (run / "attempts.jsonl").open("a") as file:
        file.write(text)
    [summary] = load_runs(tmp_path / "runs").summaries.to_dict("records")
    assert (summary["gpu"], summary["data.digest"], summary["init.digest"]) == ("A100", "aa", "bb")
