"""The share of spikes that are gone, from tables as `experiments.replay` writes them."""

import pandas as pd
import pytest

from analysis import load_runs
from analysis.figures import point_of_no_return
from analysis.figures.replays import shares as shares_of
from experiments import compact
from experiments.replay_report import Replay, table
from lowprec.diagnostics.spikes import Protocol
from tests.analysis.conftest import drawn

BETA2, CLIP = "optimizer.beta2=0.5", "clip_tensors=[visual.conv1.weight]"
HEIGHTS = {BETA2: {1: 4.0, 4: 1.0}, CLIP: {1: 4.0, 4: 4.0}}  # by lead; the control's: 4


def replays(heights=HEIGHTS, perturbed=(4.0, 4.0, 0.5), step=20):
    """Replays of a spike at `step`: their losses, 1 until then, by what they change."""
    replays = {Replay("control", 1): 4.0}
    for lead in (0, 1, 4):  # with 0, the change is too late to count
        start = step - lead
        replays[Replay("unchanged", start)] = 4.0
        replays |= {Replay("perturbed", start, n): h for n, h in enumerate(perturbed)}
        replays |= {Replay(name, start): by_lead.get(lead, 4) for name, by_lead in heights.items()}
    frames = {}
    for replay, height in replays.items():
        steps = range(replay.change_from, step + 3)
        losses = [1.0 + height * (n >= step) + 0.01 * (n % 2) for n in steps]
        frames[replay] = pd.DataFrame({"step": steps, "loss": losses, "rms": 1.0})
    return frames


def write_table(run, frames, step=20):
    """Writes the replays' table below a run, as the command does."""
    recorded = frames[Replay("control", 1)].set_index("step")["loss"]
    (run / "replays").mkdir()
    rows = table(frames, step, Protocol(), recorded)
    rows.to_csv(run / "replays" / f"step_{step}_table.csv", index=False)


@pytest.fixture
def runs(make_run, tmp_path):
    """Two runs, one with a spike that both changes remove, one with that of `replays`."""
    made = [make_run(num_steps=30, seed=seed, experiment="point_of_no_return") for seed in (0, 1)]
    write_table(made[0], replays())
    low = {change: {1: 0.1, 4: 0.1} for change in HEIGHTS}
    write_table(made[1], replays(low, perturbed=(4.0,)))
    return tmp_path / "runs"


def test_shares_are_over_spikes_and_perturbations_count_by_spike(runs):
    frame = point_of_no_return.query(load_runs(runs))
    assert set(frame["change"]) == {BETA2, CLIP, "perturbed"} and frame["exact"].all()
    shares = shares_of(frame)
    assert shares["share"].round(3).to_dict() == {
        (CLIP, 1): 0.5,
        (CLIP, 4): 0.5,
        (BETA2, 1): 0.5,
        (BETA2, 4): 1.0,
        ("perturbed", 1): 0.167,  # of 1/3 and 0
        ("perturbed", 4): 0.167,
    }
    assert (shares["num"] == 2).all()
    title = "Even 4 steps before the onset, all loss spikes are removed by beta2 0.5"
    assert point_of_no_return.title(frame[frame["lead"] == 4]) == title
    assert point_of_no_return.title(frame) == ""
    one = frame[(frame["lead"] == 4) & (frame["run"] == frame["run"].iloc[0])]
    assert point_of_no_return.title(one) == ""
    [ax] = drawn(point_of_no_return, frame)
    cells = ["2 of 2", "1 of 2", "1 of 2", "1 of 2", "17%", "17%"]  # from the earliest
    assert [text.get_text() for text in ax.texts] == cells
    assert [text.get_text() for text in ax.get_xticklabels()] == ["4", "1"]


def test_tables_survive_compaction_and_a_replay_in_two_tables_counts_once(runs, tmp_path):
    [run] = runs.glob("*/*-s0-*")
    twice = run / "replays" / "step_20_more_table.csv"
    twice.write_bytes((run / "replays" / "step_20_table.csv").read_bytes())
    (run / "replays" / "step_30_table.csv").write_text("change,lead\ncontrol,x\n")
    for out in (tmp_path / "copy", tmp_path / "archive" / "runs.zip"):
        compact.main(compact.CompactConfig(run=str(runs), out=str(out)))
        with pytest.warns(UserWarning, match="step_30_table.csv: left out"):
            copied = point_of_no_return.query(load_runs(out))
        assert len(copied) == 2 * (2 + 2) + 2 * (3 + 1)
