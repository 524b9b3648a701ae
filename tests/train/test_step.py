"""Compiled blocks and graphs compute what the eager step computes."""

import contextlib
import functools
import shutil
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from lowprec.config.schema import CLIPPING
from lowprec.data.loader import Batch
from lowprec.optim import StableAdamW
from lowprec.train import step as step_module
from lowprec.train.distributed import ONE_PROCESS
from lowprec.train.step import GraphedStep, TrainStep
from tests.same import recorded

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, NEEDS_COMPILER])


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own ways
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_compiled_blocks_follow_eager_ones(make_config, run_once, tmp_path, monkeypatch, backend):
    short = {"num_steps": 2, "model.vision_layers": 1}
    run_once(make_config(short), tmp_path / "eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    run_once(make_config({**short, "compile": True}), tmp_path / "compiled")
    eager, compiled = (recorded(tmp_path / name, "loss") for name in ("eager", "compiled"))
    assert compiled == pytest.approx(eager, rel=1e-4)


def test_checkpointing_changes_no_gradient(make_config, run_once, tmp_path):
    changes = {"num_steps": 3, "intervention.name": "kq_norm"}
    run_once(make_config(changes), tmp_path / "a")
    run_once(make_config({**changes, "checkpointing": True}), tmp_path / "b")
    plain, recomputed = (recorded(tmp_path / name, "grad_norm") for name in "ab")
    assert plain == pytest.approx(recomputed, rel=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_stochastic_rounding_draws_new_numbers_at_each_backward(built, accumulate):
    changes = {"accumulate": accumulate, "precision.recipe": "nvfp4_rht_sr"}
    built = built({**changes, "model.patch_dropout": 0.0})  # only rounding draws numbers
    built.task.model.train()
    batch, gradients, state = next(built.batches_from(1)), [], torch.get_rng_state()
    for repeats in (False, False, True):
        if repeats:
            torch.set_rng_state(state)
        built.task.model.zero_grad()
        built.task.backward(batch, lambda loss: loss)
        gradients.append(built.task.model.visual.conv1.weight.grad.clone())
    assert torch.equal(gradients[0], gradients[2]) and not torch.equal(*gradients[:2])


def test_16_bit_runs_follow_the_fp32_curve(make_config, run_once, tmp_path):
    losses = {}
    for autocast in ("fp32", "bf16", "fp16", "pure_bf16", "pure_fp16"):
        changes = {"num_steps": 12, "save_every": 12, "precision.autocast": autocast}
        changes |= {"model.vision_layers": 1, "batch_size": 8}
        if "fp16" in autocast:
            changes |= {"scaler.name": "fixed", "scaler.init_scale": 256.0}
        run_once(make_config(changes), tmp_path / autocast)
        losses[autocast] = recorded(tmp_path / autocast, "loss")[-1]
    assert losses == pytest.approx(dict.fromkeys(losses, losses["fp32"]), abs=0.15)


GRAPHED = ["bf16", "fp16 fixed", *(f"bf16 {key}" for key in ("zclip", "skip_sigmas"))]
GRAPHED += ["bf16 change", "bf16 lr_scale", "bf16 checkpointing"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", GRAPHED)
def test_graphed_step_equals_the_ungraphed_one(
    make_config, run_once, tmp_path, monkeypatch, setting
):
    changes = {"compile": True, "device": "cuda", "precision.autocast": setting.split()[0]}
    changes |= {"deterministic": True, "model.patch_dropout": 0.5}
    if "fixed" in setting:
        changes |= {"scaler.name": "fixed", "scaler.init_scale": 256.0}
    if (key := setting.split()[-1]) in CLIPPING:
        changes |= {"optimizer.name": CLIPPING[key], f"optimizer.{key}": 0.5}
        monkeypatch.setattr("lowprec.optim.clipping.ZCLIP_FIRST", 3)
        monkeypatch.setattr("lowprec.optim.clipping.WINDOW", 6)
    if key == "lr_scale":
        changes["optimizer.lr_scale"] = {"image": 0.1}
    if key == "checkpointing":
        changes["checkpointing"] = True
    if key == "change":
        changes["precision_change"] = {"step": 6, "recipe": "switchback"}
    run_once(make_config(changes), tmp_path / "graph")
    monkeypatch.setattr("lowprec.train.loop.can_capture", lambda config, device: False)
    run_once(make_config(changes), tmp_path / "plain")
    assert recorded(tmp_path / "graph", "loss") == recorded(tmp_path / "plain", "loss")


def task_of(model):
    return SimpleNamespace(model=model, parallel=model, world=ONE_PROCESS)


class LinearStep:
    """What GraphedStep needs of a TrainStep, for one matrix."""

    def __init__(self, device):
        self.weight = torch.nn.Parameter(torch.eye(4, device=device))
        self.task = task_of(torch.nn.Module())
        self.optimizer = StableAdamW([("weight", self.weight)], lr=0.1)
        self.frozen = self.optimizer.frozen = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, batch):
        loss = (batch.images @ self.weight).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.detach()}


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_capture_changes_nothing_and_its_device_is_the_current_one(monkeypatch, is_frozen):
    """Also once a run has diverged (`is_frozen`). Here the capture itself takes a step, too."""
    current, seen, norm, x = [], [], torch.nn.BatchNorm1d(3), torch.randn(8, 3)

    @contextlib.contextmanager
    def guard(device):
        current.append(device)
        yield
        current.pop()

    class Step:
        frozen, optimizer = torch.tensor(is_frozen), SimpleNamespace(param_groups=[])
        task = task_of(torch.nn.Sequential(norm))

        def __call__(self, batch):
            assert current == [self.frozen.device]
            seen.append((self.frozen.item(), [buffer.clone() for buffer in norm.buffers()]))
            norm(x)

    norm(x)
    before = [buffer.clone() for buffer in norm.buffers()]
    monkeypatch.setattr(torch, "cuda", MagicMock())
    monkeypatch.setattr(step_module, "on_device", guard)
    graphed = GraphedStep(Step(), MagicMock())
    assert [frozen for frozen, _ in seen] == [True, True, True, is_frozen]
    assert Step.frozen.item() == is_frozen
    _, _, (_, warmed), (_, captured) = seen
    assert all(map(torch.equal, captured, before)) and not torch.equal(warmed[0], before[0])
    graphed.graph.replay = lambda: Step()(None)
    graphed(MagicMock())
    assert not current


def test_a_replay_gathers_every_sharded_module_anew(monkeypatch):
    """What an evaluation gathered is older than the weights that the graph has updated."""
    resharded = []

    class Sharded(torch.nn.Sequential):
        def reshard(self):
            resharded.append(self)

    model = Sharded(torch.nn.Linear(2, 2), torch.nn.Sequential(Sharded()))

    class Step:
        frozen, optimizer, task = torch.tensor(False), SimpleNamespace(param_groups=[]), None

        def __call__(self, batch):
            return {}

    Step.task = task_of(model)
    monkeypatch.setattr(step_module, "FSDPModule", Sharded)
    monkeypatch.setattr(torch, "cuda", MagicMock())
    monkeypatch.setattr(step_module, "on_device", lambda device: contextlib.nullcontext())
    graphed = GraphedStep(Step(), MagicMock())
    graphed.graph.replay = lambda: resharded.append("replay")
    graphed(MagicMock())
    assert resharded == [model, model[1][0], "replay"]


def test_a_capture_that_fails_frees_its_graph(monkeypatch):
    """NCCL would wait for it at the end of the process."""

    class Step:
        frozen, optimizer = torch.tensor(False), SimpleNamespace(param_groups=[])
        task = task_of(torch.nn.Module())

        def __call__(self, batch):
            if torch.cuda.graph.called:
                raise RuntimeError("in the capture")

    cuda = MagicMock()
    cuda.graph.return_value.__exit__.return_value = False
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(step_module, "on_device", lambda device: contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="in the capture"):
        GraphedStep(Step(), MagicMock())
    cuda.CUDAGraph.return_value.reset.assert_called_once_with()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_graphed_step_on_another_device_than_the_current_one():
    torch.cuda.set_device(0)
    batches = [Batch(torch.randn(8, 4), *torch.zeros(3, 1)).pin_memory() for _ in range(3)]
    plain, losses = LinearStep("cuda:0"), []
    plain.optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="cuda:0")
    graphed = GraphedStep(step := LinearStep("cuda:1"), batches[0])
    step.optimizer.param_groups[0]["lr"].fill_(0.1)
    for batch in batches:
        pair = plain(batch.to(torch.device("cuda:0"))), graphed(batch)
        losses.append([values["loss"].item() for values in pair])
    assert all(a == pytest.approx(b, rel=1e-5) for a, b in losses)
    assert step.optimizer.steps == [3] and torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_a_step_does_not_wait_for_the_device(built):
    built = built({"device": "cuda", "precision.autocast": "bf16"})
    step = TrainStep(built.task, built.state.optimizer, built.state.scaler)
    batch = next(built.batches_from(1)).to(torch.device("cuda"))
    step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_resume_on_the_gpu_is_bitwise(make_config, run_once, tmp_path, compiled):
    changes = {"device": "cuda", "compile": compiled, "deterministic": True}
    changes |= {"precision.autocast": "bf16", "model.patch_dropout": 0.5}
    run_once(make_config(changes), tmp_path / "whole")
    ended, _ = run_once(make_config(changes), tmp_path / "cut", stop_at=5)
    assert (ended.state, ended.step) == ("preempted", 5)
    run_once(make_config(changes), tmp_path / "cut")
    whole, cut = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "cut"))
    assert whole == cut
