"""The search for the rule that an optimizer follows, and the table of implementations."""

from itertools import combinations

import pytest
import torch

from experiments.benchmarks import conformance
from experiments.benchmarks.configs import NoKeys
from experiments.benchmarks.conformance import (
    OURS,
    PEERS,
    RULES,
    TOLERANCES,
    Peer,
    Rule,
    distances,
    explain,
    path_of,
    run_optimizer,
)

SINGLES = [rule for rule in RULES if len(rule.departures) < 2]
TWO = Rule(rms_moment="the old u", decay_rate="the raw rate")


def test_rules_with_one_departure_differ_by_more_than_rounding():
    for a, b in combinations(SINGLES, 2):
        apart = max(distances(path_of(a), path_of(b)))[0]
        assert apart > 10 * max(TOLERANCES.values()), (str(a), str(b))
    assert explain(run_optimizer(torch.optim.SGD), 1e-9)[0] == []  # follows no rule


@pytest.mark.parametrize("rule", [*SINGLES, TWO], ids=str)
def test_a_rule_is_recognized_from_its_rounded_trajectory(rule):
    path = [
        {name: torch.tensor(values).tolist() for name, values in step.items()}
        for step in path_of(rule)
    ]
    assert explain(path, TOLERANCES[torch.float32])[0] == [rule]
    assert str(TWO) == "RMS from the old u; decays by the raw rate"


def test_each_implementation_has_a_row_and_ours_follows_its_options(monkeypatch, capsys):
    def fail(params):
        raise TypeError("no such option\nmore")

    peers = {name: peer for name, peer in PEERS.items() if peer.package in ("lowprec", "torch")}
    peers |= {"missing": Peer("no-such-package", fail), "failing": Peer("torch", fail)}
    monkeypatch.setattr(conformance, "PEERS", peers)
    conformance.main(NoKeys())
    lines = capsys.readouterr().out.splitlines()
    rows = {cells[1]: cells[2:] for cells in ([c.strip() for c in x.split("|")] for x in lines[2:])}
    assert rows["lowprec"][1:4] == ["never", "", "algorithm 2"]
    assert rows["lowprec, clip_weight_decay=False"][3] == "decays by the raw rate"
    assert rows["lowprec, clip_threshold=None"][3] == rows["torch AdamW"][3] == "clips nothing"
    assert rows["missing"][0] == "not installed"
    assert rows["failing"][3] == "not run: TypeError: no such option"
    monkeypatch.setitem(peers, "lowprec", Peer("lowprec", OURS(clip_weight_decay=False)))
    with pytest.raises(SystemExit, match="does not follow"):
        conformance.main(NoKeys())


@pytest.mark.parametrize("name", ["pytorch_optimizer", "pytorch_optimizer, foreach"])
def test_stable_adamw_of_pytorch_optimizer_follows_algorithm_2(name):
    pytest.importorskip("pytorch_optimizer")
    path = run_optimizer(PEERS[name].build)
    assert explain(path, TOLERANCES[torch.float64])[0] == [Rule()]
