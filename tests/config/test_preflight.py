"""Faults that the machine makes of a config."""

import importlib.util

import pytest

from lowprec.config import preflight
from lowprec.config.check import ConfigError

FIND = importlib.util.find_spec


@pytest.fixture
def faults(make_config, monkeypatch):
    """A function: the faults of an 8-bit optimizer with only these packages installed."""

    def of(name, packages=(), gpu=False, training=True, **changes):
        def find(package):
            eight_bit = package in ("bitsandbytes", "torchao")
            return (package in packages or None) if eight_bit else FIND(package)

        monkeypatch.setattr(importlib.util, "find_spec", find)
        monkeypatch.setattr(preflight, "_finds_gpu", lambda: gpu)
        statistics = {"diagnostics.statistics": ["grad_norm"]}
        config = make_config({"optimizer.name": name, **statistics, **changes})
        try:
            preflight.preflight(config, training=training)
        except ConfigError as error:
            return error.faults
        return []

    return of


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("adamw8bit_bnb", "pip install 'bitsandbytes<0.50'"),
        ("adamw8bit_torchao", "pip install 'torchao'"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(faults, name, command):
    (fault,) = faults(name, gpu=True, device="auto")
    assert f"optimizer={name}" in fault and command in fault


@pytest.mark.parametrize(("device", "gpu"), [("cpu", True), ("cpu", False), ("auto", False)])
def test_bitsandbytes_needs_a_gpu_to_train_and_none_to_evaluate(faults, device, gpu):
    (fault,) = faults("adamw8bit_bnb", ["bitsandbytes"], gpu, device=device)
    assert f"device={device}" in fault and "adamw8bit_torchao" in fault
    assert not faults("adamw8bit_bnb", ["bitsandbytes"], gpu, training=False, device=device)
    assert not faults("adamw8bit_bnb", ["bitsandbytes"], gpu=True, device="auto")


def test_torchao_needs_a_compiler_and_no_gpu(faults, monkeypatch):
    assert not faults("adamw8bit_torchao", ["torchao"])
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    (fault,) = faults("adamw8bit_torchao", ["torchao"])
    assert "g++" in fault
