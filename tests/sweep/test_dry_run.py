"""The dry run counts only what was measured, and says what it assumes."""

import json
import re
import shutil

import pytest

from experiments import sweep
from lowprec.runs.read import find_runs
from lowprec.sweep import estimate as sweep_estimate
from lowprec.sweep.estimate import RECORDS

MEASURED = "mini_l-bf16-adamw-s0-9ba1632507"


@pytest.fixture
def keys(squares):
    return ["evaluation=none", "data=shards", "data.val=null", f"data.train={squares}/train-*.tar"]


def test_a_dry_run_counts_what_was_measured_and_says_what_was_not(here, keys, capsys):
    choice = ["device=auto", "batch_size=64", "model=mini_l,mini_h"]
    sweep.submit([*keys, *choice, "dry_run=true"])
    said = capsys.readouterr().out
    assert "2 cells" in said and "GPU-hours on NVIDIA H" in said
    assert "unknown for 1 cells of model=mini_h" in said
    assert "measured" not in said
    assert re.search(r"disk: \d+\.\d\d GB of checkpoints; .* GB are free", said)
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("optimizer", "otherwise"),
    [("adamw", ""), ("stable_adamw", ", measured with adamw for stable_adamw")],
)
def test_a_dry_run_says_what_the_measured_run_had_otherwise(
    here, keys, capsys, monkeypatch, optimizer, otherwise
):
    (source,) = [run for run in find_runs(RECORDS) if run.name == MEASURED]
    shutil.copytree(source, here / "records" / "bf16")
    monkeypatch.setattr(sweep_estimate, "RECORDS", here / "records")
    choice = ["model=mini_l", "precision=switchback", f"optimizer={optimizer}", "dry_run=true"]
    sweep.submit([*keys, *choice, "batch_size=64"])
    (assumed,) = re.findall("assumed: .*", capsys.readouterr().out)
    assert assumed.endswith(f"batch_size, measured in bf16 for switchback{otherwise}")


def test_a_dry_run_measures_by_runs_of_as_many_processes(here, keys, capsys, monkeypatch):
    (source,) = [run for run in find_runs(RECORDS) if run.name == MEASURED]
    for count in (1, 8):
        copy = here / "records" / str(count)
        shutil.copytree(source, copy)
        attempt = json.loads((copy / "attempts.jsonl").read_text()) | {"processes": count}
        (copy / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    monkeypatch.setattr(sweep_estimate, "RECORDS", here / "records")
    choice = [
        "num_steps=1000000",
        "batch_size=64",
        "model=mini_l",
        "launcher=slurm",
        "dry_run=true",
    ]
    hours = {}
    for count in (1, 2, 8):
        sweep.submit([*keys, *choice, f"launcher.gpus={count}", "distributed=ddp"])
        said = capsys.readouterr().out
        hours[count] = re.search(r"time: (\d+\.\d+) GPU-hours on .* by .*/records/(\d)", said)
        assert ("unknown for 1 cells of model=mini_l on 2 processes" in said) == (count == 2)
        assert count == 2 or "process" in said.partition("assumed: ")[2]
    assert (hours[1][2], hours[2], hours[8][2]) == ("1", None, "8")
    assert float(hours[8][1]) == pytest.approx(8 * float(hours[1][1]), rel=0.01)
