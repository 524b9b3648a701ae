"""Entry points as a user starts them: exit codes, output, files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lowprec.config.compose import CONF
from lowprec.nn.recipe import RECIPES
from lowprec.runs.read import find_runs, read_rows, read_status

PYTHONPATH = os.pathsep.join([str(CONF.parent), os.environ.get("PYTHONPATH", "")])
TINY = ("model.vision_width=64", "model.vision_layers=1", "model.text_width=64")
TINY += ("model.text_layers=1", "model.vocab_size=512", "num_workers=1", "device=cpu")
TINY += ("precision=fp32", "batch_size=16", "log_every=5", "optimizer.lr=1e-3")
WHOLE = (*TINY, "name=whole", "num_steps=10", "evaluation=both")


def start(module, *overrides, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", f"experiments.{module}", *overrides],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(module, *overrides, cwd, code=0):
    return end(start(module, *overrides, cwd=cwd), code)


def end(process, code=0):
    output = process.communicate(timeout=200)[0]
    assert process.returncode == code, output
    return output


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a small rendered `shapes`."""
    folder = tmp_path_factory.mktemp("work")
    output = run(
        "make_shapes", "out=data/shapes", "num_train=200", "num_val=60", "image_size=32", cwd=folder
    )
    assert "200 pairs" in output and "60 pairs" in output
    return folder


@pytest.fixture(scope="module")
def whole(work):
    """A finished run."""
    assert "finished at step 10" in run("train", *WHOLE, cwd=work)
    [folder] = find_runs(work / "runs" / "whole")
    return folder


def test_a_run_from_start_to_export(work, whole):
    folder = whole
    assert read_status(folder)["state"] == "finished"
    assert (folder / "tensors.parquet").exists() and (folder / "environment.json").exists()
    assert "nothing to do" in run("train", *WHOLE, cwd=work)

    evaluating = start("evaluate", f"run={folder}", "device=cpu", cwd=work)
    exported = run("export", f"source={folder}", "out=w.safetensors", cwd=work)
    assert "tensors" in exported
    output = end(evaluating)
    [evaluated] = read_rows(folder / "evaluations.jsonl")
    trained = read_rows(folder / "metrics.jsonl")[-1]
    assert evaluated["zero_shot/top1"] == trained["zero_shot/top1"]
    assert "retrieval/text_to_image_r10" in output

    misfit = start(
        "train", *TINY, "name=misfit", "model.embed_dim=32", "model.init_from=w.safetensors",
        cwd=work,
    )  # fmt: skip
    again = run(
        "train", *TINY, "name=warm", "num_steps=1", "evaluation=none",
        "model.init_from=w.safetensors", cwd=work,
    )  # fmt: skip
    assert "finished" in again
    [warm] = find_runs(work / "runs" / "warm")
    assert read_rows(warm / "metrics.jsonl")[0]["logit_scale"] == pytest.approx(
        trained["logit_scale"], abs=0.05
    )

    assert "text_projection is (64, 128), not (64, 32)" in end(misfit, code=2)

    run("compact", f"run={folder}", "out=small", "tensors=[visual.*]", cwd=work)
    assert (work / "small" / "tensors.parquet").exists()
    assert "none of" in run(
        "compact", f"run={folder}", "out=none", "tensors=[nothing]", cwd=work, code=1
    )


def test_a_signalled_run_saves_and_resumes_to_the_same_record(work):
    command = (*TINY, "num_steps=60", "evaluation=none", "save_every=1000", "num_workers=2")
    calm = start("train", *command, "name=calm", cwd=work)
    disturbed = (*command, "name=disturbed")
    process = start("train", *disturbed, cwd=work)
    metrics = None
    for _ in range(600):
        metrics = next(iter((work / "runs").glob("disturbed/*/metrics.jsonl")), None)
        if metrics and len(read_rows(metrics)) >= 5:
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)  # its workers get it too, as under SLURM
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75, output
    assert read_status(metrics.parent)["state"] == "preempted"
    assert "finished at step 60" in run("train", *disturbed, cwd=work)
    end(calm)
    [calm] = (work / "runs").glob("calm/*/metrics.jsonl")
    assert metrics.read_bytes() == calm.read_bytes()


def test_a_sweep_runs_each_run_once_and_a_bad_one_does_not_stop_the_others(work):
    command = (*TINY, "name=sweep", "num_steps=2", "evaluation=none", "seed=1,2")
    output = run("train", "-m", *command, "batch_size=5000,16", cwd=work, code=1)
    assert "batch_size=5000 exceeds the 200 pairs" in output
    runs = find_runs(work / "runs" / "sweep")
    assert [path.name.split("-")[3] for path in runs] == ["s1", "s2"]
    assert run("train", "-m", *command, cwd=work).count("nothing to do") == 2
    assert {p.name for p in Path(work).iterdir()} <= {
        "data", "runs", "small", "w.safetensors", ".multirun", "two.txt"
    }  # fmt: skip


def test_a_second_process_for_a_run_is_refused_and_names_the_first(work):
    command = (*TINY, "name=busy", "num_steps=100000", "evaluation=none")
    holder = start("train", *command, cwd=work)
    try:
        for _ in range(600):
            if list((work / "runs").glob("busy/*/metrics.jsonl")):
                break
            time.sleep(0.05)
        output = run("train", *command, cwd=work, code=1)
        assert f"process {holder.pid}" in output
    finally:
        holder.kill()
        holder.communicate()


def test_all_path_faults_are_named_before_anything_is_written(work):
    output = run(
        "train", "data=shards", "data.train=nowhere/*.tar", "data.val=data/shapes/vla-*.tar",
        "data.classnames=no.txt", "model.init_from=no.pt", "name=never", cwd=work, code=2,
    )  # fmt: skip
    for part in ("data.train=nowhere", "nearest: data/shapes/val-0000.tar", "no.txt", "no.pt"):
        assert part in output
    assert not (work / "runs" / "never").exists()


def test_labels_are_checked_before_training(work):
    (work / "two.txt").write_text("one\ntwo\n")
    keys = ("data=shards", "data.train=data/shapes/train-*.tar", "data.val=data/shapes/val-*.tar")
    output = run("train", *TINY, *keys, "data.classnames=two.txt", "name=never", cwd=work, code=2)
    assert "two.txt names 2 classes" in output and not (work / "runs" / "never").exists()


def test_a_typo_in_the_path_of_shapes_is_refused(work):
    output = run("train", "data.train=data/shaeps/train-*.tar", cwd=work, code=2)
    assert "no file matches" in output and not (work / "data" / "shaeps").exists()


def test_the_record_has_environment_and_config(whole):
    facts = json.loads((whole / "environment.json").read_text())
    assert facts["packages"]["torch"] and facts["threads"] == 1
    config = OmegaConf.load(whole / "config.yaml")
    assert config.optimizer.lr == 1e-3 and config.experiment is None


def test_the_demo_compares_16_bit_int8_and_fp8():
    demo = OmegaConf.load(CONF / "experiment" / "loss_curves_demo.yaml").hydra.sweeper.params
    assert demo.precision.split(",") == ["bf16", "switchback", "fp8_tensorwise"]


def test_each_recipe_has_a_file():
    files = [OmegaConf.load(path) for path in (CONF / "precision").glob("*.yaml")]
    assert {file.get("recipe", "high") for file in files} == {*RECIPES, "int8_inference"}
