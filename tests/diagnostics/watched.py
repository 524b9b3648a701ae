"""A small loop to watch, its statistics by definition, and the examples of the page."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from analysis import load_runs
from lowprec.diagnostics import Protocol, watch
from lowprec.diagnostics import monitor as monitor_module

RULE = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
PROTOCOL = Protocol(ignore_steps=10, window=20)
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


def assert_recorded(monitor, expected, rtol=1e-4):
    """Compares the statistics of all rows with tables of `Definition`."""
    rows = monitor.rows()
    for row, table in zip(rows, expected, strict=True):
        found = [[row[f"{statistic}/{name}"] for statistic in STATISTICS] for name in monitor.names]
        np.testing.assert_allclose(found, table, rtol=rtol)
        assert row["grad_norm"] == pytest.approx(math.hypot(*table[:, 1]), rel=rtol)
    return rows


class Planted(nn.Sequential):
    """The model of `make`, which returns the loss of a step.

    The loss has a spike at step 43, and its gradient at step 40.
    """

    def __init__(self):
        model, optimizer = make()
        super().__init__(*model)
        self.optimizer = optimizer

    def forward(self, step):
        loss = loss_of(nn.Sequential(*self), int(step)) / 100 + (2.0 if step in (43, 44) else 0.0)
        return loss + 29 * (loss - loss.detach()) if step == 40 else loss


def planted(folder, saves, seed=0):
    """A run of `Planted`, saved at these steps."""
    model = Planted()
    monitor = watch(model, model.optimizer, flush=7, protocol=PROTOCOL)
    for step in range(1, 61):
        model.optimizer.zero_grad()
        loss = model(step)
        loss.backward()
        monitor.loss(loss)
        model.optimizer.step()
        if step in saves:
            monitor.save(folder, {"seed": seed, "optimizer.eps": 1e-6})
    return monitor


def assert_planted(folder):
    """A trainer's run of `Planted` is that of the plain loop, to the bit, with both spikes."""
    planted(folder / "plain", (60,))
    found, expected = load_runs(folder / "watched"), load_runs(folder / "plain")
    assert len(found.metrics) == 60
    keys = ["step", "loss", "lr", "grad_norm"]
    assert found.metrics[keys].equals(expected.metrics[keys])
    for statistic in STATISTICS:
        table = found.tensors("*", statistic)
        assert table.drop(columns="run").equals(
            expected.tensors("*", statistic).drop(columns="run")
        )
    events = found.events.dropna(subset="spike")
    assert [*zip(events["step"], events["spike"], strict=True)] == [(40, "rms"), (43, "loss")]


def example(word, **names):
    """Runs the README's example that contains a word; its names."""
    text = Path(monitor_module.__file__).with_name("README.md").read_text()
    [code] = [c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in c]
    exec(code, names := {"watch": watch, **names})
    return names
