"""Damaged files of a sweep: no verb fails but with a sentence, and none waits forever."""

import json
import os
import random
import shutil

import pytest

from experiments import sweep

PIECES = b'[]|null|{}|\0|-1|"x"|\xff\xfe|[[[[|}|\n|,|:|{"reason": 3}\n'.split(b"|")
PIECES += [b"9" * 400, b'{"a":' * 5000]
VALUES = (None, [], {}, "x", -1, 1.5, True, [[]], 10**30, "\n", "\0", "\ud800", "n" * 10**5)
NOTHING = ("no sweeps in runs/sweeps yet", "nothing in this sweep was submitted")


def damage(path, source):
    """Damages a file: missing, cut, another kind, foreign bytes, or a value of another type."""
    data, kind = path.read_bytes(), source.randrange(8)
    if kind < 3:
        path.unlink()
        (lambda path: None, os.mkdir, os.mkfifo)[kind](path)
    elif kind == 3:
        path.write_bytes(data[: source.randrange(len(data) + 1)])
    elif kind == 4:
        shutil.copy(path, f"{path}.bak")
        (path.parent / "checkpoints" / source.choice(["step_x", "step_5.bak"])).mkdir(
            parents=True, exist_ok=True
        )
    elif kind < 7:
        at = source.randrange(len(data) + 1)
        path.write_bytes(data[:at] + source.choice(PIECES) + data[at + source.choice([0, 1, 9]) :])
    else:
        whole = row = (
            json.loads(data) if path.suffix == ".json" else json.loads(data.split(b"\n")[0])
        )
        while True:
            key = source.choice(list(row) if isinstance(row, dict) else range(len(row)))
            if not (isinstance(row[key], (dict, list)) and row[key]) or source.random() < 0.4:
                break
            row = row[key]
        row[key] = source.choice(VALUES)
        path.write_text(json.dumps(whole) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_verbs_survive_damaged_files_or_name_them(sweeps, here, monkeypatch, capsys, seed):
    monkeypatch.setattr(sweep.local, "start", lambda *_: None)
    plan = sweeps.make(3)
    plan.hand_over([0, 1, 2], {"name": "local", "parallel": 1, "gpus": 0})
    for index in range(3):
        plan.end(index, "no")
        directory = plan.directory_of(index)
        directory.mkdir(parents=True)
        (directory / "status.json").write_text('{"state": "running", "step": 1, "saved": 0}')
        (directory / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    shutil.copytree(here / "runs", here / "whole")
    source = random.Random(seed)
    for _ in range(300):
        shutil.rmtree(here / "runs")
        shutil.copytree(here / "whole", here / "runs")
        files = [path for path in (here / "runs").rglob("*.*") if path.is_file()]
        for path in source.sample(files, source.choice([1, 1, 2, 4])):
            damage(path, source)
        for words in (["status"], ["resubmit", "--failed"], ["cancel"]):
            try:
                sweep.command(words)
            except SystemExit as left:
                fault = capsys.readouterr().err if left.code == 2 else left.code
                assert str(plan.folder) in fault or any(map(fault.count, NOTHING)), fault
        capsys.readouterr()
