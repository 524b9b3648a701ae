"""The verbs: faults of cells are named, sweeps are found, what cannot be done is a sentence."""

import errno
import json
import re
import subprocess
import sys

import pytest

from experiments import sweep
from lowprec.config.check import ConfigError
from lowprec.config.compose import CONF
from lowprec.runs import durable
from lowprec.runs.durable import DiskError
from lowprec.runs.read import find_runs, read_status
from lowprec.sweep.manifest import Ledger
from lowprec.sweep.plan import cells_of
from lowprec.sweep.status import states

TINY = ["model.vision_width=64", "model.vision_layers=1", "model.text_width=64", "num_steps=2"]
TINY += ["model.text_layers=1", "model.vocab_size=512", "num_workers=0", "device=cpu"]
TINY += ["precision=fp32", "batch_size=16", "evaluation=none", "data=shards", "data.val=null"]


@pytest.fixture
def keys(squares):
    return [*TINY, f"data.train={squares}/train-*.tar"]


def run(verb, *texts):
    """A verb and the status it leaves with."""
    try:
        sweep.command([verb, *texts])
    except SystemExit as left:
        return left.code
    return 0


def test_every_bad_cell_is_named_before_anything_is_submitted(here, keys, capsys):
    bad = ["num_steps=1,2", "schedule.warmup_steps=2", "optimizer.lr=1e-3,-1", "seed=0"]
    assert run("submit", *keys, *bad) == 2
    said = capsys.readouterr().err
    assert re.search(r"warmup_steps=2 is more than num_steps=1 \[run num_steps=1 .*\]", said)
    assert re.search(
        r"optimizer.lr=-1.* > 0.* \[run num_steps=1 optimizer.lr=-1; num_steps=2", said
    )
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["sumbit"], 1, "nearest: submit"),
        ([], 1, "submit|status|resubmit|cancel|wait"),
        (["status"], 2, "nothing was submitted there"),
        (["status", "nmae=a"], 2, "nmae: no such key.*nearest: name"),
        (["resubmit"], 1, "resubmit --failed"),
        (["submit", "launcher=slrm"], 2, "conf/launcher has local, slurm; nearest: slurm"),
        (["submit", "launcher.gpu=1"], 2, "nearest: launcher.gpus"),
        (["submit", "launcher.gpus=4", "launcher.parallel=2"], 2, "0 GPUs are visible"),
        (["submit", "launcher.parallel=0"], 2, "a whole number >= 1"),
    ],
)
def test_a_mistake_is_a_sentence_with_a_way_out(here, capsys, monkeypatch, words, code, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    left = run(*words) if words else run("")
    assert (left if isinstance(left, int) else 1) == code
    printed = capsys.readouterr().err + (left if isinstance(left, str) else "")
    assert re.search(said.replace("|", r"\|"), printed), printed


def test_a_cell_has_the_directory_that_the_same_command_would_train_in(here, keys):
    (cell,) = cells_of([*keys, "seed=3", "name=t"])
    command = [sys.executable, "-m", "experiments.train", *keys, "seed=3", "name=t"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert [str(path) for path in find_runs(here / "runs")] == [str(here / cell.run)]
    assert cell.run.endswith(f"{cell.label}-{cell.digest}")


def test_a_finished_run_is_never_submitted_and_an_edited_data_set_is_refused(
    here, keys, capsys, monkeypatch
):
    started = []
    monkeypatch.setattr(sweep.local, "start", lambda ledger: started.append(ledger))
    assert run("submit", *keys, "seed=0,1", "name=t") == 0
    cell = json.loads((here / "runs/sweeps/t/sweep.json").read_text())["cells"][0]
    (here / cell["run"]).mkdir(parents=True)
    (here / cell["run"] / "status.json").write_text('{"state": "finished", "step": 2}')
    assert run("cancel") == 0 and run("submit", *keys, "seed=0,1,2", "name=t") == 0
    assert "2 of 3 cells submitted; 1 finished" in capsys.readouterr().out
    plan = (here / "runs/sweeps/t/sweep.json").read_text()
    (here / "runs/sweeps/t/sweep.json").write_text(plan.replace(cell["digest"], "0123456789"))
    command = [sys.executable, "-m", "experiments.sweep_cell", "runs/sweeps/t", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no longer those of its sweep" in done.stderr


def test_a_key_that_names_no_run_changes_the_cell_that_is_there(here, keys, monkeypatch):
    monkeypatch.setattr(sweep.local, "start", lambda ledger: None)
    more = (
        [f"run_dir=../{here.name}/runs", "save_every=7"],
        [f"run_dir={here}/runs", "save_every=1"],
    )
    for of_one in more:
        assert run("submit", *keys, "seed=0", "name=t", *of_one) == 0
    (cell,) = Ledger(here / "runs/sweeps/t").cells
    assert cell.config["save_every"] == 1 and "save_every=1" in cell.overrides
    assert cell.run.startswith(cell.config["run_dir"])  # which the cell compares before it begins


def test_a_full_disk_is_a_sentence(here, keys, monkeypatch):
    def full(path, data):
        raise DiskError(path, OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(durable, "replace", full)
    said = run("submit", *keys, "name=t")
    assert re.fullmatch(r".*sweep.json cannot be written: No space left on device \(.*\)", said)


GPUS = ["launcher=slurm", "launcher.gpus=8"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([*GPUS], r"8 processes would be started and distributed=none .*use distributed=ddp"),
        (
            [*GPUS, "distributed=ddp", "batch_size=16,20"],
            r"batch_size=20 .* 8 processes .* nearest: batch_size=16 \[run batch_size=20\]",
        ),
        (["launcher.gpus=2"], "2 processes would be started.*use distributed=ddp"),
    ],
)
def test_cells_that_do_not_fit_the_launchers_processes_are_refused_before_they_are_written(
    here, keys, capsys, monkeypatch, words, fault
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert run("submit", *keys, "seed=0", *words) == 2
    said = capsys.readouterr().err
    assert said.startswith("1 fault(s)") and re.search(fault, said), said
    assert not (here / "runs").exists()


def test_other_gpus_of_a_resubmission_must_fit_the_cells_too(here, keys, capsys, monkeypatch):
    monkeypatch.setattr(sweep.local, "start", lambda ledger: None)
    assert run("submit", *keys, "name=t") == 0
    capsys.readouterr()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # nothing was started: the cell is lost
    assert run("resubmit", "--failed", "launcher.gpus=2") == 2
    assert "use distributed=ddp" in capsys.readouterr().err
    assert len(sweep.Ledger(here / "runs/sweeps/t").events()) == 1


def test_the_secret_of_a_url_is_in_the_plan_alone_and_is_never_printed(
    here, squares, capfd, monkeypatch
):
    monkeypatch.setattr(sweep.local, "start", lambda ledger: None)
    tiny = [key for key in TINY if not key.startswith("data")]
    urls = [f"pipe:env TOKEN=c4n4ry{i} cat {squares}/train-{i}.tar" for i in range(2)]
    tiny += ["data=stream", "data.allow_remote=[pipe]", "data.val=null", "name=t"]
    tiny += ["data.train=" + ",".join(f'"{url}"' for url in urls)]
    assert run("submit", *tiny, "schedule.warmup_steps=0,9") == 2
    assert run("submit", *tiny) == 0
    assert run("status") == 0 and run("cancel") == 0
    said = "".join(capfd.readouterr())
    assert "train-1.tar" in said and "c4n4ry" not in said
    plan = here / "runs/sweeps/t/sweep.json"
    files = [path for path in here.rglob("*") if path.is_file() and b"c4n4ry" in path.read_bytes()]
    assert files == [plan] and plan.stat().st_mode & 0o077 == 0
    assert [cell.config["data"]["train"] for cell in sweep.Ledger(plan.parent).cells] == urls


@pytest.mark.slow
def test_hydras_own_launcher_runs_the_cells_of_the_preset(here, keys):
    command = [sys.executable, "-m", "experiments.train", "-m", *keys, "name=t", "seed=0,1"]
    command += ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [read_status(run)["state"] for run in find_runs(here / "runs")] == ["finished"] * 2


@pytest.mark.parametrize("name", ["submitit_local", "submitit_slurm"])
def test_a_preset_of_hydra_has_every_key_of_the_launcher(name):
    from dataclasses import fields

    from hydra_plugins.hydra_submitit_launcher import config
    from omegaconf import OmegaConf

    schema = {"submitit_local": config.LocalQueueConf, "submitit_slurm": config.SlurmQueueConf}
    preset = OmegaConf.load(CONF / "hydra" / "launcher" / f"{name}.yaml")
    assert set(preset) == {field.name for field in fields(schema[name])}


def test_faults_without_a_sweep_are_not_repeated_by_cell(keys):
    with pytest.raises(ConfigError) as error:
        cells_of([*keys, "seed=0", "schedule.warmup_steps=9"])
    assert len(error.value.faults) == 1 and "[run" not in error.value.faults[0]


def test_a_running_cell_shows_the_step_of_its_last_row(here, keys, monkeypatch):
    monkeypatch.setattr(sweep.local, "start", lambda ledger: None)
    assert run("submit", *keys, "seed=0", "name=t") == 0
    ledger = Ledger(here / "runs/sweeps/t")
    ledger.run_of(0).mkdir(parents=True)
    (ledger.run_of(0) / "status.json").write_text('{"state": "running", "step": 0}')
    rows = ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": 2.5}', '{"step": 3, "lo']
    (ledger.run_of(0) / "metrics.jsonl").write_text("\n".join(rows))
    (state,) = states(ledger, {})
    assert (state.step, state.loss) == (2, 2.5)
