"""Claims of loss scales: falls beside chance, and runs that go on; one seed decides nothing."""

import numpy as np
import pytest

from analysis import claims
from analysis.evidence import NOT, REPRODUCED, UNDECIDED, Evidence
from lowprec.config.schema import DiagnosticsConfig, ScalerConfig, SpikeConfig

STEPS = 400
SPIKES = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=20, window=20))
HELD, FAILED = f"{REPRODUCED} at mini scale", f"{NOT} at mini scale"


def one(root, words):
    [claim] = [c for c in claims.CLAIMS if c.number == "C12" and words in c.text]
    return claims.judge(claim, Evidence([root]))


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
        (
            (30, 90, 150, 210, 230, 250, 270, 290, 310, 330, 350),
            (0, 1),
            FAILED,
        ),  # anywhere but at spikes
        ((), (0, 1), FAILED),
        ((62, 150), (0, 1), UNDECIDED),
    ],
)
def test_a_dynamic_scale_is_judged_by_its_falls_at_spikes_beside_chance(
    scaled, falls, seeds, verdict
):
    found = one(scaled("dynamic", falls, seeds=seeds), "dynamic")
    assert found.verdict == verdict, found
    if len(falls) > 2 and 62 in falls:
        assert f"{3 * len(seeds)} of {3 * len(seeds)} falls" in found.ours


def test_falls_in_one_stretch_count_once(scaled):
    found = one(scaled("dynamic", (61, 62, 63, 64, 121)), "dynamic")
    assert "4 of 4 falls of the scale are at one of 6 loss spikes" in found.ours
    assert "by chance 16.6%" in found.ours  # 21 steps at each of 3 spikes, of 380


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
    found = one(root, "fixed")
    assert found.verdict == verdict, found
