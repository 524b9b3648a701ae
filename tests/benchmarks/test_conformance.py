"""The search for the rule that an optimizer follows, and the table of implementations."""

import json
import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from experiments.benchmarks import conformance, conformance_rule
from experiments.benchmarks.conformance import OURS, PEERS, TOLERANCES, Peer, run_optimizer
from experiments.benchmarks.conformance_rule import (
    CHOICES,
    Rule,
    distances,
    explain,
    path_of,
    problem,
    variants,
)

SINGLES = [rule for rules in variants(1) for rule in rules]


def raises(error):
    def build(params):
        raise error

    return build


def test_rules_with_one_departure_differ_by_more_than_rounding():
    assert len(SINGLES) == 1 + sum(len(choices) - 1 for choices in CHOICES.values())
    for a, b in combinations(SINGLES, 2):
        apart = max(distances(path_of(a), path_of(b)))[0]
        assert apart > 10 * max(TOLERANCES.values()), (str(a), str(b))


@pytest.mark.parametrize("rule", SINGLES, ids=str)
def test_a_rule_is_recognized_from_its_rounded_trajectory(rule):
    path = [
        {name: torch.tensor(values).tolist() for name, values in step.items()}
        for step in path_of(rule)
    ]
    assert explain(path, TOLERANCES[torch.float32])[0] == [rule]


def test_departures_in_two_points_are_both_named(monkeypatch):
    rule = Rule(rms_moment="the old u", decay_rate="the raw rate")
    few = {name: CHOICES[name] for name in ("rms_moment", "clipping", "decay_rate")}
    monkeypatch.setattr(conformance_rule, "CHOICES", few)
    [match], distance = explain(path_of(rule), 1e-9)
    monkeypatch.undo()
    assert str(match) == "RMS from the old u; decays by the raw rate" and distance == 0


def test_another_optimizer_matches_no_rule():
    rules, nearest = explain(run_optimizer(torch.optim.SGD), 1e-9, most=1)
    assert rules == [] and nearest > 0.1


def test_nan_trajectories_are_infinitely_far():
    path = [{name: [math.nan] * len(values) for name, values in step.items()}
            for step in path_of(Rule())]  # fmt: skip
    assert all(distance == math.inf for distance, _ in distances(path, path_of(Rule())))


def test_the_problem_is_exact_in_float32():
    for values in (problem().start, *problem().grads, {"lr": problem().lrs}):
        for name, numbers in values.items():
            assert torch.tensor(numbers).tolist() == numbers, name


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "algorithm 2"),
        ({"clip_weight_decay": False}, "decays by the raw rate"),
        ({"clip_threshold": None}, "clips nothing"),
    ],
)
def test_our_optimizer_follows_the_rule_of_its_options(options, rule):
    peer = Peer("lowprec", OURS(**options), dtype=torch.float32)
    assert conformance._row(peer)[3] == rule


def test_missing_and_failing_libraries_have_rows(monkeypatch, capsys):
    peers = {
        "lowprec": PEERS["lowprec"],
        "missing": Peer("no-such-package-of-peers", raises(AssertionError("built"))),
        "failing": Peer("torch", raises(TypeError("no such option\nmore"))),
    }
    monkeypatch.setattr(conformance, "PEERS", peers)
    conformance.main(conformance.ConformanceConfig())
    lines = capsys.readouterr().out.splitlines()
    assert "never |  | algorithm 2" in lines[2]
    assert "not installed" in lines[3] and "built" not in lines[3]
    assert "not run: TypeError: no such option |" in lines[4]


def test_the_command_fails_if_ours_follows_another_rule(monkeypatch):
    build = OURS(clip_weight_decay=False)
    monkeypatch.setattr(conformance, "PEERS", {"lowprec": replace(PEERS["lowprec"], build=build)})
    with pytest.raises(SystemExit, match="does not follow"):
        conformance.main(conformance.ConformanceConfig())


def test_golden_trajectories_are_written(tmp_path):
    conformance.main(conformance.ConformanceConfig(golden=str(tmp_path / "golden")))
    written = json.loads((tmp_path / "golden" / "raw_decay.json").read_text())
    assert written == conformance.golden("raw_decay")
