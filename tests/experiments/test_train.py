"""Entry points as a user starts them: exit codes, output, files."""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import sys
import time
from pathlib import Path

import pytest
import rich
from omegaconf import OmegaConf
from rich.console import Console

from experiments import entry, evaluate, export, make_shapes, train
from experiments.evaluate import EvaluateConfig
from experiments.export import ExportConfig
from experiments.make_shapes import MakeShapesConfig
from lowprec import waiting
from lowprec.config.check import ConfigError
from lowprec.config.compose import CONF, ComposedRun, compose_command
from lowprec.config.schema import Config
from lowprec.nn.recipe import RECIPES
from lowprec.runs.read import find_runs, read_config, read_rows, read_status
from lowprec.train.metrics import Ended
from lowprec.train.preflight import preflight
from lowprec.train.run import train_run
from tests.small import WORDS

TINY = (*WORDS, "num_workers=1", "batch_size=16", "log_every=5", "optimizer.lr=1e-3")


def train_here(*overrides):
    """Trains a run in this process."""
    [run] = compose_command(list(overrides))
    return train_run(run.config)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a small rendered `shapes`."""
    folder = tmp_path_factory.mktemp("work")
    out = str(folder / "data" / "shapes")
    make_shapes.main(MakeShapesConfig(out, num_train=200, num_val=60, image_size=32))
    return folder


@pytest.fixture
def as_command(work, monkeypatch):
    """`as_command(*words)`: `python -m experiments.train` with these words, in this process."""
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "stderr", sys.stderr)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["train", *words])
        runpy.run_path(train.__file__, run_name="__main__")

    return run


@pytest.fixture
def said(monkeypatch):
    """All that commands say they are doing; whether it is printed depends on how long it takes."""
    texts = []

    class Recorded(waiting.Waiting):
        def __setattr__(self, name, value):
            if name == "doing":
                texts.append(value)
            super().__setattr__(name, value)

    for module in (waiting, export):
        monkeypatch.setattr(module, "Waiting", Recorded)
    return texts


def test_a_run_from_start_to_export(work, as_command, capfd, monkeypatch, said):
    monkeypatch.setattr(waiting, "SILENT_S", 0)
    monkeypatch.setattr(entry, "sweep", entry.Sweep())  # another test's
    as_command(*TINY, "name=whole", "num_steps=10", "evaluation=both")
    output = "".join(capfd.readouterr())
    assert "finished at step 10" in output and "% (chance 0.42%)" in output  # of 240 classes
    assert re.search(r"nano-fp32-adamw-s0: \w+ \(\d+ s\)", output)
    for doing in ("loading", "building", "evaluating"):
        assert f"nano-fp32-adamw-s0: {doing}" in said
    [folder] = find_runs(work / "runs" / "whole")
    assert read_status(folder)["state"] == "finished" and (folder / "tensors.parquet").exists()
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["packages"]["torch"] and facts["threads"] == 1
    assert read_config(folder).optimizer.lr == 1e-3

    capfd.readouterr()
    evaluate.main(EvaluateConfig(str(folder), device="cpu"))
    [evaluated] = read_rows(folder / "evaluations.jsonl")
    trained = read_rows(folder / "metrics.jsonl")[-1]
    assert evaluated["zero_shot/top1"] == trained["zero_shot/top1"]
    printed, told = capfd.readouterr()
    assert f"evaluating {folder} (" in told
    printed = [line.split() for line in printed.splitlines()]
    assert printed[0] == ["step", "10", "of", "10"]
    assert "retrieval/text_to_image_r10" in dict(line[:2] for line in printed)
    with pytest.raises(ConfigError) as error:  # in the keys of the command
        evaluate.main(EvaluateConfig(str(folder), val="no.tar", classnames="no.txt", device="cpu"))
    assert "classnames=no.txt" in str(error.value) and "data." not in str(error.value)

    export.main(ExportConfig(str(folder), "w.safetensors"))
    assert said[-1] == f"exporting {folder}"
    keys = [*TINY, "name=warm", "num_steps=1", "evaluation=none", "model.init_from=w.safetensors"]
    train_here(*keys)
    [row] = read_rows(*(work / "runs" / "warm").glob("*/metrics.jsonl"))
    assert row["logit_scale"] == pytest.approx(trained["logit_scale"], abs=0.05)
    with pytest.raises(ConfigError, match=r"text_projection is \(64, 128\), not \(64, 32\)"):
        train_here(*keys, "model.embed_dim=32")


@pytest.mark.parametrize("in_sweep", [True, False])
def test_a_signal_in_the_last_step_of_a_run_stops_its_sweep(in_sweep, monkeypatch):
    ended = Ended("finished", 2, stop_requested=True)
    monkeypatch.setattr("lowprec.train.run.train_run", lambda *arguments: ended)
    monkeypatch.setattr(train, "preflight", lambda config: None)
    monkeypatch.setattr(entry, "sweep", entry.Sweep(is_here=in_sweep))
    with pytest.raises(SystemExit, match="75") if in_sweep else contextlib.nullcontext():
        train.main(Config())


def test_a_sweep_runs_each_run_once_and_a_bad_one_does_not_stop_the_others(work, as_command, capfd):
    command = ["-m", *TINY, "name=sweep", "num_steps=2", "evaluation=none", "seed=1,2"]
    with pytest.raises(SystemExit, match="1"):
        as_command(*command, "batch_size=5000,16", "data.index=new")  # counted by the run
    output = "".join(capfd.readouterr())
    assert "batch_size=5000 exceeds the 200 pairs" in output
    table = [line.split() for line in output.splitlines()]
    assert ["5000", "1", "failed"] in table
    assert ["16", "2", "finished", "2"] in [row[:4] for row in table]
    runs = find_runs(work / "runs" / "sweep")
    assert [path.name.split("-")[3] for path in runs] == ["s1", "s2"]
    as_command(*command, "remark=later")
    output = capfd.readouterr().out
    assert output.count("nothing to do") == output.count("its remark is now 'later'") == 2
    losses = [f"{read_rows(run / 'metrics.jsonl')[-1]['loss']:.3f}" for run in runs]
    table = [line.split() for line in output.splitlines()]
    for seed, loss in zip("12", losses, strict=True):
        assert [seed, "ended", "before", "2", loss] in table
    as_command(*command)  # without a remark, it stays
    assert all(read_config(run).remark == "later" for run in runs)
    names = {"data", "new", "runs", "w.safetensors", ".multirun", "two.txt"}
    assert {path.name for path in work.iterdir()} <= names


def test_a_sweep_prints_its_overrides_as_they_can_be_typed_again_without_passwords():
    texts = ("~data.val", "name='a b'", "data.allow_remote=[https]", "logger.tags=")
    url = 'data.train="https://me:secret@host/a.tar?key=secret"'
    runs = [ComposedRun((*texts, url), None), ComposedRun((), None)]
    first, _ = entry.swept_runs(None, runs, is_here=True)
    expected = (*texts, 'data.train="https://host/a.tar"')
    assert first.sweep.overrides == expected and tuple(shlex.split(first.sweep.own)) == expected


def test_a_command_goes_on_when_nobody_reads_its_output(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    printed = []

    def task(config):
        for print_it in (print, Console().print, print):
            print_it("one line", flush=True) if print_it is print else print_it("one line")
            printed.append(print_it)

    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "argv", ["train", *WORDS])
        entry.run_command(task, "train")
    assert len(printed) == 3


def test_several_processes_train_no_sweep(as_command, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        as_command("-m", *TINY, "seed=1,2", "distributed=ddp")
    assert "-m does not run in 2 processes; use " in capfd.readouterr().err


SHARDS = "data=shards data.train=data/shapes/train-*.tar data.val=data/shapes/val-*.tar"
FAULTS = {  # keys: parts of the message
    "data=shards data.train=nowhere/*.tar data.val=data/shapes/vla-*.tar data.classnames=no.txt"
    " model.init_from=no.pt": (
        *("data.train=nowhere", "nearest: data/shapes/val-0000.tar", "no.txt", "pt is expected; /"),
    ),
    f"{SHARDS} data.classnames=two.txt batch_size=201 data.index=index": (
        *("two.txt names 2 classes", "batch_size=201 exceeds the 200 pairs"),
    ),
    f"{SHARDS} data.templates=no.txt data.cache=two.txt": (
        *("no.txt", "data.cache=two.txt", "two.txt is not writable (Not a directory); choose"),
    ),
    "data.train=data/shaeps/train-*.tar": ("no file matches",),
}


@pytest.mark.parametrize("keys", FAULTS)
def test_faults_of_data_are_named_before_anything_is_written(work, monkeypatch, keys):
    monkeypatch.chdir(work)
    Path("two.txt").write_text("one\ntwo\n")
    with pytest.raises(ConfigError) as error:
        [run] = compose_command([*TINY, *keys.split(), "name=never"], preflight=preflight)
        train_run(run.config)
    assert all(fault in str(error.value) for fault in FAULTS[keys])
    assert not Path("runs/never").exists() and not Path("data/shaeps").exists()


def test_each_recipe_has_a_file():
    files = [OmegaConf.load(path) for path in (CONF / "precision").glob("*.yaml")]
    assert {file.get("recipe", "high") for file in files} == set(RECIPES)


@pytest.mark.parametrize("width", [80, 120])
def test_a_long_name_leaves_room_for_the_numbers_of_a_run(monkeypatch, width):
    console = Console(width=width, force_terminal=True, file=io.StringIO(), color_system=None)
    monkeypatch.setattr(rich, "_console", console)
    monkeypatch.setattr(entry, "sweep", entry.Sweep(own="optimizer.beta2=0.95 " * 5))
    progress = train.ProgressBar(Config())
    progress.at(1)
    progress.flushed({"step": 16, "step_ms": 100, "loss": 2.3456, "memory_gib": 11})
    console.print(progress.bar.get_renderable())
    progress.close()
    [line] = console.file.getvalue().rstrip().splitlines()
    assert line.startswith("optimizer.beta2=") and len(line) <= width
    assert line.endswith("16/1000 -:--:-- loss 2.346  1280 images/s  11 GiB")


def test_a_run_without_a_terminal_tells_its_step_and_loss(monkeypatch, capfd):
    monkeypatch.setattr(waiting, "SILENT_S", 0.02)
    monkeypatch.setattr(entry, "sweep", entry.Sweep())  # another test's
    progress = train.ProgressBar(Config())

    def wait_for(text):
        deadline = time.monotonic() + 30
        while f"nano-bf16-adamw-s0: {text} (" not in capfd.readouterr().err:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    progress.at(7)
    wait_for("step 7 of 1000")
    progress.start = (time.monotonic() - 8.0, 7)
    progress.at(9)
    wait_for("step 9 of 1000, about 66 min left")
    row = {"loss": 2.3456, "memory_gib": None}
    progress.flushed({"step": 16, "step_ms": 1000, **row})
    progress.flushed({"step": 26, "step_ms": 500, **row})
    assert "loss 2.346  171 images/s" in progress.bar.tasks[0].fields["note"]  # 20 x 128 in 15 s
    progress.start = (time.monotonic() - 990.0, 7)
    progress.at(996)
    wait_for("step 996 of 1000, loss 2.346 at step 26, about 5 s left")
    progress.close()
    time.sleep(0.1)
    capfd.readouterr()  # a line that was under way
    time.sleep(0.1)
    assert not capfd.readouterr().err
