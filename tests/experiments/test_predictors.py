"""Curvature and kurtosis: their definitions, and that measuring them changes no run."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments import predictors
from experiments.curvature import curvature, hessian_product, kurtosis, plain_task
from lowprec.config.check import ConfigError, RunError
from lowprec.config.schema import Config, OptimizerConfig, ScheduleConfig
from lowprec.data.open import open_data
from lowprec.optim.stable_adamw import StableAdamW
from lowprec.runs.read import read_rows
from lowprec.train.build import build
from lowprec.train.metrics import Ended
from lowprec.train.run import train_run

PATCHES = "visual.conv1.weight"


def test_kurtosis_is_that_of_the_definition_in_float64():
    for scale, shift in ((1.0, 0.0), (1e-12, 0.0), (3.0, 5.0)):
        x = scale * torch.randn(40, 50).exp() + shift
        values = x.double().numpy()
        deviations = values - values.mean()
        expected = np.mean(deviations**4) / np.mean(deviations**2) ** 2 - 3
        assert kurtosis(x).item() == pytest.approx(expected, rel=1e-4) and expected > 5
    assert kurtosis(torch.randn(10**6)).abs() < 0.05


def test_the_product_with_the_hessian_is_the_difference_of_gradients(make_config):
    task = plain_task(build(make_config({"model.vision_layers": 1}), None))
    model = task.model.double()
    params = dict(model.named_parameters())
    pixels, tokens = torch.randn(8, 3, 32, 32).double(), torch.randint(1, 512, (8, 8))

    def loss():
        return task.loss_fn(**model(pixels, tokens))

    def moved(step):
        with torch.no_grad():
            for name, p in params.items():
                p.add_(gradient[name], alpha=step)

    with sdpa_kernel(SDPBackend.MATH):
        gradient, product = hessian_product(loss(), params)
        moved(1e-8)
        above = torch.autograd.grad(loss(), [*params.values()])
        moved(-2e-8)
        below = torch.autograd.grad(loss(), [*params.values()])
    for high, low, exact in zip(above, below, product.values(), strict=True):
        torch.testing.assert_close(exact, (high - low) / 2e-8, rtol=1e-4, atol=1e-5)
    assert max(x.abs().max() for x in product.values()) > 0.1


def state(moments, step, **rule):
    """The objects of a run before a step, with parameters of these second moments."""
    params = [(name, torch.nn.Parameter(torch.ones(len(u)))) for name, u in moments.items()]
    optimizer = StableAdamW(params)
    for name, u in moments.items():
        optimizer.tensors()["exp_avg_sq"][name].copy_(torch.tensor(u))
    schedule = ScheduleConfig("constant", warmup_steps=0)
    config = Config(num_steps=step, optimizer=OptimizerConfig(**rule), schedule=schedule)
    return SimpleNamespace(config=config, state=SimpleNamespace(optimizer=optimizer))


def test_curvature_weights_each_direction_by_the_second_moment_with_its_gradient():
    built = state({"a": [4.0, 1.0], "b": [0.0]}, 4, lr=0.01, beta1=0.5, beta2=0.75, eps=0.125)
    gradient = {"a": torch.tensor([3.0, -1.0]), "b": torch.tensor([2.0])}
    product = {"a": torch.tensor([2.0, 5.0]), "b": torch.tensor([-1.0])}
    beta2 = 0.75 * (1 - 0.75**3) / (1 - 0.75**4)
    u = 4 * beta2 + 9 * (1 - beta2), 1.0, 4 * (1 - beta2)
    along = sum(x / (v**0.5 + 0.125) for x, v in zip((6, -5, -2), u, strict=True))
    expected = 0.01 / 2 * (0.5 / 1.5) / (1 - 0.5**4) * along / 14
    assert curvature(built, 4, gradient, product).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_adamw_with_a_constant_second_moment_is_stable_where_curvature_is_below_1(factor):
    sharpness, one = 7.0, {"x": torch.ones(1)}  # of a parabola at x = 1 / 7, where g = 1
    product = {"x": torch.tensor([sharpness])}
    per_rate = curvature(state({"x": [1.0]}, 10**6, lr=1.0), 10**6, one, product).item()
    x, moment, lr = 1.0, 0.0, factor / per_rate
    for _ in range(2000):
        moment = 0.9 * moment + 0.1 * sharpness * x
        x -= lr * moment / (1 + 1e-6)
    assert (abs(x) < 1e-3) == (factor < 1)


def test_a_measured_run_is_the_same_run_with_a_row_for_every_second_step(make_config, tmp_path):
    changes = {"model.patch_dropout": 0.5, "num_steps": 6, "schedule.warmup_steps": 2}
    runs = [tmp_path / "plain", tmp_path / "measured"]
    plain, measured = (make_config({**changes, "run_dir": str(run)}) for run in runs)
    train_run(plain)
    predictors.main(measured)
    [before], [after] = (list(Path(run).rglob("metrics.jsonl")) for run in runs)
    assert before.read_bytes() == after.read_bytes()
    rows, losses = read_rows(after.parent / "predictors.jsonl"), read_rows(after)
    assert [row["step"] for row in rows] == [2, 4, 6]
    for row in rows:
        assert row["loss"] == pytest.approx(losses[row["step"] - 1]["loss"], rel=1e-5)
        assert all(math.isfinite(value) for value in row.values())
        blocks = [name for name in row if name.startswith("activation_kurtosis/")]
        names = "visual.transformer.resblocks.0", "transformer.resblocks.0"
        assert blocks == [f"activation_kurtosis/{name}" for name in names]


def test_a_stopped_run_ends_the_command_as_that_of_train(make_config, monkeypatch):
    ended = Ended("preempted", 2)
    monkeypatch.setattr("lowprec.train.run.train_run", lambda *arguments, **options: ended)
    with pytest.raises(SystemExit, match="75"):
        predictors.main(make_config())


def test_steps_that_were_not_measured_are_named_at_a_resume_and_at_the_end(make_config, capsys):
    changes = {"schedule.name": "constant", "save_every": 3}
    short, long = (make_config({**changes, "num_steps": num}) for num in (3, 6))
    train_run(short)
    with pytest.raises(RunError, match=r"1 of 1 rows are missing .* of step 2; .*run_dir=FOLDER"):
        predictors.main(long)
    train_run(long)
    with pytest.raises(RunError, match="3 of 3 rows are missing in .* of step 2"):
        predictors.main(long)


def test_a_measured_run_that_has_ended_needs_no_more(make_config, capsys):
    config = make_config({"num_steps": 5})
    for _ in range(2):
        predictors.main(config)
    assert "finished at step 5; nothing to do" in capsys.readouterr().out
    [path] = Path(config.run_dir).rglob("predictors.jsonl")
    path.write_text(path.read_text().splitlines()[0] + "\n")
    with pytest.raises(RunError, match="1 of 2 rows are missing in .* of step 4"):
        predictors.main(config)


def kurtosis64(x):
    """Excess kurtosis of a tensor, in float64."""
    return scipy.stats.kurtosis(x.detach().double().numpy(), axis=None)


def test_a_row_has_the_scores_of_the_weights_moments_and_batch_before_its_step(
    make_config, run_once, tmp_path
):
    """Step 4 of 6, 2 of them warmup: the cosine is half way down.

    The product with the Hessian is the difference of float64 gradients.
    """
    schedule = {"num_steps": 6, "schedule.warmup_steps": 2, "schedule.name": "cosine"}
    config = make_config(schedule)
    predictors.main(config)
    [path] = Path(config.run_dir).rglob("predictors.jsonl")
    row = read_rows(path)[1]
    _, built = run_once(config, tmp_path, kill_at=4)
    batch = next(iter(build(config, open_data(config)).batches_from(4)))
    model = built.task.model.double()
    pixels, outputs = built.task.normalize(batch.images).double(), {}
    params = dict(model.named_parameters())
    for name in ("visual.transformer.resblocks.0", "transformer.resblocks.0"):
        keep = partial(lambda name, *call: outputs.update({name: call[-1]}), name)
        model.get_submodule(name).register_forward_hook(keep)

    def gradient_at(step, along):
        with torch.no_grad():
            for name, p in params.items():
                p.add_(along[name], alpha=step)
        loss = built.task.loss_fn(**model(pixels, batch.tokens))
        gradient = torch.autograd.grad(loss, [*params.values()])
        return loss.item(), dict(zip(params, gradient, strict=True))

    loss, gradient = gradient_at(0, params)
    expected = {f"activation_kurtosis/{name}": kurtosis64(x) for name, x in outputs.items()}
    expected |= {"step": 4, "loss": loss, "gradient_kurtosis": kurtosis64(gradient[PATCHES])}
    _, above = gradient_at(1e-6, gradient)
    _, below = gradient_at(-2e-6, gradient)
    beta1, beta2 = config.optimizer.beta1, config.optimizer.beta2
    moments = built.state.optimizer.tensors()["exp_avg_sq"]
    debiased, along, squares = beta2 * (1 - beta2**3) / (1 - beta2**4), 0.0, 0.0
    for name, g in gradient.items():
        u = debiased * moments[name].double() + (1 - debiased) * g**2
        product = (above[name] - below[name]) / 2e-6
        along += (g * product / (u.sqrt() + config.optimizer.eps)).sum().item()
        squares += (g**2).sum().item()
    half_lr = config.optimizer.lr / 2 / 2
    momentum = (1 - beta1) / (1 + beta1) / (1 - beta1**4)
    expected["curvature"] = half_lr * momentum * along / squares
    del row["measure_ms"]
    assert row == pytest.approx(expected, rel=1e-3)


def test_runs_that_cannot_be_measured_are_refused_by_their_key(make_config):
    config = make_config({"optimizer.name": "stable_adamw", "optimizer.clip_threshold": 1.0})
    with pytest.raises(ConfigError, match="optimizer.name=stable_adamw: predictors need .*=adamw"):
        predictors.main(config)
