"""Faults that the machine makes of a config."""

import importlib.util

import pytest

from lowprec.config.check import ConfigError
from lowprec.config.preflight import preflight

FIND = importlib.util.find_spec


@pytest.fixture
def faults(make_config, monkeypatch):
    """A function: the faults of an 8-bit optimizer with only these packages installed."""

    def of(name, packages=(), training=True, **changes):
        def find(package):
            eight_bit = package in ("bitsandbytes", "torchao")
            return (package in packages or None) if eight_bit else FIND(package)

        monkeypatch.setattr(importlib.util, "find_spec", find)
        statistics = {"diagnostics.statistics": ["grad_norm"]}
        config = make_config({"optimizer.name": name, **statistics, **changes})
        try:
            preflight(config, training=training)
        except ConfigError as error:
            return error.faults
        return []

    return of


@pytest.mark.parametrize(
    ("name", "package", "command"),
    [
        ("adamw8bit_bnb", "bitsandbytes", "pip install 'bitsandbytes<0.50'"),
        ("adamw8bit_torchao", "torchao", "pip install 'torchao'"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    faults, name, package, command
):
    (fault,) = faults(name, device="auto")
    assert f"optimizer={name}" in fault and command in fault
    assert not faults(name, [package], device="auto")


def test_bitsandbytes_needs_a_gpu_to_train_and_none_to_evaluate(faults):
    (fault,) = faults("adamw8bit_bnb", ["bitsandbytes"], device="cpu")
    assert "device=cpu" in fault and "adamw8bit_torchao" in fault
    assert not faults("adamw8bit_bnb", ["bitsandbytes"], training=False, device="cpu")
