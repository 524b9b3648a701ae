"""The verbs: faults are named, sweeps are found, and a failure is one sentence."""

import fcntl
import json
import re
import shutil

import pytest

from experiments import sweep
from lowprec.config import compose
from lowprec.runs import durable
from lowprec.runs.read import find_runs, read_status
from lowprec.sweep.plan import DECLINED, Plan
from tests.small import python

GPUS = ["launcher=slurm", "launcher.gpus=8"]


def run(verb, *texts):
    """Runs a verb; its exit status or message."""
    try:
        sweep.command([verb, *texts])
    except SystemExit as left:
        return left.code
    return 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["sumbit"], 2, "nearest: submit"),
        (["status"], 2, "no sweeps in runs/sweeps yet; `.*submit ...` starts one"),
        (["status", "nmae=a"], 2, "nmae: no such key.*nearest: name"),
        (["resubmit"], 2, "resubmit --failed"),
        (["resubmit", "--failed", "optimizer.lr=1"], 2, "optimizer.lr: only `submit` takes keys"),
        (["status", "name=t"], 2, "runs/t has runs of `experiments.train`, .* `submit` with"),
        (["submit", "launcher=slrm"], 2, "nearest: slurm"),
        (["submit", "launcher.runs_per_gpu=2"], 2, "needs launcher=local and launcher.gpus=1"),
        (["submit", "launcher.sbatch={job-name: x}"], 2, "sbatch: a sweep sets job-name itself"),
        (["submit", "launcher.partition=a,b"], 2, """value is .*: 'launcher.partition="a,b"'"""),
        (["submit", "run_dir=a,b"], 2, "run_dir=a,b: a sweep has one run_dir.*such as run_dir=a$"),
        (["submit", "hydra/launcher=submitit_slurm"], 2, "hydra/launcher.*launcher=local or slurm"),
    ],
)
def test_a_mistake_is_answered_with_a_way_out(here, capsys, monkeypatch, words, code, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (here / "runs" / "t").mkdir(parents=True)
    left = run(*words)
    assert (left if isinstance(left, int) else 1) == code
    printed = capsys.readouterr().err + (left if isinstance(left, str) else "")
    assert re.search(message, printed), printed


def test_a_finished_run_is_not_submitted(here, tiny, capsys, no_launcher):
    assert run("submit", *tiny, "seed=0,1", "name=t") == 0
    plan = here / "runs/sweeps/t/sweep.json"
    directory = json.loads(plan.read_text())["runs"][0]["directory"]
    (here / "runs" / directory).mkdir(parents=True)
    (here / "runs" / directory / "status.json").write_text('{"state": "finished", "step": 2}')
    assert run("cancel") == 0 and run("submit", *tiny, "seed=0,1,2", "name=t") == 0
    out = capsys.readouterr().out
    assert "2 of 3 runs submitted; 1 finished" in out
    assert "see them: python -m experiments.sweep status name=t\n" in out
    changed = Plan(plan.parent)
    changed.runs[0].directory = f"{directory[:-10]}0123456789"
    changed.write()
    assert "0123456789" in run("train", "runs/sweeps/t", "0")


@pytest.mark.parametrize("name", ["name='a b'", '++name="a b"'])
def test_quotes_of_hydra_are_not_part_of_a_folders_name(here, tiny, no_launcher, name):
    assert run("submit", *tiny, name, 'run_dir="my runs"') == 0
    plan = Plan(here / "my runs/sweeps/a b")
    assert plan.runs[0].config["run_dir"] == "my runs"
    assert run("status", "name=a b", "run_dir=my runs") == 0


def test_a_run_dir_of_an_experiments_file_is_given_on_the_command_line(
    here, tiny, capsys, monkeypatch, no_launcher
):
    shutil.copytree(compose.CONF, here / "conf")
    study = "# @package _global_\nrun_dir: elsewhere\n"
    (here / "conf" / "experiment" / "own.yaml").write_text(study)
    monkeypatch.setattr(compose, "CONF", here / "conf")
    assert run("submit", *tiny, "experiment=own") == 2
    assert "such as run_dir=elsewhere" in capsys.readouterr().err
    assert run("submit", *tiny, "experiment=own", "run_dir=elsewhere") == 0
    assert Plan(here / "elsewhere/sweeps/own").runs


@pytest.mark.parametrize(("size", "code"), [("1", 0), ("2", DECLINED)])
def test_a_rank_declines_for_all(here, tiny, no_launcher, monkeypatch, size, code):
    assert run("submit", *tiny, "name=t") == 0
    plan = Plan(here / "runs/sweeps/t")
    monkeypatch.setattr(sweep, "GRACE_S", 0.0)
    monkeypatch.setattr(sweep, "train_run", lambda *_, **__: pytest.fail("trained"))
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", "0")
    plan.directory_of(0).mkdir(parents=True)
    with durable.locked(plan.directory_of(0) / ".lock"):
        assert run("train", str(plan.folder), "0") == code
        assert plan.why_ended(0) is None
    plan.mark(0, "cancelled").touch()
    for rank in range(int(size)):
        monkeypatch.setenv("RANK", str(rank))
        assert run("train", str(plan.folder), "0") == code


def test_keys_that_are_not_identity_replace_those_of_the_same_run(here, tiny, no_launcher):
    for keys in (
        [f"run_dir=../{here.name}/runs", "save_every=7"],
        [f"run_dir={here}/runs", "save_every=1"],
    ):
        assert run("submit", *tiny, "seed=0", "name=t", *keys) == 0
    (planned,) = Plan(here / "runs/sweeps/t").runs
    assert planned.config["save_every"] == 1 and "save_every=1" in planned.overrides
    assert planned.directory.startswith("t/nano-") and planned.config["run_dir"] == f"{here}/runs"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (GPUS, "distributed=none.*use distributed=ddp"),
        (
            [*GPUS, "distributed=ddp", "batch_size=16,20"],
            r"batch_size=20 .* 8 processes .*nearest: batch_size=16",
        ),
        (["launcher.gpus=2"], "use distributed=ddp"),
    ],
)
def test_runs_must_fit_the_launcher(here, tiny, capsys, monkeypatch, words, fault):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert run("submit", *tiny, "seed=0", *words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and re.search(fault, printed), printed
    assert not (here / "runs").exists()


def test_secrets_in_urls_are_in_the_plan_alone(here, tiny, squares, capfd, no_launcher):
    keys = [key for key in tiny if not key.startswith("data")]
    urls = [f"pipe:env TOKEN=c4n4ry{i} cat {squares}/train-{i}.tar" for i in range(2)]
    keys += ["data=stream", "data.allow_remote=[pipe]", "data.val=null", "name=t"]
    keys += ["data.train=" + ",".join(f'"{url}"' for url in urls)]
    assert run("submit", *keys, "schedule.warmup_steps=0,9") == 2
    assert run("submit", *keys) == 0
    assert run("status") == 0 and run("cancel") == 0
    printed = "".join(capfd.readouterr())
    assert "train-1.tar" in printed and "c4n4ry" not in printed
    plan = here / "runs/sweeps/t/sweep.json"
    files = [path for path in here.rglob("*") if path.is_file() and b"c4n4ry" in path.read_bytes()]
    assert files == [plan] and plan.stat().st_mode & 0o077 == 0
    assert [run.config["data"]["train"] for run in Plan(plan.parent).runs] == urls


def test_status_shows_speed_accuracy_time_left_and_folder(here, tiny, no_launcher, capsys):
    assert run("submit", *tiny, "optimizer.lr=1e-3,2e-3", "name=t", "num_steps=100") == 0
    plan = Plan(here / "runs/sweeps/t")
    directory = plan.directory_of(1)
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"step": 20, "loss": 3.0, "zero_shot/top1": 0.25}\n')
    (directory / "timing.jsonl").write_text('{"step": 20, "images_per_s": 4.0}\n')
    (directory / "events.jsonl").write_text('{"collapsed": "low"}\n{"not_learning": "high"}\n')
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        capsys.readouterr()
        assert run("status") == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "running" in line][:1]
    digest = directory.name.rpartition("-")[2]
    assert row.split() == f"1 0.002 running 20/100 3.000 25.0% 4 0:05:20 {digest}".split()
    told = [
        f"run 1 (optimizer.lr=0.002) {text}" for text in ("collapsed: low", "not learning: high")
    ]
    assert [line for line in lines if line.endswith(("low", "high"))] == told


def test_one_of_several_sweeps_needs_its_name(here, tiny, no_launcher, capsys):
    for name in ("t", "u"):
        assert run("submit", *tiny, f"name={name}") == 0
    assert run("status") == run("cancel") == 2
    assert capsys.readouterr().err.count("no such sweep; the sweeps are t, u") == 2


@pytest.mark.slow
def test_hydras_own_launcher_trains_the_runs_of_the_preset(here, tiny):
    keys = [*tiny, "name=t", "seed=0,1", "hydra/launcher=submitit_local"]
    keys += ["hydra.launcher.timeout_min=5"]
    done = python("-m", "experiments.train", "-m", *keys, cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [read_status(run)["state"] for run in find_runs(here / "runs")] == ["finished"] * 2


def test_a_refused_or_dry_resubmit_changes_nothing(here, tiny, capsys, monkeypatch, no_launcher):
    assert run("submit", *tiny, "name=t", "launcher.parallel=3") == 0
    plan = Plan(here / "runs/sweeps/t")  # nothing was started: the run is lost
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert run("resubmit", "--failed", "launcher.gpus=2") == 2
    assert "use distributed=ddp" in capsys.readouterr().err
    assert run("resubmit", "--failed", "dry_run=true") == 0
    assert capsys.readouterr().out.splitlines() == [str(plan.directory_of(0))]
    assert run("resubmit", "--failed", "dry_run=false") == 0
    assert Plan(plan.folder).launchers == plan.launchers
