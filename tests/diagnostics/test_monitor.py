"""`watch` in the harness and in other loops: statistics, spikes, the run directory it writes."""

import copy
import importlib
import logging
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from analysis import load_runs, spike_marks
from lowprec.config.check import ConfigError, RunError
from lowprec.diagnostics import moments, watch
from lowprec.diagnostics import monitor as monitor_module
from lowprec.diagnostics.spikes import PROTOCOLS
from lowprec.optim import StableAdamW, fused
from lowprec.runs.read import read_rows, read_status
from lowprec.runs.tables import read_tensors

RULE = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
PROTOCOL = replace(PROTOCOLS["paper"], ignore_steps=10, window=20)
STATISTICS = ("rms", "grad_norm", "update_norm")


def make(kind=torch.optim.AdamW, dtype=torch.float32, **options):
    """A small model with two groups of parameters, the second with half the rate."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3), nn.LayerNorm(3)
    model = nn.Sequential(*layers).to(dtype)
    named = list(model.named_parameters())
    groups = [{"params": named[:2]}, {"params": named[2:], "lr": RULE["lr"] / 2}]
    return model, kind(groups, **RULE | options)


def loss_of(model, step, factor=1.0):
    generator = torch.Generator().manual_seed(step)
    p = next(model.parameters())
    x = torch.randn(4, 8, generator=generator).to(p)
    return model(x).square().sum() * factor


def take(model, optimizer, monitor, steps, spikes=()):
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        (loss * (30.0 if step in spikes else 1.0)).backward()
        monitor.loss(loss)
        optimizer.step()


def test_statistics_are_those_of_the_harness_to_the_bit(make_config, run_once, tmp_path):
    config, monitors = make_config({"log_every": 5}), []

    def attach(built):
        monitor = watch(built.task.model, built.state.optimizer, flush=4)
        monitors.append(monitor)
        backward = built.task.backward

        def recorded(*args):
            loss, scale = backward(*args)
            monitor.loss(loss)
            return loss, scale

        built.task.backward = recorded

    run_once(config, tmp_path / "run", spoil=attach)
    [monitor], rows = monitors, read_rows(tmp_path / "run" / "metrics.jsonl")
    ours = monitor.rows()
    assert [row["step"] for row in ours] == list(range(1, 13))
    for row, expected in zip(ours, rows, strict=True):
        assert all(row[key] == expected[key] for key in ("step", "loss", "lr", "grad_norm"))
    count = 0
    for steps, statistics, names in read_tensors(tmp_path / "run"):
        for name in STATISTICS:
            for step, values in zip(steps, statistics[name], strict=True):
                expected = dict(zip(names, values.tolist(), strict=True))
                assert {n: ours[step - 1][f"{name}/{n}"] for n in names} == expected
                count += 1
    assert count == 12 * len(STATISTICS)


class Definition:
    """AdamW's moments in float64, from the gradients alone."""

    def __init__(self, optimizer):
        self.optimizer, self.moments = optimizer, {}

    def __call__(self):
        """A row for each parameter; call it after a step."""
        rows = []
        for group in self.optimizer.param_groups:
            beta1, beta2 = map(float, group["betas"])
            for p in group["params"]:
                if p.grad is None:
                    rows.append([math.nan, 0.0, 0.0])
                    continue
                g = p.grad.double()
                t, v, u = self.moments.get(p, (0, torch.zeros_like(g), torch.zeros_like(g)))
                t, v, u = t + 1, beta1 * v + (1 - beta1) * g, beta2 * u + (1 - beta2) * g * g
                self.moments[p] = t, v, u
                v, u = v / (1 - beta1**t), u / (1 - beta2**t)
                rms = (g * g / u.clamp(min=group["eps"] ** 2)).mean().sqrt()
                update = float(group["lr"]) * v / (u.sqrt() + group["eps"])
                rows.append([x.item() for x in (rms, g.norm(), update.norm())])
        return np.array(rows)


KINDS = {
    "AdamW": (torch.optim.AdamW, {"foreach": False}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "lr as a tensor": (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "foreach": False}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.0}),
    "float64": (torch.optim.AdamW, {"dtype": torch.float64}),
    "StableAdamW": (StableAdamW, {"clip_threshold": None}),
}


@pytest.mark.usefixtures("right_interpreter")
@pytest.mark.parametrize("kind", [*KINDS, "kernels"])
def test_statistics_follow_their_definition(kind, monkeypatch, device):
    model, optimizer = make(*KINDS[kind][:1], **KINDS[kind][1]) if kind in KINDS else make()
    if kind == "kernels":  # interpreted without a GPU
        monkeypatch.setattr(fused, "DEVICES", (device.type,))
        model.to(device)
    definition, expected = Definition(optimizer), []
    monitor = watch(model, optimizer, flush=4)
    for step in range(1, 7):
        model.zero_grad()
        loss_of(model, step).backward()
        if step in (1, 4):
            model[0].bias.grad = None  # which is then corrected by its own count
        optimizer.step()
        expected.append(definition())
    names = [name for name, _ in model.named_parameters()]
    assert monitor.names == names
    for row, table in zip(monitor.rows(), expected, strict=True):
        found = [[row[f"{statistic}/{name}"] for statistic in STATISTICS] for name in names]
        np.testing.assert_allclose(found, table, rtol=1e-4)
        assert row["grad_norm"] == pytest.approx(math.hypot(*table[:, 1]), rel=1e-4)
        assert math.isnan(row["loss"]) and row["lr"] == pytest.approx(1e-2)


@pytest.mark.usefixtures("right_interpreter")
@pytest.mark.parametrize("change", ["addresses", "a layout", "moments", "a moment's data", "rows"])
def test_what_has_changed_since_the_last_step_is_read_anew(change, monkeypatch, device):
    model, optimizer = make()
    monkeypatch.setattr(fused, "DEVICES", (model.to(device)[0].weight.device.type,))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    monitor, kept, decisions = watch(model, optimizer), [], []
    decide = fused.first_unfit
    monkeypatch.setattr(moments, "first_unfit", lambda x: decisions.append(1) or decide(x))
    for step in (1, 2, 3):
        kept.append([p.grad for p in params])  # so that no address comes back
        model.zero_grad()
        loss_of(model, step).backward()
        if step == 3:
            weight, state = params[0], optimizer.state[params[0]]
            if change == "a layout":
                weight.grad = weight.grad.T.contiguous().T
            elif change == "moments":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif change == "a moment's data":
                kept.append(state["exp_avg"].data)
                state["exp_avg"].data = state["exp_avg"].T.contiguous().T
            elif change == "rows":
                weight.grad = None
        optimizer.step()
        found = monitor.rows()[-1]
    assert len(decisions) == (1 if change == "addresses" else 2)
    new = watch(model, optimizer)
    new.read()
    expected = new.rows()[0] | {"step": 3}
    assert all(found[key] == pytest.approx(expected[key], rel=0, nan_ok=True) for key in expected)


class Forbidden(TorchDispatchMode):
    """Fails where the host would wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not func.__name__.startswith(("_local_scalar_dense", "nonzero")), func
        if func.__name__.startswith("_to_copy"):
            assert (kwargs or {}).get("dtype", args[0].dtype) != args[0].dtype  # a cast, no copy
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["foreach", "fused", "lr as a tensor", "StableAdamW"])
def test_nothing_is_read_back_before_the_flush(kind):
    model, optimizer = make(KINDS[kind][0], **KINDS[kind][1])
    monitor = watch(model, optimizer, flush=3)
    take(model, optimizer, monitor, [1])  # indices are copied to the device
    read = monitor.read
    for step in (2, 3):
        loss = loss_of(model, step)
        loss.backward()
        monitor._handle.remove()
        optimizer.step()
        with Forbidden():
            monitor.loss(loss)
            read()
    with Forbidden(), pytest.raises(AssertionError):
        monitor.flush()
    assert len(monitor.rows()) == 3


def test_losses_of_micro_batches_are_averaged_and_tensors_sampled():
    model, optimizer = make()
    monitor = watch(model, optimizer, every=4, flush=3)
    for _ in range(9):
        for micro in (1.0, 2.0):
            monitor.loss(torch.tensor(micro))
            loss_of(model, 1).backward()
        optimizer.step()
    monitor.loss(3.0)  # of the next step
    rows = monitor.rows()
    assert [row["loss"] for row in rows] == [1.5] * 9
    assert [row["step"] for row in rows if "rms/0.weight" in row] == [1, 4, 8]
    assert ["grad_norm" in row for row in rows] == ["rms/0.weight" in row for row in rows]
    monitor.close()
    optimizer.step()
    assert monitor.step == len(monitor.rows()) == 9


@pytest.mark.parametrize("kind", ["foreach", "fused", "StableAdamW"])
def test_a_scaler_unscales_and_skips(kind):
    (model, optimizer), (other, twin) = (make(KINDS[kind][0], **KINDS[kind][1]) for _ in range(2))
    monitor, expected = watch(model, optimizer), watch(other, twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in (1, 2, 3):
        for each, one in ((model, optimizer), (other, twin)):
            each.zero_grad()
            is_ours = one is optimizer
            (scaler.scale(loss_of(each, step)) if is_ours else loss_of(each, step)).backward()
        if step == 2:
            model[0].weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            twin.step()
    rows = monitor.rows()
    if kind == "fused":
        skipped = rows.pop(1)
        assert all(math.isnan(skipped[f"rms/{name}"]) for name in monitor.names)
        assert not any(skipped[f"update_norm/{name}"] for name in monitor.names)
        assert skipped["grad_norm"] == math.inf
    for row, other in zip(rows, expected.rows(), strict=True):
        for key in row.keys() - {"step", "loss", "lr"}:
            assert row[key] == pytest.approx(other[key], rel=1e-5), key


def test_losses_of_a_skipped_step_can_be_dropped():
    model, optimizer = make()
    monitor, scaler = watch(model, optimizer), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 2:
            model[0].weight.grad[0, 0] = math.inf
        monitor.loss(float(step))
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            monitor.drop_losses()
    assert [row["loss"] for row in monitor.rows()] == [1.0, 3.0]


def test_losses_and_rates_are_copied_when_given():
    model, optimizer = make(lr=torch.tensor(1.0), foreach=False)
    monitor, loss = watch(model, optimizer), torch.zeros(())
    for step in (1, 2, 3):
        loss.fill_(step)
        optimizer.param_groups[0]["lr"].fill_(1 / step)
        monitor.loss(loss)
        loss.fill_(9.0)
        loss_of(model, step).backward()
        optimizer.step()
    assert [row["loss"] for row in monitor.rows()] == [1.0, 2.0, 3.0]
    assert [row["lr"] for row in monitor.rows()] == pytest.approx([1.0, 0.5, 1 / 3])


def test_only_the_tables_of_recorded_steps_stay_in_memory():
    model, optimizer = make()
    monitor = watch(model, optimizer, every=10, flush=10)
    take(model, optimizer, monitor, range(1, 21))
    monitor.flush()
    held = [table if table.base is None else table.base for _, table in monitor._tables]
    size = 4 * len(monitor.names) * len(STATISTICS)
    assert [table.nbytes for table in held] == [size] * 3


def test_a_wrapped_optimizer_and_model_are_looked_into():
    model, optimizer = make()
    wrapper = type("Wrapper", (torch.optim.Optimizer,), {"__init__": lambda self: None})()
    wrapper.optimizer = optimizer
    outer = type(wrapper)()
    outer.optimizer = wrapper
    compiled = nn.Sequential(torch.compile(model, backend="eager"))
    monitor = watch(compiled, outer)
    loss_of(model, 1).backward()
    optimizer.step()
    assert monitor.step == 1 and monitor.names[0] == "0.0.weight"


def test_the_model_in_compile_and_ddp_is_named(monkeypatch):
    wrap = type("Wrap", (nn.Module,), {"forward": lambda self, x: self.module(x)})
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", wrap)  # without processes
    model, optimizer = make()
    for is_inside in (False, True):
        wrapped = wrap()
        wrapped.module = torch.compile(model, backend="eager") if is_inside else model
        wrapped = torch.compile(wrapped, backend="eager")
        monitor = watch(wrapped, optimizer)
        assert monitor.model_name == "Sequential" and monitor.names[0] == "0.weight"
        monitor.close()


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_a_compiled_step_is_watched():
    rows = []
    for compiled in (False, True):
        model, optimizer = make(lr=torch.tensor(1e-2))
        monitor = watch(model, optimizer)
        step = torch.compile(lambda o=optimizer: o.step(), backend="eager")
        for n in (1, 2, 3):
            model.zero_grad()
            loss_of(model, n).backward()
            step() if compiled else optimizer.step()
        rows.append(monitor.rows())
    for eager, row in zip(*rows, strict=True):
        assert row == pytest.approx(eager, rel=1e-3, nan_ok=True)  # the step rounds otherwise


def test_what_cannot_be_watched_is_refused():
    model, _ = make()
    halves = [*model.parameters(), nn.Parameter(torch.zeros(2, device="meta"))]
    with pytest.raises(ValueError, match="one device"):
        watch(model, torch.optim.AdamW(halves))
    for kind, option, fault in (
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True: "),
        (torch.optim.Adam, {"weight_decay": 0.1}, "weight_decay=0.1: Adam adds it to the gradient"),
    ):
        model, optimizer = make(kind, weight_decay=0.0)
        optimizer.param_groups[1] |= option  # any group counts
        loss_of(model, 1).backward()
        watch(model, optimizer)
        with pytest.raises(ValueError, match=fault):
            optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch(model, optimizer)
    with pytest.raises(ValueError, match="SGD has no exp_avg and exp_avg_sq"):
        optimizer.step()
    _, optimizer = make()
    watch(model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "param_names": ["x"]})
    with pytest.raises(ValueError, match=r"further parameters: close\(\) and watch again"):
        optimizer.step()


def planted(folder, saves, seed=0):
    """A run with an RMS spike at step 40 and a loss spike at step 43, saved at these steps."""
    model, optimizer = make()
    monitor = watch(model, optimizer, flush=7, protocol=PROTOCOL)
    for step in range(1, 61):
        optimizer.zero_grad()
        loss = loss_of(model, step) / 100 + (2.0 if step in (43, 44) else 0.0)
        (loss * (30.0 if step == 40 else 1.0)).backward()
        monitor.loss(loss)
        optimizer.step()
        if step in saves:
            monitor.save(folder, {"seed": seed, "optimizer.eps": 1e-6})
    return monitor


def test_a_planted_spike_is_found_and_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lowprec"):
        monitor = planted(tmp_path, ())
        monitor.flush()
    found = {(s.step, s.tensor if s.tensor is None else monitor.names[s.tensor])
             for s in monitor.spikes}  # fmt: skip
    assert {(43, None), (40, "0.weight")} <= found and len({s for s, _ in found}) == 2
    [said] = caplog.messages
    assert said.startswith("loss spike at step 43: 2.")


def test_what_cannot_be_saved_is_refused(tmp_path):
    model, optimizer = make()
    with pytest.raises(ValueError, match="protocol='papr': must be a Protocol or one of paper"):
        watch(model, optimizer, protocol="papr")
    monitor = watch(model, optimizer)
    take(model, optimizer, monitor, [1])
    with pytest.raises(ConfigError, match="batchsize: no such key; nearest: batch_size"):
        monitor.save(tmp_path / "run", {"batchsize": 3})
    with pytest.raises(ConfigError, match="seed='zero': not allowed"):
        monitor.save(tmp_path / "run", {"seed": "zero"})
    assert not (tmp_path / "run").exists() and len(monitor.rows()) == 1


@pytest.mark.parametrize("number", [{"every": 0}, {"flush": 0}, {"step": -1}])
def test_numbers_out_of_bounds_are_refused_before_a_step(number):
    [(name, value)] = number.items()
    with pytest.raises(ValueError, match=f"^{name}={value}: must be at least {value + 1}$"):
        watch(*make(), **number)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_run_of_the_harness_is_not_written_into(make_config, run_once, tmp_path):
    run_once(make_config(), tmp_path / "run")
    before = content(tmp_path / "run")
    model, optimizer = make()
    for step in (0, 3):
        monitor = watch(model, optimizer, step=step)
        take(model, optimizer, monitor, [1])
        with pytest.raises(RunError, match=r"run has a run that watch did not record"):
            monitor.save(tmp_path / "run")
        monitor.close()
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(RunError, match="did not record"):
        monitor.save(tmp_path / "run")
    del before["config.yaml"]
    assert content(tmp_path / "run") == before


def test_a_second_watched_run_does_not_write_into_the_first(tmp_path):
    planted(tmp_path, (20, 60))
    before = content(tmp_path)
    model, optimizer = make()
    monitor = watch(model, optimizer)
    take(model, optimizer, monitor, [1])
    with pytest.raises(RunError, match="has another run: save elsewhere or, to continue it"):
        monitor.save(tmp_path)
    assert content(tmp_path) == before
    monitor.save(tmp_path / "other")
    assert len(load_runs(tmp_path / "other").metrics) == 1


@pytest.mark.parametrize("saves", [(60,), (20, 30, 60)])
def test_the_run_directory_opens_in_analysis(tmp_path, saves):
    folder = tmp_path / "runs" / "mine"
    monitor, twin = planted(folder, saves), planted(tmp_path / "none", ())
    assert monitor.rows() == []
    runs = load_runs(tmp_path / "runs")
    [head] = runs.runs.to_dict("records")
    assert (head["run"], head["state"], head["note"]) == ("mine", "finished", "")
    assert head["optimizer.name"] == "adamw" and head["optimizer.lr"] == 1e-2
    assert head["model.name"] == "Sequential" and head["num_steps"] == 60
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
    spikes = runs.events.dropna(subset="spike")
    assert [*spikes["step"]] == [40, 43] and [*spikes["spike"]] == ["rms", "loss"]


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


def test_a_dashboard_is_given_the_rows_after_the_last_one():
    model, optimizer = make()
    monitor, logged = watch(model, optimizer), []
    take(model, optimizer, monitor, range(1, 6))
    run = SimpleNamespace(log=lambda row, step: logged.append((step, row)))
    names = example("run.log", monitor=monitor, run=run, last=3)
    assert logged == [(row["step"], row) for row in monitor.rows()[3:]] and names["last"] == 5


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


def example(word, **names):
    """Runs the README's example that contains a word; its names."""
    text = Path(monitor_module.__file__).with_name("README.md").read_text()
    [code] = [c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in c]
    exec(code, names := {"watch": watch, **names})
    return names


def test_the_pages_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example("torch.nn.Linear(8, 1)")
    assert "'rms/weight': " in capsys.readouterr().out
    assert len(load_runs(tmp_path).metrics) == 20


@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_a_callback_watches_the_trainer_of_transformers(tmp_path):
    importlib.import_module("lowprec.clip")  # a CPU build of torch can then import torchvision
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

    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    options |= dict(enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path)
    options |= dict(
        callbacks=[example("Callback):\n    def on_train_start")["Watch"]()], max_steps=4
    )
    trainer = lightning.Trainer(accumulate_grad_batches=accumulated, **options)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(32, 8), 4))
    runs = load_runs(tmp_path / "watched")
    expected = np.reshape(losses, (4, accumulated)).mean(1)
    np.testing.assert_allclose(runs.metrics["loss"], expected, rtol=1e-5)
    assert len(runs.series("layer.weight", "rms")) == 4


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_an_accelerated_loop_is_watched(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(8, 1)
    loader = torch.utils.data.DataLoader(torch.randn(32, 8), 4)
    names = example("Accelerator", model=model, loader=loader,
                    optimizer=torch.optim.AdamW(model.parameters()))  # fmt: skip
    assert names["monitor"].step == 4
    metrics = load_runs(tmp_path).metrics
    assert len(metrics) == 4 and metrics["loss"].notna().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.optim.AdamW, StableAdamW])
def test_replays_of_a_cuda_graph_are_read_by_hand(kind):
    options = {"capturable": True} if kind is torch.optim.AdamW else {"clip_threshold": None}
    model, optimizer = make(kind, **options)
    model.cuda()
    monitor, definition, expected = watch(model, optimizer, flush=2), Definition(optimizer), []
    x = torch.randn(4, 8, device="cuda")

    def step():
        model(x).square().sum().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            optimizer.zero_grad()
            step()
            expected.append(definition())
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
    torch.cuda.synchronize()
    for _ in range(3):
        for p in model.parameters():
            p.grad.zero_()
        graph.replay()
        monitor.read()
        expected.append(definition())
    rows = monitor.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row, table in zip(rows, expected, strict=True):
        found = [[row[f"{statistic}/{name}"] for statistic in STATISTICS] for name in monitor.names]
        np.testing.assert_allclose(found, table, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kind", ["foreach", "fused", "capturable"])
def test_the_step_on_a_gpu_neither_waits_nor_differs(kind):
    model, optimizer = make(**{kind: True})
    model.cuda()
    optimizer.state.clear()
    monitor, definition = watch(model, optimizer, flush=8), Definition(optimizer)
    expected = []
    for step in range(1, 7):
        model.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        monitor._handle.remove()
        optimizer.step()
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            monitor.loss(loss)
            monitor.read()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected.append(definition())
    for row, table in zip(monitor.rows(), expected, strict=True):
        found = [[row[f"{statistic}/{name}"] for statistic in STATISTICS] for name in monitor.names]
        np.testing.assert_allclose(found, table, rtol=1e-4)
