"""What is not finite in one rank alone is skipped, or ends the run, in all as in one process."""

import functools

import pytest

from lowprec.runs.read import find_runs, read_rows, read_status, scan_rows

AUTOCAST = {"none": "fp32", "dynamic": "fp16", "fixed": "fp16"}  # of each scaler
CLIPPED = {"optimizer.name": "adamw_clip", "optimizer.clip_norm": 0.05}
SPOILS = {  # name: of which rank what is NaN at which steps
    "loss": {"what": "loss", "steps": [3], "rank": 1},
    "gradient": {"what": "gradient", "steps": [3], "rank": 1},
    "often": {"what": "gradient", "steps": [2, 3, 4], "rank": 1},
}
CASES = [
    *((name, scaler) for name in ("loss", "gradient") for scaler in AUTOCAST),
    ("often", "dynamic"),
    ("often", "fixed"),
    ("clipped", "none"),
]
KINDS = {  # case: how it runs; fsdp2 refuses the dynamic scaler
    case: ("none", "ddp") + (("fsdp2",) if case[1] != "dynamic" else ()) for case in CASES
}


@pytest.fixture(scope="module")
def runs(ranks, make, once):
    """The run of each case by kind: `none` of one process, the others of two."""
    folder = once("not_finite", functools.partial(train_all, ranks, make))
    return {
        (case, kind): find_runs(folder / "_".join([*case, kind]))[0]
        for case in CASES
        for kind in KINDS[case]
    }


def train_all(ranks, make, folder):
    for size in (1, 2):
        configs, spoils = [], []
        for name, scaler in CASES:
            for kind in KINDS[name, scaler]:
                if (kind == "none") != (size == 1):
                    continue
                changes = {"precision.autocast": AUTOCAST[scaler], "scaler.name": scaler}
                # the default scale overflows float16 here, in two ranks in more tensors than in one
                changes |= {"scaler.init_scale": 256.0} if scaler != "none" else {}
                changes |= {"scaler.max_skips": 2} if name == "often" else {}
                changes |= CLIPPED if name == "clipped" else {}
                changes |= {"distributed.name": kind, "name": f"{name}_{scaler}_{kind}"}
                changes |= {"optimizer.lr": 1e-3, "num_steps": 4, "run_dir": str(folder)}
                configs.append(make(changes))
                spoils.append(SPOILS.get(name, {}))
        ranks("train", size, configs=configs, spoils=spoils)


@pytest.mark.parametrize(
    ("case", "kind"), [(case, kind) for case in CASES for kind in KINDS[case][1:]], ids=str
)
def test_two_ranks_with_one_spoiled_record_what_one_process_does(runs, case, kind):
    one, two = runs[case, "none"], runs[case, kind]
    told = [{k: read_status(run)[k] for k in ("state", "step", "reason")} for run in (one, two)]
    assert told[0] == told[1]
    left, right = (read_rows(run / "metrics.jsonl") for run in (one, two))
    assert [set(row) for row in left] == [set(row) for row in right]
    for x, y in zip(left, right, strict=True):
        assert x == pytest.approx(y, rel=1e-4 if case[1] == "none" else 1e-2, nan_ok=True)
    events = [
        [row for row in scan_rows(run / "events.jsonl")[0] if "skipped" in row]
        for run in (one, two)
    ]
    assert events[0] == events[1]


def test_each_case_triggers_its_rule_in_one_process(runs):
    """So that records which are alike are not alike in having nothing to show."""
    status = {case: read_status(runs[case, "none"]) for case in CASES}
    assert {c: (s["state"], s["step"]) for c, s in status.items()} == {
        **{("loss", scaler): ("diverged", 3) for scaler in AUTOCAST},
        ("gradient", "none"): ("diverged", 3),
        ("gradient", "dynamic"): ("finished", 4),
        ("gradient", "fixed"): ("finished", 4),
        ("often", "dynamic"): ("diverged", 3),
        ("often", "fixed"): ("diverged", 3),
        ("clipped", "none"): ("finished", 4),
    }
    assert "visual.conv1.weight" in status["gradient", "none"]["reason"]
    assert "2 consecutive skips" in status["often", "fixed"]["reason"]
    rows = read_rows(runs[("clipped", "none"), "none"] / "metrics.jsonl")
    assert all(row["clipped_grad_norm"] < 0.9 * row["grad_norm"] for row in rows)
