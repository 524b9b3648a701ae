"""The run directories that `watch` writes, and the examples of its page."""

import functools
import importlib
import json
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from analysis import compare, load_runs, plot, spike_marks, spikes
from analysis import make as make_figure
from analysis.report.page import make_page
from lowprec.config.check import ConfigError, RunError
from lowprec.diagnostics import Protocol, watch
from lowprec.nn import LowPrecisionLinear
from lowprec.nn.recipe import Recipe
from lowprec.optim import StableAdamW
from lowprec.runs.read import read_status
from tests.diagnostics.watched import (
    PROTOCOL,
    STATISTICS,
    Planted,
    assert_planted,
    example,
    loss_of,
    make,
    planted,
    take,
)


def test_a_run_is_saved_without_the_keys_that_are_refused(tmp_path):
    model, optimizer = make()
    with pytest.raises(ValueError, match="protocol='papr': must be a Protocol or one of paper"):
        watch(model, optimizer, protocol="papr")
    monitor = watch(model, optimizer)
    take(model, optimizer, monitor, [1])
    with pytest.raises(ConfigError, match="batchsize: no such key; nearest: batch_size") as error:
        monitor.save(tmp_path / "run", {"batchsize": 3, "optimizer": {"beta1": 0.8}})
    assert error.value.faults[1] == f"{tmp_path}/run is saved without these keys"
    take(model, optimizer, monitor, [2])
    products = {"output": {"first": {"format": "int8"}, "second": {"format": "int8"}}}
    with pytest.raises(ConfigError, match="seed='zero': not allowed"):
        monitor.save(tmp_path / "run", {"seed": "zero", "precision": {"products": products}})
    [run] = load_runs(tmp_path).runs.to_dict("records")
    assert (run["optimizer.beta1"], run["step"], run["seed"]) == (0.8, 2, 0)
    saved = json.loads((tmp_path / "run" / "config.yaml").read_text().partition("\n")[2])
    assert saved["precision.products"] == products


@pytest.mark.parametrize(
    ("recipes", "recorded"),
    [
        ([], "high"),
        (["high"], "high"),
        (["switchback", "high", "switchback"], "switchback"),
        (["switchback", "llm_int8"], "custom"),
        ([Recipe("mine")], "custom"),
    ],
)
def test_the_recipe_of_the_layers_is_recorded(tmp_path, recipes, recorded):
    layers = [LowPrecisionLinear(16, 16, recipe=recipe) for recipe in recipes]
    model = nn.Sequential(nn.Linear(16, 16), *layers)
    optimizer = StableAdamW(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer)
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    monitor.save(tmp_path / "run")
    assert load_runs(tmp_path / "run").runs["precision.recipe"].tolist() == [recorded]


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_run_of_the_harness_is_not_written_into(make_config, run_once, tmp_path):
    run_once(make_config(), tmp_path / "run")
    model, optimizer = make()
    for number, step in enumerate((3, 0, 0), 2):
        if number == 4:
            (tmp_path / "run" / "config.yaml").unlink()
        before = content(tmp_path / "run")
        monitor = watch(model, optimizer, step=step)
        take(model, optimizer, monitor, [1])
        monitor.save(tmp_path / "run")
        monitor.close()
        assert content(tmp_path / "run") == before
        assert len(load_runs(tmp_path / f"run-{number}").metrics) == 1


def test_a_second_watched_run_is_saved_beside_the_first(tmp_path, caplog):
    first, second = tmp_path / "run", tmp_path / "run-2"
    planted(first, (20, 60))
    before = content(first)
    model, optimizer = make()
    monitor = watch(model, optimizer)
    for step in (1, 2):
        take(model, optimizer, monitor, [step])
        monitor.save(first)
    assert content(first) == before and not (tmp_path / "run-3").exists()
    runs = load_runs(second)
    assert runs.runs["name"].tolist() == ["run-2"] and len(runs.metrics) == 2
    [said] = [text for text in caplog.messages if "another run" in text]
    assert said.startswith(f"{first} has another run: this one is saved in {second}; if resumed")


def test_a_resumed_run_names_its_folder_if_several_could_be_its_own(tmp_path):
    first, second, third = (tmp_path / name for name in ("run", "run-2", "run-3"))
    model, optimizer = make()
    for _ in range(2):
        monitor = watch(model, optimizer)
        take(model, optimizer, monitor, [1, 2])
        monitor.save(first)
        monitor.close()
    second.rename(third)  # the user may have deleted another
    before = content(first)
    resumed = watch(model, optimizer, step=2)
    take(model, optimizer, resumed, [3])
    message = f"may be in {first}, {third}: name the folder of this run; if it is {first}, rename"
    with pytest.raises(RunError, match=re.escape(message)):
        resumed.save(first)
    assert content(first) == before
    for _ in range(2):
        resumed.save(third)
    assert load_runs(third).metrics["step"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("saves", [(60,), (20, 30, 60)])
def test_the_run_directory_opens_in_analysis(tmp_path, saves):
    folder = tmp_path / "runs" / "mine"
    monitor, twin = planted(folder, saves), planted(tmp_path / "none", ())
    assert monitor.rows() == []
    runs = load_runs(tmp_path / "runs")
    assert repr(runs) == "1 run (1 finished) of no experiment"
    assert "<h1>mine</h1>" in make_page(runs)
    [head] = runs.runs.to_dict("records")
    assert (head["run"], head["state"], head["note"]) == ("mine", "finished", "")
    assert head["optimizer.name"] == "adamw" and head["optimizer.lr"] == 1e-2
    assert head["model.name"] == "Planted" and head["num_steps"] == 60
    expected = twin.rows()
    assert runs.metrics["loss"].tolist() == [row["loss"] for row in expected]
    for statistic in STATISTICS:
        frame = runs.tensors("*", statistic).set_index("step")
        for name in monitor.names:
            assert frame[name].tolist() == [row[f"{statistic}/{name}"] for row in expected]
    series = spike_marks.read_series(runs)
    protocol = spike_marks.protocol_of_run(head)
    assert protocol == PROTOCOL
    [spike] = spike_marks.spike_table(series, protocol, "0.weight").to_dict("records")
    assert (spike["step"], spike["lead"]) == (43, 3)
    events = runs.events.dropna(subset="spike")
    assert [*events["step"]] == [40, 43] and [*events["spike"]] == ["rms", "loss"]


def test_a_resumed_run_continues_its_directory(tmp_path):
    model, optimizer = make()
    monitor = watch(model, optimizer)
    take(model, optimizer, monitor, range(1, 7))
    first = monitor.rows()
    monitor.save(tmp_path / "run")
    resumed = watch(model, optimizer, step=4)  # from a checkpoint of step 4
    monitor.close()
    take(model, optimizer, resumed, range(5, 10))
    twice = {step: row for row in first + resumed.rows() if (step := row["step"])}
    resumed.save(tmp_path / "run")
    runs = load_runs(tmp_path / "run")
    assert runs.metrics["step"].tolist() == list(range(1, 10))
    expected = [twice[step] for step in range(1, 10)]
    assert runs.metrics["loss"].tolist() == [row["loss"] for row in expected]
    rms = runs.series("0.weight", "rms").tolist()
    assert rms == [row["rms/0.weight"] for row in expected]
    assert rms[4:6] != [row["rms/0.weight"] for row in first[4:6]]  # steps 5 and 6


@pytest.mark.parametrize(
    ("loss", "state", "reason"),
    [(math.nan, "diverged", "the loss is nan at step 2"), (None, "finished", "")],
)
def test_a_run_whose_last_loss_is_not_finite_diverged(tmp_path, loss, state, reason):
    model, optimizer = make()
    monitor = watch(model, optimizer)
    take(model, optimizer, monitor, [1])
    if loss is not None:
        monitor.loss(loss)
    optimizer.step()
    for _ in range(2):  # at a checkpoint, and at the end
        monitor.save(tmp_path)
        status = read_status(tmp_path)
        assert (status["state"], status["reason"], status["step"]) == (state, reason, 2)
    take(model, optimizer, monitor, [3])
    monitor.save(tmp_path)
    assert read_status(tmp_path)["state"] == "finished"


def test_later_saves_keep_the_seed_and_the_largest_rate(tmp_path):
    model, optimizer = make()
    monitor = watch(model, optimizer)
    take(model, optimizer, monitor, [1])
    monitor.save(tmp_path, {"seed": 3})
    monitor.close()
    optimizer.param_groups[0]["lr"] = 1e-4  # at the end of a schedule
    resumed = watch(model, optimizer, step=1)
    for step, given in ((2, {"seed": 3}), (3, None)):
        take(model, optimizer, resumed, [step])
        resumed.save(tmp_path, given)
    [head] = load_runs(tmp_path).runs.to_dict("records")
    assert (head["seed"], head["optimizer.lr"], head["num_steps"]) == (3, 1e-2, 3)


def test_the_pages_example_runs(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    names = example("torch.nn.Linear(8, 1)")
    names["monitor"].save("runs/watched/first")  # says nothing more
    [said] = caplog.messages
    assert said.startswith("20 steps are saved, and the first 1000 cannot have loss spikes")
    assert "'rms/weight': " in capsys.readouterr().out
    assert len(load_runs(tmp_path).metrics) == 20
    assert spikes.main(["--run", "runs/watched/first", "--tensor", "weight"]) == 0
    assert "Nothing was examined: 20 steps are recorded" in capsys.readouterr().out
    planted(tmp_path / "short", (60,))
    assert not [text for text in caplog.messages if "60 steps" in text]


def test_a_run_without_losses_says_how_to_pass_them(tmp_path, caplog, capsys):
    for name, stops in (("none", 0), ("some", 3)):
        model, optimizer = make()
        monitor = watch(model, optimizer, protocol=Protocol(ignore_steps=0, window=2))
        take(model, optimizer, monitor, range(1, stops + 1))
        for step in range(stops, 5):
            loss_of(model, step).backward()
            optimizer.step()
        for _ in range(2):
            monitor.save(tmp_path / name)
    assert len([text for text in caplog.messages if "no loss is saved: call" in text]) == 1
    lacking = "no loss is recorded: call monitor.loss(loss) before each optimizer.step()"
    runs = load_runs(tmp_path)
    assert runs.runs.set_index("run")["note"].to_dict() == {"none": lacking, "some": ""}
    for run, says in (("none", True), ("some", False)):
        page = make_page(runs.only(run))
        assert (f">{lacking}<" in page.replace("\n", "")) == says and "finished, " not in page
        assert ("5 steps are recorded, and none has a finite loss." in page) == says
    commands = {
        (spikes, "--run"): ["--tensor", "0.weight"],
        (plot, "--runs"): ["y=loss", "--out", f"{tmp_path}/plot"],
        (make_figure, "--runs"): ["loss_curves", "--experiment", "any", "--out", f"{tmp_path}/out"],
        (compare, "--runs"): [],
    }
    for (command, flag), words in commands.items():
        command.main([flag, str(tmp_path / "none"), *words])
        assert lacking in "".join(capsys.readouterr())


def test_saving_tells_of_a_run_that_is_shorter_than_half_a_window(tmp_path, caplog):
    model, optimizer = make()
    monitor = watch(model, optimizer, protocol=Protocol(ignore_steps=1))
    take(model, optimizer, monitor, range(1, 6))
    monitor.save(tmp_path)
    [said] = caplog.messages
    assert said.startswith("5 steps are saved, and the first 100 cannot have loss spikes")


LIGHTNING = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
LIGHTNING |= dict(enable_model_summary=False, accelerator="cpu")
WATCH = functools.partial(watch, flush=7, protocol=PROTOCOL)


@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_a_callback_finds_planted_spikes_in_the_trainer_of_transformers(tmp_path):
    importlib.import_module("lowprec.clip")  # a CPU build of torch can then import torchvision
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Model(Planted):
        def forward(self, step):
            return transformers.utils.ModelOutput(loss=super().forward(step))

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return None

    model, data = Model(), [{"step": step} for step in range(1, 61)]
    options = dict(max_steps=60, per_device_train_batch_size=1, report_to=[], disable_tqdm=True)
    options |= dict(max_grad_norm=0.0, save_strategy="no", use_cpu=True)
    arguments = transformers.TrainingArguments(str(tmp_path), **options)
    constant = torch.optim.lr_scheduler.LambdaLR(model.optimizer, lambda _: 1.0)
    callback = example("TrainerCallback", watch=WATCH)["Watch"]()
    trainer = InOrder(
        model,
        arguments,
        train_dataset=data,
        callbacks=[callback],
        optimizers=(model.optimizer, constant),
    )
    trainer.train()
    assert_planted(tmp_path)


@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_the_trainers_losses_of_a_decoder_are_recorded(tmp_path):
    importlib.import_module("lowprec.clip")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, vocab_size=64)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    tokens = torch.randint(64, (32, 8))
    data = [{"input_ids": x, "labels": x} for x in tokens]
    options = dict(max_steps=6, per_device_train_batch_size=4, report_to=[], disable_tqdm=True)
    options |= dict(logging_steps=1, save_strategy="no", use_cpu=True)
    arguments = transformers.TrainingArguments(str(tmp_path), **options)
    callback = example("TrainerCallback")["Watch"]()
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    metrics = load_runs(tmp_path / "watched").metrics
    assert len(losses) == 6 and metrics["loss"].tolist() == pytest.approx(losses, abs=1e-3)
    assert "model.layers.0.mlp.up_proj.weight" in callback.monitor.names


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_a_callback_finds_planted_spikes_in_lightning(tmp_path):
    importlib.import_module("lowprec.clip")
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Planted()

        def named_parameters(self, *args, **kwargs):
            return self.model.named_parameters(*args, **kwargs)

        def training_step(self, step, _):
            return self.model(step)

        def configure_optimizers(self):
            return self.model.optimizer

    callback = example("Callback):\n    def on_train_start", watch=WATCH)["Watch"]()
    options = dict(default_root_dir=tmp_path, max_epochs=1)
    trainer = lightning.Trainer(**LIGHTNING, **options, callbacks=[callback])
    trainer.fit(Module(), torch.utils.data.DataLoader(range(1, 61)))
    assert_planted(tmp_path)


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_callback_watches_lightning(tmp_path, accumulated):
    importlib.import_module("lowprec.clip")
    lightning, losses = pytest.importorskip("lightning"), []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch, _):
            loss = self.layer(batch).square().mean()
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    options = dict(default_root_dir=tmp_path, accumulate_grad_batches=accumulated)
    callback = example("Callback):\n    def on_train_start")["Watch"]()
    trainer = lightning.Trainer(**LIGHTNING, **options, callbacks=[callback], max_steps=4)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(32, 8), 4))
    runs = load_runs(tmp_path / "watched")
    expected = np.reshape(losses, (4, accumulated)).mean(1)
    np.testing.assert_allclose(runs.metrics["loss"], expected, rtol=1e-5)
    assert len(runs.series("layer.weight", "rms")) == 4


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_an_accelerated_loop_is_watched(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = nn.Linear(8, 1)
    loader = torch.utils.data.DataLoader(torch.randn(32, 8), 4)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    monitor = watch(model, optimizer)
    for x in loader:
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            monitor.loss(loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    monitor.save(tmp_path / "accelerated")
    assert monitor.step == 4
    metrics = load_runs(tmp_path).metrics
    assert len(metrics) == 4 and metrics["loss"].notna().all()
