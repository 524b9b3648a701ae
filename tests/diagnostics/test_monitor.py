"""`watch` in the harness and in other loops: statistics, losses, spikes."""

import copy
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec.diagnostics import moments, watch
from lowprec.optim import StableAdamW, fused
from lowprec.runs.read import read_rows
from lowprec.runs.tables import read_tensors
from tests.diagnostics.watched import (
    STATISTICS,
    Definition,
    assert_recorded,
    example,
    loss_of,
    make,
    planted,
    take,
)


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
    assert monitor.names == [name for name, _ in model.named_parameters()]
    for row in assert_recorded(monitor, expected):
        assert math.isnan(row["loss"]) and row["lr"] == pytest.approx(1e-2)


@pytest.mark.usefixtures("right_interpreter")
@pytest.mark.parametrize(
    "change", ["addresses", "a layout", "a moment", "a moment's data", "groups"]
)
def test_what_has_changed_since_the_last_step_is_read_anew(change, monkeypatch, device):
    model, optimizer = make()
    monkeypatch.setattr(fused, "DEVICES", (model.to(device)[0].weight.device.type,))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    monitor, kept, decisions = watch(model, optimizer), [], []
    decide = fused.first_unfit
    monkeypatch.setattr(moments, "first_unfit", lambda x: decisions.append(1) or decide(x))
    for step in (1, 2):
        kept.append([p.grad for p in params])  # so that no address comes back
        model.zero_grad()
        loss_of(model, step).backward()
        if step == 2:
            weight, state = params[0], optimizer.state[params[0]]
            if change == "a layout":
                weight.grad = weight.grad.T.contiguous().T
            elif change == "a moment":  # at the same address
                state["exp_avg"] = state["exp_avg"].view(8, 16).T
            elif change == "groups":
                first, second = (group["params"] for group in optimizer.param_groups)
                second.insert(0, first.pop())
            elif change == "a moment's data":
                kept.append(state["exp_avg"].data)
                state["exp_avg"].data = state["exp_avg"].T.contiguous().T
        optimizer.step()
        found = monitor.rows()[-1]
    assert len(decisions) == (1 if change == "addresses" else 2)
    new = watch(model, optimizer)
    new.read()
    expected = new.rows()[0] | {"step": 2}
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


def test_losses_of_single_samples_are_refused():
    monitor = watch(*make())
    monitor.loss(torch.ones(1))
    with pytest.raises(ValueError, match=r"loss \[2\]: must be one number"):
        monitor.loss(torch.ones(2))


@pytest.mark.parametrize("order", ["before", "after", "never at first"])
def test_losses_given_after_their_step_are_warned_of_once(order, caplog):
    model, optimizer = make()
    monitor = watch(model, optimizer, step=7)
    for step in range(4):
        loss_of(model, step).backward()
        for is_before in (True, False):
            if is_before == (order == "before"):
                for micro in (1.0, 2.0) if order != "never at first" or step > 1 else ():
                    monitor.loss(micro)
            if is_before:
                optimizer.step()
    late = [text for text in caplog.messages if "if you call it after the step, each" in text]
    assert len(late) == (order == "after") and all("step 8 had no loss" in text for text in late)


@pytest.mark.parametrize("kind", ["foreach", "fused", "StableAdamW"])
def test_a_scaler_unscales_and_skips_and_losses_of_a_skip_can_be_dropped(kind):
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
        monitor.loss(float(step))
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before and kind != "fused":  # whose step skips by itself
            monitor.drop_losses()
        if step != 2:
            twin.step()
    rows = monitor.rows()
    if kind == "fused":
        skipped = rows.pop(1)
        assert all(math.isnan(skipped[f"rms/{name}"]) for name in monitor.names)
        assert not any(skipped[f"update_norm/{name}"] for name in monitor.names)
        assert skipped["grad_norm"] == math.inf
    assert [row["loss"] for row in rows] == [1.0, 3.0]
    for row, other in zip(rows, expected.rows(), strict=True):
        for key in row.keys() - {"step", "loss", "lr"}:
            assert row[key] == pytest.approx(other[key], rel=1e-5), key


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
    with pytest.raises(ValueError, match="SGD has no exp_avg and exp_avg_sq .* use AdamW, Adam or"):
        watch(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["betas"] = (0.98, 0.92, 0.99)  # as Adan's
    with pytest.raises(ValueError, match="AdamW has 3 betas: RMS_t needs the two of Adam"):
        watch(model, optimizer)
    with pytest.raises(ValueError, match="the optimizer has no parameter of the model"):
        watch(copy.deepcopy(model), torch.optim.AdamW(model.parameters()))
    optimizer = torch.optim.Adamax(model.parameters())  # only its state shows it
    watch(model, optimizer)
    with pytest.raises(ValueError, match="Adamax has no exp_avg and .* use AdamW, Adam or"):
        optimizer.step()
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    watch(embedding, optimizer)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="needs dense gradients"):
        optimizer.step()


def debias(optimizer, *_):
    """Makes the second moments such as other libraries' StableAdamW keeps: without correction."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p]["exp_avg_sq"] = p.grad.square()


@pytest.mark.parametrize("is_debiased", [False, True])
def test_moments_that_are_not_adams_are_warned_of_once(is_debiased, caplog):
    model, optimizer = make()
    if is_debiased:
        optimizer.register_step_post_hook(debias)
    for _ in range(2):  # only of a new optimizer is the first RMS_t known
        monitor = watch(model, optimizer, flush=2)
        take(model, optimizer, monitor, range(1, 5))
        monitor.flush()
        monitor.close()
    expected = ["RMS_t of the first update is at most 0.1, not 1"]
    assert [text.partition(":")[0] for text in caplog.messages] == expected * is_debiased


def test_a_resumed_run_may_load_its_optimizer_after_watch(caplog):
    model, optimizer = make()
    monitor = watch(model, optimizer, step=50)
    earlier_model, earlier = make()
    loss_of(earlier_model, 1).backward()
    earlier.step()
    for state in earlier.state.values():
        state["exp_avg_sq"] += 1e4  # far above the gradients that follow
    optimizer.load_state_dict(earlier.state_dict())
    take(model, optimizer, monitor, range(51, 53))
    monitor.flush()
    assert "RMS_t of the first" not in caplog.text


@pytest.mark.parametrize("kind", [torch.optim.AdamW, StableAdamW])
def test_another_list_of_parameters_would_take_the_names_of_others_and_is_refused(kind):
    def further(groups, optimizer):
        x = {"params": [nn.Parameter(torch.zeros(2))], "param_names": ["x"]}
        optimizer.add_param_group(x)

    def moved(groups, optimizer):
        groups[1]["params"].append(groups[0]["params"].pop())

    def exchanged(groups, optimizer):
        groups[1]["params"][-1] = nn.Parameter(torch.zeros(3))

    for change in (further, moved, exchanged):
        model, optimizer = make(kind)
        watch(model, optimizer)
        loss_of(model, 1).backward()
        change(optimizer.param_groups, optimizer)
        with pytest.raises(ValueError, match=r"other parameters, .*: close\(\) and watch again"):
            optimizer.step()


def test_a_planted_spike_is_found_and_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lowprec"):
        monitor = planted(tmp_path, ())
        monitor.flush()
    found = {(s.step, s.tensor if s.tensor is None else monitor.names[s.tensor])
             for s in monitor.spikes}  # fmt: skip
    assert {(43, None), (40, "0.weight")} <= found and len({s for s, _ in found}) == 2
    [said] = caplog.messages
    assert said.startswith("loss spike at step 43: 2.")


@pytest.mark.parametrize("number", [{"every": 0}, {"flush": 0}, {"step": -1}])
def test_numbers_out_of_bounds_are_refused_before_a_step(number):
    [(name, value)] = number.items()
    with pytest.raises(ValueError, match=f"^{name}={value}: must be at least {value + 1}$"):
        watch(*make(), **number)


def test_a_dashboard_is_given_the_rows_after_the_last_one():
    model, optimizer = make()
    monitor, logged = watch(model, optimizer), []
    take(model, optimizer, monitor, range(1, 6))
    run = SimpleNamespace(log=lambda row, step: logged.append((step, row)))
    names = example("run.log", monitor=monitor, run=run, last=3)
    assert logged == [(row["step"], row) for row in monitor.rows()[3:]] and names["last"] == 5


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
    rows = assert_recorded(monitor, expected, rtol=1e-3)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


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
    assert_recorded(monitor, expected)
