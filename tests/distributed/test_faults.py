"""A signal stops all ranks after the same step; a dead or hung rank is named and the rest end."""

import re
import signal

import pytest

from lowprec.runs.read import find_runs, read_rows, read_status
from lowprec.train.checkpoint import list_checkpoints

LONG = {"num_steps": 100_000, "save_every": 100_000, "log_every": 1, "schedule.name": "constant"}


def disturbed(ranks, make, name, sent, *, size=2, hang=None, codes=(76,), **changes):
    """Runs for long; signals are sent once there are 5 rows. Returns answer, run and config."""
    config = make({**LONG, **changes, "name": name, "distributed.name": "ddp"})
    where = f"{config['run_dir']}/{name}/*/metrics.jsonl"
    signals = [{"rank": rank, "number": n, "file": where, "lines": 5} for rank, n in sent]
    answer = ranks("train", size, configs=[config], signals=signals, hang=hang, codes=codes)
    [run] = find_runs(f"{config['run_dir']}/{name}")
    return answer, run, config


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_rank_saves_once_after_the_same_step_and_all_exit_75(ranks, make, rank):
    number = signal.SIGTERM if rank else signal.SIGUSR2
    _, run, config = disturbed(ranks, make, f"stopped_{rank}", [(rank, number)], codes=[75])
    status = read_status(run)
    assert (status["state"], status["saved"]) == ("preempted", status["step"])
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, status["step"] + 1))
    assert len(list((run / "checkpoints").iterdir())) == 1
    if rank == 0:
        return
    again = ranks("train", 2, configs=[{**config, "num_steps": status["step"] + 2}])
    assert f"resuming from step {status['step']}" in again["logs"][0]


@pytest.mark.parametrize(
    ("rank", "number"), [(0, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGKILL)]
)
def test_a_dead_or_stopped_rank_is_named_and_the_others_end(ranks, make, rank, number):
    name = f"lost_{rank}_{number}"
    three = {"batch_size": 24, "num_workers": 1}  # a worker inherits what its rank has open
    three |= {"distributed.timeout_s": 4.0}  # a stopped rank closes no connection
    answer, run, _ = disturbed(ranks, make, name, [(rank, number)], size=3, codes=None, **three)
    for other in {0, 1, 2} - {rank}:
        assert answer["codes"][other] == 76, answer["logs"]
        assert answer["seconds"][other] < 12, answer["seconds"]
        assert f"rank {rank} had not reported within 2 s; rank " in answer["logs"][other]
        assert (run / "stacks/0000" / f"rank_{other}.txt").exists()
    if rank:
        assert read_status(run)["state"] == "failed"
        assert f"rank {rank}" in read_status(run)["reason"]


def test_a_rank_that_hangs_leaves_its_stack(ranks, make):
    hang = {"rank": 1, "step": 4, "stall": True}  # so that it is a report behind
    limit = {"distributed.timeout_s": 3.0}
    answer, run, _ = disturbed(ranks, make, "hung", [], hang=hang, **limit)
    for log in answer["logs"]:
        assert re.search(r"rank 1 \(.* at step 4, waiting for data: .*; rank 0 \(", log), log
        assert "no progress for 3 s" in log
    stack = (run / "stacks/0000/rank_1.txt").read_text()
    assert "sleeping" in stack and "lowprec/train/loop.py" in stack
    assert (run / "stacks/0000/rank_0.txt").exists()


def test_a_signal_while_the_data_of_a_rank_stall_ends_all_within_the_timeout(ranks, make):
    stall = {"rank": 1, "step": 6, "stall": True}
    limit = {"distributed.timeout_s": 3.0}
    answer, run, _ = disturbed(ranks, make, "stalled", [(1, signal.SIGTERM)], hang=stall, **limit)
    assert max(answer["seconds"]) < 20, answer["seconds"]
    assert "at step 6, waiting for data" in read_status(run)["reason"]


def test_a_rank_that_fails_says_why_and_ends_the_others(ranks, make):
    fails = {"rank": 1, "step": 4, "fail": True}
    answer, run, _ = disturbed(ranks, make, "failed", [], hang=fails, codes=[76, 1])
    assert "rank 1" in answer["logs"][0] and "MemoryError: as told" in answer["logs"][0]
    assert "out of memory with model=nano" in answer["logs"][1]
    assert "MemoryError: as told" in read_status(run)["reason"]


def test_a_full_disk_is_a_failed_save_in_all_ranks(ranks, make):
    config = make({"name": "full", "distributed.name": "fsdp2", "num_steps": 6, "save_every": 2})
    spoil = {"what": "disk", "steps": [2, 6], "rank": 0}  # the last save must succeed
    answer = ranks("train", 2, configs=[config], spoils=[spoil], codes=None)
    [run] = find_runs(f"{config['run_dir']}/full")
    assert [path.name for path in list_checkpoints(run)] == ["step_000000004"], answer["logs"]
    assert not list((run / "checkpoints").glob(".tmp*"))
    assert answer["codes"] in ([1, 1], [76, 1]), answer["logs"]  # depends on who notices first
    [event] = read_rows(run / "events.jsonl")
    assert event["step"] == 2
    for reason in (event["not saved"], read_status(run)["reason"]):
        assert "No space left" in reason


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_memory_that_is_full_at_a_save_of_rank_0_ends_all_ranks_which_say_so(ranks, make, name):
    config = make({"name": f"memory_{name}", "distributed.name": name, "save_every": 2})
    spoil = {"what": "memory", "steps": [], "rank": 0}
    answer = ranks("train", 2, configs=[config], spoils=[spoil], codes=[1, 76])
    [run] = find_runs(f"{config['run_dir']}/memory_{name}")
    zero, one = answer["logs"]
    assert max(answer["seconds"]) < 20, answer
    assert "the host is out of memory while saving (MemoryError: as told)" in zero
    assert re.search("rank 0 .* at step 2, saving: failed: MemoryError: as told", one), one
    assert read_status(run)["reason"] == "MemoryError: as told" and not list_checkpoints(run)
