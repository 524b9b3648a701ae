"""Pre-spike snapshots: what they hold, when they are written, and what they must not cost."""

import pytest

from lowprec.runs.attempts import CheckpointError, saved_steps, step_of
from lowprec.train.checkpoint import save_checkpoint, verify
from lowprec.train.snapshots import Snapshot, SnapshotRecorder, state_before

RECORDED = {
    "diagnostics.spikes.ignore_steps": 4,
    "diagnostics.spikes.window": 6,
    "diagnostics.spikes.num_deviations": 1,
    "diagnostics.spikes.within": 1,
    "diagnostics.recorder.enabled": True,
    "diagnostics.recorder.steps": 2,  # so a base every 2 + 1 + 3 steps
    "num_steps": 20,
    "log_every": 3,
    "save_every": 6,
    "keep_checkpoints": 9,
}


def steps_of(paths):
    return [step_of(path) for path in paths]


def contents(folder):
    files = (path for path in folder.iterdir() if path.name != "manifest.json")
    return {path.name: path.read_bytes() for path in files}


def test_a_snapshot_is_the_checkpoint_of_its_step(make_config, run_once, shaken, tmp_path):
    config, provenance = make_config(RECORDED | {"model.patch_dropout": 0.5}), {"code": {"a": "1"}}
    run_once(config, tmp_path / "with", spoil=shaken({14}), provenance=provenance)
    [snapshot] = saved_steps(tmp_path / "with" / "snapshots")
    assert step_of(snapshot) == 12 and verify(snapshot)["provenance"] == provenance
    twin = tmp_path / "with" / "checkpoints" / snapshot.name
    assert contents(snapshot) == contents(twin) and len(contents(snapshot)) == 5
    assert [path.name for path in snapshot.parent.iterdir()] == [snapshot.name]
    config.diagnostics.recorder.enabled = False
    run_once(config, tmp_path / "without", spoil=shaken({14}))
    for name in ("metrics.jsonl", "events.jsonl"):
        rows = [(tmp_path / folder / name).read_bytes() for folder in ("with", "without")]
        assert rows[0] == rows[1]
    assert not (tmp_path / "without" / "snapshots").exists()


@pytest.mark.parametrize("asked", [False, True])
def test_rms_spikes_have_snapshots_if_asked(make_config, run_once, shaken, tmp_path, capsys, asked):
    quiet = {"diagnostics.spikes.loss_sigmas": 1e6, "diagnostics.spikes.rms_threshold": 1.5}
    config = make_config(RECORDED | quiet | {"diagnostics.recorder.rms": asked})
    run_once(config, tmp_path, spoil=shaken({14}))
    assert bool(saved_steps(tmp_path / "snapshots")) == asked
    assert ("to replay the RMS spike of" in capsys.readouterr().out) == asked


def test_only_the_newest_snapshots_stay_and_a_divergence_has_one(
    make_config, run_once, shaken, tmp_path, capsys
):
    def spoil(built):
        shaken({8, 14})(built)
        shaken({22}, factor=float("nan"))(built)

    config = make_config(RECORDED | {"num_steps": 26, "diagnostics.recorder.keep": 2})
    ended, _ = run_once(config, tmp_path, spoil=spoil)
    assert (ended.state, ended.step) == ("diverged", 22)
    assert steps_of(saved_steps(tmp_path / "snapshots")) == [12, 18]
    assert len(list((tmp_path / "snapshots").iterdir())) == 2
    assert "to replay the divergence at step 22" in capsys.readouterr().out


def test_a_resume_writes_a_lost_snapshot_again(make_config, run_once, shaken, tmp_path):
    config = make_config(RECORDED | {"save_every": 20})
    run_once(config, tmp_path, spoil=shaken({14}), kill_at=18)
    [snapshot] = saved_steps(tmp_path / "snapshots")
    before = contents(snapshot)
    for name in ("step_000000016", ".tmp.step_000000016"):
        snapshot.with_name(name).mkdir()
    run_once(config, tmp_path, spoil=shaken({14}))
    assert contents(snapshot) == before
    assert [path.name for path in snapshot.parent.iterdir()] == ["step_000000012"]


class Counting:
    """Stands in for a state: how often its files were copied."""

    num_copies = 0

    def files(self):
        self.num_copies += 1
        return {"a": b"123"}


@pytest.mark.parametrize(("steps", "log_every", "within"), [(2, 3, 1), (10, 7, 4), (1, 20, 10)])
def test_a_base_is_always_old_enough(make_config, tmp_path, steps, log_every, within):
    config = make_config(
        {
            "log_every": log_every,
            "diagnostics.spikes.within": within,
            "diagnostics.recorder.steps": steps,
            "diagnostics.recorder.enabled": True,
        }
    )
    recorder = SnapshotRecorder(Counting(), tmp_path, config, {})
    recorder.begin(0)
    flushed = 0
    for flush in range(1, 300):
        if flush % log_every and flush % 11:  # now and then an evaluation flushes too
            continue
        for spike in range(max(1, flushed + 1 - within), flush + 1):
            base = recorder._snapshot_for(spike)
            assert base.step == 0 or spike - base.step >= steps
            assert base.step > spike - 3 * (steps + log_every + within)
        recorder.after_flush(flush, [])
        assert len(recorder.snapshots) <= 2
        flushed = flush
    assert recorder.state.num_copies <= 1 + 300 / (steps + log_every + within)


def test_state_before_returns_the_newest_intact_state_that_is_early_enough(tmp_path, capsys):
    for folder, step in (("checkpoints", 10), ("snapshots", 14), ("checkpoints", 20)):
        state = Snapshot(step, {"a": b"1"})
        save_checkpoint(tmp_path / folder, step, state, {}, keep=9, provenance={})

    def state_of(step, margin):
        path, manifest = state_before(tmp_path, step, margin)
        return path.parent.name, manifest["step"]

    assert state_of(30, 5) == ("checkpoints", 20)
    assert state_of(22, 5) == state_of(21, 1) == ("snapshots", 14)
    assert state_of(22, 2) == ("checkpoints", 20)
    assert state_of(13, 5) == ("checkpoints", 10)  # none is 5 steps older
    (tmp_path / "snapshots" / "step_000000014" / "a").write_bytes(b"2")
    assert state_of(22, 5) == ("checkpoints", 10)
    assert "step_000000014/a is damaged" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="of step 9 or .* of 10, 14, 20, .* step 12"):
        state_before(tmp_path, 11, 1)
    with pytest.raises(CheckpointError, match=r"there are those of no step\."):
        state_before(tmp_path / "other", 11, 1)
